"""Model, image size and recipe that fit a data set, for a first answer on a small machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitmods.recipes import RECIPES, Recipe
from vitmods.recipes.registry import parse_recipe, split_recipe

if TYPE_CHECKING:
    from vitmods.data.records import Source
    from vitmods.tasks.base import Task

PEEKED = 24  # images whose size is looked at


@dataclass(frozen=True)
class Defaults:
    """Model, image side in pixels, recipe and channels that suit a data set."""

    base: str
    img_size: int | tuple[int, int]
    recipe_name: str
    in_chans: int = 3


DIGITS = Defaults("mu3/2", 8, "digits", in_chans=1)
ORDINARY = Defaults("Ti/16", 224, "default")


@dataclass(frozen=True)
class RecipeChoice:
    """A recipe by its name (None: what fits the images, or `finetune` for trained weights), and fields to override."""

    name: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name is not None:
            split_recipe(self.name)  # a UserError for an unknown name or setting, before the images are listed

    def resolve(self, task: type[Task], defaults: Defaults, model: str | None, pixels: Mapping[str, Any]) -> Recipe:
        """Make the recipe for images of these defaults and a model of this name.

        `pixels` are mean and std of a checkpoint that training starts from; empty for new weights.
        """
        usual = task.usual_recipe or defaults.recipe_name
        name = self.name or ("finetune" if pixels else usual)
        recipe = task.fitted(parse_recipe(name, like=RECIPES[usual](), model=model))
        normalized = {name: value[:1] if len(set(value)) == 1 else value for name, value in pixels.items()}
        # An override in epochs replaces what the recipe has in steps, and the other way round.
        units = (("epochs", "steps"), ("warmup_epochs", "warmup_steps"), ("warmup_steps", "warmup_epochs"))
        replaced = {other: None for unit, other in units if self.overrides.get(unit) is not None}
        return recipe.with_(**{**normalized, **replaced, **self.overrides})


def defaults_for(spec: str) -> Defaults:
    """By the median short side of some images: about 64 to 200 patches, a tiny ViT.

    Up to 40 px: Ti/4 at 32 px; up to 128 px: Ti/8 at 64 or 96 px; above: Ti/16 at 224 px. Raises UserError where the
    spec does not name a data set.
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
