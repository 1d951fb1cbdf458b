"""DeiT: ViTs trained on ImageNet-1k alone, with strong augmentation."""

from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import recipe

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@recipe(
    paper=(
        'Touvron et al., "Training data-efficient image transformers" (arXiv:2012.12877); the defaults of its main.py'
    ),
    data="ImageNet-1k, train (1,281,167 images) at 224 px",
    expected=(
        "top-1 S/16 80.1 ± 0.03, B/16 81.8 ± 0.03 in Dual PatchNorm's runs (with it 80.4 ± 0.06, 82.0 ± 0.05). Of "
        "another training are Dynamic Token Normalization's Ti/16 72.2, S/16 79.9, B/16 81.8 (with it T*/16 73.2, "
        "S/16 80.6, B/16 82.3): its paper has the rate 0.0005 at batch 1,024, half of this one (its released code "
        "scales it to 1e-3), and that code applies no mixup, CutMix or erasing"
    ),
    command="vitmods train --data path/to/imagenet --base S/16 --img-size 224 --recipe deit --accumulate 4",
    model="S/16",
    images=1_281_167,
)
def deit(epochs: int = 300, *, batch_size: int = 1024, warmup_epochs: float = 5.0) -> Recipe:
    """ImageNet-1k from scratch as in DeiT: RandAugment, mixup or CutMix, erasing, three views of each image.

    The rate is 1e-3 for a batch of 1024, main.py's 5e-4 for 512, and follows the batch size; so does the smallest rate,
    which main.py leaves at 1e-5. It changes once an epoch; the first two epochs are at 1e-6, since main.py sets it
    after each epoch.

    Args:
        epochs: of training. main.py's 10 cooldown epochs come on top; they stay at the smallest rate.
        batch_size: images per step; the learning rate follows it.
        warmup_epochs: of linear warm-up; give fewer to a shorter training.
    """
    return imagenet_views().with_(
        epochs=epochs,
        batch_size=batch_size,
        optimizer="adamw",
        lr=1e-3,
        lr_batch=1024,
        weight_decay=0.05,
        adam_eps=1e-8,
        schedule="epoch_cosine",
        warmup_epochs=warmup_epochs,
        warmup_lr=1e-6,
        min_lr=1e-5,
        clip_norm=None,
        ema=0.99996,
        dropout=0.0,
        drop_path=0.1,
        drop_path_shape="linear",
        init="timm",
        loss="softmax",
        label_smoothing=0.1,
        repeats=3,
        randaugment=(2, 9),
        randaugment_space="timm",
        randaugment_noise=0.5,
        erasing=0.25,
        mixup=0.8,
        cutmix=1.0,
    )


@recipe(
    paper='Touvron et al., "Training data-efficient image transformers" (arXiv:2012.12877)',
    data="ImageNet-1k at 384 px, from weights trained at 224 px",
    expected="none that vitmods has a source for",
    command=(
        "vitmods finetune --model deit_small.pth --data path/to/imagenet --img-size 384 --train all --recipe "
        "deit_384 --accumulate 8"
    ),
    not_stated=(
        "batch size, warm-up and smallest rate. Here 512, none, and the rate itself, since main.py's smallest "
        "rate is above it"
    ),
    model="S/16",
    trained=True,
    images=1_281_167,
)
def deit_384(epochs: int = 30, *, batch_size: int = 512) -> Recipe:
    """A DeiT at 384 px: 30 more epochs with a small constant rate and hardly any decay.

    Args:
        epochs: of training.
        batch_size: images per step; the learning rate, 5e-6 for 512, follows it.
    """
    return deit(epochs, batch_size=batch_size, warmup_epochs=0.0).with_(
        lr=5e-6, lr_batch=512, min_lr=5e-6, warmup_lr=0.0, weight_decay=1e-8
    )


def imagenet_views() -> Recipe:
    """Random resized crop (8 to 100 %), flip, bicubic, ImageNet's mean and std, a center crop of 224 in 256."""
    return Recipe().with_(
        crop="random_resized",
        crop_scale=(0.08, 1.0),
        crop_ratio=(3 / 4, 4 / 3),
        flip=0.5,
        resample="bicubic",
        eval_crop=0.875,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
