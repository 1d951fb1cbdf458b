"""LeViT on ImageNet, without its teacher."""

from vitmods.recipes.deit import deit
from vitmods.recipes.pvt import FOREIGN
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import recipe


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
    """ImageNet-1k from scratch as in LeViT, without its teacher: DeiT's training for 1,000 epochs at half its decay.

    Args:
        epochs: of training.
        batch_size: images per step; the learning rate follows it.
        warmup_epochs: of linear warm-up; give fewer to a shorter training.
    """
    recipe = deit(epochs, batch_size=batch_size, warmup_epochs=warmup_epochs)
    return recipe.with_(**FOREIGN, weight_decay=0.025, drop_path=None)
