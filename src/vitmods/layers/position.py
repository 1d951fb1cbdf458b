"""Absolute position embeddings of a grid of patch tokens, and their change of grid."""

import torch
from torch import Tensor
from torch.nn import functional as F


def sincos2d(grid: tuple[int, int], dim: int, temperature: float = 10_000.0, centered: bool = False) -> Tensor:
    """Fixed 2-d sine-cosine positions (Beyer et al., 2022, "Better plain ViT baselines"), (1, rows * columns, dim).

    Channels are [sin(x w), cos(x w), sin(y w), cos(y w)] with x the column, y the row and dim / 4 frequencies
    ``w_k = temperature^(-k / (dim/4 - 1))``. In float64. dim is a multiple of 4.
    ``centered`` takes each position's mean over channels off.
    """
    if dim % 4:
        raise ValueError(f"sincos2d needs a width that is a multiple of 4, got {dim}.")
    rows, columns = grid
    exponents = torch.arange(dim // 4, dtype=torch.float64) / max(dim // 4 - 1, 1)
    omega = temperature**-exponents
    y = (torch.arange(rows, dtype=torch.float64)[:, None] * omega)[:, None].expand(rows, columns, -1)
    x = (torch.arange(columns, dtype=torch.float64)[:, None] * omega)[None].expand(rows, columns, -1)
    table = torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1).reshape(1, rows * columns, dim)
    return table - table.mean(-1, keepdim=True) if centered else table


def sincos1d(length: int, dim: int, temperature: float = 10_000.0) -> Tensor:
    """Fixed sine-cosine positions of a sequence, (1, length, dim), in float64; dim is even.

    Channels are [sin(i w), cos(i w)] with dim / 2 frequencies ``w_k = temperature^(-k / (dim/2 - 1))``, as in the code
    of Long Range Arena (Tay et al., 2021); the original Transformer's alternate.
    """
    if dim % 2:
        raise ValueError(f"sincos1d needs an even width, got {dim}.")
    omega = temperature ** -(torch.arange(dim // 2, dtype=torch.float64) / max(dim // 2 - 1, 1))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * omega
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[None]


def resample(
    positions: Tensor, old: tuple[int, int], new: tuple[int, int], prefix: int = 0, aligned: bool = False
) -> Tensor:
    """Position embeddings (1, prefix + T_old, C) for another grid, (1, prefix + T_new, C).

    Bicubic with antialiasing as timm does, or bilinear with aligned corners as big_vision does (``aligned``). The
    entries of the ``prefix`` tokens are kept.
    """
    if old == new:
        return positions
    kept, grid = positions[:, :prefix], positions[:, prefix:]
    image = grid.reshape(1, *old, -1).permute(0, 3, 1, 2)
    image = image if image.dtype == torch.float64 else image.float()
    if aligned:
        image = F.interpolate(image, size=new, mode="bilinear", align_corners=True)
    else:
        image = F.interpolate(image, size=new, mode="bicubic", antialias=True)
    grid = image.permute(0, 2, 3, 1).reshape(1, new[0] * new[1], -1).to(positions.dtype)
    return torch.cat([kept, grid], dim=1)


def positions_on_grid(positions: Tensor, old: tuple[int, int], new: tuple[int, int], kind: str) -> Tensor:
    """Positions (1, T_old, C) for another grid, (1, T_new, C): learned ones resampled, the tables of ``sincos2d``,
    ``sincos2d_centered`` and ``sincos1d`` computed."""
    if old == new:
        return positions
    if kind == "learn":
        return resample(positions, old, new)
    if kind == "sincos1d":
        return sincos1d(new[0] * new[1], positions.shape[-1]).to(positions)
    return sincos2d(new, positions.shape[-1], centered=kind == "sincos2d_centered").to(positions)
