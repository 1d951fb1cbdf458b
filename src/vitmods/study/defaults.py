"""Model, image size and recipe that fit a data set, and the smaller ones that a time budget is tried with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitmods.data.splits import SplitOptions, count_training
from vitmods.recipes import RECIPES, Recipe
from vitmods.recipes.registry import check_agree, evidence, parse_recipe, split_recipe
from vitmods.recipes.schedule import LENGTHS, WARMUPS, overridden
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data.records import Source
    from vitmods.tasks.base import Task

PEEKED = 24  # images whose size is looked at
SMALL_SET = 10_000  # training images; more train a ViT from scratch with the recipes for many
SMALL_SIDE = 128  # pixels; above, images are those of the recipe `default`
LEAST_STEPS = 600  # of a training whose length is not set
FEWEST_PATCHES = 4  # on a side
LADDER = (("Ti", 224), ("Ti", 128), ("Ti", 64), ("mu6", 64), ("mu3", 32))
"""Size of the model and image side, from the top: what a budget is tried with"""


@dataclass(frozen=True)
class Defaults:
    """Settings that suit a data set: model, image side in pixels, channels, and the recipe if nothing else matters.

    images: about how many are trained on; 0: unknown
    side:   median short side of the images, in pixels; 0: unknown
    """

    base: str
    img_size: int | tuple[int, int]
    recipe_name: str = ""
    in_chans: int = 3
    images: int = 0
    side: int = 0

    def recipe_for(self, side: int) -> tuple[str, str]:
        """Return the recipe's name for images of this side, and the reason."""
        if self.recipe_name:
            return self.recipe_name, "it is made for this data set"
        if 0 < self.images < SMALL_SET:
            return "small_data", f"{self.images:,} training images at {side} px are few"
        return "small_images" if side <= SMALL_SIDE else "default", f"it suits images of {side} px"

    def rungs(self, base: str | None, img_size: tuple[int, ...] | None) -> list[tuple[str, tuple[int, ...]]]:
        """List models and image sizes from the largest to the smallest; what is given stays."""
        largest = self.img_size if isinstance(self.img_size, int) else max(self.img_size)
        rungs = [(base or self.base, img_size or (largest,))] if base or img_size is None else []
        given_patch = (base or "").partition("?")[0].rpartition("/")[2]
        for size, side in () if self.recipe_name else LADDER:  # digits and sequences have one size
            side = min(img_size or (side, largest))
            patch = 16 if side > 96 else 8 if side > 40 else 4
            if base and not (given_patch.isdigit() and side >= FEWEST_PATCHES * (patch := int(given_patch))):
                continue
            if side % patch == 0:
                rungs.append((base or f"{size}/{patch}", img_size or (side,)))
        return list(dict.fromkeys(rungs)) or [(self.base, img_size or (largest,))]


DIGITS = Defaults("mu3/2", 8, "digits", in_chans=1)


@dataclass(frozen=True)
class RecipeChoice:
    """A recipe by its name (None: what fits the images, or `finetune` for trained weights), and fields to override."""

    name: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name is not None:
            split_recipe(self.name)  # a UserError for an unknown name or setting, before the images are listed

    def resolve(
        self, task: type[Task], defaults: Defaults, side: int, model: str | None, pixels: Mapping[str, Any]
    ) -> tuple[Recipe, str]:
        """Make the recipe for images of these defaults at this side and a model of this name; say why it was chosen.

        Without a name, few images are trained on for at least LEAST_STEPS steps. `pixels` are mean and std of a
        checkpoint that training starts from; empty for new weights.
        """
        usual, reason = defaults.recipe_for(side)
        if task.small_recipe and usual != "default":
            usual = task.small_recipe
        elif task.usual_recipe:
            usual, reason = task.usual_recipe, f"it is the one of {task.name}"
        if self.name is not None and (owner := evidence(split_recipe(self.name)[0]).task) != task.name:
            from vitmods.tasks.base import TASKS

            part = TASKS[owner].recipe_part if owner in TASKS else None
            if part is not None and part is not task.recipe_part:
                raise UserError(f"{self.name} is a recipe of the task {owner}, not of {task.name}: add --task {owner}.")
        if None not in (self.overrides.get("epochs"), self.overrides.get("steps")):
            raise UserError("epochs and steps both set the length of a training: leave one of them out.")
        if self.name is not None:
            check_agree(self.name, self.overrides)
        name = self.name or ("finetune" if pixels and not evidence(usual).trained else usual)
        like = RECIPES[usual]()
        recipe = task.fitted(parse_recipe(name, **{**self.overrides, "like": like, "model": model}))
        if pixels and self.name is None:  # its batches are those of the recipe that it is like
            recipe = recipe.with_(batch_size=like.batch_size)
            reason = f"training starts from trained weights; augmentation and batches are those of {usual}: {reason}"
        if self.name is None and defaults.images and recipe.steps is None and not task.usual_recipe:
            batch_size = self.overrides.get("batch_size") or recipe.batch_size
            steps_per_epoch = max(1, defaults.images // batch_size)
            recipe = recipe.with_(epochs=max(recipe.epochs, math.ceil(LEAST_STEPS / steps_per_epoch)))
        normalized = {name: value[:1] if len(set(value)) == 1 else value for name, value in pixels.items()}
        changed = f" with {', '.join(self.overrides)} set" if self.overrides else ""
        note = "" if self.name else f"Recipe {name}{changed}: {reason}."
        lengths = {field: value for field, value in split_recipe(name)[1].items() if field in (*LENGTHS, *WARMUPS)}
        images = defaults.images or evidence(split_recipe(name)[0]).images or 0
        recipe = overridden(recipe, {**lengths, **normalized, **self.overrides}, images)
        recipe.check_read(self.overrides)
        return recipe, note


def defaults_for(spec: str, options: SplitOptions) -> Defaults:
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
    base, img_size = "Ti/16", 224
    if 0 < side <= SMALL_SIDE:
        base, img_size = ("Ti/4", 32) if side <= 40 else ("Ti/8", 64 if side <= 80 else 96)
    return Defaults(base, img_size, images=count_training(source, options), side=side)


def _median_side(source: Source) -> int:
    from vitmods.data.read import Unreadable, decode

    sides: list[int] = []
    for records in source.splits.values():
        for key in records.some(PEEKED).keys:
            with suppress(Unreadable):
                sides.append(min(decode(records.fetch(int(key)), 3).shape[1:]))
    return int(statistics.median(sides)) if sides else 0
