"""The hierarchical MLP stem (Touvron et al., Three things everyone should know about Vision Transformers, 2022)."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.norms import BatchNorm
from vitmods.layers.stems.convolutions import ConvolutionStem, NormFactory
from vitmods.layers.stems.shapes import hmlp_layers


class HMLPStem(ConvolutionStem):
    """Patches of 4 x 4 pixels grow to the patch of the model by joining 2 x 2 neighbors; no value leaves its patch.

    Each layer is a linear map, a norm and, except for the last, a GELU: for 16 x 16 pixels, 4 x 4 pixels -> C/4,
    2 x 2 neighbors -> C/4, 2 x 2 neighbors -> C. Takes what timm passes to ``embed_layer``; the norms are
    ``inner_norm`` between the layers and ``norm_layer`` after the last. See ``Stem`` for shapes and ``keep``.

    Whole images go through strided convolutions. Visible patches go through the same maps as products: with the
    windows of a patch in the order of its tree (quarters of quarters), the neighbors of every layer lie side by side.
    """

    order: Tensor

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
        x = patches.unflatten(-1, (-1, 4)).index_select(2, self.order).flatten(2)
        for conv, norm, gelu in self._steps():
            x = gelu(norm(_join(x, conv)))
        return _join(x, self.proj)


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
