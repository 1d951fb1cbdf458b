"""ScaleNorm: tokens of a learned length (Nguyen & Salazar, 2019)."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitmods.layers.norms.contract import check, dtn_table, norm_kind, transformed, upcast


class _ScaleNorm(torch.autograd.Function):
    """Keeps the input and one number a token for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = upcast(x)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, length)
        return ((wide / length.clamp_min(eps)).mul_(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, length = ctx.saved_tensors
        wide, grad, gain = upcast(x), grad.to(length.dtype), weight.to(length.dtype)
        inverse = 1 / length.clamp_min(ctx.eps)
        product = (grad * wide).flatten(0, -2)
        if len(gain) == 1:
            along = product.sum(-1).view_as(length)
            grad_weight = (along * inverse).sum().view(1)
            along, grad_x = along * gain, grad * (inverse * gain)
        else:
            along = torch.mv(product, gain).view_as(length)
            grad_weight = torch.mv(product.mT, inverse.flatten())
            grad_x = (grad * gain).mul_(inverse)
        # Tokens shorter than eps are only multiplied.
        grad_x.addcmul_(wide, torch.where(length < ctx.eps, 0, along * inverse.pow(3)), value=-1)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


@norm_kind(
    "scale",
    title="ScaleNorm",
    shorts=("scalenorm",),
    paper="Nguyen & Salazar: Transformers without Tears. IWSLT 2019",
    url="https://arxiv.org/abs/1910.05895",
    how="a token is divided by its length",
    published=dtn_table(80.0, 80.6),
    lineup="norms",
    folds=True,
    unit=math.sqrt,
)
class ScaleNorm(nn.Module):
    """``y = g x / max(||x||, eps)`` over the last dimension; g starts at sqrt(C), so that fresh outputs are of size 1.

    Shapes: (..., C) in and out. ``gain="channel"`` learns g for each channel, as in the code of Dynamic Token
    Normalization; ``"scalar"`` learns one g, as in the original paper. Without ``affine`` g stays sqrt(C). Statistics
    are in float32 whatever the input type; the output has the input's type. Every token, prefix tokens too, is
    normalized by itself: no state, nothing to synchronize. Raises ValueError on another gain or an eps that is not
    positive.
    """

    token_wise = image_wise = True

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        affine: bool = True,
        gain: Literal["channel", "scalar"] = "channel",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check("ScaleNorm", dim, eps)
        if gain not in ("channel", "scalar"):
            raise ValueError(f"ScaleNorm(gain=...) is 'channel' or 'scalar', got '{gain}'.")
        self.dim, self.eps, self.gain = dim, eps, gain
        size = dim if gain == "channel" else 1
        start = torch.full((size,), math.sqrt(dim), device=device, dtype=dtype)
        self.weight = nn.Parameter(start) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        weight = upcast(x).new_full((1,), math.sqrt(self.dim)) if self.weight is None else self.weight
        if transformed():
            wide = upcast(x)
            length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            return (wide / length.clamp_min(self.eps) * weight).to(x.dtype)
        out: Tensor = _ScaleNorm.apply(x, weight, self.eps)
        return out

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, math.sqrt(self.dim))

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, gain={self.gain}, affine={self.weight is not None}"
