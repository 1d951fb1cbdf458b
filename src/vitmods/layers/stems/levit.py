"""The convolutional stem of LeViT (Graham et al., 2021), as Touvron et al., 2022, compare it: with GELU."""

from itertools import pairwise

from torch import nn

from vitmods.layers.norms import BatchNorm
from vitmods.layers.stems.base import STEMS, ConvolutionStem, NormFactory, StemSize, square_side
from vitmods.util.errors import UserError


def levit_widths(embed_dim: int, patch_size: tuple[int, int]) -> list[int]:
    """Width of each convolution of the LeViT stem; each halves the image and all but the first double the width.

    Raises UserError unless the patch is a square with a side of 2, 4, 8, ... and the width can be halved as often.
    """
    side = square_side("LeViT", patch_size)
    convolutions = side.bit_length() - 1
    if side < 2 or side != 1 << convolutions:
        raise UserError(
            f"The LeViT stem halves the image with each convolution: the patch side is 2, 4, 8, 16, ..., not {side}."
        )
    if embed_dim % (side // 2):
        raise UserError(f"The LeViT stem needs a width that is a multiple of {side // 2}, got {embed_dim}.")
    return [embed_dim >> (convolutions - 1 - i) for i in range(convolutions)]


@STEMS.register("levit")
class LeViTStem(ConvolutionStem):
    """3 x 3 convolutions with stride 2 until a patch is one token; a norm after each, GELU between them.

    For patches of 16 pixels the widths are C/8, C/4, C/2 and C. The windows overlap, so that a token depends on its
    neighbors' pixels too and there is no ``keep``. The norms are ``inner_norm`` between the convolutions and
    ``norm_layer`` after the last. See ``Stem`` for shapes.
    """

    patch_wise = False
    title, inner, published_norm = "LeViT convolutions", True, "batch"
    paper = "Graham et al.: LeViT: a Vision Transformer in ConvNet's Clothing for Faster Inference. ICCV 2021"
    url = "https://arxiv.org/abs/2104.01136"

    @classmethod
    def check(cls, embed_dim: int, patch_size: tuple[int, int]) -> None:
        levit_widths(embed_dim, patch_size)

    @classmethod
    def macs(cls, size: StemSize) -> int:
        widths = levit_widths(size.embed_dim, size.patch_size)
        inputs = [size.in_chans, *widths]
        return sum(n * 9 * i * w for n, i, w in zip(_places(size), inputs, widths, strict=False))

    @classmethod
    def normed(cls, size: StemSize, inner: bool) -> int:
        widths = levit_widths(size.embed_dim, size.patch_size)
        return sum(n * w for n, w in zip(_places(size)[:-1], widths, strict=False)) if inner else 0

    def __init__(
        self,
        size: StemSize,
        bias: bool = False,
        norm_layer: NormFactory | None = BatchNorm,
        inner_norm: NormFactory | None = BatchNorm,
    ) -> None:
        super().__init__(size)
        channels = pairwise((size.in_chans, *levit_widths(size.embed_dim, size.patch_size)))
        self.fill([nn.Conv2d(a, b, 3, 2, 1, bias=bias) for a, b in channels], inner_norm, norm_layer)


def _places(size: StemSize) -> list[int]:
    """Places in the output of each convolution."""
    halvings = range(1, size.patch_size[0].bit_length())
    return [(size.img_size[0] >> i) * (size.img_size[1] >> i) for i in halvings]
