"""The recipes of papers; recipes.toml has their evidence.

They share some arguments:

    epochs, steps: of training
    batch_size: images per step; the learning rate follows it where the docstring says so
    warmup_epochs, warmup_steps: of linear warm-up; a shorter training from Python needs a shorter one
    lr: the highest learning rate
    moment: how Adam's mean of gradients is stored

An unknown word, such as a level or a data set, raises UserError and names the nearest one.
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, ParamSpec

from vitmods.recipes.recipe import IMAGENET_MEAN, IMAGENET_STD, Recipe, weight_decay_from_big_vision
from vitmods.recipes.registry import one_of, published, recipe, size_and_patch, size_of

P = ParamSpec("P")
_EVIDENCE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def from_paper(function: Callable[P, Recipe]) -> Callable[P, Recipe]:
    """Register a recipe with the evidence under its name."""
    return recipe(**_EVIDENCE[function.__name__])(function)


def of_big_vision(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The ViTs of big_vision have a representation layer, except S/32."""
    plain = {"activation": "gelu_tanh", "position_on_prefix": False}
    return plain if size_and_patch(model) == "S/32" else {**plain, "representation": True}


def of_deit(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The released models (DeiT III's code) have no position of the class token. The paper does not state the initial
    value of LayerScale; this is their default."""
    return {"position_on_prefix": False, **({"layer_scale": 1e-4} if settings.get("layerscale") else {})}


_EVIDENCE["augreg"]["architecture"] = _EVIDENCE["sun397"]["architecture"] = of_big_vision
_EVIDENCE["a2"]["architecture"] = of_deit

# AugReg: ViTs of big_vision, as Steiner et al. (arXiv:2106.10270) and Dual PatchNorm train them.

LEVELS: dict[str, tuple[int | None, float]] = {
    "none": (None, 0.0),
    "light1": (0, 0.0),
    "light2": (10, 0.2),
    "medium1": (15, 0.2),
    "medium2": (15, 0.5),
    "strong1": (20, 0.5),
    "strong2": (20, 0.8),
}
"""level -> magnitude of RandAugment's two operations (None: no RandAugment; 0 is not the identity), alpha of mixup"""
LEVEL_OF = {"Ti/16": "light1", "S/32": "medium1"} | dict.fromkeys(("S/16", "B/32", "B/16", "L/16"), "medium2")
LEVEL_OF_21K = {"Ti/16": "none", "S/32": "none", "S/16": "light1", "B/32": "light2", "B/16": "light2"}
LEVEL_OF_21K["L/16"] = "medium2"
WARMUP_STEPS = 10_000
LR = 1e-3


@from_paper
def augreg(
    level: str | None = None,
    model: str = "B/16",
    *,
    epochs: int = 300,
    batch_size: int = 4096,
    warmup_epochs: float | None = None,
    moment: Literal["float32", "bfloat16"] = "bfloat16",
) -> Recipe:
    """ImageNet-1k from scratch as in AugReg: RandAugment and mixup by level, Adam with a bfloat16 mean, decay 0.1.

    The rate does not follow the batch size: neither source has a rule for it.

    Args:
        level: of augmentation: none, light1, light2, medium1, medium2, strong1, strong2; None: the model's own.
        model: sets the level, and dropout and stochastic depth: 0.1 for B, 0 for the others.
        warmup_epochs: instead of 10,000 steps, which are 10.8 % of the paper's training.
    """
    remedy = "Say which, as in augreg(level=light1)."
    if level is None:
        level = published(LEVEL_OF, size_and_patch(model), "level of augmentation", remedy)
    rate = 0.1 if size_of(model) == "B" else 0.0
    return _big_vision(level, batch_size, moment, warmup_epochs).with_(
        epochs=epochs, dropout=rate, drop_path=rate, drop_path_shape="linear", head_bias=-6.9
    )


@from_paper
def augreg_21k(
    level: str | None = None,
    model: str = "B/16",
    *,
    steps: int = 930_000,
    batch_size: int = 4096,
    warmup_steps: int = WARMUP_STEPS,
    moment: Literal["float32", "bfloat16"] = "bfloat16",
) -> Recipe:
    """ImageNet-21k from scratch as in AugReg, for 93,000 or 930,000 steps: lighter augmentation, no dropout.

    Args:
        level: of augmentation, as in `augreg`; None: the model's own.
        model: sets the level.
    """
    remedy = "Say which, as in augreg_21k(level=light1)."
    if level is None:
        level = published(LEVEL_OF_21K, size_and_patch(model), "level of augmentation", remedy)
    recipe = _big_vision(level, batch_size, moment, warmup_epochs=None)
    return recipe.with_(steps=steps, warmup_steps=warmup_steps, dropout=0.0, drop_path=0.0, head_bias=-10.0)


def big_vision_views() -> Recipe:
    """Images in [-1, 1], Inception crop, flip, and a center crop of 224 in 256 for evaluation, as in big_vision."""
    return Recipe().with_(
        crop="inception",
        crop_scale=(0.05, 1.0),
        crop_ratio=(0.75, 1.33),
        flip=0.5,
        resample="big_vision",
        eval_crop=0.875,
        mean=(0.5,),
        std=(0.5,),
    )


def _big_vision(level: str, batch_size: int, moment: str, warmup_epochs: float | None) -> Recipe:
    magnitude, mixup = one_of("level", level, LEVELS)
    return big_vision_views().with_(
        epochs=300,
        batch_size=batch_size,
        optimizer="adamw",
        moment=moment,
        lr=LR,
        weight_decay=weight_decay_from_big_vision(1e-4, LR),
        schedule="cosine",
        warmup_epochs=warmup_epochs,
        warmup_steps=WARMUP_STEPS if warmup_epochs is None else None,
        clip_norm=1.0,
        init="big_vision",
        loss="sigmoid",
        randaugment=None if magnitude is None else (2, magnitude),
        randaugment_space="big_vision",
        mixup=mixup,
    )


@from_paper
def better_plain(epochs: int = 90, *, batch_size: int = 1024, warmup_epochs: float | None = None) -> Recipe:
    """S/16+: ImageNet-1k from scratch with softmax, light augmentation, mean pooling and fixed positions.

    Args:
        epochs: 90, or 300 for the best number.
        warmup_epochs: instead of 10,000 steps, which a training on fewer images needs.
    """
    recipe = augreg("light2", "S/16", epochs=epochs, batch_size=batch_size, warmup_epochs=warmup_epochs)
    return recipe.with_(loss="softmax", head_bias=0.0)


# Only ImageNet-1k, with strong augmentation: DeiT, and those that train in its framework. Rates follow the batch size.


def imagenet_views() -> Recipe:
    """Random resized crop (8 to 100 %), flip, bicubic, ImageNet's mean and std, a center crop of 224 in 256."""
    return Recipe().with_(
        crop="random_resized",
        crop_scale=(0.08, 1.0),
        crop_ratio=(3 / 4, 4 / 3),
        flip=0.5,
        resample="bicubic",
        eval_crop=0.875,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


@from_paper
def deit(epochs: int = 300, *, batch_size: int = 1024, warmup_epochs: float = 5.0) -> Recipe:
    """ImageNet-1k from scratch as in DeiT: RandAugment, mixup or CutMix, erasing, three views of each image.

    The rate is 1e-3 for a batch of 1024, main.py's 5e-4 for 512, and follows the batch size; so does the smallest rate,
    which main.py leaves at 1e-5. It changes once an epoch; the first two epochs are at 1e-6, since main.py sets it
    after each epoch. main.py's 10 cooldown epochs, which follow at the smallest rate, are left out.
    """
    return imagenet_views().with_(
        epochs=epochs,
        batch_size=batch_size,
        optimizer="adamw",
        lr=1e-3,
        lr_batch=1024,
        weight_decay=0.05,
        adam_eps=1e-8,
        schedule="epoch_cosine",
        warmup_epochs=warmup_epochs,
        warmup_lr=1e-6,
        min_lr=1e-5,
        clip_norm=None,
        ema=0.99996,
        dropout=0.0,
        drop_path=0.1,
        drop_path_shape="linear",
        init="timm",
        loss="softmax",
        label_smoothing=0.1,
        repeats=3,
        randaugment=(2, 9),
        randaugment_space="timm",
        randaugment_noise=0.5,
        erasing=0.25,
        mixup=0.8,
        cutmix=1.0,
    )


@from_paper
def deit_384(epochs: int = 30, *, batch_size: int = 512) -> Recipe:
    """A DeiT at 384 px: 30 more epochs with a small constant rate, 5e-6 for a batch of 512, and hardly any decay."""
    return deit(epochs, batch_size=batch_size, warmup_epochs=0.0).with_(
        lr=5e-6, lr_batch=512, min_lr=5e-6, warmup_lr=0.0, weight_decay=1e-8
    )


FOREIGN: dict[str, Any] = {"dropout": None, "init": None}
"""settings that models of other libraries do not have"""
DEPTHS: dict[str, dict[str, Any]] = {
    "small": {"drop_path": 0.1, "clip_norm": None},
    "large": {"drop_path": 0.3, "clip_norm": 1.0},
}
DROP_PATH = {"T": 0.2, "S": 0.3}


@from_paper
def pvt(
    size: Literal["small", "large"] = "small", *, epochs: int = 300, batch_size: int = 1024, warmup_epochs: float = 5.0
) -> Recipe:
    """ImageNet-1k from scratch as in PVT: DeiT's training without an average of weights.

    Args:
        size: drop path 0.1 without clipping, or 0.3 with gradients clipped at 1.
    """
    recipe = deit(epochs, batch_size=batch_size, warmup_epochs=warmup_epochs)
    return recipe.with_(ema=None, **FOREIGN, **one_of("size", size, DEPTHS))


@from_paper
def levit(epochs: int = 1000, *, batch_size: int = 1024, warmup_epochs: float = 5.0) -> Recipe:
    """ImageNet-1k from scratch as in LeViT, without its teacher: DeiT's training for 1,000 epochs at half its decay."""
    recipe = deit(epochs, batch_size=batch_size, warmup_epochs=warmup_epochs)
    return recipe.with_(**FOREIGN, weight_decay=0.025, drop_path=None)


@from_paper
def swin(
    size: Literal["T", "S"] = "T", *, epochs: int = 300, batch_size: int = 1024, warmup_epochs: float = 20.0
) -> Recipe:
    """ImageNet-1k from scratch as in Swin: 20 epochs of warm-up, one view of each image, gradients clipped at 5.

    Rates are 5e-4 for 512 images, from 5e-7 and down to 5e-6, changed every step; those of the warm-up's start and of
    the end follow the batch as the highest does there, here only the end.

    Args:
        size: drop path 0.2 for T, 0.3 for S.
    """
    rate = one_of("size", size, DROP_PATH)
    return deit(epochs, batch_size=batch_size, warmup_epochs=warmup_epochs).with_(
        **FOREIGN, schedule="cosine", warmup_lr=1e-6, clip_norm=5.0, ema=None, repeats=1, drop_path=rate
    )


@from_paper
def dtn(released: bool = False, *, epochs: int = 300, batch_size: int = 1024, warmup_epochs: float = 5.0) -> Recipe:
    """ImageNet-1k from scratch as in DTN: DeiT's training at a rate of 0.0005 for batches of 1,024.

    Args:
        released: as the released code has it: 0.001, no mixup, no CutMix, no erasing.
    """
    recipe = deit(epochs, batch_size=batch_size, warmup_epochs=warmup_epochs)
    return recipe.with_(mixup=0.0, cutmix=0.0, erasing=0.0) if released else recipe.with_(lr=5e-4)


RATES: dict[str, tuple[float, float]] = {"Ti": (4e-3, 0.0), "S": (4e-3, 0.05), "B": (3e-3, 0.1), "L": (3e-3, 0.4)}
"""size -> highest learning rate for a batch of 2048, drop path of every block"""


@from_paper
def a2(
    layerscale: bool = False,
    model: str = "B/16",
    *,
    epochs: int | None = None,
    batch_size: int = 2048,
    warmup_epochs: float = 5.0,
    lr: float | None = None,
    drop_path: float | None = None,
) -> Recipe:
    """ImageNet-1k from scratch by LAMB and binary cross-entropy, as in Three Things.

    LayerScale is part of the model: `layerscale` gives the longer training that goes with it.

    Args:
        layerscale: 400 epochs instead of 300.
        model: sets lr (4e-3 for Ti and S, 3e-3 for B and L) and drop_path (0, 0.05, 0.1, 0.4).
        epochs: instead of 300 or 400.
        lr: instead of the model's; for a batch of 2048.
        drop_path: instead of the model's; the same in every block.
    """
    if lr is None or drop_path is None:
        remedy = "Give both, as in a2(lr=3e-3,drop_path=0.1)."
        rates = published(RATES, size_of(model), "learning rate and drop path", remedy)
        lr, drop_path = rates[0] if lr is None else lr, rates[1] if drop_path is None else drop_path
    usual = 400 if layerscale else 300
    return imagenet_views().with_(
        epochs=usual if epochs is None else epochs,
        batch_size=batch_size,
        optimizer="lamb",
        lr=lr,
        lr_batch=2048,
        weight_decay=0.02,
        schedule="cosine",
        warmup_epochs=warmup_epochs,
        min_lr=1e-6,
        clip_norm=1.0,
        dropout=0.0,
        drop_path=drop_path,
        drop_path_shape="constant",
        init="timm",
        loss="bce",
        repeats=3,
        randaugment=(2, 7),
        randaugment_space="timm",
        randaugment_noise=0.5,
        mixup=0.1,
        cutmix=1.0,
        eval_crop=0.95,
    )


# Trained weights adapted to other sets, and trainings on SUN397 and very large sets.

_SGD: dict[str, Any] = {"epochs": 1000, "optimizer": "sgd", "lr": 0.01, "min_lr": 1e-5, "weight_decay": 1e-4}
_SGD |= {"erasing": 0.0, "drop_path": 0.0}
_ADAMW: dict[str, Any] = {"epochs": 360, "lr": 7.5e-5, "min_lr": 1e-5, "weight_decay": 0.05, "erasing": 0.1}
DATASETS = dict.fromkeys(("cifar10", "cifar100", "cars", "flowers"), _SGD) | dict.fromkeys(("inat18", "inat19"), _ADAMW)


@from_paper
def transfer(
    dataset: str = "cifar10", *, epochs: int | None = None, batch_size: int = 768, warmup_epochs: float = 5.0
) -> Recipe:
    """All weights adapted to CIFAR, Cars, Flowers or iNaturalist with DeiT's augmentation.

    Args:
        dataset: CIFAR, Cars and Flowers by SGD at 0.01 for 1000 epochs without erasing and drop path; iNaturalist by
            AdamW at 7.5e-5 for 360 epochs with erasing 0.1.
        epochs: instead of those.
        batch_size: images per step; the learning rate, for 768, follows it.
    """
    values = one_of("data set", dataset, DATASETS)
    length = {} if epochs is None else {"epochs": epochs}
    return deit(batch_size=batch_size, warmup_epochs=warmup_epochs).with_(**values | length, lr_batch=768)


SUN397_GRIDS: tuple[dict[str, tuple[float, ...]], ...] = (
    {"lr": (1e-3, 3e-4, 1e-4), "weight_decay": (0.03, 0.1), "dropout": (0.0, 0.1)},
    {"mixup": (0.0, 0.2, 0.5), "magnitude": (0, 5, 10, 15)},
)
"""arguments of `sun397` that the paper tries, all with all: first the plain ones, then augmentation with the best"""


@from_paper
def sun397(
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    dropout: float = 0.0,
    mixup: float = 0.0,
    magnitude: int | None = None,
    *,
    epochs: int = 600,
    batch_size: int = 512,
) -> Recipe:
    """SUN397 from scratch: one point of the paper's two grids, `SUN397_GRIDS`.

    Args:
        weight_decay: multiplied by the learning rate, as in every recipe.
        dropout: of the model.
        mixup: alpha; 0: off.
        magnitude: of RandAugment's two operations; None: no RandAugment, which 0 is not.
        epochs: 600 in the last row.
    """
    return big_vision_views().with_(
        epochs=epochs,
        batch_size=batch_size,
        moment="bfloat16",
        lr=lr,
        weight_decay=weight_decay,
        dropout=dropout,
        drop_path=0.0,
        init="big_vision",
        loss="sigmoid",
        randaugment=None if magnitude is None else (2, magnitude),
        randaugment_space="big_vision",
        mixup=mixup,
    )


@from_paper
def high_res_finetune(steps: int = 5000, *, batch_size: int = 512, lr: float = 0.03, warmup_steps: int = 500) -> Recipe:
    """ImageNet-1k at 384 px by SGD with momentum for 5,000 steps, no augmentation but crop and flip."""
    return _momentum(steps, batch_size, lr, warmup_steps).with_(eval_crop=384 / 418)


@from_paper
def vtab(lr: float = 3e-4, *, steps: int = 2500, batch_size: int = 512, warmup_steps: int = 200) -> Recipe:
    """VTAB-1k: 2,500 steps of SGD with momentum on 800 images, the learning rate chosen on the other 200."""
    return _momentum(steps, batch_size, lr, warmup_steps).with_(crop="none", flip=0.0, eval_crop=1.0)


def _momentum(steps: int, batch_size: int, lr: float, warmup_steps: int) -> Recipe:
    return big_vision_views().with_(
        steps=steps,
        batch_size=batch_size,
        optimizer="sgd",
        momentum=0.9,
        moment="bfloat16",
        lr=lr,
        weight_decay=0.0,
        schedule="cosine",
        warmup_steps=warmup_steps,
        clip_norm=1.0,
        dropout=0.0,
        drop_path=0.0,
        init="big_vision",
        head_bias=0.0,
        loss="sigmoid",
    )


@from_paper
def jft(steps: int = 220_000, *, batch_size: int = 4096, warmup_steps: int = WARMUP_STEPS) -> Recipe:
    """Very many images, from scratch, for 220,000 or 1.1M steps: no RandAugment, no mixup, no dropout."""
    return augreg_21k("none", steps=steps, batch_size=batch_size, warmup_steps=warmup_steps)


# Other tasks.


@from_paper
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


@from_paper
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


@from_paper
def listops(steps: int = 5_000, *, batch_size: int = 32, lr: float | None = None) -> Recipe:
    """Long ListOps as in Long Range Arena's code: Adam, decay of all parameters, rate as 1 / sqrt(step).

    The rate is 0.05 min(1, t / w) / sqrt(max(t, w)) at step t, w = 1,000 being a fifth of the steps.

    Args:
        steps: of training; the warm-up is a fifth of them.
        batch_size: sequences per step; the learning rate stays.
        lr: highest learning rate; None: 0.05 / sqrt(1,000) = 1.58e-3.
    """
    warmup = max(1, steps // 5)
    return Recipe().with_(
        steps=steps,
        batch_size=batch_size,
        lr=0.05 / 1000**0.5 if lr is None else lr,
        schedule="rsqrt",
        warmup_steps=warmup,
        rsqrt_timescale=warmup,
        beta1=0.9,
        beta2=0.98,
        adam_eps=1e-9,
        weight_decay=0.1,
        decay_all=True,
        clip_norm=None,
        dropout=0.1,
        crop="none",
        flip=0.0,
        eval_crop=1.0,
    )
