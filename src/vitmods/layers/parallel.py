"""Blocks with several branches side by side (Touvron et al., 2022, Three things everyone should know about ViTs)."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vitmods.layers.block import Block


class ParallelBlock(nn.Module):
    """``x = x + sum_k A_k(x)``, then ``x = x + sum_k M_k(x)``: the attention branches of all ``blocks`` on the same
    tokens, then their MLP branches. (B, N, C) in and out, as ``Block``.

    Each branch keeps its norm, LayerScale and drop path; names are those of timm's ParallelThingsBlock. Raises
    ValueError where a block has norms after the residual sum or a residual scale, which do not belong to one branch.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        shared = [slot for b in blocks for slot in (b.norm1_after, b.residual_scale, b.norm2_after)]
        if not all(isinstance(slot, nn.Identity) for slot in shared):
            raise ValueError("Parallel branches share one residual sum: leave out norms after it and its scale.")
        self.attns = nn.ModuleList(
            _branch(norm=b.norm1, attn=b.attn, norm_branch=b.norm1_branch, ls=b.ls1, drop_path=b.drop_path1)
            for b in blocks
        )
        self.ffns = nn.ModuleList(
            _branch(norm=b.norm2, mlp=b.mlp, norm_branch=b.norm2_branch, ls=b.ls2, drop_path=b.drop_path2)
            for b in blocks
        )

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, N, C) -> (B, N, C), as ``Block.forward``."""
        if is_causal:
            raise ValueError("This block does not have causal attention: give the mask as attn_mask.")
        attns: list[Any] = list(self.attns)
        ffns: list[Any] = list(self.ffns)
        x = x + _sum(b.drop_path(b.ls(b.norm_branch(b.attn(b.norm(x), attn_mask=attn_mask)))) for b in attns)
        return x + _sum(b.drop_path(b.ls(b.norm_branch(b.mlp(b.norm(x))))) for b in ffns)


def _branch(**parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


def _sum(branches: Any) -> Tensor:
    """Add branches one by one, so that each draws its random numbers in turn."""
    total: Tensor = next(branches)
    for branch in branches:
        total = total + branch
    return total
