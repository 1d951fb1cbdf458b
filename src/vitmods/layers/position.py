"""Positions of a grid of patch tokens: absolute embeddings and their change of grid, rotary and relative positions."""

from collections.abc import Callable
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.ops.rotary import RopeConfig


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
    if _are_same(old, new):
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


def _are_same(old: tuple[int, int], new: tuple[int, int]) -> bool:
    """Whether two grids are one; not for sides that a graph leaves open, which a comparison would fix."""
    return all(isinstance(side, int) for side in new) and old == new


def positions_on_grid(positions: Tensor, old: tuple[int, int], new: tuple[int, int], kind: str) -> Tensor:
    """Positions (1, T_old, C) for another grid, (1, T_new, C): learned ones resampled, the tables of ``sincos2d``,
    ``sincos2d_centered`` and ``sincos1d`` computed."""
    if _are_same(old, new):
        return positions
    if kind == "learn":
        return resample(positions, old, new)
    if kind == "sincos1d":
        return sincos1d(new[0] * new[1], positions.shape[-1]).to(positions)
    return sincos2d(new, positions.shape[-1], centered=kind == "sincos2d_centered").to(positions)


def visible_tokens(keep: Tensor, prefix: int) -> Tensor:
    """The numbers (B, prefix + K), among all tokens, of the prefix tokens and of the patches ``keep`` (B, K)."""
    first = torch.arange(prefix, device=keep.device).expand(len(keep), -1)
    return torch.cat([first, keep + prefix], dim=1)


def check_tokens(count: int, what: str, grid: tuple[int, int], prefix: int, keep: Tensor | None = None) -> None:
    """Raise ValueError unless these are the prefix tokens and those of the grid, or of the patches ``keep`` (B, K)."""
    if count != prefix + (grid[0] * grid[1] if keep is None else keep.shape[1]):
        raise ValueError(
            f"There are {count} tokens, and the {what} are made for {prefix} prefix tokens and a grid of "
            f"{grid[0]} x {grid[1]}: set grid_size."
        )


class RotaryPositions(nn.Module):
    """Turns pairs of channels of queries and keys by angles t that grow with the position (Su et al., 2021, RoFormer):
    ``(a, b) -> (a cos t - b sin t, b cos t + a sin t)``, so that their products depend on the offset of two tokens.

    ``axial``: a token at (y, x) turns its first D/4 pairs by ``y / base^(4i/D)`` and the others by ``x / base^(4i/D)``,
    i from 0 to D/4 - 1. ``mixed``: pair i of each head by ``y f[0, i] + x f[1, i]`` with learned f, which start as the
    axial ones at a random orientation (Heo et al., 2024). Class tokens do not turn, registers by ``register_base``.
    ``keep`` (B, K), set around a forward, names the patches that are there; each turns by its place on the grid.

    Args:
        head_dim: channels of a head D, a multiple of 4.
        num_heads: heads H.
        grid_size: (rows, columns).
        prefix_tokens: class and register tokens in front of the grid.
        registers: how many of these, the last ones, are registers.
        settings: frequencies, coordinates and pairs of channels; None: the defaults.
    """

    takes = ("num_heads", "grid_size", "prefix_tokens")
    keep: Tensor | None = None

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        grid_size: tuple[int, int],
        prefix_tokens: int = 0,
        registers: int = 0,
        settings: RopeConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.settings = head_dim, num_heads, settings or RopeConfig()
        self.prefix_tokens, self.registers = prefix_tokens, registers
        freqs = torch.empty(2, num_heads, head_dim // 2, device=device, dtype=dtype)
        self.freqs = nn.Parameter(freqs) if self.settings.frequencies == "mixed" else None
        self.register_buffer("table", freqs, persistent=False)
        self.reset_parameters()
        self.set_grid(grid_size)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.freqs is not None:
            turns = torch.rand(self.num_heads, 1, device=self.freqs.device) * 2 * torch.pi
            angles = torch.cat([turns, turns + torch.pi / 2], 1).repeat_interleave(self.head_dim // 4, 1)
            self.freqs.copy_(torch.stack([angles.cos(), angles.sin()]) * self._omega(self.settings.base).repeat(2))

    def set_grid(self, grid_size: tuple[int, int]) -> None:
        """Compute and keep the table of another grid."""
        self.grid_size = self._kept = grid_size
        self.table = self._make_table(grid_size)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (B, H, n, D) of the first n tokens and keys (B, H, N, D) of all, turned.

        Raises ValueError when N is not ``prefix_tokens`` + rows * columns, or + K.
        """
        prefix = self.prefix_tokens
        check_tokens(k.shape[2], "rotary positions", self.grid_size, prefix, self.keep)
        table = self.table if self.grid_size == self._kept else self._make_table(self.grid_size)
        if self.freqs is not None:  # the table has the places
            freqs = self.freqs.to(table.dtype)[:, :, None]
            table = self._turns(table[:, :1] * freqs[0] + table[:, 1:] * freqs[1])
        if self.keep is not None:  # (2, N, D) or, for each head, (2, H, N, D) -> (2, B, 1 or H, N of them, D)
            table = table[..., visible_tokens(self.keep, prefix), :]
            table = table.unsqueeze(2) if self.freqs is None else table.transpose(1, 2)
        return self._turn(q, table[..., : q.shape[2], :]), self._turn(k, table)

    def _turn(self, x: Tensor, table: Tensor) -> Tensor:
        half = self.head_dim // 2
        halved = self.settings.pairs == "halved"
        swapped = x.roll(half, -1) if halved else x.unflatten(-1, (half, 2)).flip(-1).flatten(-2)
        return (x * table[0] + swapped * table[1]).to(x.dtype)

    def _make_table(self, grid: tuple[int, int]) -> Tensor:
        """Factors (2, N, D) of a token's channels and of their swapped pairs, or the places (N, 2) that mixed
        frequencies multiply, in float32 at least."""
        settings, reference = self.settings, self.settings.reference or grid
        rows, columns = (self._arange(n) for n in grid)
        if settings.coordinates == "centered":
            rows, columns = (2 * torch.pi * ((2 * t + 1 + 2 * settings.offset) / len(t) - 1) for t in (rows, columns))
        else:
            scales = (full / n for full, n in zip(reference, grid, strict=True))
            rows, columns = ((t + settings.offset) * s for t, s in zip((rows, columns), scales, strict=True))
        table = self._places(rows, columns)
        if self.freqs is None:
            table = self._axial(table, settings.base)
        table = nn.functional.pad(table, (0, 0, self.prefix_tokens, 0))
        if settings.register_base is not None and self.registers:
            side = self._arange(isqrt(self.registers))
            turned = slice(self.prefix_tokens - self.registers, self.prefix_tokens)
            table[turned] = self._axial(self._places(side, side), settings.register_base)
        table = table if self.freqs is not None else self._turns(table)
        return table.to(torch.promote_types(self.table.dtype, torch.float32))

    def _turns(self, angles: Tensor) -> Tensor:
        """Angles (..., N, D/2) of the pairs -> (2, ..., N, D): cosines, and sines with the sign of the first or second
        of a pair."""
        cos, sin = angles.cos(), angles.sin()
        first, second = torch.stack([cos, -sin]), torch.stack([cos, sin])
        if self.settings.pairs == "halved":
            return torch.cat([first, second], -1)
        return torch.stack([first, second], -1).flatten(-2)

    def _places(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the (y, x) of each token, (rows * columns, 2)."""
        places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)
        return places.flip(-1) if self.settings.columns_first else places

    def _axial(self, places: Tensor, base: float) -> Tensor:
        return (places[:, :, None] * self._omega(base)).flatten(1)

    def _omega(self, base: float) -> Tensor:
        """Return the frequencies, rounded to float32 as in the published models."""
        exponents = (self._arange(self.head_dim // 4) / (self.head_dim // 4)).float()
        return (1 / base**exponents).to(self._arange(0).dtype)

    def _arange(self, count: int) -> Tensor:
        dtype = torch.float32 if self.table.device.type == "mps" else torch.float64
        return torch.arange(count, device=self.table.device, dtype=dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The table is computed anew for another type: ``double()`` of a float32 table would keep its rounding."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.table = self._make_table(self._kept)
        return self

    def extra_repr(self) -> str:
        form = f"{self.settings.frequencies}, base={self.settings.base:g}"
        return f"grid_size={self.grid_size}, prefix_tokens={self.prefix_tokens}, {form}"


def _stretch(old: int, new: int) -> Tensor:
    """The linear map (2 new - 1, 2 old - 1) from values at the offsets of ``old`` positions to those of ``new``.

    As in BEiT, the old offsets keep their number and stand at 0, 1, 1 + q, 1 + q + q^2, ... on both sides, with q
    between 1.01 and 1.5 so that the last is at ``new - 1``: near offsets keep their values. Between them values are
    linear, and beyond them constant.
    """
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        low, high = (low, ratio) if sum(ratio**i for i in range(old - 1)) > new - 1 else (ratio, high)
    steps = torch.tensor([ratio**i for i in range(old - 1)]).cumsum(0)
    places = torch.cat([-steps.flip(0), torch.zeros(1), steps])
    targets = torch.arange(1.0 - new, new).clamp(places[0], places[-1])
    right = torch.bucketize(targets, places)
    left = (right - 1).clamp(min=0)
    share = (targets - places[left]) / (places[right] - places[left]).clamp(min=1)
    to_left, to_right = torch.eye(len(places))[left], torch.eye(len(places))[right]
    return to_left + share[:, None] * (to_right - to_left)


class RelativePositionBias(nn.Module):
    """A learned number for each head and each offset of two tokens, added to the logits of attention (Bao et al., 2022,
    BEiT). All are 0 at first. ``keep`` (B, K), set around a forward, names the patches that are there.

    ``table`` is ((2 rows - 1) (2 columns - 1) + 3, H) as in timm: offsets, then what class and register tokens read of
    patches, patches of them, and they of each other; without prefix tokens the last 3 are missing.
    """

    takes = ("num_heads", "grid_size", "prefix_tokens")
    keep: Tensor | None = None

    def __init__(
        self,
        num_heads: int,
        grid_size: tuple[int, int],
        prefix_tokens: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grid_size, self.prefix_tokens, self._kept = grid_size, prefix_tokens, grid_size
        rows, columns = grid_size
        entries = (2 * rows - 1) * (2 * columns - 1) + 3 * bool(prefix_tokens)
        self.table = nn.Parameter(torch.zeros(entries, num_heads, device=device, dtype=dtype))
        self.register_buffer("index", self._make_index(grid_size), persistent=False)

    def set_grid(self, grid_size: tuple[int, int]) -> None:
        """Resamples the table for another grid."""
        trained = self.table.requires_grad
        self.table = nn.Parameter(self._resample(grid_size).detach(), trained)
        self.grid_size = self._kept = grid_size
        self.index = self._make_index(grid_size)

    def forward(self, q: Tensor, k: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """For queries (B, H, n, D) of the first n tokens and keys (B, H, N, D): logits to add, (1, H, n, N), or
        (B, H, n, N) with ``keep``, with the caller's mask. Raises ValueError when N is not ``prefix_tokens`` + rows *
        columns, or + K."""
        prefix = self.prefix_tokens
        check_tokens(k.shape[2], "relative positions", self.grid_size, prefix, self.keep)
        is_kept = self.grid_size == self._kept
        table = self.table if is_kept else self._resample(self.grid_size)
        # Weights may have been assigned to a model on the meta device, whose index stays there.
        is_kept = is_kept and self.index.device == table.device
        index = self.index if is_kept else self._make_index(self.grid_size)
        if self.keep is None:
            bias = table.to(q.dtype)[index[: q.shape[2]]].permute(2, 0, 1)[None]
        else:
            tokens = visible_tokens(self.keep, prefix)
            entries = index[tokens[:, : q.shape[2], None], tokens[:, None]]
            bias = nn.functional.embedding(entries, table.to(q.dtype)).permute(0, 3, 1, 2)
        if attn_mask is None:
            return bias
        if attn_mask.dtype == torch.bool:
            return bias.masked_fill(~attn_mask, -torch.inf)
        return bias + attn_mask.to(bias.dtype)

    def _make_index(self, grid: tuple[int, int]) -> Tensor:
        """(N, N): the entry of the table for a query and a key."""
        rows, columns = (torch.arange(n, device=self.table.device) for n in grid)
        y, x = (t.flatten() for t in torch.meshgrid(rows, columns, indexing="ij"))
        offsets = (y[:, None] - y + grid[0] - 1) * (2 * grid[1] - 1) + (x[:, None] - x + grid[1] - 1)
        prefix, last = self.prefix_tokens, (2 * grid[0] - 1) * (2 * grid[1] - 1)
        index = nn.functional.pad(offsets, (prefix, 0, prefix, 0))
        index[:prefix], index[:, :prefix], index[:prefix, :prefix] = last, last + 1, last + 2
        return index

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The index is not saved: it is made anew where a model gets memory, from the meta device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.index = self._make_index(self._kept).to(self.table.device)
        return self

    def _resample(self, grid: tuple[int, int]) -> Tensor:
        if grid == self._kept:
            return self.table
        sides = [2 * n - 1 for n in self._kept]
        image = self.table[: sides[0] * sides[1]].T.unflatten(1, sides)
        rows, columns = (_stretch(*ends).to(self.table) for ends in zip(self._kept, grid, strict=True))
        return torch.cat([(rows @ image @ columns.T).flatten(1).T, self.table[sides[0] * sides[1] :]])

    def extra_repr(self) -> str:
        return f"num_heads={self.table.shape[1]}, grid_size={self.grid_size}, prefix_tokens={self.prefix_tokens}"
