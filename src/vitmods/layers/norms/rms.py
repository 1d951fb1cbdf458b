"""Root mean square normalization (Zhang & Sennrich, 2019): no centring, no bias."""

from typing import Any

import torch
from torch import Tensor, nn


def rms_rstd(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` of each token in float32 (float64 stays), (..., C) -> (..., 1)."""
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square().div(x.shape[-1]).add(eps).rsqrt()


def apply_rms(x: Tensor, weight: Tensor | None, rstd: Tensor) -> Tensor:
    """``x * rstd * weight`` in the statistics' type, output in the type of x."""
    y = x.to(rstd.dtype) * rstd
    return (y if weight is None else y * weight).to(x.dtype)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and weight."""
    grad = grad.to(rstd.dtype)
    xhat = x.to(rstd.dtype) * rstd
    g = grad if weight is None else grad * weight
    dot = (g * xhat).mean(-1, keepdim=True)
    grad_x = (torch.addcmul(g, xhat, dot, value=-1) * rstd).to(x.dtype)
    return grad_x, None if weight is None else (grad * xhat).flatten(0, -2).sum(0).to(weight.dtype)


class _RMSNormFunction(torch.autograd.Function):
    """Keeps the input and one number a token for backward; the composed form keeps three such tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        rstd = rms_rstd(x, eps)
        ctx.save_for_backward(x, weight, rstd)
        return apply_rms(x, weight, rstd)

    @staticmethod
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
