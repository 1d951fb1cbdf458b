"""Normalization with local statistics under a separable kernel, exactly: O(T (rows + columns)) work, no T x T tensor.

For logits ``a1 (dx^2 + dy^2) + a2 dx + a3 dy`` the softmax over all tokens of a grid is a product of a softmax over
columns and one over rows, ``P[(r, c), (r', c')] = Py[r, r'] Px[c, c']``: the exponential of a sum, normalised over a
product set. So ``P x`` is two small matrix products.

Tokens are held as (H, columns, rows, B, D): both products are then plain batched ones, without a copy between them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Grid = tuple[int, int]


def axis_kernel(quadratic: Tensor, linear: Tensor, length: int) -> Tensor:
    """Softmax over j of ``quadratic d^2 + linear d``, d = j - i: (H,), (H,) -> (H, length, length), rows sum to 1."""
    place = torch.arange(length, device=linear.device, dtype=linear.dtype)
    d = place - place[:, None]
    return (quadratic[:, None, None] * d.square() + linear[:, None, None] * d).softmax(-1)


def to_heads(x: Tensor, grid: Grid, heads: int) -> Tensor:
    """(B, T, C) -> a view (H, columns, rows, B, D)."""
    return x.unflatten(1, grid).unflatten(-1, (heads, -1)).permute(3, 2, 1, 0, 4)


def per_token(x: Tensor, grid: Grid) -> Tensor:
    """(B, T) -> a view (1, columns, rows, B, 1)."""
    return x.unflatten(1, grid).permute(2, 1, 0)[None, ..., None]


def columns(kernel: Tensor, x: Tensor) -> Tensor:
    """(H, c, c') times (H, c', rows, B, D)"""
    return torch.bmm(kernel, x.flatten(2)).view(x.shape)


def rows(kernel: Tensor, x: Tensor) -> Tensor:
    """(H, r, r') times (H, columns, r', B, D)"""
    return torch.matmul(kernel[:, None], x.flatten(3)).view(x.shape)


@dataclass(frozen=True)
class Layout:
    """What the function below needs to know besides tensors. ``unbiased`` divides LayerNorm's variance by C - 1."""

    grid: Grid
    heads: int
    eps: float
    unbiased: bool = False


def separable_norm(
    x: Tensor, px: Tensor, py: Tensor, mix_mean: Tensor, mix_var: Tensor, weight: Tensor, bias: Tensor, layout: Layout
) -> Tensor:
    """``weight (x - mu) / sqrt(var + eps) + bias`` with, per head, ``mu = mix_mean mean_C(x) + (1 - mix_mean) P x`` and
    ``var = mix_var var_C(x) + (1 - mix_var) (P x^2 - (P x)^2)``.

    x (B, T, C) in float32 or float64; px (H, columns, columns), py (H, rows, rows); mixes (H,); weight, bias (C,).
    Keeps x alone for backward; the rest is made again.
    """
    if torch.compiler.is_compiling():
        return _composed(x, px, py, mix_mean, mix_var, weight, bias, layout)
    out: Tensor = _SeparableNorm.apply(x, px, py, mix_mean, mix_var, weight, bias, layout)
    return out


def _token_statistics(x: Tensor, unbiased: bool) -> tuple[Tensor, Tensor]:
    """Mean and variance over channels, (B, T) each. LayerNorm's kernel is the quickest way to them on a CPU."""
    c = x.shape[-1]
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [c], None, None, 0.0)
    var = rstd.square().reciprocal()
    return mean.flatten(1), (var * (c / (c - 1)) if unbiased else var).flatten(1)


def _composed(
    x: Tensor, px: Tensor, py: Tensor, mix_mean: Tensor, mix_var: Tensor, weight: Tensor, bias: Tensor, layout: Layout
) -> Tensor:
    """The same in single operations, for the compiler, which fuses them by itself."""
    grid, heads = layout.grid, layout.heads
    lm, lv = mix_mean.view(-1, 1, 1, 1, 1), mix_var.view(-1, 1, 1, 1, 1)
    mean, var = x.mean(-1), x.var(-1, unbiased=layout.unbiased)
    centre = x.mean(1, keepdim=True).detach()  # P 1 = 1: any centre gives the same result and gradients
    xc = to_heads(x - centre, grid, heads).contiguous()
    m, q = rows(py, columns(px, xc)), rows(py, columns(px, xc * xc))
    s2 = lv * per_token(var, grid) + (1 - lv) * (q - m * m)
    shift = to_heads(centre, (1, 1), heads)
    n = (xc - (1 - lm) * m + lm * (shift - per_token(mean, grid))) * (s2 + layout.eps).rsqrt()
    return n.permute(3, 2, 1, 0, 4).flatten(3).flatten(1, 2) * weight + bias


class _SeparableNorm(torch.autograd.Function):
    """Statistics are shift invariant, so they are taken after the mean of each channel over the picture is taken off:
    P x^2 - (P x)^2 then keeps its digits whatever offset the tokens share."""

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
        layout: Layout,
    ) -> Tensor:
        mean, var = _token_statistics(x, layout.unbiased)
        centre = x.mean(1, keepdim=True)
        xc = _centred(x, centre, layout)
        square = xc * xc
        m = rows(py, columns(px, xc))
        v = rows(py, columns(px, square)).addcmul_(m, m, value=-1)
        r = _reciprocal_deviation(v, var, mix_var, layout, out=v)
        n = _deviation(xc, m, centre, mean, mix_mean, layout, out=square).mul_(r)
        y = torch.empty_like(x)
        shape = (layout.heads, 1, 1, 1, -1)
        torch.addcmul(bias.view(shape), n, weight.view(shape), out=to_heads(y, layout.grid, layout.heads))
        ctx.save_for_backward(x, px, py, mix_mean, mix_var, weight)
        ctx.layout = layout
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, px, py, mix_mean, mix_var, weight = ctx.saved_tensors
        layout, (grid, heads) = ctx.layout, (ctx.layout.grid, ctx.layout.heads)
        c = x.shape[-1]
        lm, lv = mix_mean.view(-1, 1, 1, 1, 1), mix_var.view(-1, 1, 1, 1, 1)
        over_tokens = (1, 2, 3, 4)

        # Forward once more; the products over columns are needed for the gradient of py anyway.
        mean, var = _token_statistics(x, layout.unbiased)
        centre = x.mean(1, keepdim=True)
        xc = _centred(x, centre, layout)
        square = xc * xc
        zm, zq = columns(px, xc), columns(px, square)
        m = rows(py, zm)
        v = rows(py, zq).addcmul_(m, m, value=-1)
        r = _reciprocal_deviation(v, var, mix_var, layout, out=torch.empty_like(v))
        n = _deviation(xc, m, centre, mean, mix_mean, layout, out=torch.empty_like(xc)).mul_(r)

        g = to_heads(grad, grid, heads)
        grad_weight = (g * n).sum((1, 2, 3)).flatten()
        gu = torch.mul(g, weight.view(heads, 1, 1, 1, -1), out=torch.empty_like(xc)).mul_(r)  # of x - mu
        gs = n.mul_(gu).mul_(r).mul_(-0.5)  # of the variance
        gu_token, gs_token = gu.sum(-1, keepdim=True), gs.sum(-1, keepdim=True)
        shift = to_heads(centre, (1, 1), heads)
        grad_mix_mean = (gu * m).sum(over_tokens) + (gu.sum((1, 2), keepdim=True) * shift).sum(over_tokens)
        grad_mix_mean -= (gu_token * per_token(mean, grid)).sum(over_tokens)
        grad_mix_var = (gs_token * per_token(var, grid)).sum(over_tokens) - (gs * v).sum(over_tokens)

        gq = gs.mul_(1 - lv)
        gm = torch.mul(gu, lm - 1, out=v).addcmul_(m, gq, value=-2)
        grad_py = _outer(gm.flatten(3), zm.flatten(3)).sum(1) + _outer(gq.flatten(3), zq.flatten(3)).sum(1)
        hm, hq = rows(py.mT, gm), rows(py.mT, gq)
        grad_px = _outer(hm.flatten(2), xc.flatten(2)) + _outer(hq.flatten(2), square.flatten(2))
        gu.add_(columns(px.mT, hm)).addcmul_(columns(px.mT, hq), xc, value=2)

        grad_x = torch.empty_like(x)
        to_heads(grad_x, grid, heads).copy_(gu)
        grad_mean = _to_tokens(-(gu_token * lm).sum(0)) / c
        grad_var = _to_tokens((gs_token * lv).sum(0)) * (2 / (c - 1 if layout.unbiased else c))
        grad_x.add_(grad_mean - grad_var * mean[..., None]).addcmul_(x, grad_var)
        return grad_x, grad_px, grad_py, grad_mix_mean, grad_mix_var, grad_weight, grad.sum((0, 1)), None


def _centred(x: Tensor, centre: Tensor, layout: Layout) -> Tensor:
    """(B, T, C) minus (B, 1, C) -> (H, columns, rows, B, D), contiguous."""
    xc = to_heads(x, layout.grid, layout.heads).contiguous()
    return xc.sub_(to_heads(centre, (1, 1), layout.heads))


def _deviation(
    xc: Tensor, m: Tensor, centre: Tensor, mean: Tensor, mix_mean: Tensor, layout: Layout, out: Tensor
) -> Tensor:
    """x - mu, from the centred x and m = P x."""
    lm = mix_mean.view(-1, 1, 1, 1, 1)
    torch.addcmul(xc, m, lm - 1, out=out)
    return out.add_(lm * to_heads(centre, (1, 1), layout.heads)).sub_(lm * per_token(mean, layout.grid))


def _reciprocal_deviation(v: Tensor, var: Tensor, mix_var: Tensor, layout: Layout, out: Tensor) -> Tensor:
    """1 / sqrt(mix_var var + (1 - mix_var) v + eps)"""
    lv = mix_var.view(-1, 1, 1, 1, 1)
    return torch.mul(v, 1 - lv, out=out).add_(lv * per_token(var, layout.grid) + layout.eps).rsqrt_()


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """(..., n, K) times (..., m, K) over K -> (..., n, m)"""
    return a @ b.mT


def _to_tokens(x: Tensor) -> Tensor:
    """(columns, rows, B, 1) -> (B, T, 1)"""
    return x.permute(2, 1, 0, 3).flatten(1, 2)
