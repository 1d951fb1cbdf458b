"""Sums over the processes that train together, with their gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives


def processes() -> int:
    """How many processes train together; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _SumOverProcesses(torch.autograd.Function):
    """The sum over processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert dist.group.WORLD is not None
        total: Tensor = collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", dist.group.WORLD))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return sum_over_processes(grad)


def sum_over_processes(x: Tensor) -> Tensor:
    """The sum of a tensor over all processes, with its gradient; the tensor itself where there is one."""
    out: Tensor = _SumOverProcesses.apply(x) if processes() > 1 else x
    return out


def batch_moments(mean: Tensor, var: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
    """Moments over the tokens of all processes from those of each image, (B, 1, C) -> (1, 1, C), and the number of
    those tokens (1,). ``length`` is how many an image has, or each of them (B, 1, 1); processes may have batches of
    different size."""
    if not (isinstance(length, Tensor) and length.ndim):  # torch.jit.trace makes a tensor of every length
        length = torch.ones_like(mean[..., :1]) * length
    tokens = sum_over_processes(length.sum().view(1)).clamp_min(1)
    center = sum_over_processes((length * mean).sum(0, keepdim=True)) / tokens
    spread = (length * (var + (mean - center).square())).sum(0, keepdim=True)
    return center, sum_over_processes(spread) / tokens, tokens
