"""The hierarchical MLP stem (Touvron et al., Three things everyone should know about Vision Transformers, 2022)."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.norms import BatchNorm
from vitmods.layers.stems.base import STEMS, StemSize, square_side
from vitmods.layers.stems.convolutions import ConvolutionStem, NormFactory
from vitmods.util.errors import UserError


def hmlp_layers(embed_dim: int, patch_size: tuple[int, int]) -> list[tuple[int, int]]:
    """(kernel side, width) of each layer of the hMLP stem: 4 x 4 pixels first, then 2 x 2 neighbors up to the patch.

    Raises UserError unless the patch is a square with a side of 4, 8, 16, ... and the width a multiple of 4.
    """
    side = square_side("hMLP", patch_size)
    halvings = (side // 4).bit_length() - 1
    if side != 4 << max(halvings, 0):
        raise UserError(
            f"The hMLP stem grows patches from 4 pixels by doubling: their side is 4, 8, 16, 32, ..., not {side}. "
            f"Use patch_size={4 << max(halvings, 0)}, or another stem."
        )
    if embed_dim % 4:
        raise UserError(f"The hMLP stem needs a width that is a multiple of 4, got {embed_dim}.")
    widths = [embed_dim // 4] * halvings + [embed_dim]
    return list(zip([4] + [2] * halvings, widths, strict=True))


@STEMS.register("hmlp")
class HMLPStem(ConvolutionStem):
    """Patches of 4 x 4 pixels grow to the patch of the model by joining 2 x 2 neighbors; no value leaves its patch.

    Each layer is a linear map, a norm and, except for the last, a GELU: for 16 x 16 pixels, 4 x 4 pixels -> C/4,
    2 x 2 neighbors -> C/4, 2 x 2 neighbors -> C. Takes what timm passes to ``embed_layer``; the norms are
    ``inner_norm`` between the layers and ``norm_layer`` after the last. See ``Stem`` for shapes and ``keep``.

    Whole images go through strided convolutions. Visible patches go through the same maps as products: with the
    windows of a patch in the order of its tree (quarters of quarters), the neighbors of every layer lie side by side.
    """

    title, inner, published_norm = "hMLP", True, "batch"
    order: Tensor

    @classmethod
    def check(cls, embed_dim: int, patch_size: tuple[int, int]) -> None:
        hmlp_layers(embed_dim, patch_size)

    @classmethod
    def macs(cls, size: StemSize) -> int:
        return sum(tokens * inputs * width for tokens, inputs, width in _maps(size))

    @classmethod
    def normed(cls, size: StemSize, inner: bool) -> int:
        return sum(tokens * width for tokens, _, width in _maps(size)[:-1]) if inner else 0

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        bias: bool = True,
        norm_layer: NormFactory | None = BatchNorm,
        strict_img_size: bool = True,
        output_fmt: str | None = None,
        dynamic_img_pad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        inner_norm: NormFactory | None = BatchNorm,
    ) -> None:
        super().__init__(img_size, patch_size, in_chans, strict_img_size, output_fmt, dynamic_img_pad)
        sides, widths = zip(*hmlp_layers(embed_dim, self.patch_size), strict=True)
        channels = pairwise((in_chans, *widths))
        convolutions = [nn.Conv2d(a, b, side, side, bias=bias) for side, (a, b) in zip(sides, channels, strict=True)]
        self._fill(convolutions, inner_norm, norm_layer)
        self.register_buffer("order", tree_order(in_chans, len(sides) - 1), persistent=False)
        self.to(device=device, dtype=dtype)

    def project_patches(self, patches: Tensor) -> Tensor:
        x = patches.view(*patches.shape[:-1], -1, 4).index_select(2, self.order).flatten(2)
        for conv, norm, gelu in self._steps():
            x = gelu(norm(_join(x, conv)))
        return _join(x, self.proj)


def _maps(size: StemSize) -> list[tuple[int, int, int]]:
    """(tokens, inputs, outputs) of each linear map."""
    maps, channels = [], size.in_chans
    rows, columns = size.img_size
    for side, width in hmlp_layers(size.embed_dim, size.patch_size):
        rows, columns = rows // side, columns // side
        maps.append((rows * columns, side * side * channels, width))
        channels = width
    return maps


def _join(x: Tensor, conv: nn.Module) -> Tensor:
    """A strided convolution whose windows lie one after another in ``x`` (B, N, C): (B, windows, out)."""
    assert isinstance(conv, nn.Conv2d)
    reads_pixels = conv.kernel_size == (4, 4)  # channel first as in an image; what layers give has channels last
    weight = (conv.weight if reads_pixels else conv.weight.permute(0, 2, 3, 1)).flatten(1)
    return F.linear(x.reshape(len(x), -1, weight.shape[1]), weight, conv.bias)


def tree_order(channels: int, halvings: int) -> Tensor:
    """The lines of 4 pixels of a patch in the order of its tree, by their places in the patch's values. (values / 4,)

    Quarters of the patch come one after another, in row-major order, and so within each quarter, down to 4 x 4 pixels;
    there channels and rows.
    """
    twos = [2] * halvings
    table = torch.arange(channels * 4 * (1 << halvings) ** 2).view(channels, *twos, 4, *twos)
    levels = (axis for i in range(halvings) for axis in (1 + i, 2 + halvings + i))
    return table.permute(*levels, 0, 1 + halvings).flatten()
