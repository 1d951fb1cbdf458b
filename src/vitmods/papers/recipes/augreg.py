"""AugReg, ViTs of big_vision, as Steiner et al. (arXiv:2106.10270) and Dual PatchNorm train them; and S/16+.

The learning rate does not follow `batch_size`, images per step; give fewer `warmup_steps` to a shorter training.
"""

from collections.abc import Mapping
from typing import Any, Literal

from vitmods.recipes.recipe import Recipe, weight_decay_from_big_vision
from vitmods.recipes.registry import one_of, published, recipe, size_and_patch, size_of

# level: magnitude of RandAugment's two operations (None: no RandAugment; 0 is not the identity), alpha of mixup
LEVELS: dict[str, tuple[int | None, float]] = {
    "none": (None, 0.0),
    "light1": (0, 0.0),
    "light2": (10, 0.2),
    "medium1": (15, 0.2),
    "medium2": (15, 0.5),
    "strong1": (20, 0.5),
    "strong2": (20, 0.8),
}
LEVEL_OF = {
    "Ti/16": "light1",
    "S/32": "medium1",
    "S/16": "medium2",
    "B/32": "medium2",
    "B/16": "medium2",
    "L/16": "medium2",
}
LEVEL_OF_21K = {
    "Ti/16": "none",
    "S/32": "none",
    "S/16": "light1",
    "B/32": "light2",
    "B/16": "light2",
    "L/16": "medium2",
}
WARMUP_STEPS = 10_000
LR = 1e-3


POOLED: dict[str, Any] = {"activation": "gelu_tanh", "position_on_prefix": False, "class_token": False, "pool": "avg"}
"""of big_vision's models whose tokens are averaged"""


def of_big_vision(model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Its ViTs have a representation layer, but for S/32."""
    plain = {"activation": "gelu_tanh", "position_on_prefix": False}
    return plain if size_and_patch(model) == "S/32" else {**plain, "representation": True}


@recipe(
    paper=(
        'Kumar et al., "Dual PatchNorm" (arXiv:2302.01327), section 5.1 and appendix C, after Steiner et al., '
        '"How to train your ViT?" (arXiv:2106.10270); big_vision\'s configs/vit_i1k.py'
    ),
    data="ImageNet-1k, 99 % of train (1,268,355 images) at 224 px; 300 epochs are 92.9k steps",
    expected=(
        "top-1 Ti/16 72.5 ± 0.07, S/32 72.1 ± 0.07, S/16 78.6 ± 0.32, B/32 74.8 ± 0.06, B/16 80.4 ± 0.06; with "
        "Dual PatchNorm 73.9 ± 0.09, 74.0 ± 0.09, 79.7 ± 0.2, 76.2 ± 0.07, 81.1 ± 0.09"
    ),
    command="vitmods train --data path/to/imagenet --base B/16 --img-size 224 --recipe augreg --accumulate 16",
    not_stated=(
        "dropout and stochastic depth of L/16, which has none here. big_vision's public config has none for any "
        "model; 0.1 for B is Dual PatchNorm's listing"
    ),
    images=1_268_355,
    architecture=of_big_vision,
)
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
        model: gives the level, and dropout and stochastic depth, 0.1 for B and none for the others.
        epochs: of a shorter training; give warmup_epochs too, for 10,000 steps stay 10,000.
        warmup_epochs: instead of 10,000 steps, which are 10.8 % of the paper's training.
        moment: how Adam's mean of gradients is stored.

    Raises:
        UserError: an unknown level, or none is published for the model.
    """
    remedy = "Say which, as in augreg(level=light1)."
    chosen = published(LEVEL_OF, size_and_patch(model), "level of augmentation", remedy) if level is None else level
    regularised = 0.1 if size_of(model) == "B" else 0.0
    return _big_vision(chosen, batch_size, moment, warmup_epochs).with_(
        epochs=epochs, dropout=regularised, drop_path=regularised, drop_path_shape="linear", head_bias=-6.9
    )


@recipe(
    paper=(
        'Kumar et al., "Dual PatchNorm" (arXiv:2302.01327), section 5.1, which says "similar setup"; the levels '
        "are those of big_vision's configs/vit_i21k.py"
    ),
    data="ImageNet-21k at 224 px",
    expected=(
        "25-shot top-1 on ImageNet-1k after 930,000 steps Ti/16 61.0 ± 0.03, S/32 63.8 ± 0.00, B/32 72.8 ± 0.03, "
        "S/16 72.5 ± 0.1, B/16 78.0 ± 0.06; with Dual PatchNorm 61.2 ± 0.03, 65.1 ± 0.12, 73.1 ± 0.07, 72.5 ± "
        "0.1, 78.4 ± 0.03. After 93,000 steps 52.2 ± 0.07, 54.1 ± 0.03, 60.9 ± 0.03, 64.3 ± 0.15, 70.8 ± 0.09; "
        "with Dual PatchNorm 53.6 ± 0.07, 56.7 ± 0.03, 63.7 ± 0.03, 65.0 ± 0.06, 72.0 ± 0.03"
    ),
    command="vitmods train --data path/to/imagenet21k --base B/16 --img-size 224 --recipe augreg_21k --accumulate 16",
    architecture=POOLED,
)
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
        model: gives the level.
        steps: 93,000 or 930,000 in the paper.
        moment: how Adam's mean of gradients is stored.

    Raises:
        UserError: an unknown level, or none is published for the model.
    """
    remedy = "Say which, as in augreg_21k(level=light1)."
    chosen = published(LEVEL_OF_21K, size_and_patch(model), "level of augmentation", remedy) if level is None else level
    recipe = _big_vision(chosen, batch_size, moment, warmup_epochs=None)
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
    """What both trainings share, and big_vision's S/16+."""
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


@recipe(
    paper=(
        'Beyer et al., "Better plain ViT baselines for ImageNet-1k" (arXiv:2205.01580); big_vision\'s '
        "configs/vit_s16_i1k.py"
    ),
    data="ImageNet-1k, 99 % of train (1,268,355 images) at 224 px",
    expected=(
        "top-1 76.5 in 90 epochs, 80.0 in 300; Dual PatchNorm's own baseline has 79.7 ± 0.09, with Dual PatchNorm "
        "80.2 ± 0.03"
    ),
    command="vitmods train --data path/to/imagenet --base S/16 --img-size 224 --recipe better_plain --accumulate 4",
    not_stated="the epochs of Dual PatchNorm's run",
    model="S/16",
    images=1_268_355,
    architecture={**POOLED, "position": "sincos2d", "representation": True},
)
def better_plain(epochs: int = 90, *, batch_size: int = 1024, warmup_epochs: float | None = None) -> Recipe:
    """S/16+: ImageNet-1k from scratch with softmax, light augmentation, mean pooling and fixed positions.

    Args:
        epochs: 90, or 300 for the best number.
        warmup_epochs: instead of 10,000 steps, which a training on fewer images needs.
    """
    return augreg("light2", "S/16", epochs=epochs, batch_size=batch_size, warmup_epochs=warmup_epochs).with_(
        loss="softmax", head_bias=0.0
    )
