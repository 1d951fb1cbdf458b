"""Shared code of norms: the facts of each kind, checks, types, and statistics of the batch, over all processes."""

import functools
import inspect
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from vitmods.ops.context import upcast
from vitmods.ops.padding import padding_of
from vitmods.util.errors import UserError, nearest
from vitmods.util.registry import Registry

N = typing.TypeVar("N", bound=type[nn.Module])

Device = torch.device | str | None
Dtype = torch.dtype | None
SMALL_BATCH = 8
_OF_THE_SLOT = ("self", "dim", "eps", "affine", "device", "dtype")
"""Arguments of a norm that are not options of its kind; those that it takes from the model are not either."""


@dataclass(frozen=True)
class NormKind:
    """A norm and its facts, which lists, drawings, pages, folding and the change ``norm`` read.

    The class itself says in ``token_wise`` whether a token's output depends only on that token, in ``image_wise``
    whether an image's does only on that image (both False if it says nothing), and in ``takes`` what it wants to know
    of the model: ``num_heads``, ``grid_size``, ``prefix_tokens``.
    """

    module: type[nn.Module]
    name: str
    """of the kind, in configs"""
    title: str
    paper: str
    url: str
    how: str
    """it normalizes, in half a sentence"""
    published: str
    """the gain that a paper reports"""
    shorts: tuple[str, ...] = ()
    """other names for the shell, each the change ``norm`` with this kind"""
    replaces: bool = True
    """whether it can replace every LayerNorm of a block: whether the change ``norm`` offers it"""
    least_tokens: int = 1
    folds: bool = False
    """whether ``affine=False`` leaves out a last step ``weight * y + bias``, of which ``bias`` may be missing, and
    nothing else: such a gain and bias can become part of the map that reads the norm"""
    unit: Callable[[int], float] = lambda dim: 1.0
    """the gain of a fresh norm over that many channels, which others have at 1"""
    macs: Callable[[tuple[int, int], int, bool], int] = lambda grid, width, dense: 0
    """multiply-adds of its matrix products on a grid (rows, columns) of tokens, ``dense`` in the paper's form"""

    @property
    def token_wise(self) -> bool:
        return getattr(self.module, "token_wise", False)

    @property
    def takes(self) -> tuple[str, ...]:
        return getattr(self.module, "takes", ())

    @property
    def biased(self) -> bool:
        """Whether it learns a shift ``bias`` as well as the gain."""
        with torch.device("meta"):
            norm = self.factory(1.0, True, {}, num_heads=1, grid_size=(1, 4), prefix_tokens=0)(4)
        return "bias" in dict(norm.named_parameters())

    @functools.cached_property
    def arguments(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.module.__init__).parameters)

    @functools.cached_property
    def _hints(self) -> dict[str, Any]:
        """Argument that neither the slot nor the model sets -> its type; a dataclass holds options that belong
        together."""
        hints = typing.get_type_hints(self.module.__init__)
        names = [name for name in self.arguments if name not in (*_OF_THE_SLOT, *self.takes)]
        return {name: hints.get(name, Any) for name in names}

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Name -> type of each option."""
        types: dict[str, Any] = {}
        for name, hint in self._hints.items():
            types |= typing.get_type_hints(hint) if is_dataclass(hint) else {name: hint}
        return types

    def check(self, affine: bool, options: Mapping[str, Any]) -> None:
        """Raises UserError for an unknown option, a value outside its choices, and a gain that cannot be left out."""
        allowed = self.options
        if not affine and "affine" not in self.arguments:
            raise UserError(f"The norm '{self.name}' always has learned weights: affine=False is not supported.")
        for name, value in options.items():
            if name not in allowed:
                hint = nearest(name, allowed) if allowed else "It does not have any."
                raise UserError(f"The norm '{self.name}' does not have an option '{name}'. {hint}")
            choices = typing.get_args(allowed[name]) if typing.get_origin(allowed[name]) is typing.Literal else (value,)
            if value not in choices:
                hint = nearest(str(value), map(str, choices))
                raise UserError(f"The norm '{self.name}' cannot have {name}='{value}'. {hint}")

    def factory(self, eps: float, affine: bool, options: Mapping[str, Any], **model: Any) -> Callable[..., nn.Module]:
        """Makes the norm from a number of channels; of ``model`` it gets what it takes."""
        available = {"eps": eps, "affine": affine, **{name: model[name] for name in self.takes if name in model}}
        arguments = {name: value for name, value in available.items() if name in self.arguments} | dict(options)
        for name, hint in self._hints.items():
            if is_dataclass(hint):
                together: Any = hint
                values = {key: arguments.pop(key) for key in typing.get_type_hints(hint) if key in arguments}
                arguments[name] = together(**values)
        return functools.partial(self.module, **arguments)


def dtn_table(small: float, star: float) -> str:
    """Its row in the comparison of Dynamic Token Normalization."""
    gains = f"{small} ({small - 79.9:+.1f}) and {star} ({star - 80.6:+.1f})"
    table = "Dynamic Token Normalization, Table 3"
    return f"ImageNet-1k top-1 of S/16 and S*/16, with LayerNorm 79.9 and 80.6: {gains} ({table})"


NORMS: Registry[NormKind] = Registry("norm", "vitmods.layers.norms")


def norm_kind(name: str, **facts: Any) -> Callable[[N], N]:
    """Registers a norm's class under its name, with the facts of ``NormKind``. Raises UserError for a taken name."""

    def decorate(module: N) -> N:
        NORMS.add(name, NormKind(module, name, **facts), origin=module)
        return module

    return decorate


class SmallBatchWarning(UserWarning):
    """The batch is so small that its statistics are noisy."""


def check(name: str, eps: float) -> None:
    """Raises ValueError for an eps that is not positive."""
    if not eps > 0:
        raise ValueError(f"{name}: eps must be positive, got {eps}.")


def processes() -> int:
    """Return the number of processes that train together; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _SumOverProcesses(torch.autograd.Function):
    """The sum over processes; its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert dist.group.WORLD is not None
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", dist.group.WORLD))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return sum_over_processes(grad)


def sum_over_processes(x: Tensor) -> Tensor:
    """The sum of a tensor over all processes, with its gradient; the tensor itself where there is one."""
    return _SumOverProcesses.apply(x) if processes() > 1 else x


def batch_moments(mean: Tensor, var: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the moments of each image over all processes, (B, 1, C) -> (1, 1, C); also returns the number of
    those tokens (1,). ``length`` is how many an image has, or each of them (B, 1, 1); processes may have batches of
    different size."""
    if not (isinstance(length, Tensor) and length.ndim):  # torch.jit.trace makes a tensor of every length
        length = torch.ones_like(mean[..., :1]) * length
    tokens = sum_over_processes(length.sum().view(1)).clamp_min(1)
    center = sum_over_processes((length * mean).sum(0, keepdim=True)) / tokens
    spread = (length * (var + (mean - center).square())).sum(0, keepdim=True)
    return center, sum_over_processes(spread) / tokens, tokens


def unbiased(var: Tensor, length: Tensor | int) -> Tensor:
    """Turn the biased variance over ``length`` tokens (a number, or (B, 1, 1)) into the unbiased one."""
    if isinstance(length, Tensor):  # integers, which torch.jit.trace makes of sizes too: their ratio would be float32
        length = length.to(var.dtype)
    less = length - 1
    return var * (length / (less.clamp_min(1) if isinstance(less, Tensor) else less))


class AffineNorm(nn.Module):
    """A gain ``weight`` and a shift ``bias`` a channel, or neither, and statistics over the tokens of an image, without
    padding (``vitmods.ops.padding``)."""

    token_wise, image_wise = False, True
    least = 1
    """tokens that an image must have"""
    groups = 1
    """of channels"""

    def __init__(
        self, dim: int, eps: float = 1e-5, affine: bool = True, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__()
        check(type(self).__name__, eps)
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype)) if affine else None

    def group(self, groups: int) -> None:
        """Raises ValueError for groups that do not divide the channels."""
        if groups < 1 or self.dim % groups:
            raise ValueError(
                f"{type(self).__name__}: {groups} groups do not divide {self.dim} channels: choose groups that do."
            )
        self.groups = groups

    def reset_parameters(self) -> None:
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(self.tokens(x)).view_as(x)

    def tokens(self, x: Tensor) -> Tensor:
        """(B, N, C) or (B, rows, columns, C) -> (B, N, C). Raises ValueError on other shapes and fewer tokens."""
        if x.ndim not in (3, 4):
            raise ValueError(f"This norm mixes tokens: give (B, N, C) or (B, rows, columns, C), not {tuple(x.shape)}.")
        if x.shape[-1] != self.dim:
            raise ValueError(f"This norm has {self.dim} channels and the input {x.shape[-1]}.")
        x = x.flatten(1, 2) if x.ndim == 4 else x
        if x.shape[1] < self.least:
            raise ValueError(
                f"This norm needs at least {self.least} tokens an image for its variance, got {x.shape[1]}."
            )
        return x

    def statistics(self, mean: Tensor, var: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor]:
        """The mean and variance to normalize by, (B, 1, C) or (1, 1, C) each, from those of each image and channel
        over its ``length`` tokens (with padding of each image, (B, 1, 1)), (B, 1, C) each, biased."""
        raise NotImplementedError

    def normalize(self, x: Tensor) -> Tensor:
        """``gamma (x - mean) / sqrt(var + eps) + beta`` over (B, N, C), by what ``statistics`` makes of the moments of
        each image and channel. In this order one tensor of the size of x is kept for backward. Padding is normalized
        too, and does not contribute to the moments."""
        wide, padding = upcast(x), padding_of(self, x)
        if padding is None:
            image_mean = wide.mean(1, keepdim=True)
            centered = wide - image_mean
            mean, var = self.statistics(image_mean, centered.square().mean(1, keepdim=True), x.shape[1])
        else:
            kept = (~padding)[..., None].to(wide.dtype)
            length = kept.sum(1, keepdim=True)
            weights = kept / length.clamp_min(1)
            image_mean = (wide * weights).sum(1, keepdim=True)
            centered = wide - image_mean
            mean, var = self.statistics(image_mean, (centered.square() * weights).sum(1, keepdim=True), length)
        scale, shift = (var + self.eps).rsqrt(), image_mean - mean
        if self.weight is None or self.bias is None:
            return torch.addcmul(shift * scale, centered, scale).to(x.dtype)
        scale = scale * upcast(self.weight)
        return torch.addcmul(shift * scale + upcast(self.bias), centered, scale).to(x.dtype)

    def extra_repr(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return f"{self.dim}, eps={self.eps}, affine={self.weight is not None}{groups}"


class RunningNorm(AffineNorm):
    """A norm with statistics of the batch in training and running ones, kept in float32, in evaluation."""

    image_wise = False
    _warned = False

    def run(self, name: str, start: float, device: Device, dtype: Dtype) -> None:
        """Register a running statistic for each channel."""
        kind = torch.float64 if (dtype or torch.get_default_dtype()) == torch.float64 else torch.float32
        self.register_buffer(name, torch.full((self.dim,), start, device=device, dtype=kind))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RunningNorm":
        """Move running statistics to the device but keep float32: half types would lose small updates."""
        kept = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = (
                    kept[name].to(buffer.device) if kept[name].device.type != "meta" else buffer.float()
                )
        return self

    @property
    def gathers(self) -> bool:
        """Whether this forward updates the running statistics: not when gradient checkpointing recomputes it."""
        return self.training and (torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1)

    def gather(self, name: str, value: Tensor, momentum: float) -> None:
        """Add the newest batch's statistic to the running one of that name, with weight ``momentum``."""
        if self.gathers:
            running = self.get_buffer(name)
            with torch.no_grad():
                running.lerp_(value.flatten().to(running.dtype), momentum)

    def warn_of_small_batches(self, images: int) -> None:
        if not self.training or images >= SMALL_BATCH or torch.compiler.is_compiling() or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{type(self).__name__} takes its statistics from {images} images: below {SMALL_BATCH} they are noisy. "
            "Use a larger batch, or a norm that does not use the batch, such as LayerNorm.",
            SmallBatchWarning,
            stacklevel=3,
        )
