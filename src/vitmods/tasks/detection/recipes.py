"""Detectors: their part of a recipe, and small sets from scratch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from vitmods.recipes.recipe import TASK_PARTS, Recipe, TaskPart
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
