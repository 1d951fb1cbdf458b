"""Trained weights adapted to other sets, as in DeiT and big_vision, and trainings on SUN397 and very large sets.

They share some arguments: `steps` of training; `batch_size`, images per step; `lr`, the highest learning rate; and
`warmup_steps`, fewer for a shorter training. The learning rate follows the batch size where the docstring says so.
"""

from typing import Any

from vitmods.papers.recipes.augreg import POOLED, WARMUP_STEPS, augreg_21k, big_vision_views, of_big_vision
from vitmods.papers.recipes.deit import deit
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import one_of, recipe

_SGD: dict[str, Any] = {
    "epochs": 1000,
    "optimizer": "sgd",
    "lr": 0.01,
    "min_lr": 1e-5,
    "weight_decay": 1e-4,
    "erasing": 0.0,
    "drop_path": 0.0,
}
_ADAMW: dict[str, Any] = {"epochs": 360, "lr": 7.5e-5, "min_lr": 1e-5, "weight_decay": 0.05, "erasing": 0.1}
DATASETS: dict[str, dict[str, Any]] = {
    "cifar10": _SGD,
    "cifar100": _SGD,
    "cars": _SGD,
    "flowers": _SGD,
    "inat18": _ADAMW,
    "inat19": _ADAMW,
}


@recipe(
    paper=(
        'Touvron et al., "Training data-efficient image transformers" (arXiv:2012.12877); the values are its '
        "author's in the discussions 45 (CIFAR-10, Cars) and 105 (iNaturalist, for B/16) of "
        "github.com/facebookresearch/deit"
    ),
    data="cifar10, cifar100, cars, flowers, inat18, inat19, enlarged to 224 or 384 px, from weights of ImageNet-1k",
    expected=(
        "top-1 in Three Things, whose values for this are not known, S/16 and B/16: CIFAR-10 98.9, 99.3; "
        "CIFAR-100 90.5, 92.5; Cars 89.7, 92.7; Flowers 96.8, 97.8; iNaturalist 2018 68.0, 74.1; "
        "iNaturalist 2019 73.9, 78.2"
    ),
    command=(
        "vitmods finetune --model deit_base.pth --data path/to/cars --img-size 224 --train all --recipe "
        '"transfer(dataset=cars)"'
    ),
    not_stated=(
        "values for CIFAR-100 and Flowers, here CIFAR-10's; whether 0.01 is the rate before or after it is scaled "
        "by the batch size, here after; iNaturalist's values for other models"
    ),
    model="S/16",
    weights="that of the weights, with a new head",
    trained=True,
)
def transfer(dataset: str = "cifar10", *, epochs: int | None = None, batch_size: int = 768) -> Recipe:
    """All weights adapted to CIFAR, Cars, Flowers or iNaturalist with DeiT's augmentation.

    Args:
        dataset: CIFAR, Cars and Flowers by SGD at 0.01 for 1000 epochs without erasing and drop path; iNaturalist by
            AdamW at 7.5e-5 for 360 epochs with erasing 0.1.
        epochs: instead of those, more than the 5 of the warm-up.
        batch_size: images per step; the learning rate, given for 768, follows it.

    Raises:
        UserError: an unknown data set.
    """
    values = one_of("data set", dataset, DATASETS)
    recipe = deit(batch_size=batch_size).with_(**values, lr_batch=768)
    return recipe if epochs is None else recipe.with_(epochs=epochs)


SUN397_GRIDS: tuple[dict[str, tuple[float, ...]], ...] = (
    {"lr": (1e-3, 3e-4, 1e-4), "weight_decay": (0.03, 0.1), "dropout": (0.0, 0.1)},
    {"mixup": (0.0, 0.2, 0.5), "magnitude": (0, 5, 10, 15)},
)
"""arguments of `sun397` that the paper tries, all with all: first the plain ones, then augmentation with the best"""


@recipe(
    paper='Kumar et al., "Dual PatchNorm" (arXiv:2302.01327), section 6.1 and appendix F',
    data="SUN397 at 224 px",
    expected=(
        "top-1 B/32 41.4 plain, 48.3 with augmentation, 52.5 for 600 epochs, B/16 45.6, 58.7, 60.8; with Dual "
        "PatchNorm 47.5, 50.7, 56.0 and 51.8, 63.0, 66.3"
    ),
    command=(
        "vitmods compare --data path/to/sun397 --base B/32 --img-size 224 --arms dpn --recipe "
        '"sun397(lr=1e-3,mixup=0.5,magnitude=15)"'
    ),
    not_stated=(
        "which point of the grids is best, the epochs of the first two rows, batch size, warm-up, loss. Here the "
        "batch is 512, the warm-up is that of Recipe, and the rest is AugReg's"
    ),
    model="B/32",
    architecture=of_big_vision,
)
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
        weight_decay: multiplied by the learning rate, as everywhere here.
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


@recipe(
    paper='Kumar et al., "Dual PatchNorm" (arXiv:2302.01327), section 5.3 and appendix D',
    data="ImageNet-1k at 384 px, from weights trained at 224 px",
    expected=(
        "top-1 B/32 79.0 ± 0.00, B/16 82.2 ± 0.03 from AugReg's weights; with Dual PatchNorm 80.0 ± 0.03, 82.8 ± 0.00"
    ),
    command=(
        "vitmods finetune --model runs/augreg-b16 --data path/to/imagenet --img-size 384 --train all --positions "
        "bilinear --recipe high_res_finetune --accumulate 8"
    ),
    model="B/16",
    weights=(
        "that of the weights; their representation layer stays, the head begins at zero, positions are resampled "
        "with aligned corners"
    ),
    trained=True,
    images=1_281_167,
)
def high_res_finetune(steps: int = 5000, *, batch_size: int = 512, lr: float = 0.03, warmup_steps: int = 500) -> Recipe:
    """ImageNet-1k at 384 px by SGD with momentum for 5,000 steps, no augmentation but crop and flip."""
    return big_vision_views().with_(**_momentum(steps, batch_size, lr, warmup_steps), eval_crop=384 / 418)


@recipe(
    paper='Kumar et al., "Dual PatchNorm" (arXiv:2302.01327), section 6.1 and appendix E',
    data="a VTAB task: 800 training and 200 validation images, once the rate is chosen its test images, 3 seeds",
    expected=(
        "top-1 with B/16, and with Dual PatchNorm: Caltech101 86.1, 86.6; CIFAR-100 35.5, 51.4; DTD 60.1, 63.1; "
        "Flowers102 90.8, 91.3; Pets 90.9, 92.1; Sun397 33.9, 32.5; SVHN 76.7, 78.3; Camelyon 81.3, 80.6; EuroSAT "
        "95.9, 95.8; Resisc45 81.2, 83.5; Retinopathy 74.7, 73.3; Clevr-Count 65.2, 73.7; dSpr-Loc 72.1, 72.4; "
        "dSpr-Ori 61.9, 63.0; KITTI-Dist 81.3, 80.6; sNORB-Azim 18.9, 21.6; sNORB-Elev 50.4, 36.2"
    ),
    command="vitmods finetune --model runs/augreg-b16 --data path/to/task --train all --recipe vtab --lr 3e-4",
    not_stated=(
        "which 3 learning rates are tried (3e-4 is the listing's), image size and augmentation. Here images are "
        "resized and neither cropped nor flipped"
    ),
    model="B/16",
    weights="that of the weights, with a new head that begins at zero",
    trained=True,
    images=800,
)
def vtab(lr: float = 3e-4, *, steps: int = 2500, batch_size: int = 512, warmup_steps: int = 200) -> Recipe:
    """VTAB-1k: 2,500 steps of SGD with momentum on 800 images, the learning rate chosen on the other 200."""
    views = big_vision_views().with_(crop="none", flip=0.0, eval_crop=1.0)
    return views.with_(**_momentum(steps, batch_size, lr, warmup_steps))


def _momentum(steps: int, batch_size: int, lr: float, warmup_steps: int) -> dict[str, object]:
    """What both have in common: momentum kept in bfloat16, no decay, clipping at 1, sigmoid loss, no dropout."""
    return {
        "steps": steps,
        "batch_size": batch_size,
        "optimizer": "sgd",
        "momentum": 0.9,
        "moment": "bfloat16",
        "lr": lr,
        "weight_decay": 0.0,
        "schedule": "cosine",
        "warmup_steps": warmup_steps,
        "clip_norm": 1.0,
        "dropout": 0.0,
        "drop_path": 0.0,
        "init": "big_vision",
        "head_bias": 0.0,
        "loss": "sigmoid",
    }


@recipe(
    paper='Kumar et al., "Dual PatchNorm" (arXiv:2302.01327), section 5.1, "JFT"',
    data="JFT-4B at 224 px, which is not public: any very large set",
    expected=(
        "25-shot top-1 on ImageNet-1k after 220,000 steps B/32 63.8 ± 0.03, B/16 72.1 ± 0.09, L/16 77.3 ± 0.00; with "
        "Dual PatchNorm B/32 65.2 ± 0.03, B/16 72.4 ± 0.07, L/16 77.9 ± 0.06. After 1.1M steps B/32 70.7 ± 0.1, B/16 "
        "76.9 ± 0.03, L/16 80.9 ± 0.03; with Dual PatchNorm B/32 71.1 ± 0.09, B/16 76.6 ± 0.03, L/16 81.4 ± 0.06"
    ),
    command="vitmods train --data path/to/images --base B/16 --img-size 224 --recipe jft --accumulate 16",
    not_stated=(
        "rate, decay, warm-up, clipping, loss and first bias of the head, here those of its ImageNet-21k; whether "
        "images are cropped at random and flipped, here they are, as everywhere in big_vision"
    ),
    model="B/16",
    architecture=POOLED,
)
def jft(steps: int = 220_000, *, batch_size: int = 4096, warmup_steps: int = WARMUP_STEPS) -> Recipe:
    """Very many images, from scratch, for 220,000 or 1.1M steps: no RandAugment, no mixup, no dropout.

    Args:
        steps: 220,000 or 1,100,000 in the paper.
    """
    return augreg_21k("none", steps=steps, batch_size=batch_size, warmup_steps=warmup_steps)
