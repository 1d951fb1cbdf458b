"""DINO's part of a recipe, and its training of 100 epochs."""

from dataclasses import dataclass
from typing import ClassVar

from vitmods.recipes.recipe import IMAGENET_MEAN, IMAGENET_STD, TASK_PARTS, Recipe, TaskPart
from vitmods.recipes.registry import recipe


@TASK_PARTS.register("dino")
@dataclass(frozen=True)
class DinoPart(TaskPart):
    """Settings of the task dino."""

    prototypes: int = 65536
    """outputs of the projection head"""
    head_width: int = 2048
    """hidden channels of the projection head"""
    bottleneck: int = 256
    """channels that the last layer of the projection head reads, normalized to length 1"""
    norm_last_layer: bool = True
    """whether the rows of the last layer keep length 1; otherwise their lengths are learned"""
    freeze_last_layer: float = 1.0
    """epochs at the start in which the last layer is not trained"""
    student_temp: float = 0.1
    """temperature of the student's softmax"""
    teacher_temp: float = 0.04
    """temperature of the teacher's softmax after its warm-up"""
    teacher_temp_start: float = 0.04
    """temperature of the teacher's softmax at the start of its warm-up"""
    teacher_temp_epochs: int = 0
    """epochs of that warm-up"""
    teacher_momentum: float = 0.996
    """fraction of the teacher that a step keeps at the start; it follows half a cosine to 1"""
    center_momentum: float = 0.9
    """fraction of the center of the teacher's outputs that a step keeps"""
    local_crops: int = 8
    """small crops of each image, which only the student sees"""
    local_size: int | None = None
    """side of a small crop in pixels; None: half of the image's side up to 128 pixels, above three sevenths (96 for
    224)"""
    local_scale: tuple[float, float] = (0.05, 0.4)
    """fraction of the image's area that a small crop covers; that of the two large crops is `crop_scale`"""
    color_jitter: float = 0.4
    """strength of random brightness and contrast (saturation: half), with probability 0.8; 0: off, with hue"""
    hue: float = 0.1
    """largest turn of the hue, as a fraction of the color circle, where colors are jittered"""
    grayscale: float = 0.2
    """probability of a gray crop"""
    solarize: float = 0.2
    """probability that the second large crop is solarized"""
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    """probability of Gaussian blur: of the first large crop, of the second, of a small one"""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """least and largest standard deviation of the blur, in pixels"""
    probe_blocks: int = 4
    """last blocks whose class tokens a linear probe reads, side by side"""
    ranges: ClassVar = {
        "prototypes": (2, float("inf")), "head_width": (1, float("inf")), "bottleneck": (1, float("inf")),
        "student_temp": (1e-6, 100), "teacher_temp": (1e-6, 100), "teacher_temp_start": (1e-6, 100),
        "teacher_momentum": (0, 1), "center_momentum": (0, 1), "local_size": (1, float("inf")),
        "color_jitter": (0, 1), "grayscale": (0, 1), "solarize": (0, 1), "hue": (0, 0.5),
        "probe_blocks": (1, float("inf")),
    }  # fmt: skip


@recipe(
    paper="DINO (arXiv:2104.14294), ViT-S/16 for 100 epochs",
    data="ImageNet-1k, without its labels",
    task="dino",
    images=1_281_167,
    model="S/16",
    command="vitmods train --task dino --data path/to/imagenet --base S/16 --img-size 224 --recipe dino_100",
    expected="74.0 % by linear evaluation (DTN's Table 7a)",
    not_stated="brightness, contrast, saturation and hue change in this order, instead of a random one; position "
    "embedding and class token do not decay",
)
def dino_100(epochs: int = 100, *, batch_size: int = 512) -> Recipe:
    """DINO's vanilla training without labels: two large and eight small crops, a teacher, AdamW with rising decay.

    Args:
        epochs: of training; the warm-up takes 10, or a tenth of a shorter training.
        batch_size: images per step; the learning rate is 5e-4 for 256.
    """
    return Recipe().with_(
        epochs=epochs,
        batch_size=batch_size,
        lr=5e-4,
        lr_batch=256,
        min_lr=min(5e-4, 1e-6 * 256 / batch_size),  # 1e-6 for every batch size
        schedule="dino_cosine",
        warmup_epochs=min(10.0, 0.1 * epochs),
        weight_decay=0.04,
        weight_decay_end=0.4,
        clip_norm=3.0,
        clip_each=True,
        drop_path=0.1,
        crop="random_resized",
        crop_scale=(0.4, 1.0),
        flip=0.5,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


@recipe(data="up to 128 px, or few images", task="dino", expected="none published; ours are in RESULTS.md")
def dino_small(epochs: int = 100, *, batch_size: int = 64) -> Recipe:
    """DINO for few or small images and short trainings: a small head, a faster teacher with sharper targets, no
    small crops, no blur.

    Args:
        epochs: of training.
        batch_size: images per step; the learning rate stays.
    """
    return dino_100(epochs, batch_size=batch_size).with_(
        lr=5e-4,
        lr_batch=None,
        min_lr=1e-5,
        warmup_epochs=None,
        weight_decay_end=0.04,
        drop_path=0.0,
        crop_scale=(0.3, 1.0),
        eval_crop=1.0,
        prototypes=1024,
        head_width=256,
        bottleneck=64,
        freeze_last_layer=0.0,
        teacher_temp=0.03,
        teacher_temp_start=0.03,
        teacher_momentum=0.99,
        local_crops=0,
        local_scale=(0.1, 0.4),
        blur=(0.0, 0.0, 0.0),
    )
