"""Normalization with local statistics under a separable kernel, exactly: O(T (rows + columns)) work, no T x T tensor.

For logits ``a1 (dx^2 + dy^2) + a2 dx + a3 dy`` the softmax over all tokens of a grid is a product of a softmax over
columns and one over rows, ``P[(r, c), (r', c')] = Py[r, r'] Px[c, c']``: the exponential of a sum, normalized over a
product set. So ``P x`` is two small matrix products.

Tokens are held as (H, columns, rows, B, D): both products are then plain batched ones, without a copy between them.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from vitmods.ops.context import differentiates_again, gradients_with_graph, transformed, without_autocast
from vitmods.ops.native import dynamic_token, usable

Grid = tuple[int, int]
NEGLIGIBLE = 1e-15  # beside kernels whose rows sum to 1, in float32 and in float64


def axis_kernels(a: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """P's factors: a (H, 3) -> (H, columns, columns) and (H, rows, rows), whose rows sum to 1."""
    if a.device.type == "cuda" and not (torch.compiler.is_compiling() or transformed() or isinstance(a, FakeTensor)):
        if grid[0] == grid[1]:
            px, py = _by_product(a, grid[0], (1, 2))
            return px, py
        return _by_product(a, grid[1], (1,))[0], _by_product(a, grid[0], (2,))[0]
    (rows, columns), (quadratic, dx, dy) = grid, a[..., None, None].unbind(1)
    return _axis_kernel(quadratic, dx, columns), _axis_kernel(quadratic, dy, rows)


def _axis_kernel(quadratic: Tensor, linear: Tensor, length: int) -> Tensor:
    """Softmax over j of ``quadratic d^2 + linear d``, d = j - i: (H, 1, 1) each -> (H, length, length).

    What no sum would notice is 0: far from the peak entries are subnormal numbers, with which a processor may take a
    hundred times as long.
    """
    place = torch.arange(length, device=linear.device, dtype=linear.dtype)
    d = place - place[:, None]
    p = torch.addcmul(linear * d, quadratic, d * d).softmax(-1)
    return torch.where(p < NEGLIGIBLE, 0, p)


def _by_product(a: Tensor, length: int, linear: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The same for each column of a (H, 3) in ``linear``, all by one product: a GPU, which does not mind subnormal
    numbers, waits for each operation on kernels as small as these."""
    logits: Tensor = _Product.apply(a, _offsets(length, linear, a.device, a.dtype))
    return logits.view(len(a), len(linear), length, length).softmax(-1).unbind(1)


class _Product(torch.autograd.Function):
    """A product with a constant that autocast leaves alone, and its derivative too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, constant: Tensor) -> Tensor:
        ctx.save_for_backward(constant)
        with without_autocast(a):
            return torch.mm(a, constant)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (constant,) = ctx.saved_tensors
        with without_autocast(grad):
            return torch.mm(grad, constant.T), None


@lru_cache(maxsize=64)
def _offsets(length: int, linear: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """What the columns of a (H, 3) are multiplied with, (3, kernels * length * length)."""
    with torch.inference_mode(False):  # those of inference could not be kept for backward later
        place = torch.arange(length, device=device, dtype=dtype)
        d = place - place[:, None]
        square, zero = d * d, torch.zeros_like(d)
        return torch.stack([square if i == 0 else d if i == k else zero for i in range(3) for k in linear]).view(3, -1)


@lru_cache(maxsize=64)
def _zero(device: torch.device, dtype: torch.dtype) -> Tensor:
    """What a scaled product is added to, so that it is one operation on a GPU."""
    with torch.inference_mode(False):
        return torch.zeros((), device=device, dtype=dtype)


def to_heads(x: Tensor, grid: Grid, heads: int) -> Tensor:
    """(B, T, C) -> a view (H, columns, rows, B, D)."""
    return torch.unflatten(torch.unflatten(x, 1, grid), -1, (heads, -1)).permute(3, 2, 1, 0, 4)


def per_token(x: Tensor, grid: Grid) -> Tensor:
    """(B, T) -> a view (1, columns, rows, B, 1)."""
    return torch.unflatten(x, 1, grid).permute(2, 1, 0)[None, ..., None]


def columns(kernel: Tensor, x: Tensor) -> Tensor:
    """(H, c, c') times (H, c', ...)"""
    return torch.bmm(kernel, x.flatten(2)).view(x.shape)


def rows(kernel: Tensor, x: Tensor) -> Tensor:
    """(H, r, r'), or (H, columns, r, r'), times (H, columns, r', ...)

    matmul copies a kernel of all columns for each. That is quickest where it is small compared with
    x, a head at a time elsewhere.
    """
    flat = x.flatten(3)
    if kernel.ndim == 4:
        return torch.matmul(kernel, flat).view(x.shape)
    small = _is_small(kernel, flat.shape[-1])
    if small or torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
        return torch.matmul(kernel[:, None], flat).view(x.shape)
    out = torch.empty_like(flat)
    for k, part, into in zip(kernel, flat, out, strict=True):
        torch.bmm(k.expand(len(part), -1, -1), part, out=into)
    return out.view(x.shape)


def _is_small(kernel: Tensor, width: int) -> bool:
    """Whether one for each column is small compared with the (rows, ``width``) that it multiplies there."""
    return 4 * kernel.shape[-1] <= width


@dataclass(frozen=True)
class MixingLayout:
    """Settings of the function below besides tensors. ``unbiased`` divides LayerNorm's variance by C - 1."""

    grid: Grid
    heads: int
    eps: float
    unbiased: bool = False


def separable_norm(
    x: Tensor,
    px: Tensor,
    py: Tensor,
    mix: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: MixingLayout,
) -> Tensor:
    """``weight (x - mu) / sqrt(var + eps) + bias`` with, per head, ``mu = mix[0] mean_C(x) + (1 - mix[0]) P x`` and
    ``var = mix[1] var_C(x) + (1 - mix[1]) (P x^2 - (P x)^2)``.

    x (B, T, C) in float32 or float64; px (H, columns, columns), py (H, rows, rows); mix (2, H); weight, bias (C,).
    For backward, x is kept and the rest recomputed. The native form is used where possible.
    """
    values = (x, px, py, mix, weight, bias)
    by_native = usable("dynamic_token", *values)
    if not by_native and (torch.compiler.is_compiling() or transformed()):
        return composed(*values, layout)
    return _SeparableNorm.apply(*values, layout, by_native)


def composed(
    x: Tensor,
    px: Tensor,
    py: Tensor,
    mix: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: MixingLayout,
) -> Tensor:
    """Compute ``separable_norm`` in plain operations, for compilers, which fuse them, and second derivatives."""
    grid, heads = layout.grid, layout.heads
    lm, lv = mix[..., None, None, None, None]
    mean, var = x.mean(-1), x.var(-1, unbiased=layout.unbiased)
    center = x.mean(1, keepdim=True).detach()  # P 1 = 1: any center gives the same result and gradients
    xc = to_heads(x - center, grid, heads).contiguous()
    m, q = rows(py, columns(px, xc)), rows(py, columns(px, xc * xc))
    s2 = lv * per_token(var, grid) + (1 - lv) * (q - m * m).clamp_min(0)
    shift = to_heads(center, (1, 1), heads)
    n = (xc - (1 - lm) * m + lm * (shift - per_token(mean, grid))) * (s2 + layout.eps).rsqrt()
    return n.permute(3, 2, 1, 0, 4).flatten(3).flatten(1, 2) * weight + bias


class _SeparableNorm(torch.autograd.Function):
    """x is the only tensor of its size that is kept for backward. Recomputing the moments costs no more than reading
    them back from memory, for what is kept has left the cache by then."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        px: Tensor,
        py: Tensor,
        mix: Tensor,
        weight: Tensor,
        bias: Tensor,
        layout: MixingLayout,
        by_native: bool,
    ) -> Tensor:
        values = (x, px, py, mix, weight, bias)
        y: Tensor
        statistics: list[Tensor] = []
        if by_native:
            y = dynamic_token.forward(x, px, py, *mix, weight, bias, layout.eps, layout.unbiased)
        else:
            y, *statistics = _forward(*values, layout)
        ctx.layout, ctx.by_native = layout, by_native
        ctx.save_for_backward(*values, *statistics)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout, saved = ctx.layout, ctx.saved_tensors  # which may be read once
        values, statistics = saved[:6], saved[6:]
        with without_autocast(grad):
            if differentiates_again():
                return *gradients_with_graph(partial(composed, layout=layout), values, grad), None, None
            if ctx.by_native:
                x, px, py, mix, weight, _ = values
                gradients = dynamic_token.backward(grad, x, px, py, *mix, weight, layout.eps, layout.unbiased)
                return *gradients[:3], torch.stack(gradients[3:5]), *gradients[5:], None, None
            return *_gradients(grad, (*values[:-1], *statistics), layout), None, None


def _forward(
    x: Tensor,
    px: Tensor,
    py: Tensor,
    mix: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: MixingLayout,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm; mean and variance over channels (2, B, T), and the mean over tokens.

    Statistics are shift invariant, so they are computed after subtracting the mean of each channel over the image:
    P x^2 - (P x)^2 then keeps its digits whatever offset the tokens share. Where a part of the image is flat and far
    from the rest, it can still round to less than 0, which is taken as 0.
    """
    var, mean = torch.var_mean(x, -1, correction=int(layout.unbiased))
    tokens, center = torch.stack([mean, var]), x.mean(1, keepdim=True)
    *_, around = _around(x, center, px, py, layout)
    n, _ = _normalized(x, around.lerp_(_both(tokens, layout.grid), _of_heads(mix)), layout)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    shape = (layout.heads, 1, 1, 1, -1)
    torch.addcmul(bias.view(shape), n, weight.view(shape), out=to_heads(y, layout.grid, layout.heads))
    return y, tokens, center


def _gradients(grad: Tensor, saved: tuple[Tensor, ...], layout: MixingLayout) -> tuple[Tensor, ...]:
    """Return the gradients of x, px, py, mix, weight and bias."""
    x, px, py, mix, weight, tokens, center = saved
    grid, heads, c = layout.grid, layout.heads, x.shape[-1]

    # Forward once more; the products over columns are needed for the gradient of py anyway.
    if _is_small(py, 2 * x.shape[0] * c // heads):
        py = py[:, None].expand(-1, grid[1], -1, -1).contiguous()  # once for all products
    moments, over_columns, m, around = _around(x, center, px, py, layout)
    apart, shares = around - _both(tokens, grid), _of_heads(mix)
    n, r = _normalized(x, around.addcmul_(apart, shares, value=-1), layout)

    # Through the affine map and the division: minus the gradients of mu and of the variance.
    g, of_mixed = to_heads(grad, grid, heads), torch.empty_like(moments)
    gn, rw = n.mul_(g), r * weight.view(heads, 1, 1, 1, -1)
    grad_weight = gn.sum((1, 2, 3)).flatten()
    of_u = torch.mul(g, rw, out=of_mixed[:, :, :, 0])
    of_var = torch.mul(gn, rw, out=of_mixed[:, :, :, 1])
    is_cached = x.device.type == "cuda" and not isinstance(x, FakeTensor)
    zero = _zero(x.device, x.dtype) if is_cached else x.new_zeros(())
    torch.addcmul(zero, of_var, r, value=0.5, out=of_var)

    # Through the mixtures.
    grad_mix = apart.mul_(of_mixed).permute(3, 0, 1, 2, 4, 5).sum((2, 3, 4, 5))
    within = of_mixed * shares
    grad_mean, grad_var = within.sum((0, 5)).permute(2, 3, 1, 0)[..., None]
    gm, gq = within.sub_(of_mixed).unbind(3)
    gm.addcmul_(m, gq, value=-2)

    # Through both moments, and the two products of each.
    grad_py = _outer_rows(within, over_columns)
    of_columns = rows(py.mT, within)
    grad_px = _outer_columns(of_columns, moments)
    of_x, of_square = columns(px.mT, of_columns).unbind(3)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    in_heads = torch.add(of_x, of_u, out=to_heads(grad_x, grid, heads))
    in_heads.addcmul_(of_square, moments[:, :, :, 0], value=2)

    # Through LayerNorm's statistics.
    scale = 2 / (c - layout.unbiased)
    mean, on_grid = torch.unflatten(tokens[0], 1, grid)[..., None], torch.unflatten(grad_x, 1, grid)
    grad_mean = torch.addcmul(grad_mean, mean, grad_var, value=-scale * c)
    on_grid.addcmul_(torch.unflatten(x, 1, grid), grad_var, value=-scale).sub_(grad_mean, alpha=1 / c)
    return grad_x, grad_px, grad_py, grad_mix, grad_weight, grad.sum((0, 1))


def _around(
    x: Tensor, center: Tensor, px: Tensor, py: Tensor, layout: MixingLayout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of x (B, T, C), less its mean over tokens: its first and second power, (H, columns, rows, 2, B, D) as all; both
    mixed over columns; the first mixed over rows too, P x; and mean and variance by P, of x itself."""
    shift = to_heads(center, (1, 1), layout.heads)
    values = to_heads(x, layout.grid, layout.heads)
    moments = x.new_empty(*values.shape[:3], 2, *values.shape[3:])
    xc = torch.sub(values, shift, out=moments[:, :, :, 0])
    torch.mul(xc, xc, out=moments[:, :, :, 1])
    over_columns = columns(px, moments)
    m, q = rows(py, over_columns).unbind(3)
    around = torch.empty_like(moments)
    torch.add(m, shift, out=around[:, :, :, 0])
    torch.addcmul(q, m, m, value=-1, out=around[:, :, :, 1]).clamp_min_(0)
    return moments, over_columns, m, around


def _normalized(x: Tensor, mixed: Tensor, layout: MixingLayout) -> tuple[Tensor, Tensor]:
    """x normalized by ``mixed`` mean and variance, which it overwrites, and the reciprocal deviation."""
    mu, var = mixed.unbind(3)
    r = var.add_(layout.eps).rsqrt_()
    return torch.sub(to_heads(x, layout.grid, layout.heads), mu, out=mu).mul_(r), r


def _both(tokens: Tensor, grid: Grid) -> Tensor:
    """(2, B, T) -> a view (1, columns, rows, 2, B, 1)."""
    return torch.unflatten(tokens, 2, grid).permute(3, 2, 0, 1)[None, ..., None]


def _of_heads(mix: Tensor) -> Tensor:
    """(2, H) -> a view (H, 1, 1, 2, 1, 1)."""
    return mix.T[:, None, None, :, None, None]


def _outer_columns(a: Tensor, b: Tensor) -> Tensor:
    """(H, c, ...) times (H, c', ...) over all but the first two -> (H, c, c')"""
    return a.flatten(2) @ b.flatten(2).mT


def _outer_rows(a: Tensor, b: Tensor) -> Tensor:
    """(H, columns, r, ...) times (H, columns, r', ...) over all but heads and rows -> (H, r, r')"""
    a, b = a.flatten(3), b.flatten(3)
    if 4 * a.shape[2] <= a.shape[3]:
        return (a @ b.mT).sum(1)
    zero = a.new_zeros(a.shape[2], a.shape[2])  # a product for each column would be larger than x
    return torch.stack([torch.addbmm(zero, p, q.mT) for p, q in zip(a, b, strict=True)])
