"""From a backbone to maps of one width and several strides, which detectors read.

- Of a pyramid (Swin, PVT): a feature pyramid network (Lin et al., CVPR 2017, arXiv:1612.03144), torchvision's.
- Of a plain ViT: its last map at strides of 4, 8, 16 and 32, as the simple feature pyramid (Li et al., ECCV 2022,
  arXiv:2203.16527), which needs no way from coarse to fine.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool, LastLevelP6P7
from torchvision.ops.misc import Permute

from vitmods.tasks.features import feature_channels, feature_maps, feature_strides, is_pyramid
from vitmods.util.errors import UserError

STRIDES = (4, 8, 16, 32)
MakeNorm = Callable[[int], nn.Module]


class Neck(nn.Module):
    """Maps (B, C, rows, columns), fine to coarse -> as many of `channels` and further, coarser ones, by name.

    levels: "retinanet", strides 8 to 128, the last two by convolutions of the coarsest map; or "rcnn", 4 to 64, the
    last by pooling. norm: makes one of so many channels, after each convolution of a feature pyramid network; None: the
    simple pyramid alone has norms, its own.

    Raises:
        UserError: a pyramid whose strides are others than 4, 8, 16 and 32.
    """

    def __init__(
        self, backbone: nn.Module, channels: int, levels: Literal["retinanet", "rcnn"], norm: MakeNorm | None = None
    ) -> None:
        super().__init__()
        widths, strides = feature_channels(backbone), tuple(feature_strides(backbone))
        self.plain = not is_pyramid(backbone)
        if not self.plain and strides != STRIDES:
            raise UserError(
                f"{type(backbone).__name__} has maps of strides {strides}, and detectors are built on {STRIDES}: use a "
                "pyramid with these (swin_*, pvt_v2_*), or a plain ViT."
            )
        self.first = 1 if levels == "retinanet" else 0  # the finest map is left out
        wanted = STRIDES[self.first :]
        if self.plain:
            self.maps: nn.Module = SimplePyramid(widths[-1], strides[-1], wanted, channels)
            self.more: ExtraFPNBlock = _more(levels, channels, channels)
        else:
            more = _more(levels, widths[-1], channels)
            self.maps = FeaturePyramidNetwork(widths[self.first :], channels, extra_blocks=more, norm_layer=norm)

    def forward(self, maps: list[Tensor]) -> "OrderedDict[str, Tensor]":
        if not self.plain:
            named = OrderedDict((str(i), one) for i, one in enumerate(maps[self.first :]))
            found: OrderedDict[str, Tensor] = self.maps(named)
            return found
        made: list[Tensor] = self.maps(maps[-1])
        every, names = self.more(made, made, [str(i) for i in range(len(made))])
        return OrderedDict(zip(names, every, strict=True))


def _more(levels: str, width: int, channels: int) -> ExtraFPNBlock:
    return LastLevelP6P7(width, channels) if levels == "retinanet" else LastLevelMaxPool()


def padded_maps(backbone: nn.Module, images: Tensor) -> list[Tensor]:
    """`feature_maps` of images that are padded by zeros, on the right and below, to whole patches of all strides."""
    side = math.lcm(STRIDES[-1], *feature_strides(backbone))
    height, width = images.shape[-2:]
    return feature_maps(backbone, F.pad(images, (0, -width % side, 0, -height % side)))


class SimplePyramid(nn.Module):
    """One map (B, C, rows, columns) of stride P -> a map of `channels` for each stride.

    Each is brought to its stride by transposed convolutions of side 2 (halving the stride, and the channels), nothing,
    or max-pooling, then 1 x 1 and 3 x 3 convolutions, each with a norm over the channels of a position. A stride that
    is no power of 2 from P is the nearest one that is.
    """

    def __init__(self, dim: int, stride: int, strides: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(_level(dim, round(math.log2(stride / wanted)), channels) for wanted in strides)

    def forward(self, found: Tensor) -> list[Tensor]:
        return [level(found) for level in self.levels]


def _level(dim: int, doublings: int, channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(doublings):
        layers += [nn.ConvTranspose2d(dim, dim // 2, 2, stride=2)]
        dim //= 2
        layers += [*_norm(dim), nn.GELU()] if i < doublings - 1 else []
    if doublings < 0:
        layers.append(nn.MaxPool2d(2 ** (-doublings)))
    layers += [nn.Conv2d(dim, channels, 1, bias=False), *_norm(channels)]
    layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), *_norm(channels)]
    return nn.Sequential(*layers)


def _norm(dim: int) -> list[nn.Module]:
    """LayerNorm over the channels of (B, C, rows, columns)."""
    return [Permute([0, 2, 3, 1]), nn.LayerNorm(dim, eps=1e-6), Permute([0, 3, 1, 2])]
