"""Normalization with local statistics along a sequence, without a T x T kernel, and with padding left out.

Row i of ``P[i, j] = softmax_j(a d^2 + b d)``, d = j - i, is a piece of a bell around ``i - b / 2a`` where a < 0: beyond
``sqrt(TAIL / |a|)`` of its largest weight it has less than exp(-TAIL) of it, and is taken as 0. So blocks of rows are
multiplied only with the columns that they see, in time and memory that grow as T times the window. Heads without such
a bell (a >= 0, or as wide as the sequence) are summed over all columns, a block of rows after the other: T^2 time, and
memory that grows as T. Logits are taken relative to the row's largest one in a form that does not cancel,
``(d - dm) (a (d + dm) + b)``, so that nothing overflows for any a and b.

Padding has weight 0: ``(P w x) / (P w)``. A token whose kernel is almost all on padding gets its weights anew,
from the tokens that are none.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vitmods.ops.context import differentiates_again, gradients_with_graph, transformed, without_autocast
from vitmods.ops.separable import MixingLayout

TAIL = 69.0  # exp(-69) is 1e-30: beside weights that sum to 1, nothing in float32 nor in float64
BLOCK = 64  # rows
NUMBERS = 1 << 22  # weights of a head that are held at a time
ON_DEVICE = 1 << 27  # weights that an accelerator holds at a time; where there are more, kernels are read first
FAINT = 1e-12  # a sum of weights that is made anew, since what was taken as 0 may count


def sequence_norm(
    x: Tensor, a: Tensor, mix_mean: Tensor, mix_var: Tensor, weight: Tensor, bias: Tensor, layout: MixingLayout,
    padding: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Like ``separable_norm``, for sequences x (B, T, C) and the kernels' parameters a (H, 3), of which the first two
    matter; padding (B, T) is True for tokens that contribute nothing. Where torch compiles, traces or transforms, and
    on accelerators up to ``ON_DEVICE``, kernels are whole matrices. Backward makes everything again from x."""
    form = partial(composed, layout=layout, padding=padding)
    values = (x, a, mix_mean, mix_var, weight, bias)
    if torch.compiler.is_compiling() or transformed():
        return form(*values)
    return _SequenceNorm.apply(form, *values)


class _SequenceNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Any, *values: Tensor) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(*values)
        return form(*values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values = ctx.saved_tensors
        with without_autocast(grad):
            if differentiates_again():
                return None, *gradients_with_graph(ctx.form, values, grad)
            with torch.enable_grad():
                alone = [value.detach().requires_grad_(value.requires_grad) for value in values]
                needed = [value for value in alone if value.requires_grad]
                gradients = iter(torch.autograd.grad(ctx.form(*alone), needed, grad))
            return None, *(next(gradients) if value.requires_grad else None for value in alone)


def composed(
    x: Tensor, a: Tensor, mix_mean: Tensor, mix_var: Tensor, weight: Tensor, bias: Tensor, layout: MixingLayout,
    padding: Tensor | None,
) -> Tensor:  # fmt: skip
    """The same in operations that torch differentiates."""
    heads = layout.heads
    kept = None if padding is None else (~padding)[..., None].to(x.dtype)
    if kept is None:
        center = x.mean(1, keepdim=True).detach()  # weights sum to 1: any center gives the same result and gradients
    else:
        center = ((x * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp_min(1)).detach()
    xc = torch.unflatten(x - center, -1, (heads, -1))
    m, q = moments(a, xc, kept)
    mean = x.mean(-1)[..., None, None]
    var = x.var(-1, unbiased=layout.unbiased)[..., None, None]
    lm, lv = mix_mean[:, None], mix_var[:, None]
    s2 = lv * var + (1 - lv) * (q - m * m).clamp_min(0)
    n = (xc - (1 - lm) * m + lm * (torch.unflatten(center, -1, (heads, -1)) - mean)) * (s2 + layout.eps).rsqrt()
    return n.flatten(-2) * weight + bias


def moments(a: Tensor, x: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """P x and P x^2 of x (B, T, H, D) for each head, kept (B, T, 1) being 0 for padding."""
    both = torch.cat([x, x * x], dim=-1)
    images, length, heads, _ = x.shape
    # An accelerator would wait while the host reads how far a kernel reaches: it takes whole matrices that fit.
    fits_device = x.device.type != "cpu" and heads * length**2 * (1 if kept is None else images) <= ON_DEVICE
    if torch.compiler.is_compiling() or transformed() or fits_device:
        m, q = _whole(a, both, kept).chunk(2, -1)
        return m, q
    weighed = both if kept is None else torch.cat([both * kept[..., None], kept[..., None].expand_as(x[..., :1])], -1)
    moments_of_heads = []
    for head, (quadratic, linear) in enumerate(a[:, :2].detach().tolist()):
        window = _window(quadratic, linear, x.shape[1])
        z = weighed[:, :, head].transpose(0, 1)  # (T, B, 2 D or 2 D + 1)
        out = torch.unflatten(_means(a[head, :2], z.flatten(1), window), 1, z.shape[1:])
        if kept is not None:
            out = _divided(a[head, :2], out, both[:, :, head], kept)
        moments_of_heads.append(out.transpose(0, 1))
    m, q = torch.stack(moments_of_heads, dim=2).chunk(2, -1)
    return m, q


def _window(quadratic: float, linear: float, length: int) -> tuple[int, int] | None:
    """The smallest and largest d at which a row has a weight, at the ends of the sequence too; None: any."""
    if not quadratic < 0:
        return None
    peak, reach = -linear / (2 * quadratic), math.sqrt(-TAIL / quadratic)
    if not max(abs(peak), reach) < length:
        return None
    low, high = math.floor(min(peak, 0.0) - reach), math.ceil(max(peak, 0.0) + reach)
    return (low, high) if high - low + BLOCK < length else None


def _means(a: Tensor, z: Tensor, window: tuple[int, int] | None) -> Tensor:
    """P z for one head's a (2,), (T, M) in and out."""
    length = len(z)
    place = torch.arange(length, device=z.device)
    if window is None:
        rows = max(1, NUMBERS // length)
        parts = place.split(rows)
        return torch.cat([_summed(_rows, len(parts) > 1, a, part, z) for part in parts])
    low, high = window
    blocks, columns = -(-length // BLOCK), BLOCK + high - low
    row = torch.arange(blocks * BLOCK, device=z.device).view(blocks, BLOCK, 1).clamp_max(length - 1)
    first = torch.arange(0, blocks * BLOCK, BLOCK, device=z.device).view(-1, 1, 1) + low
    column = first + torch.arange(columns, device=z.device)
    seen = F.pad(z, (0, 0, -low, blocks * BLOCK - length + high)).unfold(0, columns, BLOCK)  # (blocks, M, columns)
    count = max(1, NUMBERS // (BLOCK * columns))
    groups = list(zip(*(t.split(count) for t in (row, column, seen)), strict=True))
    summed = [_summed(_banded, len(groups) > 1, a, *group, length) for group in groups]
    return torch.cat(summed).flatten(0, 1)[:length]


def _summed(function: Any, again: bool, *values: Any) -> Tensor:
    """Compute one of several parts: its weights are recomputed in backward instead of kept."""
    if again and torch.is_grad_enabled():
        return checkpoint(function, *values, use_reentrant=False)
    out = function(*values)
    return out


def _rows(a: Tensor, row: Tensor, z: Tensor) -> Tensor:
    """Multiply some rows of P with all columns."""
    column = torch.arange(len(z), device=z.device)
    return _weights(a, row[:, None], column, len(z)) @ z


def _banded(a: Tensor, row: Tensor, column: Tensor, seen: Tensor, length: int) -> Tensor:
    return _weights(a, row, column, length) @ seen.mT


def _weights(a: Tensor, row: Tensor, column: Tensor, length: int) -> Tensor:
    """P for rows (..., R, 1) and columns (..., 1, K), of which those outside the sequence have 0."""
    with torch.no_grad():
        quadratic, linear = a.double()
        first, last = -row.double(), length - 1 - row.double()
        best = torch.where(quadratic * (first + last) + linear > 0, last, first)
        peak = (-linear / (2 * quadratic)).nan_to_num(0.0, 0.0, 0.0).round()
        best = torch.where(quadratic < 0, torch.minimum(torch.maximum(peak, first), last), best)
    logits = _relative(a, column - row, best)
    inside = (column >= 0) & (column < length)
    return logits.masked_fill(~inside, -torch.inf).softmax(-1)


def _relative(a: Tensor, d: Tensor, best: Tensor) -> Tensor:
    """Logits at d minus the logit at the offset ``best``."""
    best = best.to(a.dtype)
    return (d - best) * (a[0] * (d + best) + a[1])


def _divided(a: Tensor, out: Tensor, both: Tensor, kept: Tensor) -> Tensor:
    """Sums over tokens that are not padding, and the sum of their weights, as means: (T, B, 2 D + 1) -> (T, B, 2 D)."""
    sums, total = out[..., :-1], out[..., -1:]
    means = sums / total.clamp_min(FAINT)
    faint = (total[..., 0] < FAINT) & (kept[..., 0].T > 0)
    for image in faint.any(0).nonzero().flatten().tolist():
        row, column = faint[:, image].nonzero().flatten(), kept[image, :, 0].nonzero().flatten()
        d = column - row[:, None]
        with torch.no_grad():
            logits = a[0].double() * d * d + a[1].double() * d
            best = d.gather(1, logits.argmax(-1, keepdim=True))
        again = _relative(a, d, best).softmax(-1) @ both[image, column]
        means = means.index_put((row, torch.full_like(row, image)), again)
    return means


def _whole(a: Tensor, z: Tensor, kept: Tensor | None) -> Tensor:
    """P z by whole matrices, z (B, T, H, M) in and out: what the rest of this file computes."""
    place = torch.arange(z.shape[1], device=z.device)
    d = (place - place[:, None]).to(z.dtype)
    logits = a[:, 0, None, None] * d * d + a[:, 1, None, None] * d
    if kept is None:
        return torch.einsum("hij,bjhm->bihm", logits.softmax(-1), z)
    alone = kept.sum(1, keepdim=True) == 0  # a row of nothing but padding, which nobody reads
    logits = logits.masked_fill(~((kept > 0) | alone)[:, None, None, :, 0], -torch.inf)
    return torch.einsum("bhij,bjhm->bihm", logits.softmax(-1), z)
