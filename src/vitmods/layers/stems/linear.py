"""The plain stem: each patch through one linear map (Dosovitskiy et al., 2021), written as a strided convolution."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .resize import resize_projection


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


class LinearStem(nn.Module):
    """(B, channels, height, width) -> (B, T, C), patch tokens in row-major order.

    Takes what timm passes to ``embed_layer``; parameters are named as in timm: ``proj`` is the projection, ``norm``
    the slot after it. Raises ValueError when a picture does not have the size that the stem was made for.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        bias: bool = True,
        norm_layer: Callable[[int], nn.Module] | None = None,
        strict_img_size: bool = True,
        output_fmt: str | None = None,
        dynamic_img_pad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dynamic_img_pad or output_fmt not in (None, "NLC", "NHWC"):
            raise ValueError("This stem pads nothing and gives tokens as NLC or NHWC: leave dynamic_img_pad off.")
        self.img_size, self.patch_size = _pair(img_size), _pair(patch_size)
        self.in_chans, self.strict_img_size, self.output_fmt = in_chans, strict_img_size, output_fmt
        self.proj = nn.Conv2d(
            in_chans, embed_dim, self.patch_size, self.patch_size, bias=bias, device=device, dtype=dtype
        )
        self.norm = norm_layer(embed_dim) if norm_layer else nn.Identity()

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of patch tokens."""
        return self.dynamic_feat_size(self.img_size)

    @property
    def num_patches(self) -> int:
        return self.grid_size[0] * self.grid_size[1]

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of patch tokens of a picture of ``img_size`` pixels."""
        return img_size[0] // self.patch_size[0], img_size[1] // self.patch_size[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        return max(self.patch_size) if as_scalar else self.patch_size

    def forward(self, images: Tensor) -> Tensor:
        self._check(images)
        return self._format(self.norm(self.project(images)), images)

    def project(self, images: Tensor) -> Tensor:
        """(B, channels, height, width) -> (B, T, C)"""
        return self.proj(images).flatten(2).transpose(1, 2)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Another picture size (weights stay) or patch size (the projection is resized, FlexiViT)."""
        if patch_size is not None and _pair(patch_size) != self.patch_size:
            self._resize_patch(_pair(patch_size))
        if img_size is not None:
            self.img_size = _pair(img_size)

    def _resize_patch(self, new: tuple[int, int]) -> None:
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

    def _check(self, images: Tensor) -> None:
        size = tuple(images.shape[-2:])
        if self.strict_img_size and size != self.img_size:
            raise ValueError(
                f"The pictures are {size[0]}x{size[1]} pixels and the model is made for {self.img_size[0]}x"
                f"{self.img_size[1]}: resize them, or call set_input_size on the model."
            )
        if size[0] % self.patch_size[0] or size[1] % self.patch_size[1]:
            raise ValueError(
                f"A picture of {size[0]}x{size[1]} pixels cannot be cut into patches of {self.patch_size}."
            )

    def _format(self, tokens: Tensor, images: Tensor) -> Tensor:
        if self.output_fmt != "NHWC":
            return tokens
        return tokens.unflatten(1, self.dynamic_feat_size((images.shape[-2], images.shape[-1])))

    def extra_repr(self) -> str:
        return f"img_size={self.img_size}, patch_size={self.patch_size}"


def patchify(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """(B, channels, height, width) -> (B, T, channels * rows * columns): a patch's values in the order of a
    convolution kernel, channel first."""
    b, channels, height, width = images.shape
    rows, columns = patch_size
    cut = images.reshape(b, channels, height // rows, rows, width // columns, columns)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, channels * rows * columns)
