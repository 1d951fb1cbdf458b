"""Segmentation with a linear decoder: ADE20K as in Dual PatchNorm, and small sets from scratch."""

from dataclasses import dataclass
from typing import ClassVar

from vitmods.recipes.recipe import IMAGENET_MEAN, IMAGENET_STD, TASK_PARTS, Recipe, TaskPart
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
    paper='Kumar et al., "Dual PatchNorm" (arXiv:2302.01327), section 6.3 and appendix G',
    data="ADE20K at 512 px, from weights of ImageNet-1k",
    expected=(
        "mean IoU of B/16, ten seeds (Table 5): 45.6 ± 0.08 with all images, 40.8 ± 0.1 with a half, 36.9 ± 0.13 with "
        "a quarter, 32.6 ± 0.09 with an eighth, 27.3 ± 0.09 with a sixteenth; with Dual PatchNorm 46.1 ± 0.11, 41.9 ± "
        "0.09, 38.0 ± 0.11, 33.7 ± 0.11, 28.0 ± 0.21"
    ),
    command=(
        "vitmods compare --task segmentation --data ade20k:path/to/ADEChallengeData2016 --from vit_b16 --arms dpn "
        "--img-size 512 --recipe ade20k --seeds 10 --sweep limit_train=1/16,1/8,1/4,1/2,1"
    ),
    not_stated=(
        "whether patch tokens pass the final norm (the listing's out_with_norm=False is read as: they do not), by what "
        "padding is filled (here the mean color), and at which sizes and mirror images the reported numbers were "
        "evaluated (here at one size, without)"
    ),
    model="B/16",
    images=20_210,
    task="segmentation",
    weights="ViT-B/16 of ImageNet-1k at 224 px, with and without dpn; positions resampled",
    trained=True,
)
def ade20k(epochs: int = 128) -> Recipe:
    """The whole ViT fine-tuned on ADE20K with a linear decoder: AdamW 3e-5, decay 0.01, batches of 16, 128 epochs.

    The rate falls as the power 0.9 of the steps that are left, to 0, without warm-up; drop path 0.1; no clipping.
    Images are resized by 0.5 to 2, cut to 512 px with at most three quarters of one class, mirrored, and their colors
    distorted. The decay of 0.01 is multiplied by the rate, and positions do not decay here.
    """
    return Recipe().with_(
        epochs=epochs,
        batch_size=16,
        lr=3e-5,
        weight_decay=0.01,
        clip_norm=None,
        schedule="poly",
        poly_power=0.9,
        warmup_epochs=0.0,
        drop_path=0.1,
        resize_range=(0.5, 2.0),
        most_of_class=0.75,
        photometric=1.0,
        resample="bilinear",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        final_norm=False,
        window_stride=341,
    )


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
