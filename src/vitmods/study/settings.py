"""What a study consists of: settings, seeds, and the trials that follow from them and its arms.

A trial depends on its own settings alone (data, base, recipe, its arm's changes, its seed, its point of the grid). So
seeds, arms and points may be added to a study later without touching what is there, while anything that a finished
trial depends on may not change (`differences`).

Tuning: every arm is trained with every point of one grid, since an arm that is tuned more than base would win by that
alone. The test split is seen once an arm, by the point that is best on val (as VTAB does, arXiv:1910.04867).
"""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import tyro

from vitmods.data.sources import is_same_place
from vitmods.evals.options import Options
from vitmods.recipes.recipe import Recipe, tupled
from vitmods.study.arms import BASE, Arm, is_foreign
from vitmods.study.cells import MOST_SEEDS, Cell, Trial, make_cell
from vitmods.study.design import DESIGNS, Design
from vitmods.study.grid import AS_IS, UNTUNED, Grid, Point, make_grid
from vitmods.util.errors import UserError
from vitmods.util.text import flatten, listing

if TYPE_CHECKING:
    from vitmods.tasks.metrics import Metric


VAL = "val"
SAYS_BASE = "The checkpoint that training starts from (--from) says what base is"

PAPERS = Options()
MARGINS = {"%": 0.5, "nats": 0.01, "": 0.01}
"""by the metric's unit; in points for shares"""


@dataclass(frozen=True)
class Measure:
    """A metric of `vitmods.evals.metrics()` by its name, and options of the protocols."""

    name: str
    options: Options = PAPERS

    def __str__(self) -> str:
        options = {name: value for name, value in vars(self.options).items() if value != getattr(PAPERS, name)}
        return f"{self.name} {options or ''}".rstrip()

    @property
    def metric(self) -> Metric:
        """Its title, unit, direction and protocol. Raises UserError, naming the nearest, for an unknown name."""
        from vitmods.evals.protocols import metric_named

        return metric_named(self.name)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"name": self.name, "options": json.loads(json.dumps(asdict(self.options), default=str))}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measure:
        """The inverse of `to_dict`; missing options have their defaults."""
        return cls(values["name"], options_from(values.get("options", {})))


def measure_of(task: str) -> Measure:
    """Return the metric that trials of a task are compared by. Raises UserError for an unknown task."""
    from vitmods.tasks.base import TASKS

    kind = TASKS[task]
    return make_measure(kind.compared_by) if kind.compared_by else Measure(kind.metrics[0].name)


def make_measure(name: str, options: Options = PAPERS) -> Measure:
    """Check a metric and its options; only the few-shot accuracy in the name is measured.

    Raises:
        UserError: the metric does not exist, or does not depend on an option that is set.
    """
    from vitmods.evals.base import PROTOCOLS
    from vitmods.evals.protocols import metric_named, options_for, unread

    protocol, measured = metric_named(name).protocol, options_for(name, options)
    ignored = unread(options, [PROTOCOLS[protocol]] if protocol else [])
    if options.shots not in (PAPERS.shots, measured.shots):  # the metric's name says how many
        ignored.append("shots")
    for option in ignored:
        value = getattr(options, option)
        raise UserError(f"The metric {name} does not depend on {option}={value}: leave --{option} out.")
    return Measure(name, measured)


def options_from(values: Mapping[str, Any]) -> Options:
    """Read options of the protocols from JSON."""
    options: dict[str, Any] = {name: tupled(value) for name, value in values.items()}
    if options.get("textures") is not None:
        options["textures"] = Path(options["textures"])
    return Options(**options)


if TYPE_CHECKING:  # the shell reads text; Python may also pass what a study resolves it to
    GridLike = Grid | Mapping[str, Any] | Iterable[str]
    MetricLike = Measure | str | None
    DesignLike = Design | str | None
else:
    GridLike = tyro.conf.UseAppendAction[tuple[str, ...]]
    MetricLike = str | None
    DesignLike = str | None


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """The comparison, and how it reaches verdicts."""

    # A new setting is a field here: the shell offers it, `vm.Study` accepts it, and `Settings` writes and reads it.

    until_decided: bool = False
    """look after 4, 5, 6, 8, ... seeds, and stop each arm once it is decided or futile (docs/verdicts.md)"""
    metric: MetricLike = None
    """metric to compare: top1, balanced_accuracy, ece, nll, fewshot10, mean_corruption_error, ... (docs/tuning.md);
    None: the first of the task, top1 of classes and map of labels"""
    margin: float | None = None
    """smallest difference that matters; None: 0.5 points, or 0.01 if the metric is not a fraction"""
    generalize: Literal["images", "seeds"] = "images"
    """what verdicts are about: also other images from the same source, or only new trainings on these test images"""
    family: int | None = None
    """number of arms the study will have, if some are added later: intervals are simultaneous over this many. None:
    these arms"""
    design: DesignLike = None
    """factorial: arms are switched on and off together, and each effect is an average over the others
    (docs/factorial.md). None: each arm is compared with base"""
    runs: int | None = None
    """combinations that a factorial study trains, including base; None: 8 for 3 and 4 arms, 16 for more"""
    folds: int | None = None
    """for images without splits: test seed s of every arm on part s mod FOLDS and train on the others; verdicts then
    generalize over training sets (docs/verdicts.md)"""
    tune: GridLike = ()
    """FIELD=VALUE,VALUE,... of the recipe: train every arm with each value, and report the one that is best on val, on
    fresh seeds (docs/tuning.md)"""
    tuning_seeds: int = 1
    """trials of each value that is tuned"""
    sweep: GridLike = ()
    """FIELD=VALUE,VALUE,... of the recipe, base, limit_train or data: train base and every arm with each value; gives
    one effect for each, and their average (docs/sweeps.md)"""
    reuse: tuple[str, ...] = ()
    """folders or addresses of studies whose finished trials are not trained again, besides those next to the study
    (docs/study.md)"""
    no_reuse: bool = False
    """train every trial, also those that a study next to this one has finished"""

    def __post_init__(self) -> None:
        """Raise UserError for settings that no study can have, before any image is listed."""
        object.__setattr__(self, "reuse", (self.reuse,) if isinstance(self.reuse, str) else tuple(map(str, self.reuse)))
        if self.reuse and self.no_reuse:
            raise UserError("no_reuse trains every trial: leave reuse out (--no-reuse excludes --reuse).")
        if self.metric is not None:
            measure = self.metric if isinstance(self.metric, Measure) else Measure(self.metric)
            object.__setattr__(self, "metric", make_measure(measure.name, measure.options))
        if self.margin is not None and not (isinstance(self.margin, Real) and self.margin >= 0):
            raise UserError(f"margin is how much worse an arm may be, 0 or more, not {self.margin!r}.")
        object.__setattr__(self, "tune", make_grid(self.tune))
        object.__setattr__(self, "sweep", sweep := make_grid(self.sweep, "--sweep"))
        if not self.tune and self.tuning_seeds != 1:
            raise UserError("Nothing is tuned: name values too, as --tune lr=1e-4,3e-4,1e-3.")
        if self.tuning_seeds < 1:
            raise UserError(f"tuning_seeds must be at least 1, not {self.tuning_seeds}.")
        if sweep and len(sweep.points) < 2:
            raise UserError(f"A sweep needs two values or more, not {sweep.points[0]} alone.")
        for option in ("sweep", "tune", "folds", "until_decided", "family"):
            if getattr(self, option):
                self.refuse(option)
        if self.runs is not None and "runs" not in self.kind.options:
            names = listing([kind.name for kind in DESIGNS.values() if "runs" in kind.options], "or")
            raise UserError(f'runs belongs to a {names} study: say design="{names}" (--runs needs --design {names}).')
        if self.folds is not None:
            if self.folds < 2:
                raise UserError(f"folds must be at least 2, not {self.folds}: each seed is tested on one of the parts.")
            if self.until_decided:
                raise UserError("With --folds the number of seeds is fixed: set --seeds, not --until-decided.")
            if self.tune:
                raise UserError(
                    "With folds nothing can be tuned: the images that values are chosen on are test images of other "
                    "seeds. Leave --folds or --tune out."
                )
            if self.generalize == "seeds":
                raise UserError("With folds verdicts are about other images too: leave --generalize seeds out.")

    @property
    def kind(self) -> type[Design]:
        """The design: the one that is named, or that follows from the other settings. UserError for an unknown one."""
        if isinstance(self.design, Design) and not self.design.is_implied:
            return type(self.design)
        name = self.design if isinstance(self.design, str) else ""
        return DESIGNS[name or ("sweep" if self.sweep else "arms")]

    @property
    def swept(self) -> dict[str, list[Any]]:
        """The values of each field of the sweep."""
        return make_grid(self.sweep).to_dict()

    def refuse(self, option: str) -> None:
        """Raise UserError if the design excludes a setting, or an option of the shell."""
        if option in self.kind.excludes:
            sweep = "several bases (--base)" if "base" in self.swept else "--sweep"
            raise UserError(self.kind.excludes[option].format(sweep=sweep))

    @property
    def usual_seeds(self) -> int:
        """The number of seeds if it is not given, or the maximum of a study that runs until it is decided."""
        return max(self.kind.most_seeds if self.until_decided else self.kind.usual_seeds, self.folds or 0)


def make_seeds(seeds: int | Iterable[int]) -> tuple[int, ...]:
    """A number of seeds (0, 1, ...) or the seeds themselves. UserError for none, a repeated or a too large one, and for
    what is not whole numbers."""
    listed: Any = [seeds] if isinstance(seeds, str | bool) or not isinstance(seeds, Iterable) else [*seeds]
    if odd := [seed for seed in listed if isinstance(seed, bool) or not hasattr(seed, "__index__")]:
        raise UserError(f"seeds is how many, or which, as 5 or [3, 7], not {odd[0]!r}.")
    chosen = tuple(map(operator.index, listed))
    if not isinstance(seeds, Iterable):
        if chosen[0] > MOST_SEEDS:
            raise UserError(f"{chosen[0]} seeds are more than the {MOST_SEEDS} that a study keeps apart.")
        chosen = tuple(range(chosen[0]))
    if not chosen:
        raise UserError(f"A study needs at least one seed, not {seeds}.")
    if len(set(chosen)) < len(chosen):
        raise UserError(f"A seed is given twice in {list(chosen)}.")
    if min(chosen) < 0 or max(chosen) >= MOST_SEEDS:
        raise UserError(f"Seeds are whole numbers from 0 to {MOST_SEEDS - 1}; got {list(chosen)}.")
    return chosen


@dataclass(frozen=True)
class Settings(StudySettings):
    """Everything that defines a study: `StudySettings`, resolved for its images, task and arms.

    fixed:        name -> JSON value, nested where it helps (`recipe.schedule`): of every trial; may never change
    arms, seeds:  what is compared; may grow
    design:       what the study asks, by which arms with which seeds
    known:        trials of base, of seeds 0, 1, ..., that had finished elsewhere when the study began
    spare:        how many seeds there may be, until the time of a budget has settled their number; 0: it is settled
    open:         names in `fixed`, fields of the recipe, and "seeds", that were not given: a stored study keeps its own
    """

    fixed: Mapping[str, Any]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    _: KW_ONLY
    metric: Measure = None  # type: ignore[assignment]
    margin: float = None  # type: ignore[assignment]
    tune: Grid = UNTUNED
    sweep: Grid = UNTUNED
    design: Design = None  # type: ignore[assignment]
    known: int = 0
    spare: int = field(default=0, compare=False)
    open: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        bases = [self.fixed["base"], *(point.to_dict().get("base") for point in self.sweep.points)]
        edits = (edit for arm in self.arms for edit in arm.changes)
        if any(map(is_foreign, bases)) and any(getattr(edit, "needs_reading", "") for edit in edits):
            object.__setattr__(self, "fixed", {**self.fixed, "in_place": False})
        if not isinstance(self.design, Design) or self.design.is_implied:
            object.__setattr__(self, "design", self.kind.plan(self))
            object.__setattr__(self, "arms", self.design.arms(self.arms))
        for name, value in self.design.chosen_options.items():
            object.__setattr__(self, name, value)
        if self.metric is None:
            object.__setattr__(self, "metric", measure_of(self.fixed["task"]))
        if self.margin is None:
            object.__setattr__(self, "margin", MARGINS[self.metric.metric.unit])
        if not self.margin < (100 if self.metric.metric.unit == "%" else math.inf):
            raise UserError(f"A margin of {self.margin:g} does not exclude any difference: give a smaller one.")

    @property
    def kind(self) -> type[Design]:
        """As `StudySettings.kind`; without arms, base alone."""
        kind = super().kind
        return kind if self.arms or not kind.is_implied else DESIGNS["base"]

    @property
    def measure(self) -> Measure:
        """The metric that is compared."""
        return self.metric

    @property
    def is_plain(self) -> bool:
        """Whether each arm is compared with base under one setting, all trials seeing the same images."""
        return self.kind in (DESIGNS["arms"], DESIGNS["base"]) and not (self.sweep or self.folds)

    @property
    def compared(self) -> int:
        """Number of arms that intervals are simultaneous over."""
        return max(self.family or 0, len(self.arms))

    @property
    def recipe(self) -> Recipe:
        return Recipe.from_dict(dict(self.fixed["recipe"]))

    def cell(self, arm: str, setting: Point = AS_IS, point: Point = AS_IS) -> Cell:
        """Return what an arm trains under a setting of the sweep, at a point of the grid."""
        place = arm, setting, point
        if place not in self._cells:
            self._cells[place] = make_cell(self.fixed, self.arm(arm), setting, point, self.folds)
        return self._cells[place]

    @cached_property
    def _cells(self) -> dict[tuple[str, Point, Point], Cell]:
        return {}

    def cells_at(self, setting: Point = AS_IS) -> list[Cell]:
        """List base and every arm under a setting, with the recipe that is not tuned."""
        return [self.cell(arm.name, setting) for arm in self.every_arm]

    @property
    def cells(self) -> list[Cell]:
        """List base and every arm under every setting of the sweep."""
        return [cell for setting in self.sweep.points for cell in self.cells_at(setting)]

    def seeds_of(self, arm: str) -> tuple[int, ...]:
        """The seeds of an arm; base also has those that were known."""
        return tuple(dict.fromkeys([*self.seeds, *range(self.known)])) if arm == BASE else self.seeds

    @property
    def is_settled(self) -> bool:
        """Whether the number of seeds is given, or was settled before."""
        return "seeds" not in self.open

    @property
    def most_seeds(self) -> tuple[int, ...]:
        """The seeds, and the spare ones after them."""
        return tuple(dict.fromkeys([*self.seeds, *self.first_seeds(self.spare)]))

    def first_seeds(self, count: int) -> tuple[int, ...]:
        """So many seeds, from the first one of the study on."""
        return tuple(range(self.seeds[0], self.seeds[0] + count))

    def with_seeds(self, seeds: Iterable[int], spare: int = 0) -> Settings:
        """Return the same study with these seeds, whose number is settled."""
        return replace(self, seeds=tuple(seeds), spare=spare, open=self.open - {"seeds"})

    def with_recipe(self, **fields: Any) -> Settings:
        """The same study with other fields of the recipe."""
        recipe = json.loads(json.dumps(self.recipe.with_(**fields).to_dict()))
        return replace(self, fixed={**self.fixed, "recipe": recipe})

    @property
    def factors(self) -> tuple[Arm, ...]:
        """The arms as they were given: of a factorial study its changes, since its arms are runs."""
        return self.design.factors(self.arms)

    def continuing(self, recorded: Mapping[str, Any]) -> Settings:
        """The same with what is open as it was recorded (from `to_dict`), with places of images, splits and weights as
        they were spelled, and with the recorded runs of a factorial study, where it is of the same changes and as many
        runs."""
        fixed = {name: recorded[name] for name in self.open.intersection(self.fixed, recorded)}
        for name in ("data", "split_file"):
            now, before = self.fixed.get(name), recorded.get(name)
            if now and before and is_same_place(now, before):
                fixed[name] = before
        start, started = self.fixed.get("start"), recorded.get("start")
        if start and started and is_same_place(start["source"], started["source"]):
            fixed["start"] = {**start, "source": started["source"]}
        if any(name not in self.fixed for name in self.open - {"seeds"}):
            old = Recipe.from_dict(recorded["recipe"]).settings()
            old = {"rates": (), **old}
            self = self.with_recipe(**{name: old[name] for name in (self.open | {"rates"}).intersection(old)})
        settings = replace(self, fixed={**self.fixed, **fixed})
        if recorded.get("design", {}).get("kind") != settings.design.to_dict().get("kind"):
            return settings
        design = settings.design.continuing(recorded.get("design", {}))
        return replace(settings, arms=design.arms(settings.factors), design=design)

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
        return self.design.looks(self) if self.until_decided else ()

    @property
    def seeds_for_tuning(self) -> range:
        """The seeds with which the points of the grid are compared; none without tuning."""
        return range(MOST_SEEDS, MOST_SEEDS + self.tuning_seeds * bool(self.tune))

    @property
    def matched_points(self) -> int:
        """With how many points, at most, that arms chose and base did not, base is trained too: with every seed."""
        return min(len(self.arms), len(self.tune.points) - 1) if self.design.tunes_base else 0

    def places(self) -> Iterator[tuple[Point, str, int]]:
        """Yield the setting, the arm and the seed of each trial that the answer counts: seed by seed, base first."""
        for setting, seed, arm in itertools.product(self.sweep.points, self.seeds_of(BASE), self.every_arm):
            if seed in self.seeds_of(arm.name) and self.design.trains(self, setting, arm.name, seed):
                yield setting, arm.name, seed

    @property
    def planned(self) -> int:
        """How many trials there are; of a study that runs until it is decided, or is tuned, at most."""
        matched = len(self.sweep.points) * self.matched_points * len(self.seeds)
        return sum(1 for _ in self.places()) + matched + len(self.tuning_trials())

    def tuning_trials(self) -> list[Trial]:
        """The trials by which points are chosen; empty if nothing is tuned."""
        places = itertools.product(self.sweep.points, self.seeds_for_tuning, self.every_arm, self.tune.points)
        return [Trial(self.cell(arm.name, setting, point), seed) for setting, seed, arm, point in places]

    def trial(self, name: Mapping[str, Any]) -> Trial:
        """The inverse of `Trial.to_dict`."""
        point, setting = (Point.from_dict(name[place]) for place in ("point", "setting"))
        cell = self.cell(name["arm"], setting, point)
        return Trial(cell.on_all_images() if name["on_all_images"] else cell, name["seed"])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without settings that are None or empty."""
        settings = {field.name: getattr(self, field.name) for field in fields(StudySettings)}
        settings |= {"runs": None, "tuning_seeds": [*self.seeds_for_tuning]}  # the design has its runs
        for name, value in settings.items():
            if hasattr(value, "to_dict"):
                settings[name] = value.to_dict()
            elif isinstance(value, tuple):
                settings[name] = list(value)
        settings["known"] = self.known or None
        used = {name: value for name, value in settings.items() if value not in (None, [], {})}
        return {
            **self.fixed,
            "arms": {arm.name: arm.identity() for arm in self.arms},
            "seeds": list(self.seeds),
            **used,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`. Raises UserError for damaged settings."""
        fixed = dict(values)
        try:
            arms = tuple(Arm.from_identity(name, arm) for name, arm in fixed.pop("arms").items())
            settings = {field.name: fixed.pop(field.name) for field in fields(StudySettings) if field.name in fixed}
            settings |= {name: Grid.from_dict(settings.get(name, {})) for name in ("tune", "sweep")}
            settings["tuning_seeds"] = len(settings.get("tuning_seeds", [0]))
            fixed.pop("tune_on", None)  # of an older study: val
            settings["metric"] = Measure.from_dict(settings["metric"])
            if "design" in settings:
                settings["design"] = DESIGNS[settings["design"]["kind"]].from_dict(settings["design"])
            settings["known"] = fixed.pop("known", 0)
            study = cls(fixed, arms, tuple(map(operator.index, fixed.pop("seeds"))), **settings)
            _ = study.cells, fixed["task"]  # an error for what they lack
            return study
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"The settings of the study cannot be read ({error!r}): study.json is damaged.") from error


class Rung(NamedTuple):
    """A study that a time budget is tried with, its recipe in words, the number of training images and the median short
    side of their files in pixels, each 0 if unknown."""

    settings: Settings
    recipe_note: str
    images: int
    side: int


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings in which `new` is another study than `old` (both from `Settings.to_dict`), as `name: old -> new`.

    Added arms, seeds and values to tune or to sweep over, another margin and another metric do not count: nothing that
    was trained depends on them.
    """
    if old.get("design") != new.get("design"):
        designs = [settings.get("design", {}) for settings in (old, new)]
        was, now = (DESIGNS[design.get("kind", "arms")].describe(design) for design in designs)
        return [f"design: {was} -> {now}"]
    may_grow = {"arms", "seeds", "known", "tune_on", *(field.name for field in fields(StudySettings))} - {"folds"}
    before, after = (
        flatten({name: value for name, value in settings.items() if name not in may_grow})
        for settings in (as_now(old), new)
    )
    for settings in (before, after):
        is_read = settings.pop("in_place", True) is False
        settings["models"] = (
            "read as vitmods ViTs, as an arm needs (compare such arms in another folder)"
            if is_read
            else "changed in place"
        )
    names = dict.fromkeys([*before, *after])
    pairs = [(name, before.get(name, "(not set)"), after.get(name, "(not set)")) for name in names]
    for name, arm in old["arms"].items():
        pairs.append((f"arm {name}", _show_arm(arm), _show_arm(new["arms"].get(name))))
    for grid in ("tune", "sweep"):
        was, now = old.get(grid, {}), new.get(grid, {})
        if set(was) != set(now):  # every trial has a value of each field
            pairs.append((grid, " ".join(was) or "(nothing)", " ".join(now) or "(nothing)"))
            continue
        left_out = [name for name in was if any(value not in now[name] for value in was[name])]
        pairs += [(f"{grid} {name}", was[name], now[name]) for name in left_out]
    if not set(old["seeds"]) <= set(new["seeds"]):
        pairs.append(("seeds", old["seeds"], new["seeds"]))
    return [f"{name}: {was} -> {now}" for name, was, now in pairs if was != now]


def as_now(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file, whose recipe may lack fields that were added later, with the recipe as it is written now."""
    recipe = json.loads(json.dumps(Recipe.from_dict(settings["recipe"]).to_dict()))
    return {**settings, "recipe": recipe}


def _show_arm(arm: Mapping[str, Any] | None) -> str:
    if arm is None:
        return "(missing)"
    overrides = ", ".join(f"{name}={value}" for name, value in arm["recipe"].items())
    start = f" from {arm['start']}" if "start" in arm else ""
    return f"{arm['changes']}{start}{f' with {overrides}' if overrides else ''}"


def _check_metric(metric: Metric, task: str) -> None:
    """Raise UserError if neither a protocol nor the task measures a metric."""
    from vitmods.tasks.base import TASKS

    measured = [other.name for other in TASKS[task].metrics]
    if metric.protocol or metric.name in measured:
        return
    others = [name for name, kind in TASKS.items() if metric.name in {other.name for other in kind.metrics}]
    raise UserError(
        f"The task {task} does not measure {metric.name}, which {listing(others, 'or')} does: compare by "
        f"{listing(measured, 'or')}, or by a metric of a protocol."
    )


def check_settings(settings: Settings) -> None:
    """Raise UserError for settings that do not go together with the arms, the seeds, the recipe or the images."""
    fixed, swept = settings.fixed, {name for name, _ in settings.sweep.fields}
    if settings.family is not None and settings.family < len(settings.arms):
        raise UserError(f"family counts all arms of the study, {len(settings.arms)} or more, not {settings.family}.")
    _check_metric(settings.measure.metric, fixed["task"])
    if settings.folds and fixed.get("fold"):
        raise UserError("With folds each seed has its own fold: leave --fold out.")
    if "base" in swept and "start" in fixed:
        raise UserError(f"{SAYS_BASE}: drop --base, and base in --sweep.")
    if "limit_train" in swept and fixed.get("limit_train") is not None:
        raise UserError(f"limit_train={fixed['limit_train']} is swept over too: leave one of the two out.")
    _ = settings.looks  # a UserError for too few or too many seeds
    if len(settings.seeds) < settings.design.least_seeds:
        raise UserError(
            f"A {settings.design.name} study needs {settings.design.least_seeds} seeds or more: a spread cannot be "
            "estimated from one."
        )
    for name in sorted(swept & {name for name, _ in settings.tune.fields}):
        raise UserError(f"{name} is both tuned and swept over: leave one of the two out.")
    for grid, what in ((settings.tune, "tuned"), (settings.sweep, "swept over")):
        names = {name for name, _ in grid.fields}
        if "epochs" in names and settings.recipe.steps is not None and "steps" not in names:
            raise UserError(f"Trainings of {settings.recipe.steps:,} steps do not depend on epochs: name steps.")
        for arm in settings.arms:
            for name in sorted(names.intersection(arm.recipe)):
                raise UserError(
                    f"Arm {arm.name} sets {name}={arm.recipe[name]}, and {name} is {what} for every arm alike. Leave "
                    f"it out of the arm, or of what is {what}."
                )
    for arm in settings.arms:
        if any(getattr(change, "trains", "") for change in arm.changes) and not (arm.start or fixed.get("start")):
            raise UserError(f"Arm {arm.name} adapts trained weights and freezes them: add --from WEIGHTS.")
    set_somewhere = swept.union((name for name, _ in settings.tune.fields), *(arm.recipe for arm in settings.arms))
    has_one_kind = set_somewhere.isdisjoint(("optimizer", "schedule"))  # else another point or arm may read a field
    for setting, arm, point in itertools.product(settings.sweep.points, settings.every_arm, settings.tune.points):
        place = ", ".join(filter(None, map(str, (setting, point))))
        try:
            cell = settings.cell(arm.name, setting, point)
            if has_one_kind:
                cell.recipe.check_read({*arm.recipe, *dict(setting.values), *dict(point.values)})
        except UserError as error:
            raise UserError(f"{place}: {error}" if place else str(error)) from error
    base = settings.cell(BASE).recipe
    for arm in settings.arms:
        if not arm.changes and arm.start is None and settings.cell(arm.name).recipe == base:
            raise UserError(f"Arm {arm.name} ({arm.text}) is base itself, part of every study: leave it out.")
