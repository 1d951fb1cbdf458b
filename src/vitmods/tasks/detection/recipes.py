"""Detectors: COCO's 1x schedule as in PVT and Dynamic Token Normalization, and small sets from scratch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from vitmods.recipes.recipe import IMAGENET_MEAN, IMAGENET_STD, TASK_PARTS, Recipe, TaskPart
from vitmods.recipes.registry import recipe


@TASK_PARTS.register("detection")
@dataclass(frozen=True)
class DetectionPart(TaskPart):
    """Settings of the tasks detection and instance_segmentation."""

    fpn_channels: int = 64
    """channels of the maps that the heads read; the papers' models have 256"""
    detector_norm: Literal["group", "none"] = "group"
    """GroupNorm after the convolutions of pyramid and heads, without which training from scratch is unstable; the
    papers' models have none"""
    ranges: ClassVar = {"fpn_channels": (1, float("inf"))}


@recipe(
    paper='Shao et al., "Dynamic Token Normalization" (arXiv:2112.02624), Table 11, in the detectors of Wang et al., '
    '"Pyramid Vision Transformer" (arXiv:2102.12122)',
    data="COCO 2017 at 800 px (--img-size 800 1333), from weights of ImageNet-1k",
    expected=(
        "AP on val2017. RetinaNet: PVT-Tiny 36.7, with dtn 38.0, PVT-Small 40.4, with dtn 41.8. Boxes of Mask R-CNN: "
        "PVT-Tiny 36.7, with dtn 38.1, PVT-Small 40.4, with dtn 41.7; its masks with dtn: PVT-Tiny 36.3, PVT-Small 39.0"
    ),
    command=(
        "vitmods compare --task detection --data coco:path/to/coco --base hf:path/to/pvt-tiny --img-size 800 1333 "
        '--recipe coco_1x --arms "dtn=replace(dtn)"'
    ),
    not_stated=(
        "anything of the detectors but AdamW, 1e-4 and 1x, which PVT's released settings fill; they decay norms and "
        "biases too, resize without antialiasing and leave out training images without an object, which is not done "
        "here; parameters are drawn by torchvision, and the sizes of anchors are its"
    ),
    images=118_287,
    task="detection",
    weights="a pyramid (PVT, Swin) of ImageNet-1k",
    trained=True,
)
def coco_1x(epochs: int = 12, *, masks: bool = False) -> Recipe:
    """A detector on COCO in 12 epochs: AdamW, batches of 16, the rate a tenth from epoch 8 and a hundredth from 11 on.

    The warm-up takes 500 steps, from a thousandth of the rate. Weight decay is 1e-4, drop path 0.1, maps have 256
    channels, and images are flipped.

    Args:
        epochs: of training; the rate falls after 2/3 and 11/12 of it.
        masks: the rate of Mask R-CNN, 2e-4; without it that of RetinaNet, 1e-4.
    """
    lr = 2e-4 if masks else 1e-4
    return Recipe().with_(
        epochs=epochs,
        batch_size=16,
        lr=lr,
        weight_decay=1e-4,
        clip_norm=None,
        schedule="step",
        step_at=(2 / 3, 11 / 12),
        warmup_steps=500,
        warmup_lr=lr / 1000,
        drop_path=0.1,
        fpn_channels=256,
        detector_norm="none",
        resample="bilinear",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


@recipe(
    data="some hundred images with boxes, from scratch",
    task="detection",
    expected="none published; ours are in RESULTS.md",
)
def small_detection(epochs: int = 30, *, batch_size: int = 4) -> Recipe:
    """A few hundred images with boxes, from scratch at about 200 to 320 px: many small steps, flip, a narrow pyramid.

    Args:
        epochs: of training.
        batch_size: images per step; the learning rate stays.
    """
    return Recipe().with_(epochs=epochs, batch_size=batch_size, lr=1e-3, weight_decay=0.05, resample="bilinear")
