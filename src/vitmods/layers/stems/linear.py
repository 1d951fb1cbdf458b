"""The plain stem: each patch through one linear map (Dosovitskiy et al., 2021), written as a strided convolution."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.stems.base import STEMS, NormFactory, Stem, StemSize, unpatchify
from vitmods.ops.context import is_as_written

_FORWARD = nn.Conv2d.forward
_NAMES = frozenset(("weight", "bias", *nn.Conv2d.__constants__, "transposed", "_reversed_padding_repeated_twice"))


@STEMS.register("linear")
class LinearStem(Stem):
    """``norm(proj(patch))``; (B, channels, height, width) -> (B, T, C), see ``Stem``.

    Parameters are named as in timm: ``proj`` is the projection, ``norm`` the slot after it. ``gelu`` puts a GELU behind
    that (Touvron et al., 2022, Table 7).
    """

    title, around = "linear", True
    paper = (
        "Dosovitskiy et al.: An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale. "
        "ICLR 2021; Touvron et al.: Three things everyone should know about Vision Transformers. ECCV 2022, Table 7"
    )
    url = "https://arxiv.org/abs/2010.11929"
    proj: nn.Conv2d

    def __init__(
        self, size: StemSize, bias: bool = True, norm_layer: NormFactory | None = None, gelu: bool = False
    ) -> None:
        super().__init__(size)
        self.proj = nn.Conv2d(size.in_chans, size.embed_dim, size.patch_size, size.patch_size, bias=bias)
        self.norm = norm_layer(size.embed_dim) if norm_layer else nn.Identity()
        self.act = nn.GELU() if gelu else nn.Identity()

    def project(self, images: Tensor) -> Tensor:
        """(B, channels, height, width) -> (B, T, C)"""
        return self.proj(images).flatten(2).transpose(1, 2)

    def project_patches(self, patches: Tensor) -> Tensor:
        return self._map(patches)

    def _map(self, patches: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
        """``proj`` of each patch, (B, K, values) -> (B, K, C), as one product: differentiating a convolution with
        respect to patches takes three times as long. A ``proj`` that is hooked, wrapped or replaced is called, on the
        patches laid out as images of that shape, or side by side."""
        proj = self.proj
        if (
            type(proj) is nn.Conv2d
            and (proj.kernel_size, proj.stride) == (self.patch_size, self.patch_size)
            and (proj.padding, proj.dilation, proj.groups) == ((0, 0), (1, 1), 1)
            and nn.Conv2d.forward is _FORWARD
            and is_as_written(proj, _NAMES)
        ):
            return F.linear(patches, proj.weight.flatten(1), proj.bias)
        return LinearStem.project(self, unpatchify(patches, self.patch_size, shape))

    def finish(self, tokens: Tensor) -> Tensor:
        return self.act(self.norm(tokens))

    def resize_patch(self, new: tuple[int, int]) -> None:
        old = self.proj
        proj = nn.Conv2d(self.in_chans, old.out_channels, new, new, bias=old.bias is not None)
        proj.to(device=old.weight.device, dtype=old.weight.dtype)
        with torch.no_grad():
            proj.weight.copy_(resize_projection(old.weight, new))
            if old.bias is not None and proj.bias is not None:
                proj.bias.copy_(old.bias)
        for name, parameter in proj.named_parameters():
            parameter.requires_grad_(old.get_parameter(name).requires_grad)
        self.proj, self.patch_size = proj, new


def resize_projection(weight: Tensor, new: tuple[int, int]) -> Tensor:
    """A kernel (C, in, rows, columns) for patches of ``new`` pixels (Beyer et al., 2023, FlexiViT, equation 4).

    The pseudo-inverse of the resizing of patches: for enlarged patches the resized kernel gives on resized patches
    what the old one gave on the old patches, exactly.
    """
    rows, columns = weight.shape[-2:]
    basis = torch.eye(rows * columns, dtype=torch.float64).reshape(-1, 1, rows, columns)
    matrix = F.interpolate(basis, size=new, mode="bilinear", antialias=True).flatten(1).T  # (new pixels, old pixels)
    kernel: Tensor = weight.double().flatten(2) @ torch.linalg.pinv(matrix.to(weight.device))
    return kernel.reshape(*weight.shape[:2], *new).to(weight.dtype)


def resize_pixels(values: Tensor, channels: int, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Values of a patch's pixels (channels * old pixels,) resized bilinearly to (channels * new pixels,)."""
    image = values.detach().double().reshape(1, channels, *old)
    return F.interpolate(image, size=new, mode="bilinear", antialias=True).flatten().to(values.dtype)
