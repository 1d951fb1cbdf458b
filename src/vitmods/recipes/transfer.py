"""ImageNet weights adapted to other classification sets, as in DeiT and, as far as is known, Three Things."""

from typing import Any

from vitmods.recipes.deit import deit
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.registry import one_of, recipe

_SGD: dict[str, Any] = {
    "epochs": 1000,
    "optimizer": "sgd",
    "lr": 0.01,
    "min_lr": 1e-5,
    "weight_decay": 1e-4,
    "erasing": 0.0,
    "drop_path": 0.0,
}
_ADAMW: dict[str, Any] = {"epochs": 360, "lr": 7.5e-5, "min_lr": 1e-5, "weight_decay": 0.05, "erasing": 0.1}
DATASETS: dict[str, dict[str, Any]] = {
    "cifar10": _SGD,
    "cifar100": _SGD,
    "cars": _SGD,
    "flowers": _SGD,
    "inat18": _ADAMW,
    "inat19": _ADAMW,
}


@recipe(
    paper=(
        'Touvron et al., "Training data-efficient image transformers" (arXiv:2012.12877); the values are its '
        "author's in the discussions 45 (CIFAR-10, Cars) and 105 (iNaturalist, for B/16) of "
        "github.com/facebookresearch/deit"
    ),
    data="cifar10, cifar100, cars, flowers, inat18, inat19, enlarged to 224 or 384 px, from weights of ImageNet-1k",
    expected=(
        "top-1 in Three Things, whose values for this are not known, S/16 and B/16: CIFAR-10 98.9, 99.3; "
        "CIFAR-100 90.5, 92.5; Cars 89.7, 92.7; Flowers 96.8, 97.8; iNaturalist 2018 68.0, 74.1; "
        "iNaturalist 2019 73.9, 78.2"
    ),
    command=(
        "vitmods finetune --model deit_base.pth --data path/to/cars --img-size 224 --train all --recipe "
        '"transfer(dataset=cars)"'
    ),
    not_stated=(
        "values for CIFAR-100 and Flowers, here CIFAR-10's; whether 0.01 is the rate before or after it is scaled "
        "by the batch size, here after; iNaturalist's values for other models"
    ),
    model="S/16",
    weights="that of the weights, with a new head",
    trained=True,
)
def transfer(dataset: str = "cifar10", *, epochs: int | None = None, batch_size: int = 768) -> Recipe:
    """All weights adapted to CIFAR, Cars, Flowers or iNaturalist with DeiT's augmentation.

    Args:
        dataset: CIFAR, Cars and Flowers by SGD at 0.01 for 1000 epochs without erasing and drop path; iNaturalist by
            AdamW at 7.5e-5 for 360 epochs with erasing 0.1.
        epochs: instead of those, more than the 5 of the warm-up.
        batch_size: images per step; the learning rate, given for 768, follows it.

    Raises:
        UserError: an unknown data set.
    """
    values = one_of("data set", dataset, DATASETS)
    recipe = deit(batch_size=batch_size).with_(**values, lr_batch=768)
    return recipe if epochs is None else recipe.with_(epochs=epochs)
