"""The hierarchical MLP stem (Touvron et al., Three things everyone should know about Vision Transformers, 2022)."""

from itertools import pairwise

from torch import nn

from vitmods.layers.norms import BatchNorm
from vitmods.layers.stems.base import STEMS, ConvolutionStem, NormFactory, StemSize, square_side
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
    2 x 2 neighbors -> C/4, 2 x 2 neighbors -> C. The norms are ``inner_norm`` between the layers and ``norm_layer``
    after the last. See ``Stem`` for shapes and ``keep``.
    """

    title, inner, published_norm = "hMLP", True, "batch"
    paper = "Touvron et al.: Three things everyone should know about Vision Transformers. ECCV 2022, section 5"
    url = "https://arxiv.org/abs/2203.09795"

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
        size: StemSize,
        bias: bool = True,
        norm_layer: NormFactory | None = BatchNorm,
        inner_norm: NormFactory | None = BatchNorm,
    ) -> None:
        super().__init__(size)
        sides, widths = zip(*hmlp_layers(size.embed_dim, size.patch_size), strict=True)
        channels = pairwise((size.in_chans, *widths))
        convolutions = [nn.Conv2d(a, b, side, side, bias=bias) for side, (a, b) in zip(sides, channels, strict=True)]
        self.fill(convolutions, inner_norm, norm_layer)


def _maps(size: StemSize) -> list[tuple[int, int, int]]:
    """(tokens, inputs, outputs) of each linear map."""
    maps, channels = [], size.in_chans
    rows, columns = size.img_size
    for side, width in hmlp_layers(size.embed_dim, size.patch_size):
        rows, columns = rows // side, columns // side
        maps.append((rows * columns, side * side * channels, width))
        channels = width
    return maps
