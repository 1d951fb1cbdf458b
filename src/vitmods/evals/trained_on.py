"""What protocols that learn from the training pictures' features ask of the pictures."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data import PictureSet


def training_counts(pictures: "PictureSet", split: str, protocol: str) -> Mapping[str, int]:
    """Training pictures of each class. UserError where there are none, or it is them that is evaluated."""
    splits = pictures.summary()["splits"]
    if "train" not in splits:
        raise UserError(f"{protocol} learns from training pictures, and {pictures.name} has none: leave it out.")
    if split == "train":
        raise UserError(f"{protocol} learns from the split train: evaluate it on another (--split test).")
    return splits["train"]["per_class"]


def check_can_learn(pictures: "PictureSet", split: str, protocol: str) -> None:
    """UserError where a class has no training picture, or `training_counts` raises."""
    missing = [name for name, count in training_counts(pictures, split, protocol).items() if count == 0]
    if missing:
        raise UserError(f"{protocol} learns from training pictures, and there are none of {', '.join(missing)}.")
