"""What protocols that learn from the training images' features ask of the images."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data import ImageDataset


def training_counts(dataset: "ImageDataset", split: str, protocol: str) -> Mapping[str, int]:
    """Training images of each class. UserError where there are none, or it is them that is evaluated."""
    splits = dataset.summary()["splits"]
    if "train" not in splits:
        raise UserError(f"{protocol} learns from training images, and {dataset.name} has none: leave it out.")
    if split == "train":
        raise UserError(f"{protocol} learns from the split train: evaluate it on another (--split test).")
    return splits["train"]["per_class"]


def check_can_learn(dataset: "ImageDataset", split: str, protocol: str) -> None:
    """UserError where a class has no training image, or `training_counts` raises."""
    missing = [name for name, count in training_counts(dataset, split, protocol).items() if count == 0]
    if missing:
        raise UserError(f"{protocol} learns from training images, and there are none of {', '.join(missing)}.")
