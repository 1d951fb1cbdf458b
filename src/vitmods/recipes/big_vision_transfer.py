"""Trained ViTs adapted as in big_vision: ImageNet at 384 px, and VTAB-1k."""

from vitmods.recipes.augreg import big_vision_views
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import recipe


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
    """ImageNet-1k at 384 px by SGD with momentum for 5,000 steps, no augmentation but crop and flip.

    Args:
        steps: of training.
        batch_size: images per step; the learning rate stays.
        lr: highest learning rate.
        warmup_steps: of linear warm-up; give fewer to a shorter training.
    """
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
    """VTAB-1k: 2,500 steps of SGD with momentum on 800 images, the learning rate chosen on the other 200.

    Args:
        lr: highest learning rate.
        steps: of training.
        batch_size: images per step; the learning rate stays.
        warmup_steps: of linear warm-up; give fewer to a shorter training.
    """
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
