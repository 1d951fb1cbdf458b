"""Trainings on ImageNet-1k alone with strong augmentation: DeiT, LeViT, PVT, Swin, Dynamic Token Normalization, and the
A2 procedure of Three Things.

They share three arguments: `epochs` of training; `batch_size`, images per step, which the learning rate follows; and
`warmup_epochs` of linear warm-up, fewer for a shorter training.
"""

from collections.abc import Mapping
from typing import Any, Literal

from vitmods.recipes.recipe import IMAGENET_MEAN, IMAGENET_STD, Recipe
from vitmods.recipes.registry import one_of, published, recipe, size_of


@recipe(
    paper=(
        'Touvron et al., "Training data-efficient image transformers" (arXiv:2012.12877); the defaults of its main.py'
    ),
    data="ImageNet-1k, train (1,281,167 images) at 224 px",
    expected=(
        "top-1 S/16 80.1 ± 0.03, B/16 81.8 ± 0.03 in Dual PatchNorm's runs (with it 80.4 ± 0.06, 82.0 ± 0.05). Of "
        "another training are Dynamic Token Normalization's Ti/16 72.2, S/16 79.9, B/16 81.8 (with it T*/16 73.2, "
        "S/16 80.6, B/16 82.3): its paper has the rate 0.0005 at batch 1,024, half of this one (its released code "
        "scales it to 1e-3), and that code applies no mixup, CutMix or erasing"
    ),
    command="vitmods train --data path/to/imagenet --base S/16 --img-size 224 --recipe deit --accumulate 4",
    model="S/16",
    images=1_281_167,
)
def deit(epochs: int = 300, *, batch_size: int = 1024, warmup_epochs: float = 5.0) -> Recipe:
    """ImageNet-1k from scratch as in DeiT: RandAugment, mixup or CutMix, erasing, three views of each image.

    The rate is 1e-3 for a batch of 1024, main.py's 5e-4 for 512, and follows the batch size; so does the smallest rate,
    which main.py leaves at 1e-5. It changes once an epoch; the first two epochs are at 1e-6, since main.py sets it
    after each epoch.

    Args:
        epochs: of training. main.py's 10 cooldown epochs come on top; they stay at the smallest rate.
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


@recipe(
    paper='Touvron et al., "Training data-efficient image transformers" (arXiv:2012.12877)',
    data="ImageNet-1k at 384 px, from weights trained at 224 px",
    expected="none that vitmods has a source for",
    command=(
        "vitmods finetune --model deit_small.pth --data path/to/imagenet --img-size 384 --train all --recipe "
        "deit_384 --accumulate 8"
    ),
    not_stated=(
        "batch size, warm-up and smallest rate. Here 512, none, and the rate itself, since main.py's smallest "
        "rate is above it"
    ),
    model="S/16",
    trained=True,
    images=1_281_167,
)
def deit_384(epochs: int = 30, *, batch_size: int = 512) -> Recipe:
    """A DeiT at 384 px: 30 more epochs with a small constant rate and hardly any decay.

    Args:
        batch_size: images per step; the learning rate, 5e-6 for 512, follows it.
    """
    return deit(epochs, batch_size=batch_size, warmup_epochs=0.0).with_(
        lr=5e-6, lr_batch=512, min_lr=5e-6, warmup_lr=0.0, weight_decay=1e-8
    )


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


FOREIGN: dict[str, Any] = {"dropout": None, "init": None}
"""what models of other libraries know no setting of a recipe for"""
DEPTHS: dict[str, dict[str, Any]] = {
    "small": {"drop_path": 0.1, "clip_norm": None},
    "large": {"drop_path": 0.3, "clip_norm": 1.0},
}


@recipe(
    paper=(
        'Wang et al., "Pyramid Vision Transformer" (arXiv:2102.12122); the defaults of its classification/main.py, in '
        "which Dynamic Token Normalization (arXiv:2112.02624) trains it"
    ),
    data="ImageNet-1k, train (1,281,167 images) at 224 px",
    expected=(
        "top-1 PVT-Tiny 75.1, with dtn 76.3; PVT-Small 79.9, with dtn 80.8; PVT-Large 81.7, with dtn 82.3; PVTv2-B3 "
        "83.2, with dtn 83.7"
    ),
    command=(
        "vitmods compare --data path/to/imagenet --base timm:pvt_v2_b3 --img-size 224 --recipe 'pvt(size=large)' "
        "--arms 'dtn=replace(dtn)' --accumulate 4"
    ),
    not_stated=(
        "by Dynamic Token Normalization anything; of PVT's own its ten epochs of cooldown, at the smallest rate, are "
        "left out, and drop path is 0.1 or 0.3 by the model: size=small is PVT-Tiny and -Small, large is -Medium, "
        "-Large and PVTv2-B3"
    ),
    model="Ti/16",
    images=1_281_167,
)
def pvt(
    size: Literal["small", "large"] = "small",
    *,
    epochs: int = 300,
    batch_size: int = 1024,
    warmup_epochs: float = 5.0,
) -> Recipe:
    """ImageNet-1k from scratch as in PVT: DeiT's training without an average of weights.

    Args:
        size: drop path 0.1 without clipping, or 0.3 with gradients clipped at 1.

    Raises:
        UserError: another size.
    """
    recipe = deit(epochs, batch_size=batch_size, warmup_epochs=warmup_epochs)
    return recipe.with_(ema=None, **FOREIGN, **one_of("size", size, DEPTHS))


@recipe(
    paper=(
        'Graham et al., "LeViT" (arXiv:2104.01136); the defaults of its main.py. Dynamic Token Normalization '
        "(arXiv:2112.02624) replaces norms in it"
    ),
    data="ImageNet-1k, train (1,281,167 images) at 224 px",
    expected="top-1 with distillation LeViT-128S 76.6 or 76.7, by table, with dtn 77.3",
    command=(
        "vitmods train --data path/to/imagenet --base timm:levit_128s --img-size 224 --recipe levit --accumulate 4"
    ),
    not_stated=(
        "by Dynamic Token Normalization anything. LeViT learns from a RegNetY-16GF's predictions beside the labels, "
        "and clips each weight's gradient by the weight's norm (0.01), which is not done here; on how many GPUs its "
        "batches of 256 were, here on four"
    ),
    model="Ti/16",
    images=1_281_167,
)
def levit(epochs: int = 1000, *, batch_size: int = 1024, warmup_epochs: float = 5.0) -> Recipe:
    """ImageNet-1k from scratch as in LeViT, without its teacher: DeiT's training for 1,000 epochs at half its decay."""
    recipe = deit(epochs, batch_size=batch_size, warmup_epochs=warmup_epochs)
    return recipe.with_(**FOREIGN, weight_decay=0.025, drop_path=None)


DROP_PATH = {"T": 0.2, "S": 0.3}


@recipe(
    paper=(
        'Liu et al., "Swin Transformer" (arXiv:2103.14030); its config.py and configs, in which Dynamic Token '
        "Normalization (arXiv:2112.02624) trains it"
    ),
    data="ImageNet-1k, train (1,281,167 images) at 224 px",
    expected="top-1 Swin-T 81.2, with dtn 81.9; Swin-S 83.0, with dtn 83.5",
    command=(
        "vitmods compare --data path/to/imagenet --base timm:swin_tiny_patch4_window7_224 --img-size 224 --recipe swin "
        "--arms 'dtn=replace(dtn)' --accumulate 4"
    ),
    not_stated="by Dynamic Token Normalization anything",
    model="Ti/16",
    images=1_281_167,
)
def swin(
    size: Literal["T", "S"] = "T", *, epochs: int = 300, batch_size: int = 1024, warmup_epochs: float = 20.0
) -> Recipe:
    """ImageNet-1k from scratch as in Swin: 20 epochs of warm-up, one view of each image, gradients clipped at 5.

    Rates are 5e-4 for 512 images, from 5e-7 and down to 5e-6, changed every step; those of the warm-up's start and of
    the end follow the batch as the highest does there, here the end alone.

    Args:
        size: drop path 0.2 for T, 0.3 for S.

    Raises:
        UserError: another size.
    """
    return deit(epochs, batch_size=batch_size, warmup_epochs=warmup_epochs).with_(
        **FOREIGN,
        schedule="cosine",
        warmup_lr=1e-6,
        clip_norm=5.0,
        ema=None,
        repeats=1,
        drop_path=one_of("size", size, DROP_PATH),
    )


@recipe(
    paper=(
        'Shao et al., "Dynamic Token Normalization Improves Vision Transformers" (arXiv:2112.02624), section 4.1 and '
        "appendix B.1, which train in DeiT's framework; released=true: the defaults of its released code"
    ),
    data="ImageNet-1k, train (1,281,167 images) at 224 px",
    expected=(
        "top-1 with LayerNorm T*/16 72.3, S/16 79.9, S*/16 80.6, B/16 81.8, B*/16 81.7; with dtn T*/16 73.2, "
        "S/16 80.6, S*/16 81.7, B/16 82.3, B*/16 82.5"
    ),
    command=(
        "vitmods compare --data path/to/imagenet --base S*/16 --img-size 224 --recipe dtn --arms dtn --accumulate 4"
    ),
    not_stated=(
        "anything but AdamW, the batch, the rate, the decay and the epochs: here DeiT's. The released code scales the "
        "rate to 0.001 at that batch, and reads mixup and CutMix without applying them"
    ),
    model="S*/16",
    images=1_281_167,
    architecture={"qkv_bias": False},
)
def dtn(released: bool = False, *, epochs: int = 300, batch_size: int = 1024, warmup_epochs: float = 5.0) -> Recipe:
    """ImageNet-1k from scratch as in DTN: DeiT's training at a rate of 0.0005 for batches of 1,024.

    Args:
        released: as the released code has it: 0.001, no mixup, no CutMix, no erasing.
    """
    recipe = deit(epochs, batch_size=batch_size, warmup_epochs=warmup_epochs)
    return recipe.with_(mixup=0.0, cutmix=0.0, erasing=0.0) if released else recipe.with_(lr=5e-4)


def _with_layer_scale(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """LayerScale's first value is not stated: here the default of the released models."""
    return {"layer_scale": 1e-4} if settings.get("layerscale") else {}


# size: highest learning rate for a batch of 2048, drop path of every block
RATES: dict[str, tuple[float, float]] = {"Ti": (4e-3, 0.0), "S": (4e-3, 0.05), "B": (3e-3, 0.1), "L": (3e-3, 0.4)}


@recipe(
    paper=(
        'Touvron et al., "Three things everyone should know about Vision Transformers" (arXiv:2203.09795), '
        'section 2.2, after Wightman et al., "ResNet strikes back" (arXiv:2110.00476), procedure A2'
    ),
    data="ImageNet-1k, train (1,281,167 images) at 224 px",
    expected="top-1 Ti/16 72.7, S/16 79.7, B/16 82.2, L/16 83.0; with LayerScale and 400 epochs 73.5, 80.7, 82.7, 84.0",
    command="vitmods train --data path/to/imagenet --base B/16 --img-size 224 --recipe a2 --accumulate 8",
    not_stated=(
        "the initial value of LayerScale, here the default of the released models; rates and drop path of models "
        "deeper than these; whether the rate changes every step, as here, or once an epoch; what the last rate, "
        "1e-6, is in other batches than 2,048, where it is scaled here as the highest is"
    ),
    images=1_281_167,
    architecture=_with_layer_scale,
)
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
        model: gives lr (4e-3 for Ti and S, 3e-3 for B and L) and drop_path (0, 0.05, 0.1, 0.4).
        epochs: instead of 300 or 400.
        batch_size: images per step; the learning rate, given for 2048, follows it.
        lr: instead of the model's; for a batch of 2048.
        drop_path: instead of the model's; the same in every block.

    Raises:
        UserError: nothing is published for the model, and lr or drop_path is not given.
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
