"""Multi-head self-attention that can compute the outputs of the leading tokens only."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.norms import LayerNorm
from vitmods.layers.positional_attention import GatedPositions


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al., 2017), parameters named as in timm.

    ``norm`` is the slot between the heads and the output projection (Sub-LN's inner norm); ``head_scale`` adds one
    learned factor a head at the same place (NormFormer). ``positions`` mixes what the heads read with what a kernel of
    positions reads (GatedPositions).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        qk_norm: Callable[[int], nn.Module] | None = None,
        norm: nn.Module | None = None,
        positions: GatedPositions | None = None,
        head_scale: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"The width {dim} is not a multiple of the number of heads {num_heads}.")
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.q_norm = qk_norm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = qk_norm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = attn_drop
        self.positions = positions
        self.head_scale = nn.Parameter(torch.ones(num_heads, device=device, dtype=dtype)) if head_scale else None
        self.norm = norm or nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, queries: int | None = None, attn_mask: Tensor | None = None) -> Tensor:
        """(B, N, C) -> (B, N, C), or (B, queries, C): the outputs of the first ``queries`` tokens, reading all.

        ``attn_mask`` is passed to scaled_dot_product_attention (True or 0 where a query may look).
        """
        if queries is None:
            return self.mix(self.qkv(x), attn_mask)
        dim = x.shape[-1]
        bias = self.qkv.bias
        q = F.linear(x[:, :queries], self.qkv.weight[:dim], None if bias is None else bias[:dim])
        kv = F.linear(x, self.qkv.weight[dim:], None if bias is None else bias[dim:])
        k, v = kv.unflatten(-1, (2, self.num_heads, self.head_dim)).unbind(2)
        return self._attend(q.unflatten(-1, (self.num_heads, self.head_dim)), k, v, attn_mask)

    def mix(self, qkv: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """From the joint projection (B, N, 3C) on: attention, inner norm, output projection. -> (B, N, C)"""
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        return self._attend(q, k, v, attn_mask)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        drop = self.attn_drop if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=drop)
        if self.positions is not None:
            if attn_mask is not None:
                raise ValueError("Positions in attention read the whole grid and take no mask: leave attn_mask out.")
            x = self.positions(x, v)
        if self.head_scale is not None:
            x = x * self.head_scale.view(-1, 1, 1)
        x = x.transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(self.norm(x)))

    def weights(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, H, N, N): the fraction of each token (last) in what a token reads; rows sum to 1.

        To look at: ``forward`` never holds this matrix.
        """
        q, k, _ = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        weights = (q @ k.mT * self.head_dim**-0.5).softmax(-1)
        return weights if self.positions is None else self.positions.mix_weights(weights)


class AttentionPool(nn.Module):
    """One learned query attends to all tokens, followed by an MLP branch: the "map" pooling of big_vision and timm.

    (B, N, C) -> (B, C). Parameters named as in timm's AttentionPoolLatent. Source: Zhai et al., 2022 (scaling ViTs).
    """

    def __init__(self, dim: int, num_heads: int, mlp: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.latent = nn.Parameter(torch.zeros(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = norm or LayerNorm(dim)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.latent).expand(x.shape[0], -1, -1).unflatten(-1, (self.num_heads, self.head_dim))
        k, v = self.kv(x).unflatten(-1, (2, self.num_heads, self.head_dim)).unbind(2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out = self.proj(out.transpose(1, 2).flatten(2))
        out = out + self.mlp(self.norm(out))
        return out[:, 0]
