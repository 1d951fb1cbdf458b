"""What the norms that mix tokens share: checks, types, and statistics that outlive a batch."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SMALL_BATCH = 8


class SmallBatchWarning(UserWarning):
    """Statistics are taken from so few images that they are noisy."""


def check(name: str, dim: int, eps: float, groups: int = 1) -> None:
    """Raises ValueError for an eps that is not positive, and for groups that do not divide the channels."""
    if not eps > 0:
        raise ValueError(f"{name}: eps must be positive, got {eps}.")
    if groups < 1 or dim % groups:
        raise ValueError(f"{name}: {groups} groups do not divide {dim} channels: choose groups that do.")


def upcast(x: Tensor) -> Tensor:
    """The type for statistics: float32, and float64 for float64."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def wide_type(dtype: torch.dtype | None) -> torch.dtype:
    """The type of running statistics beside parameters of this type."""
    return torch.float64 if (dtype or torch.get_default_dtype()) == torch.float64 else torch.float32


def transformed() -> bool:
    """Whether torch.func differentiates or maps here: it takes single operations and no rule of our own."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def tokens(x: Tensor, least: int = 1) -> Tensor:
    """(B, N, C) or (B, rows, columns, C) -> (B, N, C). Raises ValueError on other shapes and fewer tokens."""
    if x.ndim not in (3, 4):
        raise ValueError(f"This norm mixes tokens: give (B, N, C) or (B, rows, columns, C), not {tuple(x.shape)}.")
    x = x.flatten(1, 2) if x.ndim == 4 else x
    if x.shape[1] < least:
        raise ValueError(f"This norm needs at least {least} tokens an image for its variance, got {x.shape[1]}.")
    return x


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

    def scale_and_shift(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """``gamma (x - mean) / sqrt(var + eps) + beta`` as ``x * scale + shift``."""
        scale = (var + self.eps).rsqrt()
        if self.weight is None or self.bias is None:
            return scale, -mean * scale
        scale = scale * self.weight.to(scale.dtype)
        return scale, self.bias.to(scale.dtype) - mean * scale

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
