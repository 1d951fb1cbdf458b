"""Dynamic Token Normalization (Shao et al., ICLR 2022): learned mixtures of statistics within and across tokens."""

import math
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.norms.contract import Device, Dtype, check, dtn_table, norm_kind
from vitmods.ops.context import transformed, upcast, without_autocast
from vitmods.ops.padding import padding_of
from vitmods.ops.separable import Grid, MixingLayout, axis_kernels, separable_norm
from vitmods.ops.sequence import sequence_norm
from vitmods.ops.token_mixing import TokenMixing
from vitmods.util.errors import UserError

PAPER = TokenMixing()
LONG = 256  # tokens


@norm_kind(
    "dynamic_token",
    title="Dynamic Token",
    paper="Shao et al.: Dynamic Token Normalization Improves Vision Transformers. ICLR 2022",
    url="https://arxiv.org/abs/2112.02624",
    how="a learned mixture of statistics within a token and over its neighborhood, for each head",
    published=dtn_table(80.6, 81.7),
    replaces=False,
    folds=True,
    # two moments of every channel, by the kernels of both axes or by T x T ones
    macs=lambda grid, width, dense: 2 * math.prod(grid) * (math.prod(grid) if dense else sum(grid)) * width,
)
class DynamicTokenNorm(nn.Module):
    r"""Normalizes a token by its own statistics and those of the tokens around it, for each head (equations 4 to 7).

    .. math::

        \begin{align*}
        y &= \gamma \, \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta \\
        \mu &= \lambda_\mu \, \mu_{LN} + (1 - \lambda_\mu) \, P x \\
        \sigma^2 &= \lambda_\sigma \, \sigma^2_{LN} + (1 - \lambda_\sigma) \, (P x^2 - (P x)^2) \\
        P_{ij} &= \mathrm{softmax}_j (a_1 (dx^2 + dy^2) + a_2 \, dx + a_3 \, dy)
        \end{align*}

    Every lambda is the sigmoid of an omega; dx is in columns and dy in rows of the grid. Statistics with LN are
    LayerNorm's, over all channels of a token, biased. P is separable and never formed, so the cost grows as
    T (rows + columns), exactly.

    Shapes: (B, N, C) with N = ``prefix_tokens`` + rows * columns, or (B, rows, columns, C) for any grid; the output as
    the input, in its type, statistics in float32. Prefix tokens get LayerNorm's statistics and contribute none. A
    sequence is a grid of one row, with offsets spread evenly around 0 (the paper does not define that case).

    Args:
        dim: channels C, a multiple of num_heads.
        num_heads: heads H, each with its own kernel and trade-off.
        grid_size: (rows, columns), or a sequence's length; None for inputs (B, rows, columns, C), or sequences.
        eps: added to the variance; the paper's code has 1e-5.
        affine: learn gamma and beta.
        prefix_tokens: class and register tokens in front of the grid.
        mixing: how statistics within and across tokens are mixed.

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
        mixing: TokenMixing = PAPER,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide {dim} channels: choose a divisor.")
        check("DynamicTokenNorm", eps)
        if not isinstance(mixing.pool, int):
            raise ValueError(f"pool is one number for a layer, not {mixing.pool}: several are for models with stages.")
        self.mixing = m = mixing
        self.dim, self.num_heads, self.eps, self.prefix_tokens = dim, num_heads, eps, prefix_tokens
        self.grid_size = (1, grid_size) if isinstance(grid_size, int) else grid_size

        def learned(*shape: int, start: float = 0.0) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, start, device=device, dtype=dtype))

        self.weight = learned(dim, start=1.0) if affine else None
        self.bias = learned(dim) if affine else None
        self.a = learned(num_heads, 3) if m.learns_kernel else None
        self.omega_mean = learned(num_heads) if m.trade_off is None and m.statistics != "variance" else None
        self.omega_var = learned(num_heads) if m.trade_off is None and m.statistics != "mean" else None
        self._cached: tuple[Any, Tensor, Tensor] | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        start = math.log(self.mixing.lambda_init / (1 - self.mixing.lambda_init))
        for value, number in ((self.weight, 1.0), (self.bias, 0.0), (self.omega_mean, start), (self.omega_var, start)):
            if value is not None:
                nn.init.constant_(value, number)
        if self.a is not None:
            sequence = self.grid_size is None or self.grid_size[0] == 1
            start_kernels(self.a, self.mixing.init, sequence, self.mixing.offsets == "whole")

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in (3, 4) or x.shape[-1] != self.dim:
            raise ValueError(
                f"This norm takes (B, N, {self.dim}) or (B, rows, columns, {self.dim}), not {tuple(x.shape)}."
            )
        with without_autocast(x):
            if x.ndim == 4:
                flat = x.flatten(1, 2)
                return self._normalize(flat, (x.shape[1], x.shape[2]), padding_of(self, flat)).view(x.shape)
            grid, prefix, padding = self._grid_of(x), self.prefix_tokens, padding_of(self, x)
            if not prefix:
                return self._normalize(x, grid, padding)
            first, patches = x.split([prefix, x.shape[1] - prefix], dim=1)
            first = F.layer_norm(upcast(first), (x.shape[-1],), *self._affine(x), self.eps).to(x.dtype)
            padding = None if padding is None else padding[:, prefix:]
            return torch.cat([first, self._normalize(patches, grid, padding)], dim=1)

    def kernels(self, grid: Grid, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """P as its factors over columns and rows, (H, columns, columns) and (H, rows, rows), in float32.

        Learned ones are kept without gradients, on a CPU, until a parameter changes; fixed ones (``kernel="uniform"``,
        ``window``) are in type and device of ``like``. A band is not such a product.
        """
        assert self.mixing.band is None
        if self.a is None:
            width, kernels = self.mixing.window or 2 * max(grid), []
            dtype = torch.float32 if like is None else like.dtype
            for length in grid[::-1]:  # equal weights for the ``width`` places around each
                place = torch.arange(length, device=None if like is None else like.device)
                inside = ((place - place[:, None]).abs() <= width // 2).to(dtype)
                kernels.append((inside / inside.sum(-1, keepdim=True)).expand(self.num_heads, -1, -1))
            return kernels[0], kernels[1]
        # Numbers at hand: a device would have to be waited for, and a tracer does not have any.
        traced = torch.compiler.is_compiling() or transformed() or torch._C._len_torch_dispatch_stack() > 0
        if torch.is_grad_enabled() or self.a.device.type != "cpu" or traced:
            return axis_kernels(upcast(self.a), grid)
        # The numbers themselves, since averages of weights are written through .data, which leaves no other trace.
        key = (self.a.flatten().tolist(), self.a.dtype, grid)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, *axis_kernels(upcast(self.a), grid))
        return self._cached[1:]

    def lambdas(self) -> tuple[Tensor | float, Tensor | float]:
        """Weights of LayerNorm's mean and variance: for each head (H,) in float32 where they are learned."""
        return self._lambda(self.omega_mean, "variance"), self._lambda(self.omega_var, "mean")

    def _mix(self, like: Tensor) -> Tensor:
        """Both, (2, H) in float32, or as `like` where they are fixed."""
        if self.omega_mean is not None and self.omega_var is not None:
            return torch.sigmoid(upcast(torch.stack([self.omega_mean, self.omega_var])))
        both = (t if isinstance(t, Tensor) else like.new_full((self.num_heads,), t) for t in self.lambdas())
        return torch.stack(list(both))

    def _lambda(self, omega: Tensor | None, other: Literal["mean", "variance"]) -> Tensor | float:
        if omega is not None:
            return torch.sigmoid(upcast(omega))
        fixed = self.mixing.trade_off
        return 1.0 if fixed is None or self.mixing.statistics == other else fixed

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

    def _normalize(self, x: Tensor, grid: Grid, padding: Tensor | None) -> Tensor:
        """(B, T, C) on a grid"""
        wide, m = upcast(x), self.mixing
        refused = padding is not None and (grid[0] > 1 or self.a is None or max(m.pools) > 1)
        if refused and not torch.compiler.is_compiling() and padding is not None and not padding.any():
            padding = None
        elif refused:
            raise UserError(
                "Padding is left out of sequences only with learned kernels: dtn(kernel=..., band=..., window=..., "
                "pool=...) and grids of several rows take batches without padding."
            )
        released = m.variant == "released"
        if released:
            heads = self._heads(wide)
            wide = (heads * (heads.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2)
        weight, bias = self._affine(x)
        layout = MixingLayout(grid, self.num_heads, self.eps, unbiased=released)
        mix = self._mix(wide)
        lm, lv = mix
        if m.band is not None or max(m.pools) > 1:
            return (self._averaged(wide, lm, lv, layout) * weight + bias).to(x.dtype)
        # A whole kernel of a long sequence takes more time than the window that is seen of it.
        is_long = grid[0] == 1 and grid[1] > LONG and not torch.compiler.is_compiling() and not transformed()
        if self.a is not None and (padding is not None or is_long):
            a = upcast(self.a)
            return sequence_norm(wide, a, lm, lv, weight, bias, layout, padding).to(x.dtype)
        return separable_norm(wide, *self.kernels(grid, wide), mix, weight, bias, layout).to(x.dtype)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, H, D)"""
        return torch.unflatten(x, -1, (self.num_heads, -1))

    def _affine(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.weight is None or self.bias is None:
            ones = upcast(x.new_ones(x.shape[-1]))
            return ones, torch.zeros_like(ones)
        return upcast(self.weight), upcast(self.bias)

    def _averaged(self, x: Tensor, mix_mean: Tensor, mix_var: Tensor, layout: MixingLayout) -> Tensor:
        """The norm without gain and shift where the statistics across tokens are of a band or of pooled tokens."""
        (rows, columns), (pool,), band = layout.grid, self.mixing.pools, self.mixing.band

        def around(values: Tensor) -> Tensor:
            """The mean over the band around each token, or P's over pooled tokens, (B, T, C) out."""
            if band is not None:
                side = min(band, 2 * values.shape[1] - 1)
                return F.avg_pool1d(values.mT, side, 1, side // 2, count_include_pad=False).mT
            px, py = self.kernels((values.shape[2], values.shape[3]), values)
            small = torch.unflatten(values, 1, (self.num_heads, -1))
            mixed = torch.einsum("hrs,hcw,bhdsw->bhdrc", py, px, small).flatten(1, 2)
            return mixed.repeat_interleave(pool, 2).repeat_interleave(pool, 3).flatten(2).mT

        center = x.mean(1, keepdim=True)
        values = x - center
        if band is None:
            if rows % pool or columns % pool:
                raise ValueError(f"A grid of {rows} x {columns} tokens cannot be pooled by {pool}: choose a divisor.")
            values = F.avg_pool2d(torch.unflatten(values.mT, 2, layout.grid), pool)
        m, q = around(values), around(values.square())
        v = (q - m.square()).clamp_min(0)
        heads, m, v = (self._heads(t) for t in (x, m + center, v))
        lm, lv = mix_mean[:, None], mix_var[:, None]
        mean, var = x.mean(-1)[..., None, None], x.var(-1, unbiased=layout.unbiased)[..., None, None]
        return ((heads - lm * mean - (1 - lm) * m) * (lv * var + (1 - lv) * v + self.eps).rsqrt()).flatten(-2)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cached": None}  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        current = [f"{f.name}={getattr(self.mixing, f.name)}" for f in fields(self.mixing)]
        standard = [f"{f.name}={f.default}" for f in fields(self.mixing)]
        chosen = [text for text, usual in zip(current, standard, strict=True) if text != usual]
        return ", ".join([f"num_heads={self.num_heads}, grid_size={self.grid_size}, eps={self.eps}", *chosen])


@torch.no_grad()
def start_kernels(a: Tensor, init: Literal["local", "noise"], sequence: bool = False, whole: bool = False) -> None:
    """Fill the kernels' parameters (H, 3): each "local" one peaks at another offset, the others are noise."""
    nn.init.trunc_normal_(a, std=0.02)
    if init == "local":
        peaks = local_offsets(len(a), sequence, whole).to(a)
        a[: len(peaks)] = torch.cat([-torch.ones_like(peaks[:, :1]), 2 * peaks], dim=1)


def local_offsets(num_heads: int, sequence: bool = False, whole: bool = False) -> Tensor:
    """(dx, dy) at which the kernels peak in the beginning, (k, 2): a k x k square of offsets around 0 for k =
    floor(sqrt(H)), or for a sequence H offsets in a row. For an even side they are halves, or ``whole`` with one more
    above 0 than below."""
    side = num_heads if sequence else math.isqrt(num_heads)
    place = torch.arange(side, dtype=torch.float64) - ((side - 1) // 2 if whole else (side - 1) / 2)
    if sequence:
        return torch.stack([place, torch.zeros_like(place)], dim=1)
    return torch.stack([place.repeat_interleave(side), place.repeat(side)], dim=1)
