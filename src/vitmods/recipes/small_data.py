"""For people with a few thousand images: tuned by us, with the evidence in RESULTS.md."""

from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import recipe


@recipe(
    data="1,000 to 10,000 images whose class stays the same when mirrored",
    expected="none published; ours are in RESULTS.md",
)
def small_data(epochs: int = 30, *, batch_size: int = 32) -> Recipe:
    """A few thousand images from scratch: many small steps, crops of at least half of the area, flip, smoothing.

    Tuned with small ViTs for 20 epochs on 5,000 images of CIFAR-10 at 32 px and 2,000 of clothing at 64 px. So short
    a training does not yet fit its images: RandAugment and mixup cost points there, and may pay in a longer one.

    Args:
        epochs: of training.
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
