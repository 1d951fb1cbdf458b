"""Detectors: a backbone, its pyramid of maps, and the heads, anchors and losses of torchvision.

RetinaNet (Lin et al., ICCV 2017, arXiv:1708.02002) and Mask R-CNN (He et al., ICCV 2017, arXiv:1703.06870).

From a backbone to maps of one width and several strides, which detectors read.

- Of a pyramid (Swin, PVT): a feature pyramid network (Lin et al., CVPR 2017, arXiv:1612.03144), torchvision's.
- Of a plain ViT: its last map at strides of 4, 8, 16 and 32, as the simple feature pyramid (Li et al., ECCV 2022,
  arXiv:2203.16527), which needs no way from coarse to fine.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool, LastLevelP6P7
from torchvision.ops.misc import Permute

from vitmods.tasks.base import TaskModel
from vitmods.tasks.features import feature_channels, feature_maps, feature_strides, is_pyramid
from vitmods.util.errors import UserError

STRIDES = (4, 8, 16, 32)
MakeNorm = Callable[[int], nn.Module]


class Neck(nn.Module):
    """Maps (B, C, rows, columns), fine to coarse -> as many of `channels` and further, coarser ones, by name.

    levels: "retinanet", strides 8 to 128, the last two by convolutions of the coarsest map; or "rcnn", 4 to 64, the
    last by pooling. norm: makes one of so many channels, after each convolution of a feature pyramid network; None: the
    simple pyramid has norms, the others do not.

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
        wanted, width = STRIDES[self.first :], channels if self.plain else widths[-1]
        more: ExtraFPNBlock = LastLevelP6P7(width, channels) if levels == "retinanet" else LastLevelMaxPool()
        if self.plain:
            self.maps: nn.Module = SimplePyramid(widths[-1], strides[-1], wanted, channels)
            self.more = more
        else:
            self.maps = FeaturePyramidNetwork(widths[self.first :], channels, extra_blocks=more, norm_layer=norm)

    def forward(self, maps: list[Tensor]) -> "OrderedDict[str, Tensor]":
        if not self.plain:
            named = OrderedDict((str(i), level) for i, level in enumerate(maps[self.first :]))
            return self.maps(named)
        levels: list[Tensor] = self.maps(maps[-1])
        every, names = self.more(levels, levels, [str(i) for i in range(len(levels))])
        return OrderedDict(zip(names, every, strict=True))


def padded_maps(backbone: nn.Module, images: Tensor) -> list[Tensor]:
    """`feature_maps` of images that are padded by zeros, on the right and below, to whole patches of all strides."""
    side = math.lcm(STRIDES[-1], *feature_strides(backbone))
    height, width = images.shape[-2:]
    return feature_maps(backbone, F.pad(images, (0, -width % side, 0, -height % side)))


class SimplePyramid(nn.Module):
    """One map (B, C, rows, columns) of stride P -> a map of `channels` for each stride.

    Each is brought to its stride by transposed convolutions of side 2 (halving the stride, and the channels), nothing,
    or max-pooling, then 1 x 1 and 3 x 3 convolutions, each with a norm over the channels of a position. A stride that
    is not a power of 2 from P is the nearest one that is.
    """

    def __init__(self, dim: int, stride: int, strides: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(_level(dim, round(math.log2(stride / wanted)), channels) for wanted in strides)

    def forward(self, features: Tensor) -> list[Tensor]:
        return [level(features) for level in self.levels]


def _level(dim: int, doublings: int, channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(doublings):
        layers += [nn.ConvTranspose2d(dim, dim // 2, 2, stride=2)]
        dim //= 2
        layers += [*_channel_norm(dim), nn.GELU()] if i < doublings - 1 else []
    if doublings < 0:
        layers.append(nn.MaxPool2d(2 ** (-doublings)))
    layers += [nn.Conv2d(dim, channels, 1, bias=False), *_channel_norm(channels)]
    layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), *_channel_norm(channels)]
    return nn.Sequential(*layers)


def _channel_norm(dim: int) -> list[nn.Module]:
    """LayerNorm over the channels of (B, C, rows, columns)."""
    return [Permute([0, 2, 3, 1]), nn.LayerNorm(dim, eps=1e-6), Permute([0, 3, 1, 2])]


MOST = 100  # detections of an image, as many as COCO's metrics count
Size = tuple[int, int]
Targets = Sequence[dict[str, Any]]
Losses = dict[str, Tensor]
Found = list[dict[str, Tensor]]


class Detector(TaskModel):
    """Images (B, C, H, W), padded on the right and below to one size, to losses, or to detections of each image.

    Targets are a dict for each image: `boxes` float32 (n, 4) in pixels of the padded image, `labels` int64 (n,) from 0,
    `size`, the image's height and width without padding, and for masks `masks` uint8 (n, H, W). Detections are `boxes`,
    `labels`, `scores`, the likeliest first, and perhaps `masks`.
    """

    also_forward: ClassVar[tuple[str, ...]] = ("measure", "detect")
    neck: Neck
    classes: int

    def forward(self, images: Tensor, targets: Targets | None = None) -> Any:
        """The losses by name; without targets the detections, as if nothing were padded."""
        if targets is not None:
            return self.losses(self.maps(images), _listed(images, targets), targets)
        sizes = [(images.shape[-2], images.shape[-1])] * len(images)
        return self.detections(self.maps(images), ImageList(images, sizes), sizes)

    def measure(self, images: Tensor, targets: Targets) -> tuple[Losses, Found]:
        """Losses as in training, and detections in pixels of `native`, each target's height and width in its file; from
        one pass through the backbone. Random numbers are left as they were, and no statistics change."""
        maps, listed = self.maps(images), _listed(images, targets)
        devices = [images.device] if images.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            losses = self.losses(maps, listed, targets)
        return losses, self.detections(maps, listed, [target["native"] for target in targets])

    def detect(self, images: Tensor, targets: Targets) -> Found:
        """Detections in pixels of `native`."""
        return self.detections(self.maps(images), _listed(images, targets), [target["native"] for target in targets])

    def maps(self, images: Tensor) -> "OrderedDict[str, Tensor]":
        """The inputs of the heads, in float32."""
        levels = self.neck(padded_maps(self.backbone, images))
        return OrderedDict((name, level.float()) for name, level in levels.items())

    def losses(self, maps: "OrderedDict[str, Tensor]", images: ImageList, targets: Targets) -> Losses:
        """Means over the images, whatever mode the model is in."""
        raise NotImplementedError

    def detections(self, maps: "OrderedDict[str, Tensor]", images: ImageList, native: Sequence[Size]) -> Found:
        """In pixels of images of the sizes `native`."""
        raise NotImplementedError


class RetinaNetDetector(Detector):
    """Focal loss over the classes of all anchors, and L1 of the boxes of those that lie on objects."""

    def __init__(self, backbone: nn.Module, classes: int, channels: int, norm: MakeNorm | None = None) -> None:
        super().__init__(backbone)
        self.classes = classes
        self.neck = Neck(backbone, channels, "retinanet", norm)
        head = RetinaNetHead(channels, 9, classes, norm_layer=norm)  # three sizes and three aspects of anchors
        # In the place of torchvision's backbone, which here comes before: it only says how wide the maps are.
        maps = SimpleNamespace(out_channels=channels)
        self.detector = RetinaNet(maps, classes, head=head, detections_per_img=MOST)

    def losses(self, maps: "OrderedDict[str, Tensor]", images: ImageList, targets: Targets) -> Losses:
        features = list(maps.values())
        losses = self.detector.compute_loss(
            targets, self.detector.head(features), self.detector.anchor_generator(images, features)
        )
        return {"loss_class": losses["classification"], "loss_box": losses["bbox_regression"]}

    def detections(self, maps: "OrderedDict[str, Tensor]", images: ImageList, native: Sequence[Size]) -> Found:
        features = list(maps.values())
        per_place = self.detector.anchor_generator.num_anchors_per_location()[0]
        counts = [level.shape[-2] * level.shape[-1] * per_place for level in features]
        outputs = {name: list(level.split(counts, dim=1)) for name, level in self.detector.head(features).items()}
        anchors = [list(level.split(counts)) for level in self.detector.anchor_generator(images, features)]
        resized = self.detector.postprocess_detections(outputs, anchors, images.image_sizes)
        return _native(self.detector, resized, images, native)


class MaskRCNNDetector(Detector):
    """Proposals, then a class, a box and a mask for each: losses of both stages.

    In training a fixed number of anchors and proposals of each image is drawn at random; the means are over these.
    """

    def __init__(self, backbone: nn.Module, classes: int, channels: int, norm: MakeNorm | None = None) -> None:
        super().__init__(backbone)
        self.classes = classes
        self.neck = Neck(backbone, channels, "rcnn", norm)
        anchors = AnchorGenerator(tuple((side,) for side in (32, 64, 128, 256, 512)), ((0.5, 1.0, 2.0),) * 5)
        self.detector = MaskRCNN(
            SimpleNamespace(out_channels=channels),
            classes + 1,
            rpn_anchor_generator=anchors,
            mask_head=MaskRCNNHeads(channels, [256] * 4, 1, norm_layer=norm),
            box_detections_per_img=MOST,
        )

    def losses(self, maps: "OrderedDict[str, Tensor]", images: ImageList, targets: Targets) -> Losses:
        objects = [{**target, "labels": target["labels"] + 1} for target in targets]  # 0 is the background
        parts = (self.detector.rpn, self.detector.roi_heads)
        mode = self.training
        try:
            for part in parts:  # they hold no norm and no dropout: training mode only makes them give losses
                part.train()
            proposals, of_proposals = self.detector.rpn(images, maps, objects)
            _, of_objects = self.detector.roi_heads(maps, proposals, images.image_sizes, objects)
        finally:
            for part in parts:
                part.train(mode)
        return {
            "loss_class": of_objects["loss_classifier"],
            "loss_box": of_objects["loss_box_reg"],
            "loss_mask": of_objects["loss_mask"],
            "loss_proposal_class": of_proposals["loss_objectness"],
            "loss_proposal_box": of_proposals["loss_rpn_box_reg"],
        }

    def detections(self, maps: "OrderedDict[str, Tensor]", images: ImageList, native: Sequence[Size]) -> Found:
        proposals, _ = self.detector.rpn(images, maps, None)
        detections, _ = self.detector.roi_heads(maps, proposals, images.image_sizes, None)
        moved = _native(self.detector, detections, images, native)
        return [{**image, "labels": image["labels"] - 1, "masks": image["masks"][:, 0] > 0.5} for image in moved]


def _listed(images: Tensor, targets: Targets) -> ImageList:
    return ImageList(images, [target["size"] for target in targets])


def _native(detector: Any, detections: Found, images: ImageList, native: Sequence[Size]) -> Found:
    """Boxes, and masks, in pixels of the images as they are in their files."""
    detector.transform.training = False
    return detector.transform.postprocess(detections, images.image_sizes, list(native))
