"""The answer of a study, read from its trials: effects, costs, the outcome of every trial, and caveats to know before
acting on a verdict."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import statistics
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from vitmods import __version__
from vitmods.evals.protocols import metric_named
from vitmods.stats.decision import Decision
from vitmods.stats.factorial import Factorial
from vitmods.stats.settings import OverSettings
from vitmods.stats.verdict import POINTS_PER_FRACTION, Effect
from vitmods.study.arms import BASE, Arm
from vitmods.study.doubts import outcome_doubts, planning_doubts
from vitmods.study.grid import AS_IS, Point, mean_of, show_value
from vitmods.study.plan import Settings, Trial
from vitmods.study.questions import Look, decision_at, factorial_at, looks, over_settings_at, spare_trials
from vitmods.study.state import (
    HIDDEN,
    Curve,
    StudyState,
    TrialRecord,
    at_the_edge,
    evaluated_of,
    read_curves,
    with_begun_seeds,
)
from vitmods.study.store import SCHEMA, Facts, ModelFacts, Sample, StudyFolder, model_name, read_object
from vitmods.tasks.base import TASKS
from vitmods.tasks.metrics import Metric
from vitmods.util.address import named
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import write_atomically, write_json
from vitmods.util.registry import Registry
from vitmods.util.text import no_formula


def outcomes(state: StudyState) -> Iterator[str]:
    """Failures and warnings of trials; in tuning, trials of points that are not chosen may diverge."""
    for trial, record in state.records.items():
        if record.status == "failed" or (record.status == "diverged" and not trial.for_tuning):
            yield f"{record} {record.status}: {record.message}"
    for record in state.records.values():
        yield from (f"{record}: {warning}" for warning in record.warnings)


@dataclass(frozen=True)
class CostRatio:
    """Arm / base: the median over rounds, and its 95 % interval."""

    ratio: float
    low: float
    high: float
    batch: int | None = None


@dataclass(frozen=True)
class ArmCost:
    """The costs of an arm as ratios to base; `flops` is None for models without a FLOP count."""

    params: float
    flops: float | None
    train_step: CostRatio
    infer_1: CostRatio
    infer_n: CostRatio
    peak_memory: CostRatio
    infer_memory: CostRatio | None = None
    """of the batch of `infer_n`; None if it was not measured"""
    against: str | None = None
    """how base and the arm are built, if they are built differently"""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ArmCost:
        fields: dict[str, Any] = {k: CostRatio(**v) if isinstance(v, Mapping) else v for k, v in values.items()}
        return cls(**fields)


@dataclass(frozen=True)
class BaseCost:
    """The costs of base: parameters, multiply-adds, seconds, and peak bytes of training and of inference."""

    params: int
    macs: int | None
    train_step_s: float
    infer_1_s: float
    infer_n_s: float
    peak_memory_bytes: int
    train_batch: int
    infer_batch: int
    infer_memory_bytes: int | None = None


@dataclass(frozen=True)
class PointScores:
    """One point of the grid: the metric on val by seed (None if the trial diverged or has not ended), and its mean."""

    values: Mapping[str, Any]
    scores: Mapping[int, float | None]
    mean: float | None


@dataclass(frozen=True)
class Tuning:
    """The points of an arm, the chosen one (None: not yet), and the fields whose choice is the first or last tried."""

    chosen: Mapping[str, Any] | None
    at_the_edge: tuple[str, ...]
    points: tuple[PointScores, ...]


@dataclass(frozen=True)
class SettingAnswer:
    """The scores and costs under one setting of a sweep; `Answer.over_settings` has the effects.

    scores: arm, including base -> seed -> the metric
    tuning: arm, including base -> its points; empty without tuning
    """

    name: str
    values: Mapping[str, Any]
    scores: Mapping[str, Mapping[int, float | None]]
    tuning: Mapping[str, Tuning] = field(default_factory=dict)
    base_cost: BaseCost | None = None
    costs: Mapping[str, ArmCost] = field(default_factory=dict)


@dataclass(frozen=True)
class ArmAnswer:
    """The results of one arm, or of base, whose effect and cost are None. A sweep's scores are means over settings.

    scores:        seed -> the metric on the answer's images; None without a score
    other_metrics: metric -> seed -> value
    trials:        every planned trial; in a tuned study, those that compared its points are read on val
    tuning:        None without tuning, and in a sweep, whose settings have it
    """

    name: str
    changes: str
    recipe: Mapping[str, Any]
    model: ModelFacts
    scores: Mapping[int, float | None]
    other_metrics: Mapping[str, Mapping[int, float]]
    trials: tuple[TrialRecord, ...]
    tuning: Tuning | None = None
    effect: Effect | None = None
    cost: ArmCost | None = None

    @property
    def mean(self) -> float | None:
        """The mean of the scores so far."""
        return mean_of(self.scores.values())

    @property
    def counted(self) -> tuple[TrialRecord, ...]:
        """The trials whose scores count."""
        return tuple(trial for trial in self.trials if trial.counted)


@dataclass(frozen=True)
class Running:
    """A run that works on the study of an answer.

    written: when the answer was read
    left_s:  seconds until the last trial ends; None: unknown
    due:     if the report is not written again by then, the run has stopped; None: unknown
    """

    written: datetime
    left_s: float | None = None
    due: datetime | None = None


Costs = dict[Point, tuple[BaseCost | None, dict[str, ArmCost]]]
"""setting -> the costs of base and of each arm"""


def read_costs(folder: StudyFolder, settings: Settings) -> tuple[dict[str, Any], Costs]:
    """Read costs.json, as it is and as costs by setting. A damaged file is a warning and counts as empty, since the
    effects do not depend on it."""
    costs: Costs = {}
    try:
        recorded = read_object(folder.costs_file)
        for point in settings.sweep.points:
            values = costs_under(recorded, point)
            arms = {name: ArmCost.from_dict(cost) for name, cost in values.get("arms", {}).items()}
            costs[point] = BaseCost(**values["base"]) if values.get("base") else None, arms
    except (AttributeError, TypeError, ValueError) as error:
        warnings.warn(
            f"{named(folder.costs_file)} is damaged ({error}): the costs of arms are unknown until the same command "
            "measures them again.",
            stacklevel=2,
        )
        return {}, {point: (None, {}) for point in settings.sweep.points}
    return recorded, costs


def costs_under(costs: Mapping[str, Any], setting: Point) -> dict[str, Any]:
    """Select from costs.json what was measured under a setting, which depends only on its base."""
    base = setting.to_dict().get("base")
    return dict(costs if base is None else costs.get(base, {}))


VIEWS: Registry[Callable[..., Any]] = Registry("view of an answer", "vitmods.report")
"""text, bibtex, methods: Answer -> str; html: (Answer, path or None) -> path of the report"""


@dataclass(frozen=True, repr=False)
class Answer:
    """The results of a study. Prints itself as the table of verdicts; `answer["dpn"]` is that arm's `Effect`.

    metric, splits:  what is compared, and on which images
    margin:          a smaller difference does not matter; in points if the metric is a fraction
    base:            base, or the arm that the others are compared with instead
    arms:            in the order of the study
    decision:        the effects, and what holds for all of them; of a sweep, on average over its settings
    factorial:       of a factorial study, whose arms are runs: the effects of its changes
    confirmed:       of a factorial study: the effect of its best combination on fresh seeds, if it was trained on some
    sweep:           the results under each setting
    over_settings:   of a sweep: averages, the effects under each setting, and whether they differ
    looks:           of a study that runs until it is decided: the decision at each number of seeds
    tuned:           recipe fields and the values that every arm was trained with; None if nothing was tuned
    complete:        whether every trial has been run
    doubts:          what to know before acting on a verdict; part of the warnings
    path:            the study's folder
    curves:          the metric of `trials[...].curve`
    running:         the run that works on the study, if it wrote this answer; part of the report alone
    """

    created: str
    metric: Metric
    splits: tuple[str, ...]
    margin: float
    base: ArmAnswer
    arms: tuple[ArmAnswer, ...]
    decision: Decision
    complete: bool
    command: str
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    resolved: Mapping[str, Any]
    environment: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    other_metrics: Mapping[str, Metric] = field(default_factory=dict)
    base_cost: BaseCost | None = None
    factorial: Factorial | None = None
    confirmed: Effect | None = None
    sweep: tuple[SettingAnswer, ...] = ()
    over_settings: OverSettings | None = None
    looks: tuple[Look, ...] = ()
    tuned: Mapping[str, Sequence[Any]] | None = None
    vitmods: str = __version__
    curves: Metric | None = field(default=None, metadata=HIDDEN)
    samples: tuple[Sample, ...] = field(default=(), metadata=HIDDEN)
    path: Path = field(default=Path(), metadata=HIDDEN)
    running: Running | None = field(default=None, metadata=HIDDEN)

    @classmethod
    def load(cls, path: str | Path, reference: str = BASE) -> Answer:
        """Read the answer of the study in a folder or at an address, finished or not.

        reference: the arm that all others, including base, are compared with. Raises UserError without such a study or
        arm.
        """
        folder = StudyFolder(path)
        folder.refresh()
        return read_answer(folder, folder.known_facts(), reference=reference)

    @property
    def effects(self) -> dict[str, Effect]:
        """Arm -> Effect, in the order of the study."""
        return {arm.name: arm.effect for arm in self.arms if arm.effect}

    @property
    def headline(self) -> Mapping[str, Effect]:
        """Arm -> Effect, or change -> Effect in a factorial study."""
        return self.factorial.effects if self.factorial else self.effects

    @property
    def every_arm(self) -> tuple[ArmAnswer, ...]:
        """Base and the arms."""
        return (self.base, *self.arms)

    @property
    def base_mean(self) -> float | None:
        """The mean of base over the seeds that the effects are read from: known ones and those of the last look, or
        all."""
        scores, earlier = self.base.scores, range(self.settings.get("known", 0))
        seeds = list(scores)[: self.looks[-1].seeds if self.looks else None]
        return mean_of(
            score for seed, score in scores.items() if seed in seeds or (self.base.name == BASE and seed in earlier)
        )

    @property
    def trials(self) -> list[TrialRecord]:
        return [trial for arm in self.every_arm for trial in arm.trials]

    @property
    def has_diverged(self) -> bool:
        """Whether every trial of base that has ended diverged, so that nothing can be compared."""
        ended = [trial.status for trial in self.base.counted if trial.ended]
        return bool(ended) and set(ended) == {"diverged"}

    @property
    def failed(self) -> list[str]:
        """A line for each trial that failed in the last run, or is damaged."""
        return [f"{trial}: {trial.message}" for trial in self.trials if trial.status in ("failed", "damaged")]

    @property
    def chosen(self) -> dict[str, Mapping[str, Any] | None]:
        """Arm, including base -> the values of its chosen point, None before the choice; in a sweep the keys are
        `SETTING, ARM`. Empty without tuning."""
        pairs = ((setting, arm, tuning) for setting, arms in self.tunings.items() for arm, tuning in arms.items())
        return {", ".join(filter(None, (setting, arm))): tuning.chosen for setting, arm, tuning in pairs}

    @property
    def tunings(self) -> dict[str, Mapping[str, Tuning]]:
        """Setting of a sweep, or "" -> arm, including base -> its tuning. Empty without tuning."""
        alone = {arm.name: arm.tuning for arm in self.every_arm if arm.tuning}
        of_settings = {setting.name: setting.tuning for setting in self.sweep if setting.tuning}
        return {"": alone} if alone else of_settings

    def __getitem__(self, arm: str) -> Effect:
        if arm not in self.headline:
            raise UserError(f"The study does not have an arm {arm!r}. {nearest(arm, self.headline)}")
        return self.headline[arm]

    def __repr__(self) -> str:
        return str(VIEWS["text"](self))

    @property
    def _table(self) -> Decision:
        return _of_changes(self.decision, self.factorial) if self.factorial else self.decision

    def to_markdown(self) -> str:
        """Format the effects as a table for a README."""
        return self._table.to_markdown()

    def to_latex(self) -> str:
        """Format the effects as a `tabular` with the rules of booktabs."""
        return self._table.to_latex()

    def to_bibtex(self) -> str:
        """Format the papers of the changes and of the reproduced table, and vitmods itself, as BibTeX."""
        return str(VIEWS["bibtex"](self))

    def to_methods(self) -> str:
        """Describe models, images, recipe, seeds and statistics in a paragraph for a paper."""
        return str(VIEWS["methods"](self))

    def to_pandas(self) -> Any:
        """Return the effects as a data frame. Raises UserError without pandas."""
        return self._table.to_pandas()

    def to_dict(self) -> dict[str, Any]:
        """Return the content of results.json."""
        fields: dict[str, Any] = _plain(self)
        return {"schema": SCHEMA, **fields}

    def to_csv(self) -> str:
        """Return the content of results.csv: for each trial its metrics (fractions as fractions) and its paired
        difference to base. A tuned study adds the point and the metric on val; only trials of chosen points have the
        others."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(_csv_rows(self))
        return text.getvalue()

    def write(self) -> None:
        """Write results.json and results.csv to the study's folder. Raises UserError if that fails."""
        write_json(self.path / "results.json", self.to_dict())
        write_atomically(self.path / "results.csv", lambda file: file.write(self.to_csv().encode()))

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report as one HTML file, or as a figure of the verdicts if the name ends with .svg, .pdf or .png;
        returns its path. The default is report.html in the study's folder, or report-dpn.html with the reference dpn.

        results.json and results.csv, which are always against base, are written too; failing to write them is only a
        warning if the report goes elsewhere. Raises UserError if the report cannot be written.
        """
        try:
            self.write() if self.base.name == BASE else None
        except UserError as error:
            if path is None:
                raise
            warnings.warn(f"{error} The report is of what results.json would hold.", stacklevel=2)
        return VIEWS["html"](self, path)


def read_answer(
    folder: StudyFolder,
    facts: Facts,
    settings: Settings | None = None,
    reference: str = BASE,
) -> Answer:
    """Read the answer from a study's folder, finished or not.

    Args:
        settings: None: from the facts.
        reference: the arm that the others are compared with.

    Raises:
        UserError: a file that the whole answer depends on is damaged, or the study does not have the arm. A damaged
            trial is reported in the answer.
    """
    with folder.naming_damage():
        settings = with_begun_seeds(folder, facts, settings or Settings.from_dict(facts.settings))
        metric, task_metric = settings.measure.metric, TASKS[settings.fixed["task"]].metrics[0]
        evaluated, first = evaluated_of(folder, facts), settings.sweep.points[0]
        models = {arm.name: facts.models[model_name(first, arm.name)] for arm in settings.every_arm}
    if not settings.arms:
        raise UserError(
            f"{named(folder.path)} has trials of base only: base.json describes them. Compare arms in another folder "
            "next to it, which reuses them."
        )
    if reference not in (names := [arm.name for arm in settings.every_arm]):
        raise UserError(f"The study does not have an arm {reference!r}. {nearest(reference, names)}")
    if reference != BASE and settings.design:
        raise UserError(
            "A factorial study compares each change with its absence: leave the reference out (--reference)."
        )

    # The trials, and the curves of the study's metric, or else of the task's, whichever was logged.
    state, curve_names = StudyState(folder, settings, evaluated), (metric.name, task_metric.name)
    taken = () if settings.sweep else tuple(looks(state))
    stopped = {arm for look in taken for arm in look.stopped}
    for trial in (spare := spare_trials(state, taken)):  # whether one has ended depends on the time that trials take
        record = state.answered[trial]
        state.answered[trial] = TrialRecord(record.arm, record.seed, "unfinished", record.folder, record.point)
    records = state.records
    logged = {trial: {} if trial in spare else read_curves(folder.trial(trial), curve_names) for trial in records}
    curve_name = next((name for name in curve_names if any(name in curves for curves in logged.values())), "")
    records = {
        trial: replace(record, curve=logged[trial].get(curve_name, Curve()), counted=trial in state.answered)
        for trial, record in records.items()
    }
    records = dict(_with_steps_to_base(state, records, _metric_of(curve_name or metric.name)))
    curve_metric = _metric_of(curve_name) if curve_name else None
    arms = {arm.name: _arm(state, models[arm.name], records, arm) for arm in settings.every_arm}
    base = arms.pop(reference)

    # The decision: on average over a sweep, at the last look of a study until decided, else on all trials.
    last = taken[-1].decision if taken else None
    over = over_settings_at(state, reference) if settings.sweep else None
    if over:
        decision = over.decision
    elif reference == BASE and isinstance(last, Decision):
        decision = last
    else:
        decision = decision_against(state, reference, stopped)
    changes = None
    if settings.design is not None:
        changes = last if isinstance(last, Factorial) else factorial_at(state, settings.seeds)
    ended = all(record.ended or state.arms_of(trial) <= stopped for trial, record in state.records.items())

    counted = _of_changes(decision, changes) if changes else decision
    doubts = (*planning_doubts(state), *outcome_doubts(counted, base.counted, curve_metric))
    state.enter_look()
    _, costs = read_costs(folder, settings)
    has_costs = reference == BASE and "base" not in dict(settings.sweep.fields)
    base_cost, arm_costs = costs[first] if has_costs else (None, {})
    by_setting = []
    for point in filter(None, settings.sweep.points):
        scores: dict[str, dict[int, float | None]] = {arm.name: {} for arm in settings.every_arm}
        for trial, record in state.answered.items():
            if trial.setting == point:
                scores[trial.arm.name][trial.seed] = record.score(metric.name)
        tuning = {arm.name: _tuning(state, point, arm) for arm in settings.every_arm} if settings.tune else {}
        by_setting.append(SettingAnswer(str(point), point.to_dict(), scores, tuning, *costs[point]))
    return Answer(
        created=facts.created,
        metric=metric,
        splits=state.splits if any(record.images for record in records.values()) else state.splits[-1:],
        margin=settings.margin,
        base=base,
        arms=tuple(
            replace(arm, effect=decision.effects.get(name), cost=arm_costs.get(name)) for name, arm in arms.items()
        ),
        decision=decision,
        complete=not facts.plan.spare and (len(stopped) == len(settings.arms) or ended),
        command=facts.command,
        data=facts.data,
        settings=facts.settings,
        resolved=facts.resolved,
        environment=facts.environment,
        warnings=(*doubts, *facts.data.get("warnings", ()), *facts.warnings, *outcomes(state)),
        doubts=doubts,
        other_metrics={name: _metric_of(name) for arm in (base, *arms.values()) for name in arm.other_metrics},
        base_cost=base_cost,
        factorial=changes,
        confirmed=_confirmed(folder, changes) if changes else None,
        sweep=tuple(by_setting),
        over_settings=over,
        looks=taken,
        tuned=settings.tune.to_dict() or None,
        curves=curve_metric,
        samples=tuple(folder.samples()),
        path=folder.path,
    )


def decision_against(state: StudyState, reference: str, stopped: Container[str]) -> Decision:
    """Compare with another arm than base. Arms that stopped before the first look at all pairs, which is later than
    that at a known base, do not hold up the others; they have no interval."""
    early: dict[str, Effect] = {}
    while True:
        decision = decision_at(state, state.settings.seeds, base=reference, frozen=early)
        waiting = [effect for effect in decision.effects.values() if effect.arm in stopped and effect.arm not in early]
        if not waiting or any(not math.isnan(effect.low) for effect in decision.effects.values()):
            return decision
        fewest = min(effect.n for effect in waiting)
        early |= {effect.arm: effect for effect in waiting if effect.n == fewest}


def _of_changes(runs: Decision, changes: Factorial) -> Decision:
    """Replace the effects in a decision on runs by those of the changes."""
    notes = (*changes.notes, *filter(None, [changes.prediction]))
    cleared: dict[str, Any] = {"best": (), "ruled_out": (), "pairs": {}, "look": changes.look}
    return replace(runs, effects=dict(changes.effects), family=len(changes.effects), notes=notes, **cleared)


def _confirmed(folder: StudyFolder, changes: Factorial) -> Effect | None:
    """Read the effect of the best combination on fresh seeds; None unless it was trained on all of them."""
    name = "+".join(changes.best)
    confirmation = folder.confirmation(name)
    try:
        facts = confirmation.facts() if changes.best else None
        answer = read_answer(confirmation, facts) if facts else None
    except UserError as error:  # the study itself is not damaged
        warnings.warn(f"What was confirmed is not known: {error}", stacklevel=2)
        return None
    return answer.effects.get(name) if answer and answer.complete else None


def _arm(state: StudyState, model: ModelFacts, records: Mapping[Trial, TrialRecord], arm: Arm) -> ArmAnswer:
    """Collect the results of an arm; under several settings, the means of the seeds that have ended under each."""
    settings, metric, points = state.settings, state.settings.measure.name, state.settings.sweep.points
    values: dict[str, dict[int, list[float]]] = {metric: {}}
    for seed in settings.seeds_of(arm.name):
        trials = [state.trial(setting, arm.name, seed) for setting in points]
        finished = [records[trial] for trial in trials if trial and records[trial].status == "finished"]
        for record in finished if len(finished) == len(points) else ():
            for name, value in record.metrics.items():
                values.setdefault(name, {}).setdefault(seed, []).append(value)
    means = {name: {seed: math.fsum(v) / len(v) for seed, v in by_seed.items()} for name, by_seed in values.items()}
    scores = means.pop(metric)
    return ArmAnswer(
        name=arm.name,
        changes=arm.text,
        recipe=dict(arm.recipe),
        model=model,
        scores={seed: scores.get(seed) for seed in settings.seeds_of(arm.name)},
        other_metrics=means,
        trials=tuple(record for trial, record in records.items() if trial.arm == arm),
        tuning=_tuning(state, AS_IS, arm) if settings.tune and not settings.sweep else None,
    )


def _tuning(state: StudyState, setting: Point, arm: Arm) -> Tuning:
    selection = state.selections[setting, arm.name]
    tried = tuple(PointScores(p.to_dict(), on_val, mean_of(on_val.values())) for p, on_val in selection.scores.items())
    chosen = selection.chosen
    edge = tuple(at_the_edge(state.settings.tune, chosen)) if chosen else ()
    return Tuning(chosen.to_dict() if chosen else None, edge, tried)


def _with_steps_to_base(
    state: StudyState, records: Mapping[Trial, TrialRecord], metric: Metric
) -> Iterator[tuple[Trial, TrialRecord]]:
    """Add when each trial reached base's final score: the mean over its finished trials under the same setting."""
    sign = 1 if metric.higher_is_better else -1
    ends: dict[Point, list[float]] = {}
    for trial, record in records.items():
        if trial in state.answered and trial.arm.name == BASE and record.status == "finished" and record.curve.score:
            ends.setdefault(trial.setting, []).append(sign * record.curve.score[-1])
    for trial, record in records.items():
        target = statistics.fmean(ends.get(trial.setting, [math.inf]))
        reached = (step for step, score in zip(record.curve.step, record.curve.score) if sign * score >= target)
        yield trial, replace(record, steps_to_base=next(reached, None))


def _metric_of(name: str) -> Metric:
    """Return the metric of that name; a name that protocols do not know is a loss that training measures."""
    try:
        return metric_named(name)
    except UserError:
        return Metric(name, name, "", higher_is_better=False, unit="")


def _csv_rows(answer: Answer) -> Iterator[list[Any]]:
    metric, fields = answer.metric, list(answer.tuned or {})
    names, swept = [metric.name, *answer.other_metrics], list(answer.sweep[0].values if answer.sweep else ())
    tuned = [*fields, f"val_{metric.name}"] if fields else []
    difference = "difference_points" if metric.unit == "%" else "difference"
    yield [*swept, "arm", "changes", *tuned, "seed", "status", *names, difference, "steps_to_base", "wall_s", "folder"]
    bases = {(str(trial.setting), trial.seed): trial.score(metric.name) for trial in answer.base.counted}
    for arm in answer.every_arm:
        for trial in arm.trials:
            tried, on_val = [show_value(trial.point[name]) for name in fields], trial.for_tuning
            chosen = [trial.score(metric.name) if on_val else ""] if fields else []
            values: list[Any] = ["" if on_val else trial.metrics.get(name, "") for name in names]
            base = bases.get((str(trial.setting), trial.seed))
            apart = arm is not answer.base and values[0] != "" and base is not None
            gap = (POINTS_PER_FRACTION if metric.unit == "%" else 1) * (values[0] - base) if apart else ""
            start = map(
                no_formula, [*(show_value(trial.setting[name]) for name in swept), arm.name, arm.changes, *tried]
            )
            place = [trial.steps_to_base, trial.wall_s, trial.folder]
            yield [*start, *chosen, trial.seed, trial.status, *values, gap, *place]


def _plain(value: Any) -> Any:
    """Convert to what JSON returns: None if not finite, fields as keys, without fields that only the report needs."""
    if isinstance(value, Decision | Effect | Factorial):
        return _plain(value.to_dict())
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.metadata.get("json", True)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
