"""Dynamic Token Normalization (Shao et al., ICLR 2022): learned mixtures of statistics within and across tokens."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.norms.contract import dtn_table, norm_kind, transformed, upcast
from vitmods.ops.separable import Grid, Layout, axis_kernels, separable_norm, without_autocast

Statistic = Literal["both", "mean", "variance"]
CHOICES = {
    "variant": ("paper", "released"),
    "init": ("local", "noise"),
    "kernel": ("learned", "uniform"),
    "statistics": ("both", "mean", "variance"),
}


def _macs(grid: Grid, width: int, dense: bool) -> int:
    """Two moments of every channel, by the kernels of both axes or by T x T ones."""
    tokens = grid[0] * grid[1]
    return 2 * tokens * (tokens if dense else sum(grid)) * width


@norm_kind(
    "dynamic_token",
    title="Dynamic Token",
    paper="Shao et al.: Dynamic Token Normalization Improves Vision Transformers. ICLR 2022",
    url="https://arxiv.org/abs/2112.02624",
    how="a learned mixture of statistics within a token and over its neighborhood, for each head",
    published=dtn_table(80.6, 81.7),
    replaces=False,
    folds=True,
    macs=_macs,
)
class DynamicTokenNorm(nn.Module):
    """``y = gamma (x - mu) / sqrt(s2 + eps) + beta`` with, for each head h (equations 4 to 7),

    ``mu = lambda_mean mu_LN + (1 - lambda_mean) P x``,
    ``s2 = lambda_var s2_LN + (1 - lambda_var) (P x^2 - (P x)^2)``,
    ``P[i, j] = softmax_j(a . [dx^2 + dy^2, dx, dy])`` over the tokens of the grid, dx in columns and dy in rows,

    and ``lambda = sigmoid(omega)``. mu_LN and s2_LN are LayerNorm's, over all channels of a token, biased. P is
    separable and never formed, so the cost grows as T (rows + columns), exactly.

    Shapes: (B, N, C) with N = ``prefix_tokens`` + rows * columns, or (B, rows, columns, C) for any grid; the output as
    the input, in its type, statistics in float32. Prefix tokens get LayerNorm's statistics and lend none. A sequence
    is a grid of one row, with offsets spread evenly around 0 (the paper does not define that case).

    Args:
        dim: channels C, a multiple of num_heads.
        num_heads: heads H, each with its own kernel and trade-off.
        grid_size: (rows, columns), or a sequence's length; None for inputs with a grid of their own, or sequences.
        eps: added to the variance; the paper's code has 1e-5.
        affine: learn gamma and beta.
        prefix_tokens: class and register tokens in front of the grid.
        variant: "paper", or "released" for the layer of the released code: each head of a token is first divided by
            its root mean square, and LayerNorm's variance is unbiased.
        init: of a. "local" peaks each kernel at an offset of a floor(sqrt(H)) square of offsets (equation 7; further
            heads truncated normal 0.02), "noise" is truncated normal 0.02 for all.
        trade_off: None to learn lambda from 0.5, or a fixed lambda in [0, 1] (Table 5). 0 with ``kernel="uniform"`` is
            InstanceNorm, 1 is LayerNorm.
        kernel: "learned", or "uniform" for P = 1 / T (Table 5).
        statistics: which of mean and variance looks across tokens; the other is LayerNorm's.
        band: instead of a learned kernel, equal weights within this many tokens (odd) along each axis (Figure 4).
        pool: average-pool the tokens by this side before statistics across tokens are taken (section 3.3).
        lambda_init: where the learned lambdas start; near 1 a trained LayerNorm model starts close to itself.

    Raises ValueError when these do not fit, or the input does not fit the grid.
    """

    takes = ("num_heads", "grid_size", "prefix_tokens")
    token_wise, image_wise = False, True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: Grid | int | None = None,
        eps: float = 1e-5,
        affine: bool = True,
        prefix_tokens: int = 0,
        variant: Literal["paper", "released"] = "paper",
        init: Literal["local", "noise"] = "local",
        trade_off: float | None = None,
        kernel: Literal["learned", "uniform"] = "learned",
        statistics: Statistic = "both",
        band: int | None = None,
        pool: int = 1,
        lambda_init: float = 0.5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(dim, num_heads, eps, trade_off, band, pool, lambda_init)
        for name, value in (("variant", variant), ("init", init), ("kernel", kernel), ("statistics", statistics)):
            if value not in CHOICES[name]:
                raise ValueError(f"{name} is one of {', '.join(CHOICES[name])}, got '{value}'.")
        if band is not None and kernel == "uniform":
            raise ValueError("A band has a kernel of its own: leave kernel='uniform' out, or the band.")
        self.dim, self.num_heads, self.eps, self.prefix_tokens = dim, num_heads, eps, prefix_tokens
        self.grid_size = (1, grid_size) if isinstance(grid_size, int) else grid_size
        self.variant, self.init, self.statistics, self.band, self.pool = variant, init, statistics, band, pool
        self.lambda_init = lambda_init
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.ones(dim, **options)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim, **options)) if affine else None
        learns_kernel = kernel == "learned" and band is None and trade_off != 1
        self.a = nn.Parameter(torch.zeros(num_heads, 3, **options)) if learns_kernel else None
        self.trade_off = trade_off
        learns_mean = trade_off is None and statistics != "variance"
        learns_var = trade_off is None and statistics != "mean"
        self.omega_mean = nn.Parameter(torch.zeros(num_heads, **options)) if learns_mean else None
        self.omega_var = nn.Parameter(torch.zeros(num_heads, **options)) if learns_var else None
        self._cached: tuple[Any, Tensor, Tensor] | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for value, start in ((self.weight, 1.0), (self.bias, 0.0)):
            if value is not None:
                nn.init.constant_(value, start)
        for omega in (self.omega_mean, self.omega_var):
            if omega is not None:
                nn.init.constant_(omega, math.log(self.lambda_init / (1 - self.lambda_init)))
        if self.a is not None:
            start_kernels(self.a, self.init, sequence=self.grid_size is None or self.grid_size[0] == 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in (3, 4) or x.shape[-1] != self.dim:
            raise ValueError(
                f"This norm takes (B, N, {self.dim}) or (B, rows, columns, {self.dim}), not {tuple(x.shape)}."
            )
        with without_autocast(x):
            if x.ndim == 4:
                return self._normalize(x.flatten(1, 2), (x.shape[1], x.shape[2])).view(x.shape)
            grid, prefix = self._grid_of(x), self.prefix_tokens
            if not prefix:
                return self._normalize(x, grid)
            first = F.layer_norm(upcast(x[:, :prefix]), (x.shape[-1],), *self._affine(x), self.eps).to(x.dtype)
            return torch.cat([first, self._normalize(x[:, prefix:], grid)], dim=1)

    def kernels(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """P as its factors over columns and rows, (H, columns, columns) and (H, rows, rows), in float32.

        Without gradients, on a CPU, they are kept until a parameter changes.
        """
        if self.a is None or torch.is_grad_enabled() or not _readable(self.a):
            return self._make_kernels(grid)
        # The numbers themselves, since averages of weights are written through .data, which leaves no other trace.
        key = (self.a.flatten().tolist(), self.a.dtype, grid)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, *self._make_kernels(grid))
        return self._cached[1:]

    def lambdas(self) -> tuple[Tensor, Tensor]:
        """Weights of LayerNorm's mean and variance for each head, (H,) each, in float32."""
        return self._lambda(self.omega_mean, "variance"), self._lambda(self.omega_var, "mean")

    def _lambda(self, omega: Tensor | None, other: Statistic) -> Tensor:
        if omega is not None:
            return torch.sigmoid(upcast(omega))
        fixed = 1.0 if self.statistics == other or self.trade_off is None else self.trade_off
        reference = self.weight if self.weight is not None else self.a
        wide = torch.float64 if reference is not None and reference.dtype == torch.float64 else torch.float32
        return torch.full((self.num_heads,), fixed, device=None if reference is None else reference.device, dtype=wide)

    def _make_kernels(self, grid: Grid) -> tuple[Tensor, Tensor]:
        if self.a is None:
            width = self.band or (2 * max(grid) + 1)
            like = self.lambdas()[0]
            return _band_kernel(grid[1], width, like), _band_kernel(grid[0], width, like)
        return axis_kernels(upcast(self.a), grid)

    def _grid_of(self, x: Tensor) -> Grid:
        tokens = x.shape[1] - self.prefix_tokens
        if self.grid_size is None:
            return 1, tokens
        if tokens != self.grid_size[0] * self.grid_size[1]:
            raise ValueError(
                f"The input has {tokens} tokens after {self.prefix_tokens} prefix tokens, and the norm's grid is "
                f"{self.grid_size[0]} x {self.grid_size[1]}. Set grid_size, or pass (B, rows, columns, C)."
            )
        return self.grid_size

    def _normalize(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, T, C) on a grid"""
        wide = upcast(x)
        released = self.variant == "released"
        if released:
            heads = wide.unflatten(-1, (self.num_heads, -1))
            wide = (heads * (heads.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2)
        weight, bias = self._affine(x)
        layout = Layout(grid, self.num_heads, self.eps, unbiased=released)
        if self.pool > 1:
            return self._pooled(wide, weight, bias, layout).to(x.dtype)
        px, py = self.kernels(grid)
        return separable_norm(wide, px, py, *self.lambdas(), weight, bias, layout).to(x.dtype)

    def _affine(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.weight is None or self.bias is None:
            one = upcast(x.new_ones(x.shape[-1]))
            return one, torch.zeros_like(one)
        return upcast(self.weight), upcast(self.bias)

    def _pooled(self, x: Tensor, weight: Tensor, bias: Tensor, layout: Layout) -> Tensor:
        """Statistics across tokens from averages of pool x pool tokens, which share them."""
        (rows, columns), pool = layout.grid, self.pool
        if rows % pool or columns % pool:
            raise ValueError(f"A grid of {rows} x {columns} tokens cannot be pooled by {pool}: choose a divisor.")
        image = x.mT.unflatten(2, layout.grid)
        small = F.avg_pool2d(image - image.mean((2, 3), keepdim=True), pool)
        small = small.unflatten(1, (self.num_heads, -1))  # (B, H, D, rows, columns)
        px, py = self.kernels((rows // pool, columns // pool))
        m, q = (torch.einsum("hrs,hcw,bhdsw->bhdrc", py, px, value) for value in (small, small * small))
        v = (q - m.square()).clamp_min(0)
        m = m + image.mean((2, 3)).unflatten(1, (self.num_heads, -1))[..., None, None]
        spread = [t.flatten(1, 2).repeat_interleave(pool, 2).repeat_interleave(pool, 3).flatten(2).mT for t in (m, v)]
        m, v = (t.unflatten(-1, (self.num_heads, -1)) for t in spread)  # (B, T, H, D)
        lm, lv = (t[:, None] for t in self.lambdas())
        mean, var = x.mean(-1)[..., None, None], x.var(-1, unbiased=layout.unbiased)[..., None, None]
        heads = x.unflatten(-1, (self.num_heads, -1))
        y = (heads - lm * mean - (1 - lm) * m) * (lv * var + (1 - lv) * v + self.eps).rsqrt()
        return y.flatten(-2) * weight + bias

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cached": None}

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, grid_size={self.grid_size}, eps={self.eps}, variant={self.variant}"


@torch.no_grad()
def start_kernels(a: Tensor, init: Literal["local", "noise"], sequence: bool = False) -> None:
    """Fills the kernels' parameters (H, 3): each "local" one peaks at an offset of its own, the others are noise."""
    nn.init.trunc_normal_(a, std=0.02)
    if init == "local":
        peaks = local_offsets(len(a), sequence).to(a)
        a[: len(peaks)] = torch.cat([-torch.ones_like(peaks[:, :1]), 2 * peaks], dim=1)


def local_offsets(num_heads: int, sequence: bool = False) -> Tensor:
    """(dx, dy) at which the kernels peak in the beginning, (k, 2): a k x k square of offsets around 0 for k =
    floor(sqrt(H)), or for a sequence H offsets in a row."""
    if sequence:
        dx = torch.arange(num_heads, dtype=torch.float64) - (num_heads - 1) / 2
        return torch.stack([dx, torch.zeros_like(dx)], dim=1)
    side = math.isqrt(num_heads)
    place = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    return torch.stack([place.repeat_interleave(side), place.repeat(side)], dim=1)


def _band_kernel(length: int, width: int, like: Tensor) -> Tensor:
    """Equal weights within a band, for every head: (H, length, length)."""
    place = torch.arange(length, device=like.device)
    inside = ((place - place[:, None]).abs() <= width // 2).to(like.dtype)
    return (inside / inside.sum(-1, keepdim=True)).expand(len(like), -1, -1).contiguous()


def _readable(x: Tensor) -> bool:
    """Whether its numbers are at hand: a device would have to be waited for, and a tracer has none."""
    traced = torch.compiler.is_compiling() or transformed() or torch._C._len_torch_dispatch_stack() > 0
    return x.device.type == "cpu" and not traced


def _check(
    dim: int, heads: int, eps: float, trade_off: float | None, band: int | None, pool: int, lambda_init: float
) -> None:
    if heads < 1 or dim % heads:
        raise ValueError(f"{heads} heads do not divide {dim} channels: choose a divisor.")
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}.")
    if trade_off is not None and not 0 <= trade_off <= 1:
        raise ValueError(f"trade_off is a fraction between 0 and 1, got {trade_off}.")
    if band is not None and (band < 1 or band % 2 == 0):
        raise ValueError(f"band is an odd number of tokens, got {band}.")
    if pool < 1:
        raise ValueError(f"pool is 1 (none) or more, got {pool}.")
    if not 0 < lambda_init < 1:
        raise ValueError(f"lambda_init lies between 0 and 1, got {lambda_init}.")
    if trade_off is not None and lambda_init != 0.5:
        raise ValueError("trade_off fixes lambda, so lambda_init would have no effect: give one of them.")
