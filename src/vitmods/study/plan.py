"""What a study consists of: settings, seeds, and the trials that follow from them and its arms.

A trial depends on its own settings alone (data, base, recipe, its arm's changes, its seed, its point of the grid). So
seeds, arms and points may be added to a study later without touching what is there, while anything that a finished
trial depends on may not change (`differences`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from vitmods.study.arms import BASE, Arm
from vitmods.study.edits import parse_edits
from vitmods.study.measure import Measure, measure_of
from vitmods.study.tuning import AS_IS, UNTUNED, VAL, Grid, Point
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.recipes import Recipe

_MAY_DIFFER = ("arms", "seeds", "noise_floor", "margin", "metric", "tune", "tune_on")
OTHER_SEEDS = 10_000  # added to a seed, it gives the seed of the second base trial that measures the noise floor


class ImageOptions(TypedDict, total=False):
    """What is said of the images beside where they lie; what is not said, or None, fits them.

    img_size: side, or (rows, columns), in pixels.
    in_chans: channels that the model reads.
    split_seed, val_fraction, test_fraction, fold, group_by, split_file, limit_train, limit_val: which of them are
        trained on, chosen by and reported; see `vitmods.data.SplitOptions`.
    unreadable: "stop" at images that cannot be read, or "skip" them and say so in the report.
    """

    img_size: int | tuple[int, ...] | None
    in_chans: int | None
    split_seed: int
    val_fraction: float | None
    test_fraction: float | None
    fold: Sequence[int] | None
    group_by: str | Path | None
    split_file: str | Path | None
    limit_train: int | None
    limit_val: int | None
    unreadable: Literal["stop", "skip"]


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
class Candidate:
    """Trials of one arm among whose points one is chosen: an arm, base, or base with other seeds."""

    arm: Arm
    seeds: tuple[int, ...]

    @property
    def is_noise_floor(self) -> bool:
        return self.seeds[0] >= OTHER_SEEDS

    def trials(self, point: Point) -> list[Trial]:
        return [Trial(self.arm, seed, point) for seed in self.seeds]


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

    fixed:       name -> JSON value, nested where it helps (`recipe.schedule`): of every trial; may never change
    arms, seeds: what is compared; may grow
    noise_floor: whether base is also run with other seeds; may be switched on
    margin:      how much worse an arm may be and count as no worse, in the unit of differences
    grid:        values of recipe fields that every arm is trained with; may get more values
    measure:     the metric that is compared, None: the task's; it and the margin concern the reading alone
    """

    fixed: Mapping[str, Any]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    noise_floor: bool = False
    margin: float = 0.5
    grid: Grid = UNTUNED
    measure: Measure = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.measure is None:
            object.__setattr__(self, "measure", measure_of(self.fixed["task"]))

    @property
    def recipe(self) -> Recipe:
        from vitmods.recipes import Recipe

        return Recipe.from_dict(dict(self.fixed["recipe"]))

    def recipe_of(self, arm: Arm, point: Point = AS_IS) -> Recipe:
        overrides = {**arm.recipe, **dict(point.values)}
        return self.recipe.with_(**overrides) if overrides else self.recipe

    def arm(self, name: str) -> Arm:
        return next(arm for arm in (Arm(BASE), *self.arms) if arm.name == name)

    def evaluated_on(self, split: str) -> str:
        """The split that trials are evaluated on by themselves, where the answer is about `split`."""
        return VAL if self.grid else split

    def candidates(self) -> list[Candidate]:
        """Base, base with other seeds if the noise floor is asked for, and the arms.

        Base with other seeds is tuned by itself: it stands for an arm that does nothing, and arms are tuned.
        """
        other = tuple(seed + OTHER_SEEDS for seed in self.seeds)
        base = Arm(BASE)
        floor = [Candidate(base, other)] if self.noise_floor else []
        return [Candidate(base, self.seeds), *floor, *(Candidate(arm, self.seeds) for arm in self.arms)]

    def trials(self) -> list[Trial]:
        """Every trial, base (and the noise floor) first, then seed by seed so that an early stop leaves whole pairs."""
        points = self.grid.points
        bases = [one for one in self.candidates() if one.arm.name == BASE]
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
        """The inverse of `to_dict`. UserError where `values` are no settings."""
        rest = dict(values)
        try:
            arms = tuple(
                Arm(name, parse_edits(arm["changes"]), arm["recipe"], arm.get("start"))
                for name, arm in rest.pop("arms").items()
            )
            seeds, noise_floor, margin = tuple(rest.pop("seeds")), rest.pop("noise_floor"), rest.pop("margin")
            grid, measure = Grid.from_dict(rest.pop("tune", {})), Measure.from_dict(rest.pop("metric"))
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"These are no settings of a study ({error!r}): study.json is damaged.") from error
        rest.pop("tune_on", None)
        return cls(rest, arms, seeds, noise_floor, margin, grid, measure)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings in which `new` is another study than `old` (both from `Settings.to_dict`), as `name: old -> new`.

    Added arms, seeds and values to tune, a noise floor, another margin and another metric are no difference: nothing
    that was trained depends on them.
    """
    before, after = (_flat({k: v for k, v in one.items() if k not in _MAY_DIFFER}) for one in (old, new))
    found = []
    for name in dict.fromkeys([*before, *after]):
        was, now = before.get(name, "(not set)"), after.get(name, "(not set)")
        if was != now:
            found.append(f"{name}: {was} -> {now}")
    for name, arm in old["arms"].items():
        if name not in new["arms"]:
            found.append(f"arm {name}: {arm['changes']} -> (missing)")
        elif new["arms"][name] != arm:
            found.append(f"arm {name}: {_show_arm(arm)} -> {_show_arm(new['arms'][name])}")
    found += _tuning_differences(old.get("tune", {}), new.get("tune", {}))
    if not set(old["seeds"]) <= set(new["seeds"]):
        found.append(f"seeds: {old['seeds']} -> {new['seeds']}")
    if old["noise_floor"] and not new["noise_floor"]:
        found.append("noise_floor: true -> false")
    return found


def _tuning_differences(old: Mapping[str, list[Any]], new: Mapping[str, list[Any]]) -> list[str]:
    """Fields cannot join or leave, since every trial has a value of each; values can only be added."""
    if set(old) != set(new):
        return [f"tune: {' '.join(old) or '(nothing)'} -> {' '.join(new) or '(nothing)'}"]
    left_out = [name for name in old if any(value not in new[name] for value in old[name])]
    return [f"tune {name}: {old[name]} -> {new[name]}" for name in left_out]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {prefix: list(value) if isinstance(value, tuple) else value}
    return {
        name: leaf
        for key, inner in value.items()
        for name, leaf in _flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _show_arm(arm: Mapping[str, Any]) -> str:
    overrides = ", ".join(f"{name}={value}" for name, value in arm["recipe"].items())
    begins = f" from {arm['start']}" if "start" in arm else ""
    return f"{arm['changes']}{begins}{f' with {overrides}' if overrides else ''}"


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
