"""Recipes for a first look at one's own images. They reproduce no paper: they are made for small budgets.

For people with a few thousand images: tuned by us, with the evidence in docs/log/training.md.
"""

from vitmods.finetune.roles import ALL
from vitmods.recipes.recipe import Rate, Recipe
from vitmods.recipes.registry import recipe


@recipe(data="any", expected="none; for debugging, and for sets that need no augmentation")
def plain(epochs: int = 30) -> Recipe:
    """No augmentation and no regularisation but weight decay: what is left is the model and the images."""
    return Recipe().with_(epochs=epochs, crop="none", flip=0.0, eval_crop=1.0)


@recipe(data="images of 96 px and more", expected="none published for such short training")
def default(epochs: int = 30) -> Recipe:
    """A folder of images of ordinary size, from scratch, with the augmentation of AugReg's `medium1` level.

    Random resized crop of 5 to 100 % of the area, flip, RandAugment (2 operations, magnitude 15), mixup 0.2; AdamW
    1e-3 with decay 0.1, clipping at 1, cosine: the values of Steiner et al., "How to train your ViT?"
    (arXiv:2106.10270), which trains for 300 epochs in batches of 4096.
    """
    return Recipe().with_(
        epochs=epochs,
        weight_decay=0.1,
        crop="random_resized",
        crop_scale=(0.05, 1.0),
        randaugment=(2, 15),
        mixup=0.2,
    )


@recipe(data="up to 64 px", expected="none published")
def small_images(epochs: int = 30) -> Recipe:
    """Sets of small images (CIFAR-10 and the like, 32 px): pad and crop, flip, label smoothing 0.1."""
    return Recipe().with_(epochs=epochs, weight_decay=0.1, crop="pad", flip=0.5, label_smoothing=0.1, eval_crop=1.0)


@recipe(data="digits", expected="about 95 to 96 % top-1 on a fifth of them, with mu3/2 in 760 steps")
def digits(epochs: int = 40) -> Recipe:
    """scikit-learn's 1,797 handwritten digits (8 px, gray): no flip, which would change the class."""
    return Recipe().with_(
        epochs=epochs, lr=8e-3, weight_decay=0.1, label_smoothing=0.1, crop="none", flip=0.0, eval_crop=1.0
    )


def _rates(lr: float) -> tuple[Rate, ...]:
    """Rates of the parts of trained weights, from that of the last block (what was measured: docs/log/training.md)."""
    few = (Rate(part, 10 * lr) for part in ("biases", "lora", "dora", "prompts", "head"))
    return Rate(ALL, lr, 0.7), Rate("norms", 3 * lr), *few


@recipe(
    data="any",
    expected=(
        "none published for such short training; at 384 px on ImageNet ViT-S has 82.7 / 82.5 / 82.2 % top-1 with "
        "all, attention or ffn trained by AdamW, ViT-B 84.3 / 84.3 / 84.1 %"
    ),
    trained=True,
)
def finetune(like: Recipe | None = None, epochs: int = 20) -> Recipe:
    """Trained weights adapted to other images or another resolution, by AdamW; `train` says which part of them.

    The augmentation is that of `like` (None: `default`), the rate that of what is trained (`rates`): lower blocks learn
    at a fraction of the rate of those above, and parts have rates of their own. The head begins as a linear probe
    (`head_start`), so that a short training does not end below what the weights give untrained; norms that an arm adds
    are blended in (`norm_blend`).

    Touvron et al., "Three things everyone should know about Vision Transformers" (arXiv:2203.09795), section 4,
    fine-tunes at 384 px by AdamW and SGD without stating rates; these are ours, for small budgets. DeiT III's command
    for 384 px has 20 epochs, lr 1e-5, no layer_decay, weight_decay 0.1 and batch_size 512.
    """
    usual = (like or default()).with_(epochs=epochs, weight_decay=0.1, head_start="probe", norm_blend=0.5)
    return usual.with_(rates=_rates(3e-4)).with_(train=ALL)


@recipe(
    data="any",
    expected=(
        "none published for such short training; at 384 px on ImageNet ViT-S has 82.6 / 82.3 / 82.0 % top-1 with "
        "all, attention or ffn trained by SGD, ViT-B 84.3 / 84.2 / 84.0 %"
    ),
    trained=True,
)
def finetune_sgd(like: Recipe | None = None, epochs: int = 20) -> Recipe:
    """`finetune` by SGD with momentum 0.9 and without weight decay."""
    return finetune(like, epochs).with_(optimizer="sgd", weight_decay=0.0, rates=_rates(0.01)).with_(train=ALL)


@recipe(
    data="1,000 to 10,000 images whose class stays the same when mirrored",
    expected="none published; ours are in RESULTS.md",
)
def small_data(epochs: int = 30, *, batch_size: int = 32) -> Recipe:
    """A few thousand images from scratch: many small steps, crops of at least half of the area, flip, smoothing.

    Tuned with small ViTs for 20 epochs on 5,000 images of CIFAR-10 at 32 px and 2,000 of clothing at 64 px. So short
    a training does not yet fit its images: RandAugment and mixup cost points there, and may pay in a longer one.

    batch_size: images per step; the learning rate stays.
    """
    return Recipe().with_(
        epochs=epochs,
        batch_size=batch_size,
        lr=1e-3,
        weight_decay=0.1,
        label_smoothing=0.1,
        crop="random_resized",
        crop_scale=(0.5, 1.0),
        flip=0.5,
        eval_crop=1.0,
    )
