"""One Transformer block for every placement of norms: each place where a change may act is a slot."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitmods.layers.attention import Attention
from vitmods.layers.drop import DropPath, FixedScale, LayerScale, add_branch
from vitmods.layers.mlp import Mlp
from vitmods.layers.norms import LayerNorm

NormFactory = Callable[[int], nn.Module]
"""Takes the number of channels."""


@dataclass(frozen=True)
class BranchNorms:
    """Norms in the slots of one branch F: ``x = after(x + scale * branch(F(before(x))))``; ``inner`` sits
    inside F, before its last linear map. None leaves a slot empty."""

    before: NormFactory | None = None
    inner: NormFactory | None = None
    branch: NormFactory | None = None
    after: NormFactory | None = None


@dataclass(frozen=True)
class BlockConfig:
    """The parts of a block.

    ``attn`` and ``mlp`` make the branches: they are called with ``(dim, num_heads, norm=inner norm)`` and
    ``(dim, mlp_dim, norm=inner norm)``, and their other slots and options are bound before (functools.partial).
    """

    dim: int
    num_heads: int
    mlp_dim: int
    attn: Callable[..., nn.Module] = Attention
    mlp: Callable[..., nn.Module] = Mlp
    attn_norms: BranchNorms = BranchNorms(before=LayerNorm)
    mlp_norms: BranchNorms = BranchNorms(before=LayerNorm)
    layer_scale: float | None = None
    residual_scale: bool = False
    norm_scale: float = 1.0
    drop_path: float = 0.0


class Block(nn.Module):
    """Attention and MLP branches around a residual stream; (B, N, C) in and out::

        x ──┬─ norm1 ─ attn ─ norm1_branch ─ ls1 ─ drop_path1 ─ + ─ norm1_after ─┐
            └───────────────────────────────────────────────────┘                │
        ┌────────────────────────────────────────────────────────────────────────┘
        └───┬─ norm2 ─ mlp ── norm2_branch ─ ls2 ─ drop_path2 ─ + ─ norm2_after ─── x
            └─ residual_scale ──────────────────────────────────┘

    By default ``norm1`` and ``norm2`` are LayerNorms and all other slots identities: the pre-norm block of ViT.
    ``residual_scale`` is a learned factor for each channel, 1 at first (NormFormer's code), ``norm_scale`` a fixed one
    of what ``norm1`` and ``norm2`` put out. Parameter names are timm's;
    ``norm1_branch``, ``norm1_after``, ``norm2_branch``, ``norm2_after`` and ``residual_scale`` are ours.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        dim, attn, mlp = config.dim, config.attn_norms, config.mlp_norms
        self.norm_scale = nn.Identity() if config.norm_scale == 1 else FixedScale(config.norm_scale)
        self.norm1 = _norm(attn.before, dim)
        self.attn = config.attn(dim, config.num_heads, norm=_norm(attn.inner, dim))
        self.norm1_branch = _norm(attn.branch, dim)
        self.ls1 = LayerScale(dim, config.layer_scale) if config.layer_scale else nn.Identity()
        self.drop_path1 = DropPath(config.drop_path) if config.drop_path else nn.Identity()
        self.norm1_after = _norm(attn.after, dim)

        self.norm2 = _norm(mlp.before, dim)
        self.mlp = config.mlp(dim, config.mlp_dim, norm=_norm(mlp.inner, config.mlp_dim))
        self.norm2_branch = _norm(mlp.branch, dim)
        self.ls2 = LayerScale(dim, config.layer_scale) if config.layer_scale else nn.Identity()
        self.drop_path2 = DropPath(config.drop_path) if config.drop_path else nn.Identity()
        self.residual_scale = LayerScale(dim, 1.0) if config.residual_scale else nn.Identity()
        self.norm2_after = _norm(mlp.after, dim)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, values: Tensor | None = None
    ) -> Tensor:
        """(B, N, C) -> (B, N, C); ``attn_mask`` and ``values`` go to attention. Raises ValueError for ``is_causal``
        (timm's)."""
        if is_causal:
            raise ValueError("This block does not have causal attention: give the mask as attn_mask.")
        first_values = {} if values is None else {"values": values}  # attention of other kinds does not take them
        h = self.norm1_branch(self.attn(self.norm_scale(self.norm1(x)), attn_mask=attn_mask, **first_values))
        x = self.norm1_after(add_branch(x, h, self.ls1, self.drop_path1))
        h = self.norm2_branch(self.mlp(self.norm_scale(self.norm2(x))))
        x = self.norm2_after(add_branch(self.residual_scale(x), h, self.ls2, self.drop_path2))
        return x

    def first_values(self, x: Tensor) -> Tensor:
        """(B, N, C) -> the values (B, H, N, D) of its attention."""
        attn: Any = self.attn
        values: Tensor = attn.values(self.norm_scale(self.norm1(x)))
        return values


def _norm(factory: NormFactory | None, dim: int) -> nn.Module:
    return factory(dim) if factory else nn.Identity()
