"""Better plain ViT baselines: big_vision's S/16+."""

from vitmods.recipes.augreg import POOLED, augreg
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import recipe


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
        batch_size: images per step; the learning rate stays.
        warmup_epochs: instead of 10,000 steps, which a training on fewer images needs.
    """
    return augreg("light2", "S/16", epochs=epochs, batch_size=batch_size, warmup_epochs=warmup_epochs).with_(
        loss="softmax", head_bias=0.0
    )
