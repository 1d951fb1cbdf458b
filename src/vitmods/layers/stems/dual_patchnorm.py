"""Dual PatchNorm (Kumar, Dehghani & Houlsby, 2023): norms before and after the patch projection."""

from collections.abc import Iterable

from torch import Tensor, nn

from vitmods.layers.norms import LayerNorm
from vitmods.layers.norms.whitening import Whitening
from vitmods.layers.stems.base import NormFactory, StemSize, patchify
from vitmods.layers.stems.linear import LinearStem, resize_pixels
from vitmods.util.errors import UserError


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

    @property
    def waits_for_images(self) -> bool:
        """Whether ``fit`` has something to compute that was not computed yet."""
        return isinstance(self.norm_before, Whitening) and not self.norm_before.fitted

    def fit(self, images: Tensor | Iterable[Tensor]) -> None:
        """Compute what ``norm_before`` knows of training images (whitening): images (B, channels, height, width) as the
        model is given them, or batches of them. UserError where it needs none."""
        if not isinstance(self.norm_before, Whitening):
            raise UserError("This stem has nothing to fit to images: only dpn(before=whiten) does.")
        batches = (images,) if isinstance(images, Tensor) else images
        self.norm_before.fit(patchify(batch, self.patch_size) for batch in batches)

    def project(self, images: Tensor) -> Tensor:
        if isinstance(self.norm_before, nn.Identity):
            return super().project(images)
        return self._map(self.norm_before(patchify(images, self.patch_size)), images.shape)

    def project_patches(self, patches: Tensor) -> Tensor:
        return super().project_patches(self.norm_before(patches))

    def resize_patch(self, new: tuple[int, int]) -> None:
        old = self.patch_size
        if isinstance(self.norm_before, Whitening):
            raise UserError("The whitening is of patches of one size: keep the patch size, or begin anew with another.")
        super().resize_patch(new)
        for name, values in list(self.norm_before.named_parameters()):
            resized = nn.Parameter(resize_pixels(values, self.in_chans, old, new), values.requires_grad)
            setattr(self.norm_before, name, resized)
        if isinstance(self.norm_before, LayerNorm):
            self.norm_before.normalized_shape = (self.in_chans * new[0] * new[1],)
