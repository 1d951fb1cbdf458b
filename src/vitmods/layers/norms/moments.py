"""Moments over the tokens of each picture, and the map ``x * scale + shift`` that a norm makes of them.

Instance, group, switchable and synchronised batch normalization are a few lines of algebra between the two, since the
moments of a group, a picture or a batch follow exactly from those of its channels (law of total variance). Each keeps
its input alone for backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as collectives

from .contract import widen


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = widen(x)
        mean = wide.mean(1, keepdim=True)
        ctx.save_for_backward(x, mean)
        return mean, (wide - mean).square_().mean(1, keepdim=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        slope = grad_var * (2 / x.shape[1])
        return torch.addcmul(grad_mean / x.shape[1] - slope * mean, widen(x), slope).to(x.dtype)


class _ScaleShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.addcmul(shift, widen(x), scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        grad = grad.to(scale.dtype)
        grad_scale = (grad * x).sum(1, keepdim=True).sum_to_size(scale.shape)
        grad_shift = grad.sum(1, keepdim=True).sum_to_size(scale.shape)
        return (grad * scale).to(x.dtype), grad_scale, grad_shift


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over tokens, (B, N, C) -> (B, 1, C) each, in float32 (float64 stays)."""
    mean, var = _Moments.apply(x)
    return mean, var


def scale_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``x * scale + shift`` in the type of x; scale and shift are (B, 1, C), or (1, 1, C) for the whole batch."""
    out: Tensor = _ScaleShift.apply(x, scale, shift)
    return out


def processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _SumOverProcesses(torch.autograd.Function):
    """The sum over processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", dist.group.WORLD))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(grad.contiguous(), "sum", dist.group.WORLD))


def sum_over_processes(x: Tensor) -> Tensor:
    out: Tensor = _SumOverProcesses.apply(x) if processes() > 1 else x
    return out


def batch_moments(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Moments over all pictures of all processes from those of each, (B, 1, C) -> (1, 1, C). Equal tokens a picture."""
    if processes() == 1:
        center = mean.mean(0, keepdim=True)
        return center, (var + (mean - center).square()).mean(0, keepdim=True)
    pictures = sum_over_processes(mean.new_tensor([float(len(mean))]))
    center = sum_over_processes(mean.sum(0, keepdim=True)) / pictures
    spread = (var + (mean - center).square()).sum(0, keepdim=True)
    return center, sum_over_processes(spread) / pictures
