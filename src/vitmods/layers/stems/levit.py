"""The convolutional stem of LeViT (Graham et al., 2021), as Touvron et al., 2022, compare it: with GELU."""

from itertools import pairwise

import torch
from torch import nn

from vitmods.layers.norms import BatchNorm
from vitmods.layers.stems.convolutions import ConvolutionStem, NormFactory
from vitmods.layers.stems.shapes import levit_widths


class LeViTStem(ConvolutionStem):
    """3 x 3 convolutions with stride 2 until a patch is one token; a norm after each, GELU between them.

    For patches of 16 pixels the widths are C/8, C/4, C/2 and C. The windows overlap, so that a token depends on its
    neighbors' pixels too and there is no ``keep``. Takes what timm passes to ``embed_layer``; the norms are
    ``inner_norm`` between the convolutions and ``norm_layer`` after the last. See ``Stem`` for shapes.
    """

    patch_wise = False

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        bias: bool = False,
        norm_layer: NormFactory | None = BatchNorm,
        strict_img_size: bool = True,
        output_fmt: str | None = None,
        dynamic_img_pad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        inner_norm: NormFactory | None = BatchNorm,
    ) -> None:
        super().__init__(img_size, patch_size, in_chans, strict_img_size, output_fmt, dynamic_img_pad)
        channels = pairwise((in_chans, *levit_widths(embed_dim, self.patch_size)))
        self._fill([nn.Conv2d(a, b, 3, 2, 1, bias=bias) for a, b in channels], inner_norm, norm_layer)
        self.to(device=device, dtype=dtype)
