"""Shared code of stems: sizes, checks, and computing only the visible patches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from vitmods.util.errors import UserError
from vitmods.util.registry import Registry

NormFactory = Callable[[int], nn.Module]
"""Takes the number of channels."""

STEMS: Registry[type["Stem"]] = Registry("stem", "vitmods.layers.stems")
"""By their kinds in configs."""


@dataclass(frozen=True)
class StemSize:
    """The sizes of a stem in pixels, (rows, columns) or one number for both."""

    img_size: tuple[int, int]
    patch_size: tuple[int, int]
    in_chans: int = 3
    embed_dim: int = 768

    def __post_init__(self) -> None:
        for name in ("img_size", "patch_size"):
            object.__setattr__(self, name, _pair(getattr(self, name)))

    @property
    def patches(self) -> int:
        return (self.img_size[0] // self.patch_size[0]) * (self.img_size[1] // self.patch_size[1])

    @property
    def values(self) -> int:
        """Number of values of one patch."""
        return self.in_chans * self.patch_size[0] * self.patch_size[1]


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


class Stem(nn.Module):
    """Map images (B, channels, height, width) to patch tokens (B, T, C) in row-major order.

    With ``keep`` (B, K), the indices of visible patches, only these are computed: (B, K, C) in the order of ``keep``,
    equal to computing all tokens and selecting. In training, norms with batch statistics then see only these.

    A subclass registers in ``STEMS``. Its constructor gets a ``StemSize`` and the content of its slots (``bias``,
    ``norm_layer``, ``inner_norm``, ``gelu``). It makes ``proj``, the last linear map, and ``norm``, the slot after it,
    and defines ``project``. Class attributes and ``check``, ``macs`` and ``normed`` describe it.

    Three attributes may be set: ``strict_img_size=False`` accepts images of any size that patches fill,
    ``crop_border=True`` ignores the pixels after the last whole patch, and ``output_fmt="NHWC"`` returns tokens as
    (B, rows, columns, C).

    Raises ValueError when an image does not have the size that the stem was made for, and UserError on a ``keep``
    that is empty, repeats itself or names patches that do not exist, and where the stem is not patch-wise.
    """

    proj: nn.Module
    norm: nn.Module
    patch_wise = True
    """Whether a token depends only on its own patch."""
    first_layer = "proj"
    """Name of the layer that reads the images."""
    title: ClassVar[str]
    """name in drawings"""
    paper: ClassVar[str] = ""
    """where it was published, in the form of ``Change.paper``, with its address ``url``; a subclass has its own"""
    url: ClassVar[str] = ""
    inner: ClassVar[bool] = False
    """whether it has several layers, with ``inner_norm`` between them"""
    around: ClassVar[bool] = False
    """whether it may have a norm on the pixels of a patch, and a GELU at its end"""
    sequences: ClassVar[bool] = False
    """whether it reads tokens, whole numbers (B, T), instead of images"""
    published_norm: ClassVar[str | None] = "none"
    """the norm that it was published with, "batch", "layer" or "none"; None where the change ``stem`` does not offer
    it, because the patch side goes with it"""

    def __init_subclass__(cls) -> None:
        cls.paper, cls.url = vars(cls).get("paper", ""), vars(cls).get("url", "")

    @classmethod
    def check(cls, embed_dim: int, patch_size: tuple[int, int]) -> None:
        """Raise UserError if the stem cannot have this width and patch size."""

    @classmethod
    def macs(cls, size: StemSize) -> int:
        """Count the multiply-adds for one image."""
        return size.patches * size.values * size.embed_dim

    @classmethod
    def normed(cls, size: StemSize, inner: bool) -> int:
        """Count the values of one image that pass norms between its layers, if these slots are filled (``inner``)."""
        return 0

    def __init__(self, size: StemSize) -> None:
        super().__init__()
        self.img_size, self.patch_size, self.in_chans = size.img_size, size.patch_size, size.in_chans
        self.strict_img_size, self.crop_border = True, False
        self.output_fmt: Literal["NLC", "NHWC"] = "NLC"

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of patch tokens."""
        return self.dynamic_feat_size(self.img_size)

    @property
    def num_patches(self) -> int:
        return self.grid_size[0] * self.grid_size[1]

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of patch tokens of an image of ``img_size`` pixels."""
        return img_size[0] // self.patch_size[0], img_size[1] // self.patch_size[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        return max(self.patch_size) if as_scalar else self.patch_size

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are matrices but not weights."""
        return set()

    def as_images(self, inputs: Tensor) -> Tensor:
        """Convert the model's inputs to images (B, channels, height, width)."""
        return inputs

    def padding(self, images: Tensor) -> Tensor | None:
        """Mask of padding tokens, (B, T), or None."""
        return None

    def example(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw noise of the shape of the model's inputs."""
        return torch.randn(count, self.in_chans, *self.img_size, generator=generator)

    def forward(self, images: Tensor, keep: Tensor | None = None, drawn: bool = False) -> Tensor:
        """Images (B, channels, height, width) to tokens (B, T, C), or (B, K, C) of only the patches ``keep`` (B, K),
        whose values are not looked at where the model has ``drawn`` them itself."""
        self._check(images)
        if self.crop_border:
            rows, columns = self.dynamic_feat_size((images.shape[-2], images.shape[-1]))
            images = images[..., : rows * self.patch_size[0], : columns * self.patch_size[1]]
        if keep is None:
            tokens: Tensor = self.finish(self.project(images))
            if self.output_fmt == "NHWC":
                tokens = tokens.unflatten(1, self.dynamic_feat_size((images.shape[-2], images.shape[-1])))
            return tokens
        if not self.patch_wise:
            raise UserError(
                f"{type(self).__name__} reads overlapping windows: a visible token needs the pixels of hidden patches, "
                "so keep cannot be exact. Use a patch-wise stem (linear, dpn, hmlp, local), or mask the tokens."
            )
        if self.output_fmt == "NHWC":
            raise UserError("The visible patches do not form a grid: leave output_fmt at NLC to use keep.")
        if not drawn:
            rows, columns = self.dynamic_feat_size((images.shape[-2], images.shape[-1]))
            check_keep(keep, len(images), rows * columns)
        return self.finish(self.project_patches(take_patches(images, keep, self.patch_size)))

    def project(self, images: Tensor) -> Tensor:
        """(B, channels, height, width) -> (B, T, C), before the norm."""
        raise NotImplementedError

    def project_patches(self, patches: Tensor) -> Tensor:
        """(B, K, channels * rows * columns), a patch's values as ``patchify`` orders them -> (B, K, C).

        Layers are called as for whole images, with whatever hooks and adapters they have."""
        return self.project(unpatchify(patches, self.patch_size))

    def finish(self, tokens: Tensor) -> Tensor:
        return self.norm(tokens)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Another image size (weights stay) or patch size, where the stem can follow one."""
        if patch_size is not None and _pair(patch_size) != self.patch_size:
            self.resize_patch(_pair(patch_size))
        if img_size is not None:
            self.img_size = _pair(img_size)

    def resize_patch(self, new: tuple[int, int]) -> None:
        """Let the layers follow to another patch size."""
        raise UserError(
            f"The layers of this {type(self).__name__} are made for patches of {self.patch_size}: its weights cannot "
            f"follow to {new}. Keep the patch size, or take the linear stem."
        )

    def _check(self, images: Tensor) -> None:
        if isinstance(images, torch.fx.Proxy):
            return  # a traced graph takes what it is given
        size = tuple(images.shape[-2:])
        if self.strict_img_size and size != self.img_size:
            raise ValueError(
                f"The images are {size[0]}x{size[1]} pixels and the model is made for {self.img_size[0]}x"
                f"{self.img_size[1]}: resize them, or call set_input_size on the model, with that size or with "
                "dynamic_img_size=True for any."
            )
        if not self.crop_border and (size[0] % self.patch_size[0] or size[1] % self.patch_size[1]):
            raise ValueError(f"An image of {size[0]}x{size[1]} pixels cannot be cut into patches of {self.patch_size}.")

    def extra_repr(self) -> str:
        return f"img_size={self.img_size}, patch_size={self.patch_size}"


class ConvolutionStem(Stem):
    """A stem of several convolutions on whole images.

    ``layers`` holds convolution, norm and GELU of each layer but the last, which are ``proj`` and ``norm``.
    ``convolutions`` are those of all layers, ``inner_norm`` makes the norms between them. Convolutions run with the
    channels last in memory, as the norms want them; on CPUs that is a tenth faster for the whole stem too.
    """

    proj: nn.Conv2d

    def fill(
        self, convolutions: list[nn.Conv2d], inner_norm: NormFactory | None, norm_layer: NormFactory | None
    ) -> None:
        *first, last = convolutions
        self.layers = nn.Sequential()
        for conv in first:
            norm = inner_norm(conv.out_channels) if inner_norm else nn.Identity()
            self.layers.extend([conv, norm, nn.GELU()])
        self.proj = last
        self.norm = norm_layer(last.out_channels) if norm_layer else nn.Identity()
        self.first_layer = "layers.0" if first else "proj"

    def project(self, images: Tensor) -> Tensor:
        x = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # torch.vmap takes no memory_format
        layers = list(self.layers)
        for conv, norm, gelu in zip(layers[::3], layers[1::3], layers[2::3], strict=True):
            x = gelu(norm(conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return self.proj(x).permute(0, 2, 3, 1).flatten(1, 2)


def square_side(name: str, patch_size: tuple[int, int]) -> int:
    """The side of a square patch. Raises UserError, naming the stem, for another."""
    if patch_size[0] != patch_size[1]:
        raise UserError(f"The {name} stem needs square patches, got {patch_size[0]} x {patch_size[1]} pixels.")
    return patch_size[0]


def patchify(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """(B, channels, height, width) -> (B, T, channels * rows * columns): a patch's values in the order of a
    convolution kernel, channel first."""
    b, channels, height, width = images.shape
    rows, columns = patch_size
    cut = images.reshape(b, channels, height // rows, rows, width // columns, columns)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, channels * rows * columns)


def unpatchify(patches: Tensor, patch_size: tuple[int, int], shape: tuple[int, ...] | None = None) -> Tensor:
    """The inverse of ``patchify``, for images of that shape, or of one row of patches."""
    rows, columns = patch_size
    if shape is None:
        shape = len(patches), patches.shape[2] // (rows * columns), rows, patches.shape[1] * columns
    b, channels, height, width = shape
    cut = patches.reshape(b, height // rows, width // columns, channels, rows, columns)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(shape)


def take_patches(images: Tensor, keep: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """The patches ``keep`` (B, K) of images (B, channels, height, width), as ``patchify`` gives them.

    Each row of pixels of a visible patch is found by its number among all of them, so that no others are read.
    """
    b, channels, height, width = images.shape
    rows, columns = patch_size
    across = width // columns
    plane = torch.arange(b * channels, device=keep.device).view(b, 1, channels, 1)
    row = (keep // across * rows)[:, :, None, None] + torch.arange(rows, device=keep.device)
    number = (plane * height + row) * across + (keep % across)[:, :, None, None]
    return images.reshape(-1, columns).index_select(0, number.flatten()).view(b, keep.shape[1], -1)


def check_keep(keep: Tensor, patches_as_images: int, patches: int) -> None:
    """Raises UserError unless ``keep`` is (B, K), K >= 1 different indices of patches for each image.

    Values are not checked while a graph is traced. A CUDA device checks them when it gets
    there: the host does not wait, and gets the error in a later call.
    """
    if not isinstance(keep, Tensor) or keep.dtype not in (torch.int64, torch.int32) or keep.ndim != 2:
        raise UserError("keep is a tensor (B, K) of whole numbers: the indices of the visible patches of each image.")
    if len(keep) != patches_as_images:
        raise UserError(
            f"keep has rows for {len(keep)} images, and there are {patches_as_images}: give one row for each."
        )
    if not keep.shape[1]:
        raise UserError("keep is empty: at least one patch of each image must be visible.")
    if torch.compiler.is_compiling():
        return
    ordered = keep.sort(dim=1).values
    if keep.device.type == "cuda":
        fits = (ordered[:, 0] >= 0) & (ordered[:, -1] < patches) & (ordered[:, 1:] != ordered[:, :-1]).all(dim=1)
        torch.ops.aten._assert_async.msg(fits.all(), f"keep names different patches of an image, of {patches}")
        return
    if ordered[:, 0].min() < 0 or ordered[:, -1].max() >= patches:
        outside = sorted({int(i) for i in keep.flatten() if not 0 <= i < patches})
        raise UserError(f"keep names the patches {outside[:5]}; an image has {patches}, numbered from 0.")
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        row = int((ordered[:, 1:] == ordered[:, :-1]).any(1).nonzero()[0])
        raise UserError(f"keep repeats a patch of image {row}: each visible patch is named once.")
