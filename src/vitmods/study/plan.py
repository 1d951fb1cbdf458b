"""What a study consists of: settings, seeds, and the trials that follow from them and its arms.

A trial depends on its own settings alone (data, base, recipe, its arm's changes, its seed, its point of the grid). So
seeds, arms and points may be added to a study later without touching what is there, while anything that a finished
trial depends on may not change (`differences`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from vitmods.study.arms import BASE, Arm
from vitmods.study.factors import FactorialPlan
from vitmods.study.measure import Measure, measure_of
from vitmods.study.tuning import AS_IS, UNTUNED, VAL, Grid, Point
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.recipes import Recipe

_MAY_DIFFER = (
    "arms",
    "seeds",
    "until_decided",
    "margin",
    "metric",
    "generalize",
    "family",
    "tune",
    "tune_on",
    "tuning_seeds",
    "sweep",
)
MOST_SEEDS = 10_000  # from this seed on trials are for tuning alone, never part of the answer


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
    limit_train: float | None
    limit_val: int | None
    unreadable: Literal["stop", "skip"]


@dataclass(frozen=True)
class Trial:
    """One arm with one seed; in a tuned study at one point of the grid, in a sweep under one setting."""

    arm: Arm
    seed: int
    point: Point = AS_IS
    setting: Point = AS_IS

    def __str__(self) -> str:
        return ", ".join(filter(None, (str(self.setting), self.arm.name, str(self.point), f"seed {self.seed}")))

    def to_dict(self) -> dict[str, Any]:
        """Its name, for a worker."""
        places = {"point": self.point.to_dict(), "setting": self.setting.to_dict()}
        return {"arm": self.arm.name, "seed": self.seed, **places}


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


def make_seeds(seeds: int | Iterable[int]) -> tuple[int, ...]:
    """A number of seeds (0, 1, ...) or the seeds themselves. UserError for none, a repeated or a too large one."""
    if isinstance(seeds, int):
        if seeds < 1:
            raise UserError(f"A study needs at least one seed, not {seeds}.")
        if seeds > MOST_SEEDS:
            raise UserError(f"{seeds} seeds are more than the {MOST_SEEDS} that a study keeps apart.")
        return tuple(range(seeds))
    chosen = tuple(int(seed) for seed in seeds)
    if not chosen:
        raise UserError("A study needs at least one seed.")
    if len(set(chosen)) < len(chosen):
        raise UserError(f"A seed is given twice in {list(chosen)}.")
    if min(chosen) < 0 or max(chosen) >= MOST_SEEDS:
        raise UserError(f"Seeds are whole numbers from 0 to {MOST_SEEDS - 1}; got {list(chosen)}.")
    return chosen


@dataclass(frozen=True)
class Settings:
    """Everything that defines a study.

    fixed:         name -> JSON value, nested where it helps (`recipe.schedule`): of every trial; may never change
    arms, seeds:   what is compared; may grow
    until_decided: whether arms stop as soon as they are decided, the seeds being the most that are run
    margin:        how much worse an arm may be and count as no worse, in the unit of differences
    grid:          values of recipe fields that every arm is trained with; may get more values
    tuning_seeds:  with which the points of the grid are compared; the study's own, or others, which is better
    measure:       the metric that is compared, None: the task's; it and the margin concern the reading alone
    generalize:    what the verdicts are about: new "images" and new trainings, or new "seeds" on these images
    family:        how many arms there will be, those that are added later included; 0: those that there are
    sweep:         settings under each of which base and all arms are trained (bases, fractions of the data, ...)
    design:        of a factorial study: its changes, of which the arms are the runs; None: arms are compared with base
    """

    fixed: Mapping[str, Any]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    until_decided: bool = False
    margin: float = 0.5
    grid: Grid = UNTUNED
    tuning_seeds: tuple[int, ...] = ()
    measure: Measure = None  # type: ignore[assignment]
    generalize: Literal["images", "seeds"] = "images"
    family: int = 0
    sweep: Grid = UNTUNED
    design: FactorialPlan | None = None

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

    @property
    def folds(self) -> int:
        """In how many parts the images are tested, seed by seed; 0: all seeds on the same ones."""
        return int(self.fixed.get("folds", 0))

    def at(self, setting: Point, seed: int | None = None) -> Settings:
        """The same without the sweep, under one of its settings; with the fold of the seed, where there are folds."""
        if seed is not None and self.folds:
            fold = {"fold": [seed % self.folds, self.folds]}
            return replace(self, fixed={**self.fixed, **fold}).at(setting)
        values = setting.to_dict()
        fixed = {name: values.pop(name) for name in list(values) if name in self.fixed}
        recipe = self.recipe.with_(**dict(Point.from_dict(values).values)).to_dict() if values else self.fixed["recipe"]
        return replace(self, fixed={**self.fixed, **fixed, "recipe": recipe}, sweep=UNTUNED)

    def with_seeds(self, seeds: tuple[int, ...]) -> Settings:
        """The same study with other seeds."""
        return replace(self, seeds=seeds, tuning_seeds=seeds if self.same_seeds else self.tuning_seeds)

    @property
    def factors(self) -> tuple[Arm, ...]:
        """What is compared: the changes of a factorial study, else the arms."""
        return self.design.factors if self.design else self.arms

    def continuing(self, recorded: Mapping[str, Any]) -> Settings:
        """The same with the runs of a factorial study as they were recorded (from `to_dict`), where it is of the same
        changes and as many runs. Another version of vitmods might choose others."""
        if self.design is None or "design" not in recorded:
            return self
        plan = self.design.continuing(FactorialPlan.from_dict(recorded["design"]))
        return replace(self, arms=plan.arms, design=plan)

    @property
    def every_arm(self) -> tuple[Arm, ...]:
        """Base, and the arms."""
        return (Arm(BASE), *self.arms)

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.every_arm if arm.name == name)

    @property
    def looks(self) -> tuple[int, ...]:
        """The seeds at which a study that runs until it is decided is looked at; none of a fixed one. UserError for too
        few or too many seeds."""
        if not self.until_decided:
            return ()
        from vitmods.stats import factorial, sequential  # scipy, which the shell's help does without

        return factorial.looks(len(self.seeds)) if self.design else sequential.looks(len(self.seeds))

    @property
    def same_seeds(self) -> bool:
        """Whether points are chosen on the very trials that are then reported, which makes these too good."""
        return bool(self.grid) and self.tuning_seeds == self.seeds

    def for_tuning(self, trial: Trial) -> bool:
        """Whether the trial is one that points are compared by: it must not see test."""
        return bool(self.grid) and trial.seed in self.tuning_seeds

    @property
    def planned(self) -> int:
        """How many trials there are; of a study that runs until it is decided, at most."""
        settings, arms = len(self.sweep.points), len(self.every_arm)
        answered = 0 if self.same_seeds else settings * arms * len(self.seeds)
        return answered + len(self.tuning_trials())

    def tuning_trials(self) -> list[Trial]:
        """What points are chosen by; none where nothing is tuned."""
        if not self.grid:
            return []
        places = itertools.product(self.sweep.points, self.tuning_seeds, self.every_arm, self.grid.points)
        return [Trial(arm, seed, point, setting) for setting, seed, arm, point in places]

    def work(self, name: Mapping[str, Any]) -> Work:
        """The inverse of `Trial.to_dict` and `Evaluation.to_dict`."""
        point, setting = (Point.from_dict(name[place]) for place in ("point", "setting"))
        trial = Trial(self.arm(name["arm"]), name["seed"], point, setting)
        return Evaluation(trial, name["split"]) if "split" in name else trial

    def to_dict(self) -> dict[str, Any]:
        tuning = {"tune": self.grid.to_dict(), "tune_on": VAL, "tuning_seeds": list(self.tuning_seeds)}
        return {
            **self.fixed,
            "arms": {arm.name: arm.identity() for arm in self.arms},
            "seeds": list(self.seeds),
            "until_decided": self.until_decided,
            "margin": self.margin,
            "metric": self.measure.to_dict(),
            "generalize": self.generalize,
            **({"family": self.family} if self.family else {}),
            **(tuning if self.grid else {}),
            **({"sweep": self.sweep.to_dict()} if self.sweep else {}),
            **({"design": self.design.to_dict()} if self.design else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`. UserError where `values` are no settings."""
        rest = dict(values)
        try:
            arms = tuple(Arm.from_identity(name, arm) for name, arm in rest.pop("arms").items())
            own = {name: rest.pop(name) for name in ("until_decided", "margin", "generalize")}
            own["family"] = rest.pop("family", 0)
            seeds, tuning_seeds = tuple(rest.pop("seeds")), tuple(rest.pop("tuning_seeds", ()))
            grid, sweep = (Grid.from_dict(rest.pop(name, {})) for name in ("tune", "sweep"))
            measure = Measure.from_dict(rest.pop("metric"))
            design = FactorialPlan.from_dict(rest.pop("design")) if "design" in rest else None
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"These are no settings of a study ({error!r}): study.json is damaged.") from error
        rest.pop("tune_on", None)
        tuned: dict[str, Any] = {"grid": grid, "tuning_seeds": tuning_seeds}
        return cls(rest, arms, seeds, measure=measure, sweep=sweep, design=design, **tuned, **own)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings in which `new` is another study than `old` (both from `Settings.to_dict`), as `name: old -> new`.

    Added arms, seeds and values to tune or to sweep over, another margin and another metric are no difference: nothing
    that was trained depends on them.
    """
    if old.get("design") != new.get("design"):
        return [f"design: {_show_design(old)} -> {_show_design(new)}"]
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
    for name in ("tune", "sweep"):
        found += _grid_differences(name, old.get(name, {}), new.get(name, {}))
    if not set(old["seeds"]) <= set(new["seeds"]):
        found.append(f"seeds: {old['seeds']} -> {new['seeds']}")
    return found


def _grid_differences(grid: str, old: Mapping[str, list[Any]], new: Mapping[str, list[Any]]) -> list[str]:
    """Fields cannot join or leave, since every trial has a value of each; values can only be added."""
    if set(old) != set(new):
        return [f"{grid}: {' '.join(old) or '(nothing)'} -> {' '.join(new) or '(nothing)'}"]
    left_out = [name for name in old if any(value not in new[name] for value in old[name])]
    return [f"{grid} {name}: {old[name]} -> {new[name]}" for name in left_out]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {prefix: list(value) if isinstance(value, tuple) else value}
    return {
        name: leaf
        for key, inner in value.items()
        for name, leaf in _flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _show_design(settings: Mapping[str, Any]) -> str:
    if "design" not in settings:
        return "each arm against base"
    design = settings["design"]
    factors = ", ".join(one["changes"] for one in design["factors"].values())
    return f"{design['kind']} of {factors} in {len(design['runs'])} runs"


def _show_arm(arm: Mapping[str, Any]) -> str:
    overrides = ", ".join(f"{name}={value}" for name, value in arm["recipe"].items())
    begins = f" from {arm['start']}" if "start" in arm else ""
    return f"{arm['changes']}{begins}{f' with {overrides}' if overrides else ''}"


def check_plan(settings: Settings) -> None:
    """UserError if an arm sets a field that is tuned or swept over, a point or a setting makes no recipe, for base or
    an arm, or a study that runs until it is decided cannot be looked at."""
    if settings.sweep and len(settings.sweep.points) < 2:
        raise UserError(f"A sweep needs two values or more, and there is {settings.sweep.points[0]} alone.")
    if settings.folds:
        _check_folds(settings)
    if settings.until_decided and settings.sweep:
        raise UserError("A sweep has a fixed number of seeds: leave --until-decided out, and say --seeds.")
    _ = settings.looks  # a UserError for too few or too many seeds
    if settings.design and settings.sweep:
        raise UserError("A factorial study has one setting: run it again for each value of what would be swept over.")
    if settings.design and len(settings.seeds) < 2:
        raise UserError("A factorial study needs 2 seeds or more: without them there is no spread to compare with.")
    for grid, what in ((settings.grid, "tuned"), (settings.sweep, "swept over")):
        fields = {name for name, _ in grid.fields}
        for arm in settings.arms:
            for name in sorted(fields.intersection(arm.recipe)):
                raise UserError(
                    f"Arm {arm.name} sets {name}={arm.recipe[name]}, and {name} is {what} for every arm alike. Leave "
                    f"it out of the arm, or of what is {what}."
                )
    for setting, arm, point in itertools.product(settings.sweep.points, settings.every_arm, settings.grid.points):
        place = ", ".join(filter(None, map(str, (setting, point))))
        try:
            settings.at(setting).recipe_of(arm, point)
        except UserError as error:
            raise UserError(f"{place}: {error}" if place else str(error)) from error


def _check_folds(settings: Settings) -> None:
    if settings.folds < 2:
        raise UserError(f"folds must be at least 2, not {settings.folds}: each seed is tested on one of so many parts.")
    if settings.until_decided:
        raise UserError("With folds the number of seeds is fixed: leave --until-decided out, and say --seeds.")
    if settings.sweep or settings.design:
        raise UserError(
            "Folds go with neither a sweep nor a factorial design: leave --folds or --sweep or --design out."
        )
    if settings.grid:
        raise UserError(
            "With folds nothing can be tuned: the images that values are chosen on are test images of other seeds. "
            "Leave --folds or --tune out."
        )
    if settings.generalize == "seeds":
        raise UserError("With folds verdicts are about other images too: leave --generalize seeds out.")
    if settings.fixed.get("fold"):
        raise UserError("folds gives each seed a fold of its own: leave --fold out.")
