"""Moments over the tokens of each image, and the map ``x * scale + shift`` that a norm makes of them.

Instance, group, switchable and synchronized batch normalization are a few lines of algebra between the two, since the
moments of a group, an image or a batch follow exactly from those of its channels (law of total variance).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import _functional_collectives as collectives

from vitmods.layers.norms.contract import transformed, upcast
from vitmods.ops.native import moments as native
from vitmods.ops.native import usable

Solve = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


IN_CACHE = 1 << 17  # numbers of a piece that stays in a processor core's cache with two more of its size


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of as many images cut alike on a CPU, where memory bounds a norm's passes; whole elsewhere."""
    first = tensors[0]
    step = max(1, IN_CACHE // first[0].numel()) if first.device.type == "cpu" and len(first) else max(1, len(first))
    return zip(*(t.split(step) for t in tensors), strict=True)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over tokens, (B, N, C) -> (B, 1, C) each, in float32 (float64 stays)."""
    if usable("moments", x):
        return native.moments(x)
    means, variances = [], []
    for (piece,) in _pieces(x):
        wide = upcast(piece)
        mean = wide.mean(1, keepdim=True)
        means.append(mean)
        variances.append((wide - mean).square_().mean(1, keepdim=True))
    return torch.cat(means), torch.cat(variances)


def _map(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``x * scale + shift`` in the type of x."""
    if usable("moments", x):
        return native.scale_shift(x, scale, shift)
    return torch.addcmul(shift, upcast(x), scale).to(x.dtype)


def _map_sums(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over tokens of ``grad * x`` and of grad, (B, 1, C) each: gradients of the map's scale and shift."""
    if usable("moments", grad, x):
        return native.scale_shift_sums(grad, x)
    products, sums = (upcast(x).new_empty(len(x), 1, x.shape[-1]) for _ in range(2))
    for g, piece, a, b in _pieces(grad, x, products, sums):
        torch.sum(upcast(g) * piece, 1, keepdim=True, out=a)
        torch.sum(upcast(g), 1, keepdim=True, out=b)
    return products, sums


def _map_backward(grad: Tensor, x: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """``grad * scale + x * slope + offset`` in the type of x."""
    if usable("moments", grad, x):
        return native.scale_shift_backward(grad, x, scale, slope, offset)
    grad_x = torch.empty_like(x)
    for out, g, wide, s, o, c in _pieces(grad_x, grad, x, slope, offset, scale.expand_as(slope)):
        out.copy_(torch.addcmul(o, upcast(wide), s).addcmul_(g.to(s.dtype), c))
    return grad_x


class _Normalize(torch.autograd.Function):
    """The passes over x by hand; the small algebra between moments and scale is left to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, solve: Solve, *parameters: Tensor) -> Tensor:
        mean, var = moments(x)
        # Hooks on saved tensors, as of gradient checkpointing, are for large tensors: these (B, 1, C) stay as they are.
        # Detached, since a node that keeps its own result with its history is a cycle that nothing frees.
        with torch.enable_grad(), saved_tensors_hooks(torch.detach, _same):
            inputs = mean.detach().requires_grad_(), var.requires_grad_()
            outputs = solve(*inputs)
        scale, shift = (t.detach() for t in outputs)
        ctx.save_for_backward(x, mean, scale)
        ctx.algebra = outputs, (*inputs, *parameters)
        return _map(x, scale, shift)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale = ctx.saved_tensors
        outputs, inputs = ctx.algebra
        sums = _map_sums(grad, x)
        grads = [g.sum_to_size(out.shape) for g, out in zip(sums, outputs, strict=True)]
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, grads, retain_graph=True))
        grad_mean, grad_var, *grad_parameters = (next(found) if t.requires_grad else None for t in inputs)
        slope = grad_var * (2 / x.shape[1])
        offset = grad_mean / x.shape[1] - slope * mean
        return _map_backward(grad, x, scale, slope, offset), None, *grad_parameters


def _same(x: Tensor) -> Tensor:
    return x


def normalize(x: Tensor, solve: Solve, parameters: Iterable[Tensor]) -> Tensor:
    """``x * scale + shift`` over (B, N, C), in the type of x.

    ``solve`` makes scale and shift, (B, 1, C) or (1, 1, C), of the mean and the biased variance over tokens, (B, 1, C)
    each, in float32 (float64 stays), and of the parameters that it closes over.
    """
    if not (torch.compiler.is_compiling() or transformed()):
        out: Tensor = _Normalize.apply(x, solve, *parameters)
        return out
    wide = upcast(x)
    mean = wide.mean(1, keepdim=True)
    scale, shift = solve(mean, (wide - mean).square().mean(1, keepdim=True))
    return (wide * scale + shift).to(x.dtype)


def processes() -> int:
    """How many processes train together; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _all_reduce(x: Tensor) -> Tensor:
    assert dist.group.WORLD is not None
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", dist.group.WORLD))


class _SumOverProcesses(torch.autograd.Function):
    """The sum over processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _all_reduce(grad)


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
