"""BeiT's part of a recipe, its pre-training, for ImageNet and for few images, and its fine-tuning."""

from dataclasses import dataclass
from typing import ClassVar

from vitmods.recipes.recipe import IMAGENET_MEAN, IMAGENET_STD, TASK_PARTS, Recipe, TaskPart, require
from vitmods.recipes.registry import recipe


@TASK_PARTS.register("beit")
@dataclass(frozen=True)
class BeitPart(TaskPart):
    """Settings of the task beit."""

    codes: int = 8192
    """number of codes: outputs for each masked patch"""
    code_encoder: str | None = None
    """trained weights (a trial's folder, a file, a timm model) whose features are clustered; None: pixels of patches"""
    vae_steps: int = 0
    """training steps of a discrete VAE, whose codes are then predicted; 0: clusters"""
    masked: float = 75 / 196
    """fraction of the patches that is masked"""
    least_block: float = 16 / 196
    """fraction of the patches that a masked rectangle has at least, while so many are left to mask"""
    decoder_depth: int = 0
    """blocks of a decoder behind the model, which then sees the visible patches alone (MAE); 0: the model itself reads
    a learned token in the place of each masked patch (BeiT)"""
    decoder_width: int | None = None
    """channels of the decoder; None: half of the model's"""
    files: ClassVar = ("code_encoder",)
    ranges: ClassVar = {
        "codes": (2, float("inf")), "masked": (1e-6, 1), "least_block": (0, 1), "decoder_depth": (0, 1000),
        "decoder_width": (4, float("inf")),
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.code_encoder is None or self.vae_steps == 0,
            "code_encoder and vae_steps both give the codes: leave one of them out.",
        )
        require(
            self.decoder_width is None or self.decoder_depth > 0,
            "decoder_width is of a decoder: set decoder_depth too, or leave decoder_width out.",
        )


_ARCHITECTURE = {"layer_scale": 0.1, "position": "none", "position_on_prefix": False}


@recipe(
    paper="BeiT (arXiv:2106.08254) as in Three Things (arXiv:2203.09795): ViT-B/16 for 300 epochs",
    data="ImageNet-1k, without its labels",
    task="beit",
    images=1_281_167,
    model="B/16",
    command="vitmods train --task beit --data path/to/imagenet --base B/16 --img-size 224 --recipe beit_base",
    expected="83.05 ± 0.08 % after `beit_finetune`, with the linear stem of B/16 (Three Things, Table 7)",
    not_stated="codes are clusters of pixels instead of a trained tokenizer's; changes of color are left out here",
    architecture={**_ARCHITECTURE, "rel_pos": "shared"},
)
def beit_base(epochs: int = 300, *, batch_size: int = 2048) -> Recipe:
    """BeiT's pre-training: predict the codes of masked patches, with AdamW at a high rate.

    Args:
        epochs: of training; the warm-up takes 10, or a tenth of a shorter training.
        batch_size: images per step; the learning rate is 1.5e-3 for 2048.
    """
    return Recipe().with_(
        epochs=epochs,
        batch_size=batch_size,
        lr=1.5e-3,
        lr_batch=2048,
        min_lr=min(1.5e-3, 1e-5 * 2048 / batch_size),  # 1e-5 for every batch size
        schedule="dino_cosine",
        warmup_epochs=min(10.0, 0.1 * epochs),
        warmup_lr=1e-6,
        weight_decay=0.05,
        clip_norm=3.0,
        drop_path=0.1,
        init="beit",
        crop="random_resized",
        flip=0.5,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


@recipe(data="up to 128 px, or few images", task="beit", expected="none published; ours are in RESULTS.md")
def beit_small(epochs: int = 100, *, batch_size: int = 64) -> Recipe:
    """BeiT for few or small images and short trainings: fewer codes, small batches, no dropped paths.

    Args:
        epochs: of training.
        batch_size: images per step; the learning rate stays.
    """
    return beit_base(epochs, batch_size=batch_size).with_(
        lr=1e-3,
        lr_batch=None,
        min_lr=1e-5,
        warmup_epochs=None,
        drop_path=0.0,
        init=None,
        eval_crop=1.0,
        codes=512,
    )


@recipe(
    paper="BeiT (arXiv:2106.08254): ViT-B/16 fine-tuned for 100 epochs",
    data="ImageNet-1k",
    images=1_281_167,
    model="B/16",
    command="vitmods finetune --model runs/PRETRAINED --data path/to/imagenet --recipe beit_finetune --train all",
    expected="83.05 ± 0.08 % after `beit_base`, with the linear stem of B/16 (Three Things, Table 7)",
    not_stated="the head reads what base pools, and its initial weights are not scaled by 0.001",
    trained=True,
    weights="of `beit_base`",
    architecture={**_ARCHITECTURE, "rel_pos": True},
)
def beit_finetune(epochs: int = 100, *, batch_size: int = 1024) -> Recipe:
    """BeiT's fine-tuning: lower blocks learn more slowly, with DeiT's augmentation.

    Args:
        epochs: of training; the warm-up takes 20, or a fifth of a shorter training.
        batch_size: images per step; the learning rate is 4e-3 for 1024.
    """
    return Recipe().with_(
        epochs=epochs,
        batch_size=batch_size,
        lr=4e-3,
        lr_batch=1024,
        layer_decay=0.65,
        min_lr=min(4e-3, 1e-6 * 1024 / batch_size),
        schedule="dino_cosine",
        warmup_epochs=min(20.0, 0.2 * epochs),
        warmup_lr=1e-6,
        weight_decay=0.05,
        clip_norm=None,
        drop_path=0.1,
        label_smoothing=0.1,
        crop="random_resized",
        flip=0.5,
        randaugment=(2, 9),
        randaugment_space="timm",
        randaugment_noise=0.5,
        erasing=0.25,
        mixup=0.8,
        cutmix=1.0,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
