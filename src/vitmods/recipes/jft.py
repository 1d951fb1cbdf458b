"""Dual PatchNorm's training on billions of images, without augmentation."""

from vitmods.recipes.augreg import POOLED, WARMUP_STEPS, augreg_21k
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import recipe


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
        batch_size: images per step; the learning rate stays.
        warmup_steps: of linear warm-up; give fewer to a shorter training.
    """
    return augreg_21k("none", steps=steps, batch_size=batch_size, warmup_steps=warmup_steps)
