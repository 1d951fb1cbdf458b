"""What a study consists of: settings, seeds, and the trials that follow from them and its arms.

A trial depends on its own settings alone (data, base, recipe, its arm's changes, its seed, its point of the grid). So
seeds, arms and points may be added to a study later without touching what is there, while anything that a finished
trial depends on may not change (same.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitmods.study.arms import BASE, Arm
from vitmods.study.edits import parse_edits
from vitmods.study.measure import DEFAULT, Measure
from vitmods.study.tuning import AS_IS, UNTUNED, VAL, Grid, Point
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.recipes import Recipe

OTHER_SEEDS = 10_000  # added to a seed, it gives the seed of the second base trial that measures the noise floor


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
        """The inverse of `to_dict`; folders of older versions tune nothing and compare top-1."""
        try:
            return cls._from_dict(values)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"These are no settings of a study ({error!r}): study.json is damaged.") from error

    @classmethod
    def _from_dict(cls, values: Mapping[str, Any]) -> Settings:
        rest = dict(values)
        arms = tuple(
            Arm(name, parse_edits(arm["changes"]), arm["recipe"], arm.get("start"))
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
