"""What the norms that mix tokens share: checks, types, and statistics that outlive a batch."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.ops.context import upcast

SMALL_BATCH = 8


class SmallBatchWarning(UserWarning):
    """Statistics are taken from so few images that they are noisy."""


def check(name: str, dim: int, eps: float, groups: int = 1) -> None:
    """Raises ValueError for an eps that is not positive, and for groups that do not divide the channels."""
    if not eps > 0:
        raise ValueError(f"{name}: eps must be positive, got {eps}.")
    if groups < 1 or dim % groups:
        raise ValueError(f"{name}: {groups} groups do not divide {dim} channels: choose groups that do.")


def running_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The type of running statistics beside parameters of this type."""
    return torch.float64 if (dtype or torch.get_default_dtype()) == torch.float64 else torch.float32


class AffineNorm(nn.Module):
    """A gain ``weight`` and a shift ``bias`` a channel, or neither."""

    token_wise = False

    def __init__(
        self,
        dim: int,
        eps: float,
        affine: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        groups: int = 1,
    ) -> None:
        super().__init__()
        check(type(self).__name__, dim, eps, groups)
        self.dim, self.eps, self.groups = dim, eps, groups
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype)) if affine else None

    def reset_parameters(self) -> None:
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def tokens(self, x: Tensor, least: int = 1) -> Tensor:
        """(B, N, C) or (B, rows, columns, C) -> (B, N, C). Raises ValueError on other shapes and fewer tokens."""
        if x.ndim not in (3, 4):
            raise ValueError(f"This norm mixes tokens: give (B, N, C) or (B, rows, columns, C), not {tuple(x.shape)}.")
        if x.shape[-1] != self.dim:
            raise ValueError(f"This norm has {self.dim} channels and the input {x.shape[-1]}.")
        x = x.flatten(1, 2) if x.ndim == 4 else x
        if x.shape[1] < least:
            raise ValueError(f"This norm needs at least {least} tokens an image for its variance, got {x.shape[1]}.")
        return x

    def statistics(self, mean: Tensor, var: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The mean and variance to normalize by, (B, 1, C) or (1, 1, C) each, from those of each image and channel
        over its ``length`` tokens, (B, 1, C) each, biased."""
        raise NotImplementedError

    def normalize(self, x: Tensor) -> Tensor:
        """``gamma (x - mean) / sqrt(var + eps) + beta`` over (B, N, C), by what ``statistics`` makes of the moments of
        each image and channel. In this order one tensor of the size of x is kept for backward."""
        wide = upcast(x)
        own = wide.mean(1, keepdim=True)
        centered = wide - own
        mean, var = self.statistics(own, centered.square().mean(1, keepdim=True), x.shape[1])
        scale, shift = (var + self.eps).rsqrt(), own - mean
        if self.weight is None or self.bias is None:
            return torch.addcmul(shift * scale, centered, scale).to(x.dtype)
        scale = scale * upcast(self.weight)
        return torch.addcmul(shift * scale + upcast(self.bias), centered, scale).to(x.dtype)

    def extra_repr(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return f"{self.dim}, eps={self.eps}, affine={self.weight is not None}{groups}"


class RunningNorm(AffineNorm):
    """A norm with statistics of the batch in training and running ones, kept in float32, in evaluation."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._warned = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RunningNorm":
        """Half types are too coarse to gather small steps in: the statistics follow to the device alone."""
        kept = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = (
                    kept[name].to(buffer.device) if kept[name].device.type != "meta" else buffer.float()
                )
        return self

    @property
    def gathers(self) -> bool:
        """Whether this forward adds to the running statistics. One that gradient checkpointing runs again does not."""
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
            "Use a larger batch, or a norm without the batch as LayerNorm.",
            SmallBatchWarning,
            stacklevel=3,
        )
