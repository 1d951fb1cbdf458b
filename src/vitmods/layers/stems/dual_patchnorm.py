"""Dual PatchNorm (Kumar, Dehghani & Houlsby, 2023): norms before and after the patch projection."""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.linear import fold_affine, inference_linear
from vitmods.layers.norms import LayerNorm
from vitmods.layers.stems.base import patchify
from vitmods.layers.stems.linear import LinearStem
from vitmods.layers.stems.resize import resize_pixels
from vitmods.ops.native import patch_norm as native
from vitmods.ops.native import usable

NormFactory = Callable[[int], nn.Module]


class DualPatchNormStem(LinearStem):
    """``norm(proj(norm_before(patches)))``; (B, channels, height, width) -> (B, T, C).

    ``norm_before`` acts on the values of one patch, in the order of the projection's kernel (channel, row, column);
    its gain can be looked at as an image with ``norm_before.weight.view(channels, rows, columns)``. Either norm may
    be left out (None). With a LayerNorm in front, training multiplies its gain and bias into the projection, which is
    the same function and spares the gradient of the normalized patches.
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
        return self._normalize_and_map(images)

    def project_patches(self, patches: Tensor) -> Tensor:
        if isinstance(self.norm_before, nn.Identity):
            return super().project_patches(patches)
        patches_as_images = patches.reshape(-1, self.in_chans, *self.patch_size)
        return self._normalize_and_map(patches_as_images).view(*patches.shape[:2], -1)

    def finish(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.act(self._norm_after(tokens))
        return out

    def _normalize_and_map(self, images: Tensor) -> Tensor:
        weight, norm = self.proj.weight.flatten(1), self.norm_before
        if not _known(norm):
            return inference_linear(norm(patchify(images, self.patch_size)), weight, self.proj.bias)
        if not torch.is_grad_enabled():
            patches = _normalized_patches(images, self.patch_size, norm.weight, norm.bias, norm.eps)
            return inference_linear(patches, weight, self.proj.bias)
        one = weight.new_ones(weight.shape[1])  # PyTorch's kernel is faster with a gain and a bias than without them
        patches = _normalized_patches(images, self.patch_size, one, torch.zeros_like(one), norm.eps)
        return F.linear(patches, *fold_affine(weight, self.proj.bias, norm.weight, norm.bias))

    def _norm_after(self, tokens: Tensor) -> Tensor:
        norm = self.norm
        if torch.is_grad_enabled() or not _known(norm) or not usable("patch_norm", tokens, norm.weight):
            out: Tensor = norm(tokens)
            return out
        # A token is a patch of one line.
        out = native.patch_norm(tokens.unsqueeze(1), norm.weight, norm.bias, 1, tokens.shape[-1], norm.eps)
        return out

    def _resize_patch(self, new: tuple[int, int]) -> None:
        old = self.patch_size
        super()._resize_patch(new)
        for name, values in list(self.norm_before.named_parameters()):
            resized = nn.Parameter(resize_pixels(values, self.in_chans, old, new), values.requires_grad)
            setattr(self.norm_before, name, resized)
        if isinstance(self.norm_before, LayerNorm):
            self.norm_before.normalized_shape = (self.in_chans * new[0] * new[1],)


def _known(norm: nn.Module) -> TypeGuard[LayerNorm]:
    """Whether it is a LayerNorm with gain and bias, and no hook waits for it to be called."""
    watched = norm._forward_hooks or norm._forward_pre_hooks
    return isinstance(norm, LayerNorm) and norm.weight is not None and not watched


def _normalized_patches(images: Tensor, patch_size: tuple[int, int], gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """LayerNorm of the patches of images, (B, channels, height, width) -> (B, T, values)."""
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (images, gain, shift))
    if not recorded and usable("patch_norm", images, gain, shift):
        out: Tensor = native.patch_norm(images, gain, shift, *patch_size, eps)
        return out
    return F.layer_norm(patchify(images, patch_size), gain.shape, gain, shift, eps)
