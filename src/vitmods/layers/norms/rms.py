"""Root mean square normalization (Zhang & Sennrich, 2019): no centering, no bias."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitmods.layers.norms.contract import check, norm_kind, transformed, upcast
from vitmods.ops.native import rms as native
from vitmods.ops.native import usable


def rms_rstd(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` over the last dimension in float32 (float64 stays), (..., C) -> (...)"""
    return torch.linalg.vector_norm(upcast(x), dim=-1).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def rms_forward(
    x: Tensor, gain: Tensor | None, eps: float, shift: Tensor | None = None, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """``y = gain z + shift`` with ``z = x rstd``, where groups of channels are normalized by themselves.

    (..., C) -> y, in the type of x, and rstd (..., groups) in float32 (float64 stays)."""
    if usable("rms", x, gain, shift):
        return native.forward(x, gain, shift, groups, eps)
    wide = upcast(x).unflatten(-1, (groups, -1))
    rstd = rms_rstd(wide, eps)
    y = (wide * rstd[..., None]).flatten(-2)
    if gain is not None:
        y = y.mul_(gain) if shift is None else torch.addcmul(shift, y, gain)
    return y.to(x.dtype), rstd


def rms_quadratic_means(x: Tensor, groups: int, eps: float) -> Tensor:
    """The mean over rows of z^2 for each channel, (rows, C) -> (C,), in float32 (float64 stays)."""
    if usable("rms", x):
        return native.quadratic_means(x, groups, eps)
    return rms_forward(upcast(x), None, eps, groups=groups)[0].square_().mean(0)


def rms_backward(
    grad: Tensor, x: Tensor, gain: Tensor | None, rstd: Tensor, pull: Tensor | None = None, shifted: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, of gain where there is one, and with ``shifted`` of shift, in the type of rstd but for x.

    ``pull`` is for a rule that is not the derivative: z then has the gradient ``grad * gain - pull * z``.
    """
    if usable("rms", grad, x, gain):
        grad_x, *sums = native.backward(grad, x, gain, pull, rstd, shifted)
    else:
        wide, like = (grad.to(rstd.dtype), x.to(rstd.dtype)), None if gain is None else gain.to(rstd.dtype)
        grad_x, *sums = _by_groups(*wide, like, rstd, pull) if shifted else _by_tokens(*wide, like, rstd)
    return grad_x.to(x.dtype), None if gain is None else sums[0], sums[1] if shifted else None


def _by_tokens(grad: Tensor, x: Tensor, gain: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and gain, for one group. LayerNorm's own backward kernel, given a mean of 0, differs from
    what is needed by ``rstd * mean(grad * gain)`` for each token: adding that back takes half the time of a
    composition."""
    dim = x.shape[-1]
    grad_x, grad_gain, _ = torch.ops.aten.native_layer_norm_backward(
        grad, x, [dim], torch.zeros_like(rstd), rstd, gain, None, [True, gain is not None, False]
    )
    total = grad.sum(-1) if gain is None else torch.mv(grad.reshape(-1, dim), gain)
    return grad_x.add_(total.view_as(rstd) * rstd / dim), grad_gain


def _by_groups(
    grad: Tensor, x: Tensor, gain: Tensor | None, rstd: Tensor, pull: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gain and shift, for (rows, C). BatchNorm's kernel for fixed statistics, 0 and 1, makes the sums
    in the same pass."""
    groups = x.unflatten(-1, (rstd.shape[-1], -1))
    z, zero = (groups * rstd[..., None]).flatten(-2), grad.new_zeros(grad.shape[-1])
    a, grad_gain, grad_shift = torch.ops.aten.native_batch_norm_backward(
        grad, z, gain, zero, zero + 1, None, None, False, 0.0, [True, True, True]
    )
    if pull is not None:
        a.addcmul_(z, pull, value=-1)
    grad_x, _ = _by_tokens(a.view_as(groups), groups, None, rstd[..., None])
    return grad_x.view_as(x), grad_gain, grad_shift


class _RMSNormFunction(torch.autograd.Function):
    """Keeps the input and one number a token and group for backward; the composed form keeps three such tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float, shift: Tensor | None, groups: int) -> Tensor:
        y, rstd = rms_forward(x, gain, eps, shift, groups)
        ctx.save_for_backward(x, gain, rstd)
        ctx.shifted = shift is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, gain, rstd = ctx.saved_tensors
        grad_x, grad_gain, grad_shift = rms_backward(grad, x, gain, rstd, shifted=ctx.shifted)
        return grad_x, None if grad_gain is None else grad_gain.to(gain.dtype), None, grad_shift, None


def _composed(x: Tensor, gain: Tensor | None, eps: float, shift: Tensor | None, groups: int) -> Tensor:
    wide = upcast(x).unflatten(-1, (groups, -1))
    y = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2)
    y = y if gain is None else y * gain
    return (y if shift is None else y + shift).to(x.dtype)


def rms_norm(x: Tensor, gain: Tensor | None, eps: float, shift: Tensor | None = None, groups: int = 1) -> Tensor:
    """``gain * x / sqrt(mean(x^2) + eps) + shift`` with the mean over each group of channels of the last dimension;
    statistics in float32, output as the input. A shift has the type of the statistics. Raises ValueError for a gain of
    another length."""
    if gain is not None and len(gain) != x.shape[-1]:
        raise ValueError(f"This norm has {len(gain)} channels and the input {x.shape[-1]}.")
    if transformed():
        return _composed(x, gain, eps, shift, groups)
    if not torch.is_grad_enabled():
        return rms_forward(x, gain, eps, shift, groups)[0]
    out: Tensor = _RMSNormFunction.apply(x, gain, eps, shift, groups)
    return out


@norm_kind(
    "rms",
    title="RMSNorm",
    shorts=("rms", "rmsnorm"),
    paper="Zhang & Sennrich: Root Mean Square Layer Normalization. NeurIPS 2019",
    url="https://arxiv.org/abs/1910.07467",
    how="a token is divided by the root mean square of its channels",
    published="none for ViTs; as part of Dual PatchNorm it loses 0.0 to 1.7 (Dual PatchNorm, Table 6)",
    lineup="norms",
    folds=True,
)
class RMSNorm(nn.Module):
    """``y = gamma * x / sqrt(mean(x^2) + eps)`` over the last dimension.

    Shapes: (B, N, C) or (B, rows, columns, C) in and out. Statistics are in float32 whatever the input type; the
    output has the input's type. Every token is normalized by itself. Raises ValueError on an eps that is not positive.
    """

    token_wise = image_wise = True

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check("RMSNorm", dim, eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return f"eps={self.eps}, affine={self.weight is not None}"
