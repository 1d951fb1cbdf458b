"""Root mean square normalization (Zhang & Sennrich, 2019): no centring, no bias."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def rms_rstd(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` of each token in float32 (float64 stays), (..., C) -> (..., 1)."""
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def apply_rms(x: Tensor, weight: Tensor | None, rstd: Tensor) -> Tensor:
    """``x * rstd * weight`` in the statistics' type, output in the type of x."""
    y = x.to(rstd.dtype) * rstd
    return (y if weight is None else y.mul_(weight)).to(x.dtype)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and weight.

    LayerNorm's own backward kernel, told that the mean is 0, differs from what is needed by ``rstd * mean(grad *
    weight)`` for each token: adding that back takes half the time of a composition. Statistics' type throughout.
    """
    dim, gain = x.shape[-1], None if weight is None else weight.to(rstd.dtype)
    wide, rows = x.to(rstd.dtype), grad.to(rstd.dtype).reshape(-1, x.shape[-1])
    grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
        rows.view_as(wide), wide, [dim], torch.zeros_like(rstd), rstd, gain, None, [True, weight is not None, False]
    )
    total = rows.sum(-1) if gain is None else torch.mv(rows, gain)
    grad_x.add_(total.view_as(rstd) * rstd / dim)
    return grad_x.to(x.dtype), None if weight is None else grad_weight.to(weight.dtype)


class _RMSNormFunction(torch.autograd.Function):
    """Keeps the input and one number a token for backward; the composed form keeps three such tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        rstd = rms_rstd(x, eps)
        ctx.save_for_backward(x, weight, rstd)
        return apply_rms(x, weight, rstd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return *rms_norm_backward(grad, *ctx.saved_tensors), None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; statistics in float32, output as the input."""
    out: Tensor = _RMSNormFunction.apply(x, weight, eps)
    return out


class RMSNorm(nn.Module):
    """``y = gamma * x / sqrt(mean(x^2) + eps)`` over the last dimension.

    Shapes: (B, N, C) or (B, rows, columns, C) in and out. Statistics are in float32 whatever the input type; the
    output has the input's type. Every token is normalised by itself.
    """

    token_wise = True

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return f"eps={self.eps}, affine={self.weight is not None}"
