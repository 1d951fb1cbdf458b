"""What fits a data set when nothing is said: model, image size, recipe; for a first answer on a small machine."""

from __future__ import annotations

import statistics
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitmods.recipes import RECIPES, Recipe

if TYPE_CHECKING:
    from vitmods.data.records import Source

PEEKED = 24  # images whose size is looked at


@dataclass(frozen=True)
class Defaults:
    """Model, image side in pixels, recipe and channels that suit a data set."""

    base: str
    img_size: int | tuple[int, int]
    recipe_name: str
    in_chans: int = 3

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.recipe_name]()


DIGITS = Defaults("mu3/2", 8, "digits", in_chans=1)
ORDINARY = Defaults("Ti/16", 224, "default")


def defaults_for(spec: str) -> Defaults:
    """By the median short side of some images: about 64 to 200 patches, a tiny ViT.

    Up to 40 px: Ti/4 at 32 px; up to 128 px: Ti/8 at 64 or 96 px; above: Ti/16 at 224 px. Raises UserError where the
    spec names no data set.
    """
    if spec == "digits":
        return DIGITS
    from vitmods.data.sources import open_source

    source = open_source(spec)
    if source.inputs is not None:
        return Defaults(*source.inputs.recommend(source))
    side = _median_side(source)
    if side is None or side > 128:
        return ORDINARY
    if side <= 40:
        return Defaults("Ti/4", 32, "small_images")
    return Defaults("Ti/8", 64 if side <= 80 else 96, "small_images")


def _median_side(source: Source) -> float | None:
    from vitmods.data.read import Unreadable, decode

    sides: list[int] = []
    for records in source.splits.values():
        for key in records.some(PEEKED).keys:
            with suppress(Unreadable):
                sides.append(min(decode(records.fetch(int(key)), 3).shape[1:]))
    return statistics.median(sides) if sides else None
