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


def batch_moments(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moments over the images of all processes from those of each image, (B, 1, C) -> (1, 1, C), and the number of
    those images (1,). Images have equally many tokens; processes may have batches of different size."""
    images = sum_over_processes(mean.new_tensor([float(len(mean))]))
    center = sum_over_processes(mean.sum(0, keepdim=True)) / images
    spread = (var + (mean - center).square()).sum(0, keepdim=True)
    return center, sum_over_processes(spread) / images, images
