"""What a study consists of: arms, seeds, settings, and the trials that follow from them.

A trial depends on its own settings alone (data, base, recipe, its arm's changes, its seed, its point of the grid). So
seeds, arms and points may be added to a study later without touching what is there, while anything that a finished
trial depends on may not change (same.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.errors import UserError
from vitmods.finetune.roles import chosen_roles
from vitmods.study.measure import DEFAULT, Measure
from vitmods.study.tuning import AS_IS, UNTUNED, VAL, Grid, Point

if TYPE_CHECKING:
    from vitmods.changes import Change
    from vitmods.recipes import Recipe

BASE = "base"
TRAINING = {"full": "train(all)", **{role: f"train({role})" for role in ("attention", "ffn", "head")}}
OTHER_SEEDS = 10_000  # added to a seed, it gives the seed of the second base trial that measures the noise floor


@dataclass(frozen=True)
class Arm:
    """A named list of changes, with recipe overrides if any; `base` is the arm with none."""

    name: str
    changes: tuple[Change, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict, hash=False)
    start: str | None = None
    """trained weights of its own that it begins with, changes included; None: base's"""

    @property
    def short(self) -> str:
        """The changes in their shell form, e.g. `dpn+norm(rms)`."""
        return "+".join(str(change) for change in self.changes)

    @property
    def text(self) -> str:
        """The changes and the recipe overrides, for people, e.g. `dpn+train(attention)`."""
        overrides = (f"train({value})" if name == "train" else f"{name}={value}" for name, value in self.recipe.items())
        own = f"from {Path(self.start).name}" if self.start and not self.changes else ""
        return "+".join(filter(None, (self.short, own, *overrides)))

    def identity(self) -> dict[str, Any]:
        """What makes it this arm, as JSON gives it back (which has no tuples)."""
        begins = {"start": self.start} if self.start else {}
        return {"changes": self.short, "recipe": json.loads(json.dumps(dict(self.recipe))), **begins}


@dataclass(frozen=True)
class Trial:
    """One arm with one seed, and in a tuned study one point of the grid."""

    arm: Arm
    seed: int
    point: Point = AS_IS

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.arm.name, str(self.point), f"seed {self.seed}")))

    def to_dict(self) -> dict[str, Any]:
        """Its name, for a worker."""
        return {"arm": self.arm.name, "seed": self.seed, "point": self.point.to_dict()}


@dataclass(frozen=True)
class Evaluation:
    """A finished trial's weights on a split that the trial itself has not seen."""

    trial: Trial
    split: str

    def __str__(self) -> str:
        return f"{self.trial}, on {self.split}"

    def to_dict(self) -> dict[str, Any]:
        """Its name, for a worker."""
        return {**self.trial.to_dict(), "split": self.split}


Work = Trial | Evaluation


@dataclass(frozen=True)
class Contender:
    """Trials of one arm among whose points one is chosen: an arm, base, or base with other seeds."""

    arm: Arm
    seeds: tuple[int, ...]

    @property
    def is_noise_floor(self) -> bool:
        return self.seeds[0] >= OTHER_SEEDS

    def trials(self, point: Point) -> list[Trial]:
        return [Trial(self.arm, seed, point) for seed in self.seeds]


def arm_from_text(text: str) -> Arm:
    """Read `CHANGES` or `NAME=CHANGES`, e.g. `dpn`, `post=placement(attn=post)`. UserError for an unknown change.

    Among the changes `train(ROLES)` may say what is trained, e.g. `dpn+train(attention)`; the words `attention`,
    `ffn`, `head` and `full` are short for that.
    """
    from vitmods.changes import parse_changes

    named = re.match(r"\s*([^=()]+?)\s*=\s*(.+)$", text, flags=re.DOTALL)
    name, told = (named[1], named[2]) if named else (text.strip(), text)
    changes, recipe = split_training(told)
    return Arm(name, tuple(parse_changes(changes)), recipe)


def split_training(text: str) -> tuple[str, dict[str, Any]]:
    """The changes, and the recipe override that `train(...)` among them, or a word for it, is."""
    text = TRAINING.get(text.strip(), text)
    pattern = r"(?:(?<=\+)|^)\s*train\(([^()]*)\)\s*(?:\+|$)"
    found = re.findall(pattern, text)
    if len(found) > 1:
        raise UserError(f"'{text}' says twice what is trained: join the roles, train({'+'.join(found)}).")
    if not found:
        return text, {}
    chosen_roles(found[0])  # an unknown role is told before anything runs
    return re.sub(pattern, "", text).rstrip("+ "), {"train": found[0].strip()}


def arms_from_text(text: str) -> list[Arm]:
    """The same, or the arms of a line-up where the text is its name, e.g. `norms`."""
    from vitmods.changes import LINEUPS, parse_changes

    if lineup := LINEUPS.get(text.strip()):
        return [Arm(name, parse_changes(changes)) for name, changes in lineup.arms.items()]
    return [arm_from_text(text)]


def make_arms(arms: Mapping[str, Any] | Iterable[Any]) -> tuple[Arm, ...]:
    """The arms that users name: a mapping name -> changes, or short forms, line-ups and Arm objects. Without `base`.

    Raises UserError when there is no arm, a name is taken twice, two arms are the same changes, or something else than
    changes is given.
    """
    if isinstance(arms, Mapping):
        found = [_arm(str(name), given) for name, given in arms.items()]
    else:
        listed = [arms] if isinstance(arms, str) else arms
        found = [arm for one in listed for arm in ([one] if isinstance(one, Arm) else arms_from_text(str(one)))]
    found = [arm for arm in found if arm.name != BASE or arm.changes or arm.recipe]
    _check_arms(found)
    return tuple(found)


def _arm(name: str, given: Any) -> Arm:
    """The arm that a user gives under a name: a short form, an Arm, one change, or several."""
    from vitmods.changes import Change

    if isinstance(given, str | Arm):
        return replace(arm_from_text(given) if isinstance(given, str) else given, name=name)
    listed = tuple(given) if isinstance(given, Iterable) and not isinstance(given, type) else (given,)
    for change in listed:
        if not isinstance(change, Change):
            raise UserError(
                f"Arm {name}: {change!r} is no change. Give changes as DualPatchNorm(), or as text: 'dpn+rms'."
            )
    return Arm(name, listed)


def _check_arms(arms: Sequence[Arm]) -> None:
    if not arms:
        raise UserError("A study needs an arm beside base, for example dpn; `vitmods changes` lists what there is.")
    names: set[str] = set()
    contents: dict[str, str] = {}
    for arm in arms:
        if arm.name == BASE:
            raise UserError("The arm named base is the model without changes. Give this arm another name.")
        if not arm.changes and not arm.recipe and arm.start is None:
            raise UserError(f"Arm {arm.name} changes nothing. Base is always part of the study; leave this arm out.")
        if arm.name in names:
            raise UserError(f"Two arms are named {arm.name}. Leave one out, or name it differently: NAME=CHANGES.")
        content = repr(arm.identity())
        if content in contents:
            raise UserError(
                f"Arms {contents[content]} and {arm.name} are the same changes ({arm.text}). Leave one out."
            )
        names.add(arm.name)
        contents[content] = arm.name


def make_seeds(seeds: int | Iterable[int]) -> tuple[int, ...]:
    """A number of seeds (0, 1, ...) or the seeds themselves. UserError for none, a repeated or a too large one."""
    if isinstance(seeds, int):
        if seeds < 1:
            raise UserError(f"A study needs at least one seed, not {seeds}.")
        if seeds > OTHER_SEEDS:
            raise UserError(f"{seeds} seeds are more than the {OTHER_SEEDS} that a study keeps apart.")
        return tuple(range(seeds))
    chosen = tuple(int(seed) for seed in seeds)
    if not chosen:
        raise UserError("A study needs at least one seed.")
    if len(set(chosen)) < len(chosen):
        raise UserError(f"A seed is given twice in {list(chosen)}.")
    if min(chosen) < 0 or max(chosen) >= OTHER_SEEDS:
        raise UserError(f"Seeds are whole numbers from 0 to {OTHER_SEEDS - 1}; got {list(chosen)}.")
    return chosen


@dataclass(frozen=True)
class Settings:
    """Everything that defines a study.

    fixed:       name -> JSON value, nested where it helps (`recipe.lr`): what every trial depends on; may never change
    arms, seeds: what is compared; may grow
    noise_floor: whether base is also run with other seeds; may be switched on
    margin:      how much worse an arm may be and count as no worse, in the unit of differences
    grid:        values of recipe fields that every arm is trained with; may get more values
    measure:     the metric that is compared; it and the margin concern the reading of the results alone
    """

    fixed: Mapping[str, Any]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    noise_floor: bool = False
    margin: float = 0.5
    grid: Grid = UNTUNED
    measure: Measure = DEFAULT

    @property
    def recipe(self) -> Recipe:
        from vitmods.recipes import Recipe

        return Recipe.from_dict(dict(self.fixed["recipe"]))

    def recipe_of(self, arm: Arm, point: Point = AS_IS) -> Recipe:
        overrides = {**arm.recipe, **dict(point.values)}
        return self.recipe.with_(**overrides) if overrides else self.recipe

    def arm(self, name: str) -> Arm:
        return next(arm for arm in (Arm(BASE), *self.arms) if arm.name == name)

    def judged_on(self, split: str) -> str:
        """The split that trials are judged on by themselves, where the answer is about `split`."""
        return VAL if self.grid else split

    def contenders(self) -> list[Contender]:
        """Base, base with other seeds if the noise floor is asked for, and the arms.

        Base with other seeds is tuned by itself: it stands for an arm that does nothing, and arms are tuned.
        """
        other = tuple(seed + OTHER_SEEDS for seed in self.seeds)
        base = Arm(BASE)
        floor = [Contender(base, other)] if self.noise_floor else []
        return [Contender(base, self.seeds), *floor, *(Contender(arm, self.seeds) for arm in self.arms)]

    def trials(self) -> list[Trial]:
        """Every trial, base (and the noise floor) first, then seed by seed so that an early stop leaves whole pairs."""
        points = self.grid.points
        bases = [one for one in self.contenders() if one.arm.name == BASE]
        planned = [Trial(one.arm, seed, point) for one in bases for seed in one.seeds for point in points]
        return planned + [Trial(arm, seed, point) for seed in self.seeds for arm in self.arms for point in points]

    def work(self, name: Mapping[str, Any]) -> Work:
        """The inverse of `Trial.to_dict` and `Evaluation.to_dict`."""
        trial = Trial(self.arm(name["arm"]), name["seed"], Point.from_dict(name["point"]))
        return Evaluation(trial, name["split"]) if "split" in name else trial

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.fixed,
            "arms": {arm.name: arm.identity() for arm in self.arms},
            "seeds": list(self.seeds),
            "noise_floor": self.noise_floor,
            "margin": self.margin,
            "metric": self.measure.to_dict(),
            **({"tune": self.grid.to_dict(), "tune_on": VAL} if self.grid else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`; folders of older versions tune nothing and compare top-1."""
        from vitmods.changes import parse_changes

        rest = dict(values)
        arms = tuple(
            Arm(name, tuple(parse_changes(arm["changes"])), arm["recipe"], arm.get("start"))
            for name, arm in rest.pop("arms").items()
        )
        seeds, noise_floor, margin = tuple(rest.pop("seeds")), rest.pop("noise_floor"), rest.pop("margin")
        grid = Grid.from_dict(rest.pop("tune", {}))
        rest.pop("tune_on", None)
        measure = Measure.from_dict(rest.pop("metric", {}))
        return cls(rest, arms, seeds, noise_floor, margin, grid, measure)


def check_points(settings: Settings) -> None:
    """UserError if an arm sets a field that is tuned, or a point makes no recipe, for base or an arm."""
    tuned = {name for name, _ in settings.grid.fields}
    for arm in settings.arms:
        for name in sorted(tuned.intersection(arm.recipe)):
            raise UserError(
                f"Arm {arm.name} sets {name}={arm.recipe[name]}, and {name} is tuned for every arm alike. Leave it out "
                "of the arm, or of what is tuned."
            )
    for arm in (Arm(BASE), *settings.arms):
        for point in settings.grid.points:
            try:
                settings.recipe_of(arm, point)
            except UserError as error:
                raise UserError(f"{point}: {error}" if point else str(error)) from error
