"""Dynamic Token Normalization's ImageNet training of ViTs: DeiT's, at half its rate."""

from vitmods.recipes.deit import deit
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import recipe


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
        epochs: of training.
        batch_size: images per step; the learning rate follows it.
        warmup_epochs: of linear warm-up; give fewer to a shorter training.
    """
    recipe = deit(epochs, batch_size=batch_size, warmup_epochs=warmup_epochs)
    return recipe.with_(mixup=0.0, cutmix=0.0, erasing=0.0) if released else recipe.with_(lr=5e-4)
