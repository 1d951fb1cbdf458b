"""Dynamic Token Normalization with P as a T x T matrix, in three ways, to compare with.

Each takes (x, a, omega_mean, omega_var, weight, bias, grid, eps) as the paper's formula, autograd does the rest.
"""

from functools import cache

import torch
from torch import Tensor

Grid = tuple[int, int]


@cache
def offsets(grid: Grid) -> Tensor:
    """dx^2 + dy^2, dx and dy from token i to token j, (3, T, T)."""
    y = torch.arange(float(grid[0])).repeat_interleave(grid[1])
    x = torch.arange(float(grid[1])).repeat(grid[0])
    dx, dy = x - x[:, None], y - y[:, None]
    return torch.stack([dx.square() + dy.square(), dx, dy])


def kernel(a: Tensor, grid: Grid) -> Tensor:
    """P, (H, T, T)"""
    return (a @ offsets(grid).flatten(1)).unflatten(1, (grid[0] * grid[1], -1)).softmax(-1)


def heads_first(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def combine(
    x: Tensor, xh: Tensor, m: Tensor, v: Tensor, mixes: tuple[Tensor, Tensor], affine: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    lm, lv = (torch.sigmoid(omega)[:, None, None] for omega in mixes)
    mean = x.mean(-1)[:, None, :, None]
    var = (x - x.mean(-1, keepdim=True)).square().mean(-1)[:, None, :, None]
    y = (xh - lm * mean - (1 - lm) * m) * (lv * var + (1 - lv) * v + eps).rsqrt()
    return y.transpose(1, 2).flatten(2) * affine[0] + affine[1]


def literal(x, a, om, ov, weight, bias, grid, eps=1e-5):
    """Algorithm 1 as printed: P once for the batch, a product for the mean and one for the second moment."""
    p, xh = kernel(a, grid), heads_first(x, len(a))
    m = p @ xh
    return combine(x, xh, m, p @ (xh * xh) - m * m, (om, ov), (weight, bias), eps)


def fused(x, a, om, ov, weight, bias, grid, eps=1e-5):
    """One product for both moments of the whole batch."""
    batch, tokens, _ = x.shape
    p, xh = kernel(a, grid), heads_first(x, len(a))
    both = torch.cat([xh, xh * xh], -1).permute(1, 2, 0, 3).flatten(2)  # (H, T, B 2D)
    m, q = torch.bmm(p, both).view(len(a), tokens, batch, -1).permute(2, 0, 1, 3).chunk(2, -1)
    return combine(x, xh, m, q - m * m, (om, ov), (weight, bias), eps)


def released(x, a, om, ov, weight, bias, grid, eps=1e-5):
    """The structure of the released code: P made for every image of the batch, tokens divided by their heads' rms."""
    heads = x.unflatten(-1, (len(a), -1))
    x = (heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2)
    places = offsets(grid).permute(1, 2, 0).expand(len(x), -1, -1, -1)
    p = (places @ a.T).permute(0, 3, 1, 2).softmax(-1)
    xh = heads_first(x, len(a))
    m = p @ xh
    return combine(x, xh, m, p @ (xh * xh) - m * m, (om, ov), (weight, bias), eps)
