"""Cells and trials: what is trained, resolved once.

A cell is all that a trial's numbers depend on but its seed: base with its weights, an arm's edits, images and recipe,
as they are after the setting of a sweep, the arm and the tuned point. A trial is a cell with a seed. Nothing else
resolves settings: whoever trains, times, reads or reuses a trial asks its cell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

import tyro

from vitmods.changes.compose import adds_norms
from vitmods.data.splits import SplitOptions
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.schedule import overridden
from vitmods.study.arms import Arm
from vitmods.study.grid import AS_IS, Point
from vitmods.util.errors import UserError

MOST_SEEDS = 10_000  # from this seed on trials are for tuning alone, never part of the answer

if TYPE_CHECKING:  # the shell reads text; Python may also pass one number
    Sides = int | tuple[int, ...] | None
else:
    Sides = tuple[int, ...] | None


@dataclass(frozen=True)
class ImageOptions(SplitOptions):
    """How a study uses its images."""

    img_size: Sides = None
    """image side, or rows and columns, in pixels; None: what fits the images"""
    in_chans: int | None = None
    """channels that the model reads: 3 (RGB) or 1 (gray); None: what fits the images"""
    unreadable: Literal["stop", "skip"] = "stop"
    """images that cannot be read stop the run before training, or are left out and reported"""
    answer_on: tyro.conf.Suppress[Literal["val", "test"] | None] = None
    """val: verdicts are about val, and no trial sees test, so that a study of what was chosen may answer on test; None:
    test, or all held-out images where vitmods made both splits"""

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = (self.img_size,) if isinstance(self.img_size, int) else self.img_size
        if sides is not None and (len(sides) not in (1, 2) or min(sides) < 1):
            raise UserError(f"img_size is one side or two (rows, columns) in pixels, not {self.img_size}.")


def image_settings(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Select what decides which images a trial sees; config.json keeps it, so that the trial can be evaluated again."""
    names = ("task", "data", *(field.name for field in fields(ImageOptions)), "train_on_all")
    return {name: fixed[name] for name in names if name in fixed}


def images_key(fixed: Mapping[str, Any]) -> str:
    """Name which images a trial sees, as study.json has their fingerprint."""
    return blake2b(json.dumps(image_settings(fixed)).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Cell:
    """All that a trial's numbers depend on but its seed.

    fixed:   base, task, data, image settings, trained weights (`start`), as study.json names them, without the recipe
    recipe:  with the values of the setting, the arm and the point
    setting: of a sweep, under which it is trained
    point:   the tuned values that its recipe has
    folds:   parts of the images, each seed being tested on another one; 0: every seed sees the same images
    """

    arm: Arm
    fixed: Mapping[str, Any] = field(hash=False)
    recipe: Recipe = field(hash=False)
    setting: Point = AS_IS
    point: Point = AS_IS
    folds: int = 0

    def images(self, seed: int = 0) -> dict[str, Any]:
        """Return which images a trial of this seed sees."""
        fold = {"fold": [seed % self.folds, self.folds]} if self.folds else {}
        return image_settings({**self.fixed, **fold})

    @property
    def start(self) -> Mapping[str, Any] | None:
        """The fields of the `Start` that base begins from; None: new weights."""
        return self.fixed.get("start")

    @property
    def name(self) -> str:
        """The arm, in a sweep with the setting before it."""
        return ", ".join(filter(None, (str(self.setting), self.arm.name)))

    @property
    def is_on_all_images(self) -> bool:
        """Whether no image is held out."""
        return bool(self.fixed.get("train_on_all"))

    def on_all_images(self) -> Cell:
        """The same, trained on all images, val and test included."""
        fixed = {**self.fixed, **self.images(), "train_on_all": True}
        fixed.pop("answer_on", None)  # nothing is left to answer on
        return replace(self, fixed=fixed, folds=0)


def make_cell(
    fixed: Mapping[str, Any], arm: Arm, setting: Point = AS_IS, point: Point = AS_IS, folds: int | None = None
) -> Cell:
    """Resolve what an arm trains under a setting of the sweep, at a point of the grid.

    fixed: what all trials of the study share, the recipe included. Raises UserError for values that recipes lack.
    """
    values = setting.to_dict()
    here = {name: values.pop(name, value) for name, value in fixed.items()}
    here |= {name: values.pop(name) for name in ("limit_train",) if name in values}  # not in every older study.json
    recipe = Recipe.from_dict(dict(here.pop("recipe")))
    swept, own = dict(Point.from_dict(values).values), {**arm.recipe, **dict(point.values)}
    for overrides in (swept, own):
        recipe = overridden(recipe, overrides) if overrides else recipe
    if recipe.norm_blend and (arm.start or not adds_norms(arm.changes)):
        if arm.recipe.get("norm_blend"):
            raise UserError(
                f"Arm {arm.name}: norm_blend is for changes that only add norms to the weights of base, and this arm "
                "does not have one: leave norm_blend out. Of subln, rescale=false is one."
            )
        recipe = recipe.with_(norm_blend=0.0)
    return Cell(arm, here, recipe.with_(rates=()), setting, point, folds or 0)  # with the rate of what it trains


@dataclass(frozen=True)
class Trial:
    """A cell with one seed."""

    cell: Cell
    seed: int

    @property
    def arm(self) -> Arm:
        return self.cell.arm

    @property
    def setting(self) -> Point:
        """The values that a sweep sets."""
        return self.cell.setting

    @property
    def point(self) -> Point:
        """The tuned values."""
        return self.cell.point

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.cell.name, str(self.point), f"seed {self.seed}")))

    def to_dict(self) -> dict[str, Any]:
        """Return its name, for a worker; `Settings.trial` finds it."""
        values = {"point": self.point.to_dict(), "setting": self.setting.to_dict()}
        return {"arm": self.arm.name, "seed": self.seed, **values, "on_all_images": self.cell.is_on_all_images}

    @property
    def for_tuning(self) -> bool:
        """Whether it is one that points are compared by: it must not see test."""
        return self.seed >= MOST_SEEDS
