"""Dual PatchNorm (Kumar, Dehghani & Houlsby, 2023): norms before and after the patch projection."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..linear import inference_linear
from ..norms import LayerNorm
from .linear import LinearStem, patchify
from .resize import resize_pixels

NormFactory = Callable[[int], nn.Module]


class DualPatchNormStem(LinearStem):
    """``norm(proj(norm_before(patches)))``; (B, channels, height, width) -> (B, T, C).

    ``norm_before`` acts on the values of one patch, in the order of the projection's kernel (channel, row, column);
    its gain can be looked at as a picture with ``norm_before.weight.view(channels, rows, columns)``. Either norm may
    be left out (None). With a LayerNorm in front, training multiplies its gain and bias into the projection, which is
    the same function and spares the gradient of the normalised patches.
    """

    def __init__(
        self,
        *args: Any,
        norm_before: NormFactory | None = LayerNorm,
        norm_layer: NormFactory | None = LayerNorm,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **{**kwargs, "norm_layer": norm_layer})
        values = self.in_chans * self.patch_size[0] * self.patch_size[1]
        self.norm_before = norm_before(values) if norm_before else nn.Identity()

    def project(self, images: Tensor) -> Tensor:
        if isinstance(self.norm_before, nn.Identity):
            return super().project(images)
        patches = patchify(images, self.patch_size)
        weight, norm = self.proj.weight.flatten(1), self.norm_before
        if not torch.is_grad_enabled() or norm.weight is None or not isinstance(norm, LayerNorm):
            return inference_linear(norm(patches), weight, self.proj.bias)
        return F.linear(_standardise(patches, norm.eps), weight * norm.weight, self._folded_bias(weight, norm.bias))

    def _folded_bias(self, weight: Tensor, shift: Tensor) -> Tensor:
        bias = weight @ shift
        return bias if self.proj.bias is None else bias + self.proj.bias

    def _resize_patch(self, new: tuple[int, int]) -> None:
        old = self.patch_size
        super()._resize_patch(new)
        for name, values in list(self.norm_before.named_parameters()):
            resized = nn.Parameter(resize_pixels(values, self.in_chans, old, new), values.requires_grad)
            setattr(self.norm_before, name, resized)
        if isinstance(self.norm_before, LayerNorm):
            self.norm_before.normalized_shape = (self.in_chans * new[0] * new[1],)


def _standardise(patches: Tensor, eps: float) -> Tensor:
    """LayerNorm without gain and bias. PyTorch's CPU kernel is faster with ones and zeros than without them."""
    n = patches.shape[-1]
    return F.layer_norm(patches, (n,), patches.new_ones(n), patches.new_zeros(n), eps)
