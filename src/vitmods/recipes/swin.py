"""Swin Transformers on ImageNet."""

from typing import Literal

from vitmods.recipes.deit import deit
from vitmods.recipes.pvt import FOREIGN
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import one_of, recipe

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
        epochs: of training.
        batch_size: images per step; the learning rate follows it.
        warmup_epochs: of linear warm-up; give fewer to a shorter training.

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
