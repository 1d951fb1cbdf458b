"""Pyramid Vision Transformers on ImageNet, as Dynamic Token Normalization trains them."""

from typing import Any, Literal

from vitmods.recipes.deit import deit
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import one_of, recipe

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
        epochs: of training.
        batch_size: images per step; the learning rate follows it.
        warmup_epochs: of linear warm-up; give fewer to a shorter training.

    Raises:
        UserError: another size.
    """
    recipe = deit(epochs, batch_size=batch_size, warmup_epochs=warmup_epochs)
    return recipe.with_(ema=None, **FOREIGN, **one_of("size", size, DEPTHS))
