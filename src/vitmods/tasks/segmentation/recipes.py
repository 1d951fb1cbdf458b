"""Segmentation with a linear decoder: its part of a recipe, and small sets from scratch."""

from dataclasses import dataclass
from typing import ClassVar

from vitmods.recipes.recipe import TASK_PARTS, Recipe, TaskPart
from vitmods.recipes.registry import recipe
from vitmods.util.errors import UserError


@TASK_PARTS.register("segmentation")
@dataclass(frozen=True)
class SegmentationPart(TaskPart):
    """Settings of the task segmentation."""

    resize_range: tuple[float, float] | None = None
    """random size of the whole image, relative to the size that just covers the view; a view is then cut from it, or
    padded; None: the size that just covers it"""
    most_of_class: float = 0.75
    """a crop with more than this fraction of one class is drawn again, up to ten times"""
    photometric: float = 0.0
    """strength of random brightness, contrast, saturation and hue, each with probability 0.5; 1: as in mmsegmentation;
    0: off"""
    final_norm: bool = True
    """whether the decoder reads a plain ViT's patch tokens after the final norm, as in Segmenter"""
    window_stride: int | None = None
    """pixels from one window of the evaluation to the next; None: two thirds of the window, which is the image size"""
    eval_scales: tuple[float, ...] = (1.0,)
    """sizes of the image over which the evaluation averages probabilities"""
    eval_flip: bool = False
    """whether the evaluation averages over each image and its mirror image"""
    ranges: ClassVar = {"most_of_class": (0.01, 1), "photometric": (0, 1), "window_stride": (1, float("inf"))}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resize_range is not None and not (
            len(self.resize_range) == 2 and 0 < self.resize_range[0] <= self.resize_range[1]
        ):
            raise UserError(f"recipe: resize_range must be two increasing numbers above 0, not {self.resize_range}.")
        if not self.eval_scales or min(self.eval_scales) <= 0:
            raise UserError(f"recipe: eval_scales must be numbers above 0, as 0.75 1.0 1.25, not {self.eval_scales}.")


@recipe(
    data="some hundred images with masks, from scratch",
    task="segmentation",
    expected="none published; ours are in RESULTS.md",
)
def small_segmentation(epochs: int = 60, *, batch_size: int = 8) -> Recipe:
    """A few hundred images with masks, from scratch at about 100 to 200 px: many small steps, moderate resizing, flip.

    Args:
        epochs: of training.
        batch_size: images per step; the learning rate stays.
    """
    return Recipe().with_(
        epochs=epochs,
        batch_size=batch_size,
        lr=1e-3,
        weight_decay=0.05,
        resize_range=(0.75, 1.5),
        photometric=0.5,
        resample="bilinear",
    )
