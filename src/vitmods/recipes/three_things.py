"""The supervised training of Three Things, on top of timm's A2 procedure."""

from collections.abc import Mapping
from typing import Any

from vitmods.recipes.deit import imagenet_views
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import published, recipe, size_of


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
        warmup_epochs: of linear warm-up; give fewer to a shorter training.
        lr: instead of the model's; for a batch of 2048.
        drop_path: instead of the model's; the same in every block.

    Raises:
        UserError: nothing is published for the model, and lr or drop_path is not given.
    """
    if lr is None or drop_path is None:
        remedy = "Give both, as in a2(lr=3e-3,drop_path=0.1)."
        known = published(RATES, size_of(model), "learning rate and drop path", remedy)
        lr, drop_path = known[0] if lr is None else lr, known[1] if drop_path is None else drop_path
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
