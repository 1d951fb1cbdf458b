"""Normalization with local statistics under a separable kernel, exactly: O(T (rows + columns)) work, no T x T tensor.

For logits ``a1 (dx^2 + dy^2) + a2 dx + a3 dy`` the softmax over all tokens of a grid is a product of a softmax over
columns and one over rows, ``P[(r, c), (r', c')] = Py[r, r'] Px[c, c']``: the exponential of a sum, normalized over a
product set. So ``P x`` is two small matrix products.

Tokens are held as (H, columns, rows, B, D): both products are then plain batched ones, without a copy between them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitmods.ops.context import differentiates_again, gradients_with_graph, transformed, without_autocast
from vitmods.ops.native import dynamic_token, usable

Grid = tuple[int, int]
NEGLIGIBLE = 1e-15  # beside kernels whose rows sum to 1, in float32 and in float64


def axis_kernels(a: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """P's factors: a (H, 3) -> (H, columns, columns) and (H, rows, rows), whose rows sum to 1."""
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


def to_heads(x: Tensor, grid: Grid, heads: int) -> Tensor:
    """(B, T, C) -> a view (H, columns, rows, B, D)."""
    return torch.unflatten(torch.unflatten(x, 1, grid), -1, (heads, -1)).permute(3, 2, 1, 0, 4)


def per_token(x: Tensor, grid: Grid) -> Tensor:
    """(B, T) -> a view (1, columns, rows, B, 1)."""
    return torch.unflatten(x, 1, grid).permute(2, 1, 0)[None, ..., None]


def columns(kernel: Tensor, x: Tensor) -> Tensor:
    """(H, c, c') times (H, c', rows, B, D)"""
    return torch.bmm(kernel, x.flatten(2)).view(x.shape)


def rows(kernel: Tensor, x: Tensor) -> Tensor:
    """(H, r, r') times (H, columns, r', B, D)

    matmul copies the kernel for each column. That is quickest where it is small compared with
    x, a head at a time elsewhere.
    """
    flat = x.flatten(3)
    small = 4 * kernel.shape[-1] <= flat.shape[-1]
    if small or torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
        return torch.matmul(kernel[:, None], flat).view(x.shape)
    out = torch.empty_like(flat)
    for k, part, into in zip(kernel, flat, out, strict=True):
        torch.bmm(k.expand(len(part), -1, -1), part, out=into)
    return out.view(x.shape)


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
    mix_mean: Tensor,
    mix_var: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: MixingLayout,
) -> Tensor:
    """``weight (x - mu) / sqrt(var + eps) + bias`` with, per head, ``mu = mix_mean mean_C(x) + (1 - mix_mean) P x`` and
    ``var = mix_var var_C(x) + (1 - mix_var) (P x^2 - (P x)^2)``.

    x (B, T, C) in float32 or float64; px (H, columns, columns), py (H, rows, rows); mixes (H,); weight, bias (C,).
    For backward, x is kept and the rest recomputed. The native form is used where possible.
    """
    values = (x, px, py, mix_mean, mix_var, weight, bias)
    by_native = usable("dynamic_token", *values)
    if not by_native and (torch.compiler.is_compiling() or transformed()):
        return composed(*values, layout)
    return _SeparableNorm.apply(*values, layout, by_native)


def composed(
    x: Tensor,
    px: Tensor,
    py: Tensor,
    mix_mean: Tensor,
    mix_var: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: MixingLayout,
) -> Tensor:
    """Compute ``separable_norm`` in plain operations, for compilers, which fuse them, and second derivatives."""
    grid, heads = layout.grid, layout.heads
    lm, lv = mix_mean.view(-1, 1, 1, 1, 1), mix_var.view(-1, 1, 1, 1, 1)
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
        mix_mean: Tensor,
        mix_var: Tensor,
        weight: Tensor,
        bias: Tensor,
        layout: MixingLayout,
        by_native: bool,
    ) -> Tensor:
        values = (x, px, py, mix_mean, mix_var, weight, bias)
        y: Tensor
        statistics: list[Tensor] = []
        if by_native:
            y = dynamic_token.forward(*values, layout.eps, layout.unbiased)
        else:
            y, *statistics = _forward(*values, layout)
        ctx.layout, ctx.by_native = layout, by_native
        ctx.save_for_backward(*values, *statistics)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout, saved = ctx.layout, ctx.saved_tensors  # which may be read once
        values, statistics = saved[:7], saved[7:]
        with without_autocast(grad):
            if differentiates_again():
                return *gradients_with_graph(partial(composed, layout=layout), values, grad), None, None
            if ctx.by_native:
                return *dynamic_token.backward(grad, *values[:-1], layout.eps, layout.unbiased), None, None
            return *_gradients(grad, (*values[:-1], *statistics), layout), None, None


def _forward(
    x: Tensor,
    px: Tensor,
    py: Tensor,
    mix_mean: Tensor,
    mix_var: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: MixingLayout,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm, and mean and variance over channels and the mean over tokens.

    Statistics are shift invariant, so they are computed after subtracting the mean of each channel over the image:
    P x^2 - (P x)^2 then keeps its digits whatever offset the tokens share. Where a part of the image is flat and far
    from the rest, it can still round to less than 0, which is taken as 0.
    """
    grid, heads = layout.grid, layout.heads
    mean = x.mean(-1)  # over channels, (B, T); the norm is ten times as quick on a CPU as var
    var = torch.linalg.vector_norm(x - mean[..., None], dim=-1).square() / (x.shape[-1] - layout.unbiased)
    center = x.mean(1, keepdim=True)
    xc = _centered(x, center, layout)
    square = xc * xc
    m = rows(py, columns(px, xc))
    v = rows(py, columns(px, square)).addcmul_(m, m, value=-1).clamp_min_(0)
    r = _reciprocal_deviation(v, var, mix_var, layout, out=v)
    n = _deviation(xc, m, center, mean, mix_mean, layout, out=square).mul_(r)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    shape = (heads, 1, 1, 1, -1)
    torch.addcmul(bias.view(shape), n, weight.view(shape), out=to_heads(y, grid, heads))
    return y, mean, var, center


def _gradients(grad: Tensor, saved: tuple[Tensor, ...], layout: MixingLayout) -> tuple[Tensor, ...]:
    """Return the gradients of x, px, py, mix_mean, mix_var, weight and bias."""
    x, px, py, mix_mean, mix_var, weight, mean, var, center = saved
    grid, heads, c = layout.grid, layout.heads, x.shape[-1]
    lm, lv = mix_mean.view(-1, 1, 1, 1, 1), mix_var.view(-1, 1, 1, 1, 1)

    # Forward once more; the products over columns are needed for the gradient of py anyway.
    xc = _centered(x, center, layout)
    square = xc * xc
    zm, zq = columns(px, xc), columns(px, square)
    m = rows(py, zm)
    v = rows(py, zq).addcmul_(m, m, value=-1).clamp_min_(0)
    r = _reciprocal_deviation(v, var, mix_var, layout, out=torch.empty_like(v))
    n = _deviation(xc, m, center, mean, mix_mean, layout, out=torch.empty_like(v)).mul_(r)

    # Through the affine map and the division: gu is the gradient of x - mu, gs of the variance.
    g = _heads_copy(grad, grid, heads)
    gs = n.mul_(g)
    grad_weight = gs.sum((1, 2, 3)).flatten()
    rw = r * weight.view(heads, 1, 1, 1, -1)
    gu = g.mul_(rw)
    gs.mul_(rw).mul_(r).mul_(-0.5)

    # Through the mixtures.
    gu_token, gs_token = gu.sum(-1, keepdim=True), gs.sum(-1, keepdim=True)
    grad_mix_mean = _dot(gu, m) - _dot(gu_token, per_token(mean, grid))
    grad_mix_mean += _dot(gu.sum((1, 2), keepdim=True), to_heads(center, (1, 1), heads))
    grad_mix_var = _dot(gs_token, per_token(var, grid)) - _dot(gs, v)

    # Through both moments, and the two products of each.
    gq = gs.mul_(1 - lv)
    gm = torch.mul(gu, lm - 1, out=rw).addcmul_(m, gq, value=-2)
    grad_py = _outer_rows(gm, zm) + _outer_rows(gq, zq)
    hm, hq = rows(py.mT, gm), rows(py.mT, gq)
    grad_px = _outer_columns(hm, xc) + _outer_columns(hq, square)
    gu.add_(columns(px.mT, hm)).addcmul_(columns(px.mT, hq), xc, value=2)

    # Through LayerNorm's statistics.
    grad_mean = _to_tokens((gu_token * lm).sum(0)) / -c
    grad_var = _to_tokens((gs_token * lv).sum(0)) * (2 / (c - layout.unbiased))
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    to_heads(grad_x, grid, heads).copy_(gu)
    grad_x.addcmul_(x, grad_var).add_(grad_mean - grad_var * mean[..., None])
    return grad_x, grad_px, grad_py, grad_mix_mean, grad_mix_var, grad_weight, grad.sum((0, 1))


def _heads_copy(x: Tensor, grid: Grid, heads: int) -> Tensor:
    """(B, T, C) -> (H, columns, rows, B, D), contiguous and always a copy."""
    return to_heads(x, grid, heads).clone(memory_format=torch.contiguous_format)


def _centered(x: Tensor, center: Tensor, layout: MixingLayout) -> Tensor:
    """(B, T, C) minus (B, 1, C) -> (H, columns, rows, B, D)"""
    return _heads_copy(x, layout.grid, layout.heads).sub_(to_heads(center, (1, 1), layout.heads))


def _deviation(
    xc: Tensor, m: Tensor, center: Tensor, mean: Tensor, mix_mean: Tensor, layout: MixingLayout, out: Tensor
) -> Tensor:
    """x - mu, from the centered tokens and their mean m = P xc."""
    lm = mix_mean.view(-1, 1, 1, 1, 1)
    torch.addcmul(xc, m, lm - 1, out=out)
    return out.add_(lm * to_heads(center, (1, 1), layout.heads)).sub_(lm * per_token(mean, layout.grid))


def _reciprocal_deviation(v: Tensor, var: Tensor, mix_var: Tensor, layout: MixingLayout, out: Tensor) -> Tensor:
    """1 / sqrt(mix_var var + (1 - mix_var) v + eps)"""
    lv = mix_var.view(-1, 1, 1, 1, 1)
    torch.addcmul(lv * per_token(var, layout.grid) + layout.eps, v, 1 - lv, out=out)
    return out.rsqrt_()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products for each head, (H,)"""
    if a.shape != b.shape:
        return (a * b).sum((1, 2, 3, 4))
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1))


def _outer_columns(a: Tensor, b: Tensor) -> Tensor:
    """(H, c, rows, B, D) times (H, c', rows, B, D) over rows, B and D -> (H, c, c')"""
    return a.flatten(2) @ b.flatten(2).mT


def _outer_rows(a: Tensor, b: Tensor) -> Tensor:
    """(H, columns, r, B, D) times (H, columns, r', B, D) over columns, B and D -> (H, r, r').

    addbmm adds over its batch; a product of (H, columns) matrices that is summed later would need T rows numbers.
    """
    zero = a.new_zeros(a.shape[2], a.shape[2])
    return torch.stack([torch.addbmm(zero, p.flatten(2), q.flatten(2).mT) for p, q in zip(a, b, strict=True)])


def _to_tokens(x: Tensor) -> Tensor:
    """(columns, rows, B, 1) -> (B, T, 1)"""
    return x.permute(2, 1, 0, 3).flatten(1, 2)
