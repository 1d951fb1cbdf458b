"""Linear maps: a faster one for inference on a CPU, and one that takes the gain and shift of a norm before it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from vitmods.ops.native import fold as native
from vitmods.ops.native import usable


def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` (..., in) -> (..., out), by oneDNN's product where no gradient is recorded: on the CPUs that we
    measured (benchmarks/stem.py) a tenth faster than the default one, equal up to float32 rounding.

    Falls back to ``F.linear`` for other devices and types, under autocast, and when compiling or exporting.
    """
    if onednn_fits(x, torch.float32):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def onednn_fits(x: Tensor, *types: torch.dtype) -> bool:
    """Whether oneDNN's product may take this input of one of the ``types``: a plain tensor on the CPU, nothing that
    records gradients, casts, compiles or exports, and a PyTorch that has the product."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    plain = x.device.type == "cpu" and x.dtype in types and type(x) is Tensor
    return bool(plain and torch.backends.mkldnn.enabled) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def fold_affine(weight: Tensor, bias: Tensor | None, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (out, in) and bias (out,) of the map from z that is ``linear(gain * z + shift)``, with gradients."""
    if usable("fold", weight, gain, shift, *(() if bias is None else (bias,))):
        folded, offset = _Fold.apply(weight, bias, gain, shift)
        return folded, offset
    offset = weight @ shift
    return weight * gain, offset if bias is None else offset + bias


class _Fold(torch.autograd.Function):
    """Each weight is read once forward and once backward: with few patches that is a good part of a stem's time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight, gain, shift)
        ctx.biased = bias is not None
        folded, offset = native.fold(weight, bias, gain, shift)
        return folded, offset

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, folded: Tensor, offset: Tensor) -> tuple[Tensor | None, ...]:
        grad_weight, grad_gain, grad_shift = native.fold_backward(folded, offset, *ctx.saved_tensors)
        return grad_weight, offset if ctx.biased else None, grad_gain, grad_shift
