"""Multi-head self-attention, with a slot at each place where a change may act."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitmods.layers.norms import LayerNorm
from vitmods.ops.attention import attend


@dataclass(frozen=True)
class AttentionSlots:
    """Modules in the slots of ``Attention``; all slots are empty by default. ``qk_norm(D)`` makes
    the norm of the queries and that of the keys."""

    qk_norm: Callable[[int], nn.Module] | None = None
    mask: nn.Module | None = None
    positions: nn.Module | None = None
    head_scale: bool = False
    rope: nn.Module | None = None
    rel_pos: nn.Module | None = None
    gate: Literal["none", "channel", "head"] = "none"
    value_mix: bool = False


class ValueMix(nn.Module):
    """``a first + b own`` with two learned numbers (a, b) for the values (B, H, N, D) of two layers."""

    def __init__(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 0.5, device=device, dtype=dtype))

    def forward(self, first: Tensor, own: Tensor) -> Tensor:
        return self.weight[0] * first + self.weight[1] * own


class Attention(nn.Module):
    """``proj(gate * norm(head_scale * positions(attend(q_norm(q), k_norm(k), v))))`` with q, k, v = qkv(x).

    Multi-head self-attention (Vaswani et al., 2017), (B, N, C) in and out, parameters named as in timm. Slots, empty by
    default:

    - ``q_norm``, ``k_norm``: on the queries and keys of each head (B, N, H, D).
    - ``rope``: called with those, (B, H, N, D) each; returns both, turned (RotaryPositions).
    - ``rel_pos``: as ``mask``, before it (RelativePositionBias).
    - ``mask``: called with q, k (B, H, N, D) and the caller's attn_mask or None; returns the attn_mask to use, boolean
      (True where a query may look) or added to the logits, of a shape that broadcasts to (B, H, N, N), or None.
    - ``positions``: called with what the heads have read and their values, (B, H, N, D) each; returns the first's like.
    - ``head_scale``: a learned factor for each head (NormFormer).
    - ``norm``: on the concatenated heads, before the output projection (Sub-LN).
    - ``gate``: ``sigmoid(gate(x))`` multiplies the concatenated heads, each channel or each head by its own.
    - ``value_mix``: two learned factors, 0.5 each at first, of another layer's values and its own.

    Heads have ``head_dim`` channels, or C / H; ValueError where the heads do not divide the width then.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        slots: AttentionSlots = AttentionSlots(),
        head_dim: int | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        norm: nn.Module | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            raise ValueError(f"The width {dim} is not a multiple of the number of heads {num_heads}.")
        self.num_heads, self.head_dim = num_heads, head_dim or dim // num_heads
        inner = self.num_heads * self.head_dim
        self.qkv = nn.Linear(dim, 3 * inner, bias=qkv_bias, device=device, dtype=dtype)
        self.q_norm = slots.qk_norm(self.head_dim) if slots.qk_norm else nn.Identity()
        self.k_norm = slots.qk_norm(self.head_dim) if slots.qk_norm else nn.Identity()
        self.rope = slots.rope
        self.rel_pos = slots.rel_pos
        self.mask = slots.mask
        self.attn_drop = attn_drop
        self.positions = slots.positions
        self.head_scale = nn.Parameter(torch.ones(num_heads, device=device, dtype=dtype)) if slots.head_scale else None
        self.norm = norm or nn.Identity()
        gates = {"none": 0, "channel": inner, "head": num_heads}[slots.gate]
        self.gate = nn.Linear(dim, gates, device=device, dtype=dtype) if gates else None
        self.value_mix = ValueMix(device, dtype) if slots.value_mix else None
        self.proj = nn.Linear(inner, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        """(B, N, C) -> (B, N, C); ``attn_mask`` as scaled_dot_product_attention takes it; ``values`` (B, H, N, D) of
        another layer for ``value_mix``. Raises ValueError for a mask together with positions, which read the whole
        grid."""
        tokens = x
        q, k, v = self._heads(x)
        if self.value_mix is not None and values is not None:
            v = self.value_mix(values, v)
        if self.positions is not None and attn_mask is not None:
            raise ValueError(
                "Positions in attention need the whole grid: masks are not supported, leave attn_mask out."
            )
        if self.rel_pos is not None:
            attn_mask = self.rel_pos(q, k, attn_mask)
        if self.mask is not None:
            attn_mask = self.mask(q, k, attn_mask)
        drop = self.attn_drop if self.training else 0.0
        x = attend(q, k, v, attn_mask, drop)
        if self.positions is not None:
            x = self.positions(x, v)
        if self.head_scale is not None:
            x = x * self.head_scale.view(-1, 1, 1)
        x = self.proj_drop(self.proj(self.gated(self.norm(x.transpose(1, 2).flatten(2)), tokens)))
        return x

    def gated(self, heads: Tensor, tokens: Tensor) -> Tensor:
        """The concatenated heads (B, N, inner) times their gates, which read the tokens (B, N, C)."""
        if self.gate is None:
            return heads
        gates = self.gate(tokens).sigmoid()
        return (heads.unflatten(-1, (gates.shape[-1], -1)) * gates[..., None]).flatten(-2)

    def values(self, x: Tensor) -> Tensor:
        """(B, N, C) -> only the values (B, H, N, D)."""
        # Not by the rows of its weight alone: the map may be wrapped, as by LoRA.
        return self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))[:, :, 2].transpose(1, 2)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N, C) -> queries, keys and values of the heads, (B, H, N, D) each."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        if self.rope is not None:
            q, k = self.rope(q, k)
        return q, k, v

    def weights(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, H, N, N): the fraction of each token (last) in what a token reads; rows sum to 1.

        To look at: ``forward`` never holds this matrix. What the slot ``mask`` adds is left out.
        """
        q, k, _ = self._heads(x)
        logits = q @ k.mT * self.head_dim**-0.5
        weights: Tensor = (logits if self.rel_pos is None else logits + self.rel_pos(q, k)).softmax(-1)
        positions: Any = self.positions
        if positions is not None:
            weights = positions.mix_weights(weights)
        return weights


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
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out = self.proj(out.transpose(1, 2).flatten(2))
        out = out + self.mlp(self.norm(out))
        return out[:, 0]
