"""Stochastic depth and LayerScale after a branch, a fixed factor before it, DropKey inside attention."""

import torch
from torch import Tensor, nn

from vitmods.ops.context import is_as_written, transformed
from vitmods.ops.scale import add_scaled


class DropPath(nn.Module):
    """Drops a whole branch for each image with probability ``rate`` and rescales what stays by 1 / (1 - rate)
    (Huang et al., 2016). Shape (B, ...) in and out; the identity in evaluation."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        return x * self.draw(x)

    def draw(self, x: Tensor) -> Tensor:
        """A new factor for each image, 0 or 1 / (1 - rate), (B, 1, ...) in the type of x (B, ...)."""
        keep = torch.empty((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
        return keep.bernoulli_(1.0 - self.rate).div_(1.0 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


class LayerScale(nn.Module):
    """A learned factor for each channel of a branch's output (Touvron et al., 2021, CaiT). (..., C) in and out."""

    def __init__(
        self, dim: int, init: float = 1e-5, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.init = init
        self.gamma = nn.Parameter(torch.full((dim,), init, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.init)


_LAYER_SCALE = frozenset({"gamma", "init"})


def add_branch(x: Tensor, h: Tensor, scale: nn.Module, drop_path: nn.Module) -> Tensor:
    """``x + drop_path(scale(h))``. On an accelerator a LayerScale is part of the sum, one operation instead of two."""
    on_device = isinstance(h, Tensor) and h.device.type != "cpu"  # torch.fx has no tensors
    if not on_device or type(scale) is not LayerScale or type(drop_path) is not nn.Identity:
        out: Tensor = x + drop_path(scale(h))
        return out
    if torch.compiler.is_compiling() or transformed() or not is_as_written(scale, _LAYER_SCALE):
        return x + drop_path(scale(h))
    return add_scaled(x, h, scale.gamma)


class FixedScale(nn.Module):
    """The same factor for all numbers (LayerNorm scaling, Sun et al., 2025)."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor:.4g}"


class DropKey(nn.Module):
    """Dropout before the softmax of attention (Li et al., CVPR 2023), for its slot ``mask``: in training each query
    sees each key with probability ``1 - rate``, drawn for every image and head; the weights of what it sees still sum
    to 1. In evaluation it does nothing.

    Called with queries and keys (B, H, N, D) and the caller's mask or None; returns logits to add (B, H, N, N). A query
    that would see nothing sees everything alike.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, q: Tensor, k: Tensor, attn_mask: Tensor | None = None) -> Tensor | None:
        if not self.training or self.rate == 0:
            return attn_mask
        shape = (*q.shape[:-1], k.shape[-2])
        dropped = torch.rand(shape, device=q.device) < self.rate
        # Far below all logits, and no infinity, whose softmax over a whole row is not a number.
        hidden = torch.zeros(shape, dtype=q.dtype, device=q.device).masked_fill_(dropped, torch.finfo(q.dtype).min / 2)
        if attn_mask is None:
            return hidden
        if attn_mask.dtype == torch.bool:
            return hidden.masked_fill(~attn_mask, -torch.inf)
        return hidden + attn_mask.to(hidden.dtype)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
