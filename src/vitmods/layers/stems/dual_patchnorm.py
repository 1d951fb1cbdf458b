"""Dual PatchNorm (Kumar, Dehghani & Houlsby, 2023): norms before and after the patch projection."""

from torch import Tensor, nn

from vitmods.layers.norms import LayerNorm
from vitmods.layers.stems.base import NormFactory, StemSize, patchify, unpatchify
from vitmods.layers.stems.linear import LinearStem, resize_pixels


class DualPatchNormStem(LinearStem):
    """``norm(proj(norm_before(patches)))``; (B, channels, height, width) -> (B, T, C).

    ``norm_before`` acts on the values of one patch, in the order of the projection's kernel (channel, row, column);
    its gain can be looked at as an image with ``norm_before.weight.view(channels, rows, columns)``. Either norm may
    be left out (None).
    """

    def __init__(
        self,
        size: StemSize,
        bias: bool = True,
        norm_before: NormFactory | None = LayerNorm,
        norm_layer: NormFactory | None = LayerNorm,
        gelu: bool = False,
    ) -> None:
        super().__init__(size, bias, norm_layer, gelu)
        self.norm_before = norm_before(size.values) if norm_before else nn.Identity()

    def project(self, images: Tensor) -> Tensor:
        if not isinstance(self.norm_before, nn.Identity):
            patches = self.norm_before(patchify(images, self.patch_size))
            images = unpatchify(patches, self.patch_size, images.shape)
        return super().project(images)

    def project_patches(self, patches: Tensor) -> Tensor:
        return super().project(self._in_a_row(self.norm_before(patches)))

    def _resize_patch(self, new: tuple[int, int]) -> None:
        old = self.patch_size
        super()._resize_patch(new)
        for name, values in list(self.norm_before.named_parameters()):
            resized = nn.Parameter(resize_pixels(values, self.in_chans, old, new), values.requires_grad)
            setattr(self.norm_before, name, resized)
        if isinstance(self.norm_before, LayerNorm):
            self.norm_before.normalized_shape = (self.in_chans * new[0] * new[1],)
