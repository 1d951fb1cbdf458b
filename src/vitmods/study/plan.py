"""What a study consists of: settings, seeds, and the trials that follow from them and its arms.

A trial depends on its own settings alone (data, base, recipe, its arm's changes, its seed, its point of the grid). So
seeds, arms and points may be added to a study later without touching what is there, while anything that a finished
trial depends on may not change (`differences`).

Tuning: every arm is trained with every point of one grid, and evaluated by the point that is best on validation.

The grid is part of the comparison: an arm that were tuned more than base would win by that alone. The test split is
seen once an arm, by the chosen point (as VTAB does, arXiv:1910.04867).

What a study compares: a metric, and the options of the protocol that gives it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from vitmods.data.splits import SplitOptions
from vitmods.evals.options import Options
from vitmods.recipes.recipe import tupled
from vitmods.study.arms import BASE, Arm
from vitmods.study.factors import FactorialPlan
from vitmods.util.errors import UserError, nearest
from vitmods.util.text import flatten

if TYPE_CHECKING:
    from vitmods.recipes import Recipe
    from vitmods.tasks.metrics import Metric


VAL = "val"
_BRIEF = 20  # characters of a model's options that are shown wherever its name is


@dataclass(frozen=True)
class Point:
    """Values of recipe fields, in the order of the grid; without any, the recipe as it is."""

    values: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return ",".join(f"{name}={_brief(show_value(value))}" for name, value in self.values)

    @property
    def spelled(self) -> str:
        """The same with all options of models, which `str` leaves out."""
        return ",".join(f"{name}={show_value(value)}" for name, value in self.values)

    def __bool__(self) -> bool:
        return bool(self.values)

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self.values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Point:
        return cls(tuple((name, tupled(value)) for name, value in values.items()))


AS_IS = Point()


@dataclass(frozen=True)
class Grid:
    """Recipe fields and the values that each may take; its points are their product, the last field fastest.

    Without fields it has one point, the recipe as it is: a study that tunes nothing.
    """

    fields: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.fields)

    @property
    def points(self) -> tuple[Point, ...]:
        names = [name for name, _ in self.fields]
        return tuple(Point(tuple(zip(names, chosen))) for chosen in product(*(values for _, values in self.fields)))

    def to_dict(self) -> dict[str, list[Any]]:
        """As JSON gives it back."""
        return {name: [Point(((name, value),)).to_dict()[name] for value in values] for name, values in self.fields}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Sequence[Any]]) -> Grid:
        return cls(tuple((name, tuple(map(tupled, values))) for name, values in fields.items()))


UNTUNED = Grid()


def make_grid(tune: Mapping[str, Any], tune_on: str | None) -> Grid:
    """The grid that users name: field -> value or values, each of the field's type or its text.

    Raises:
        UserError: a field that a recipe does not have, a value that is none of it or is given twice, or a split that
            nothing may be chosen on.
    """
    _check_split(tune_on, bool(tune))
    return Grid(tuple((name, _values(name, given)) for name, given in tune.items()))


def make_sweep(sweep: Mapping[str, Any], fixed: Mapping[str, Any]) -> Grid:
    """What a study is repeated under: field of the recipe, `base` or `limit_train` -> values. `limit_train` may be a
    fraction of the training images, below 1. UserError as `make_grid`, or where a checkpoint says what base is."""
    return Grid(tuple((name, _settings(name, given, fixed)) for name, given in sweep.items()))


def _settings(name: str, given: Any, fixed: Mapping[str, Any]) -> tuple[Any, ...]:
    if name not in ("base", "limit_train"):
        return _values(name, given)
    listed = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if name == "base":
        if "start" in fixed:
            raise UserError("The checkpoint that training starts from says what base is: it cannot be swept over.")
        return _once(name, tuple(map(str, listed)))
    if fixed.get("limit_train") is not None:
        raise UserError(f"limit_train={fixed['limit_train']} is swept over too: leave one of the two out.")
    try:
        numbers = tuple(float(Fraction(value)) for value in listed)  # of text, 1/16 too
    except (TypeError, ValueError, ZeroDivisionError):
        numbers = (0.0,)
    if not all(0 < value <= 1 or value == int(value) > 1 for value in numbers):
        raise UserError(f"limit_train is a number of images, or a fraction of them up to 1, not {show_value(listed)}.")
    return _once(name, tuple(value if value <= 1 else int(value) for value in numbers))


def grid_from_text(texts: Iterable[str], option: str = "--tune") -> dict[str, tuple[str, ...]]:
    """Read `FIELD=VALUE,VALUE`, e.g. `lr=1e-4,3e-4`. UserError for anything else, naming the option."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not (sign and name and values.strip()):
            raise UserError(f"{option} takes FIELD=VALUE,VALUE,... as lr=1e-4,3e-4,1e-3, not '{text}'.")
        if name in found:
            raise UserError(f"{option} names {name} twice: list all of its values once, {name}=VALUE,VALUE,...")
        found[name] = tuple(value.strip() for value in values.split(","))
    return found


def choose(scores: Mapping[Point, Mapping[int, float | None]], higher_is_better: bool = True) -> Point:
    """The point with the best mean over the seeds; the first of equal ones.

    Args:
        scores: point -> seed -> the metric on validation, None where the trial diverged. A point with fewer diverged
            trials is better than one with more, whatever its mean.
        higher_is_better: of the metric.
    """
    sign = -1 if higher_is_better else 1

    def worth(point: Point) -> tuple[int, float]:
        values = list(scores[point].values())
        mean = mean_of(values)
        return values.count(None), 0.0 if mean is None else sign * mean

    return min(scores, key=worth)


def mean_of(scores: Iterable[float | None]) -> float | None:
    """Of those that there are; None without any."""
    known = [score for score in scores if score is not None]
    return math.fsum(known) / len(known) if known else None


def _check_split(tune_on: str | None, tuned: bool) -> None:
    if not tuned and tune_on is not None:
        raise UserError(f"tune_on={tune_on} without anything to tune: name values too, as --tune lr=1e-4,3e-4,1e-3.")
    if not tuned or tune_on == VAL:
        return
    if tune_on is None:
        raise UserError('Say what the tuned values are chosen on: --tune-on val (tune_on="val").')
    if tune_on == "test":
        raise UserError(
            "Nothing can be chosen on test: the best of several numbers is too good, and the study would report it. "
            "Choose on val: --tune-on val."
        )
    raise UserError(f"Nothing can be chosen on {tune_on!r}, only on the validation split: --tune-on val.")


def _values(name: str, given: Any) -> tuple[Any, ...]:
    from vitmods.recipes.recipe import fields_by_name

    types = {each: kind for each, (_, _, kind) in fields_by_name().items()}
    if name not in types:
        raise UserError(f"A recipe has no field {name!r} to tune. {nearest(name, types)}")
    listed = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    values = tuple(_value(name, types[name], value) for value in listed)
    if not values:
        raise UserError(f"There is no value of {name} to try: give at least one.")
    return _once(name, values)


def _once(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    for value in values:
        if values.count(value) > 1:
            raise UserError(f"{name}={show_value(value)} is to be tried twice: list every value once.")
    return values


def _value(name: str, kind: Any, given: Any) -> Any:
    try:
        return _read(kind, given)
    except (TypeError, ValueError):
        raise UserError(f"{given!r} is no value of {name}, which is {_called(kind)}.") from None


def _read(kind: Any, given: Any) -> Any:
    """`given`, or what its text says, as a `kind`. ValueError or TypeError where it is none."""
    options = get_args(kind)
    if NoneType in options:
        (kind,) = (option for option in options if option is not NoneType)
        return None if given in (None, "none") else _read(kind, given)
    if get_origin(kind) is Literal:
        return options[options.index(given)]
    if get_origin(kind) is tuple:
        parts = given.split(":") if isinstance(given, str) else tuple(given)
        kinds = options[:1] * len(parts) if options[-1] is Ellipsis else options
        return tuple(_read(*pair) for pair in zip(kinds, parts, strict=True))
    if isinstance(given, bool) or (kind is int and isinstance(given, float)):
        raise TypeError
    return kind(given)


def _called(kind: Any) -> str:
    """A type in words: `a number`, `adamw or sgd or lamb`."""
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return " or ".join(map(str, options))
    if get_origin(kind) is tuple:
        return "numbers with : between them"
    if options:
        return " or ".join("none" if option is NoneType else _called(option) for option in options)
    return {int: "a whole number", float: "a number"}.get(kind, "a word")


def _brief(value: str) -> str:
    """A model's name without its options, but for a mark that sets it apart from others of that name."""
    name, asked, options = value.partition("?")
    return f"{name}?…{sha256(options.encode()).hexdigest()[:4]}" if asked and len(options) > _BRIEF else value


def show_value(value: Any) -> str:
    """As it is written on the command line."""
    if value is None:
        return "none"
    return ":".join(map(show_value, value)) if isinstance(value, tuple | list) else str(value).removesuffix(".0")


PAPERS = Options()
MARGINS = {"%": 0.5, "nats": 0.01, "": 0.01}
"""by the metric's unit; in points for shares"""


@dataclass(frozen=True)
class Measure:
    """A metric of `vitmods.evals.metrics()` by its name, and options of the protocols."""

    name: str
    options: Options = PAPERS

    @property
    def metric(self) -> Metric:
        """Its title, unit, direction and protocol. UserError, naming the nearest, where there is none of that name."""
        from vitmods.evals.protocols import metric_named

        return metric_named(self.name)

    def to_dict(self) -> dict[str, Any]:
        """As JSON gives it back."""
        return {"name": self.name, "options": {name: _plain(value) for name, value in asdict(self.options).items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measure:
        """The inverse of `to_dict`; options that are not named have their defaults."""
        return cls(values["name"], options_from(values.get("options", {})))


def measure_of(task: str) -> Measure:
    """The metric that trials of a task are compared by, where nothing else is asked. UserError for an unknown task."""
    from vitmods.tasks.base import TASKS

    return Measure(TASKS[task].metrics[0].name)


def make_measure(name: str, options: Options | None = None) -> Measure:
    """What users ask for; of few-shot accuracies the one that is asked for is measured.

    Raises:
        UserError: there is no such metric, its protocol does not give it with these options, or has no such option.
    """
    from vitmods.evals.base import PROTOCOLS
    from vitmods.evals.protocols import metric_named, options_for, unread

    given, protocol = options or PAPERS, metric_named(name).protocol
    asked = options_for(name, given)
    ignored = unread(given, [PROTOCOLS[protocol]] if protocol else [])
    if given.shots not in (PAPERS.shots, asked.shots):  # the metric's name says how many
        ignored.append("shots")
    for option in ignored:
        raise UserError(
            f"The metric {name} does not depend on {option}={getattr(given, option)}: leave --{option} out."
        )
    return Measure(name, asked)


def options_from(values: Mapping[str, Any]) -> Options:
    """Options of the protocols from JSON."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if given.get("textures") is not None:
        given["textures"] = Path(given["textures"])
    return Options(**given)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


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


@dataclass(frozen=True)
class ImageOptions(SplitOptions):
    """How a study uses its images; values that are None fit them."""

    img_size: int | tuple[int, ...] | None = None
    """image side, or rows and columns, in pixels"""
    in_chans: int | None = None
    """channels that the model reads: 3 (RGB) or 1 (gray)"""
    unreadable: Literal["stop", "skip"] = "stop"
    """images that cannot be read stop the run before training, or are left out and reported"""


IMAGE_OPTIONS = tuple(field.name for field in fields(ImageOptions))


def image_settings(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Select what decides which images a trial sees; config.json keeps it, so that the trial can be evaluated again."""
    names = ("task", "data", *IMAGE_OPTIONS, "train_on_all")
    return {name: fixed[name] for name in names if name in fixed}


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


def trial_of(work: Work) -> Trial:
    """Return the trial that a piece of work belongs to."""
    return work.trial if isinstance(work, Evaluation) else work


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
    before, after = (flatten({k: v for k, v in one.items() if k not in _MAY_DIFFER}) for one in (as_now(old), new))
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


def as_now(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose recipe is written as this version writes it: fields may have moved."""
    from vitmods.recipes import Recipe

    recipe = json.loads(json.dumps(Recipe.from_dict(settings["recipe"]).to_dict()))
    return {**settings, "recipe": recipe}


def _grid_differences(grid: str, old: Mapping[str, list[Any]], new: Mapping[str, list[Any]]) -> list[str]:
    """Fields cannot join or leave, since every trial has a value of each; values can only be added."""
    if set(old) != set(new):
        return [f"{grid}: {' '.join(old) or '(nothing)'} -> {' '.join(new) or '(nothing)'}"]
    left_out = [name for name in old if any(value not in new[name] for value in old[name])]
    return [f"{grid} {name}: {old[name]} -> {new[name]}" for name in left_out]


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
