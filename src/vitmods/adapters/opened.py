"""PyTorch's attention, opened: it computes the same with the same parameters, and calls modules for its parts."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class OpenAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` that calls ``tokens`` on what its queries read (B, N, C), ``q_norm`` and ``k_norm`` on
    the queries and keys of its heads (B, heads, N, C / heads), and ``out_proj`` as a module."""

    tokens: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        is_batch = query.ndim == 3
        if not is_batch:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self._projected(self.tokens(query), key, value)
        q, k = self.q_norm(q), self.k_norm(k)
        mask = self._mask(attn_mask, key_padding_mask, q)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat((x, self._split(b.expand(len(x), 1, -1))), 2) for x, b in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[2] - mask.shape[-1]))
        rate, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            logits = q @ k.mT / q.shape[-1] ** 0.5
            weights = F.dropout((logits if mask is None else logits + mask).softmax(-1), rate)
            heads = weights @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, rate)
        out = self.out_proj(heads.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not is_batch:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _projected(self, *tokens: Tensor) -> tuple[Tensor, ...]:
        maps: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            maps = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(self._split(F.linear(x, w, b)) for x, w, b in zip(tokens, maps, biases, strict=True))

    def _mask(self, attention: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
        """Both masks as one that is added to the logits (B, heads, N, M)."""

        def added(mask: Tensor) -> Tensor:
            return (
                torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
                if mask.dtype == torch.bool
                else mask
            )

        masks = []
        if attention is not None:
            masks.append(added(attention if attention.ndim == 2 else attention.unflatten(0, (-1, self.num_heads))))
        if padding is not None:
            masks.append(added(padding)[:, None, None])
        return sum(masks[1:], masks[0]) if masks else None


def open_attentions(model: nn.Module) -> None:
    """Open each ``nn.MultiheadAttention``, in place."""
    for module in list(model.modules()):
        if type(module) is nn.MultiheadAttention:
            module.__class__ = OpenAttention
            for name in ("tokens", "q_norm", "k_norm"):
                module.add_module(name, nn.Identity())
