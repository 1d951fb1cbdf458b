"""From the trials of a study to its answer: effects, costs, warnings and every trial's end.

The parts of an answer: what came out of an arm, of a setting, of the points that were tried, and what it costs.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitmods import __version__
from vitmods.evals.protocols import metric_named
from vitmods.stats.decision import Decision
from vitmods.stats.factorial import Factorial
from vitmods.stats.settings import OverSettings
from vitmods.stats.verdict import POINTS, Effect
from vitmods.study.arms import BASE, Arm
from vitmods.study.doubts import outcome_doubts, outcomes, planning_doubts
from vitmods.study.plan import AS_IS, Point, Settings, Trial, mean_of, show_value
from vitmods.study.scores import Look, decision_at, factorial_at, looks, over_settings_at
from vitmods.study.state import HIDDEN, Curve, Evaluated, Selection, StudyState, TrialRecord, at_the_edge, read_curves
from vitmods.study.store import SCHEMA, Facts, ModelFacts, Sample, StudyFolder, read_object
from vitmods.tasks.base import TASKS
from vitmods.tasks.metrics import Metric
from vitmods.util.address import named
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import write_atomically, write_json
from vitmods.util.registry import Registry
from vitmods.util.text import no_formula


@dataclass(frozen=True)
class CostRatio:
    """arm / base: median over rounds, and its 95 % interval."""

    ratio: float
    low: float
    high: float
    batch: int | None = None


@dataclass(frozen=True)
class ArmCost:
    """What an arm costs, as ratios to base; `flops` None: not known of these models."""

    params: float
    flops: float | None
    train_step: CostRatio
    infer_1: CostRatio
    infer_n: CostRatio
    peak_memory: CostRatio
    infer_memory: CostRatio | None = None
    """of the batch of `infer_n`; None in studies that did not measure it"""
    against: str | None = None
    """how base and the arm are built, where they are not built alike"""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ArmCost:
        known: dict[str, Any] = {k: CostRatio(**v) if isinstance(v, Mapping) else v for k, v in values.items()}
        return cls(**known)


@dataclass(frozen=True)
class BaseCost:
    """What base costs: numbers of parameters and multiply-adds, seconds, and bytes at the peaks of training and of
    inference."""

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
    """One point of the grid: the metric on val by seed (None where the trial diverged or has not ended), its mean."""

    values: Mapping[str, Any]
    scores: Mapping[int, float | None]
    mean: float | None


@dataclass(frozen=True)
class Tuning:
    """What was tried for an arm and chosen (None: not yet), and the fields whose choice is the first or last tried."""

    chosen: Mapping[str, Any] | None
    at_the_edge: tuple[str, ...]
    points: tuple[PointScores, ...]


@dataclass(frozen=True)
class SettingAnswer:
    """What came out under one setting of a sweep, beside the effects, which `Answer.over_settings` has.

    scores: arm, base too -> seed -> the metric
    costs:  None where they were not measured
    """

    name: str
    values: Mapping[str, Any]
    scores: Mapping[str, Mapping[int, float | None]]
    base_cost: BaseCost | None = None
    costs: Mapping[str, ArmCost] = field(default_factory=dict)


@dataclass(frozen=True)
class ArmAnswer:
    """What came out of one arm; base too, whose effect and cost are None. A sweep's scores are means over settings.

    scores:        seed -> the metric on the answer's images; None where the trial has none
    other_metrics: metric -> seed -> value, of what was measured beside it
    trials:        every planned trial; in a tuned study those that its points were compared by stand as on val
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
        """Of the scores there are."""
        return mean_of(self.scores.values())

    @property
    def counted(self) -> tuple[TrialRecord, ...]:
        """The trials that the scores are of."""
        if self.tuning is None:
            return self.trials
        chosen = self.tuning.chosen
        return tuple(trial for trial in self.trials if trial.point == chosen and trial.seed in self.scores)


Costs = dict[Point, tuple[BaseCost | None, dict[str, ArmCost]]]


def costs_of(folder: StudyFolder, settings: Settings) -> Costs:
    """Under each setting: base's, and those of the arms."""
    return _parsed(read_costs(folder, settings), settings)


def read_costs(folder: StudyFolder, settings: Settings) -> dict[str, Any]:
    """What costs.json holds; nothing, with a warning, where it is damaged: the effects do not depend on it."""
    try:
        kept = read_object(folder.costs_file)
        _parsed(kept, settings)
    except (AttributeError, TypeError, ValueError) as error:
        text = (
            f"{named(folder.costs_file)} is damaged ({error}): what the arms cost is not known until the same command"
        )
        warnings.warn(f"{text} measures it again.", stacklevel=2)
        return {}
    return kept


def _parsed(costs: Mapping[str, Any], settings: Settings) -> Costs:
    found: Costs = {}
    for point in settings.sweep.points:
        kept = costs_under(costs, point)
        arms = {name: ArmCost.from_dict(cost) for name, cost in kept.get("arms", {}).items()}
        found[point] = BaseCost(**kept["base"]) if kept.get("base") else None, arms
    return found


def costs_under(costs: Mapping[str, Any], setting: Point) -> dict[str, Any]:
    """Of what costs.json holds, which depends on base alone."""
    base = setting.to_dict().get("base")
    return dict(costs if base is None else costs.get(base, {}))


def tuning_of(settings: Settings, selection: Selection) -> Tuning | None:
    if not settings.grid:
        return None
    points = tuple(PointScores(p.to_dict(), scores, mean_of(scores.values())) for p, scores in selection.scores.items())
    chosen = selection.chosen
    edge = at_the_edge(settings.grid, chosen) if chosen else []
    return Tuning(chosen.to_dict() if chosen else None, tuple(edge), points)


__all__ = ["VIEWS", "Answer", "ArmAnswer", "ArmCost", "BaseCost", "Tuning", "evaluated_of", "model_name", "read_answer"]
VIEWS: Registry[Callable[..., Any]] = Registry("view of an answer", "vitmods.report")
"""text: Answer -> str; html: (Answer, path or None) -> path of what was written"""


@dataclass(frozen=True, repr=False)
class Answer:
    """What came out of a study. Prints itself as the table of verdicts; `answer["dpn"]` is that arm's `Effect`.

    metric, splits:  what is compared, and on which images
    margin:          a difference of less than this does not matter; in points where the metric is a fraction
    base:            what the arms are compared with: base, or the arm that was asked for
    arms:            in the order of the study
    decision:        the effects, and what holds for all of them; in a sweep those on average over its settings
    factorial:       of a factorial study, whose arms are runs: the effects of its changes
    confirmed:       of a factorial study: what its best combination did on fresh seeds, if it was trained on some
    sweep:           what is behind the averages, setting by setting
    over_settings:   of a sweep: averages, the effects under each setting, and whether they differ
    looks:           of a study that runs until it is decided: what was decided at so many seeds
    tuned:           recipe fields and the values that every arm was trained with; None where nothing was
    complete:        whether nothing is left to be run
    doubts:          what to know before any verdict is trusted; part of the warnings
    path:            the study's folder
    curves:          what `trials[...].curve` are of
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

    @classmethod
    def load(cls, path: str | Path, reference: str = BASE) -> Answer:
        """The answer of the study in a folder or at an address, finished or not, from its trials.

        reference: the arm that all others, base too, are compared with. UserError where there is no study, or no such
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
        """What the study is about -> Effect: the changes of a factorial one, else the arms."""
        return self.factorial.effects if self.factorial else self.effects

    @property
    def every_arm(self) -> tuple[ArmAnswer, ...]:
        """Base, and the arms."""
        return (self.base, *self.arms)

    @property
    def base_mean(self) -> float | None:
        """Of base's scores over the seeds that the effects are read from: those of the last look, or all."""
        seeds = list(self.base.scores)[: self.looks[-1].seeds if self.looks else None]
        return mean_of(self.base.scores[seed] for seed in seeds)

    @property
    def trials(self) -> list[TrialRecord]:
        return [trial for arm in self.every_arm for trial in arm.trials]

    @property
    def failed(self) -> list[str]:
        """A line for each trial that failed in the last run, or is damaged."""
        return [f"{trial}: {trial.message}" for trial in self.trials if trial.status in ("failed", "damaged")]

    @property
    def chosen(self) -> dict[str, Mapping[str, Any] | None]:
        """Arm, base too -> the values of the point that it is evaluated by; None before the choice. Empty where nothing
        was tuned."""
        return {arm.name: arm.tuning.chosen for arm in self.every_arm if arm.tuning}

    def __getitem__(self, arm: str) -> Effect:
        if arm not in self.headline:
            raise UserError(f"The study has no arm {arm!r}. {nearest(arm, self.headline)}")
        return self.headline[arm]

    def __repr__(self) -> str:
        return str(VIEWS["text"](self))

    @property
    def _shown(self) -> Decision:
        """What is shown as a table: the changes of a factorial study, else the decision."""
        return _of_changes(self.decision, self.factorial) if self.factorial else self.decision

    def to_markdown(self) -> str:
        """The effects as a table for a README."""
        return self._shown.to_markdown()

    def to_latex(self) -> str:
        """The effects as a `tabular` with the rules of booktabs."""
        return self._shown.to_latex()

    def to_pandas(self) -> Any:
        """The effects as a data frame. UserError without pandas."""
        return self._shown.to_pandas()

    def to_dict(self) -> dict[str, Any]:
        """What results.json holds."""
        found: dict[str, Any] = _plain(self)
        return {"schema": SCHEMA, **found}

    def to_csv(self) -> str:
        """What results.csv holds: a row a trial with its metrics on the split of the answer as they are kept (fractions
        as fractions), and the paired difference to base. In a tuned study also its point and its metric on val; of the
        others only chosen ones have."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(_csv_rows(self))
        return text.getvalue()

    def write(self) -> None:
        """results.json and results.csv in the study's folder. UserError if that cannot be."""
        write_json(self.path / "results.json", self.to_dict())
        write_atomically(self.path / "results.csv", lambda file: file.write(self.to_csv().encode()))

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report as one HTML file, by default report.html in the study's folder (report-dpn.html of one with
        the reference dpn), or as an image of the verdicts if the name ends with .svg; returns its path.

        results.json and results.csv, which are always against base, are written with it. Where the report goes
        elsewhere, a study that cannot be written to is only warned of. UserError if the report cannot be written.
        """
        try:
            self.write() if self.base.name == BASE else None
        except UserError as error:
            if path is None:
                raise
            warnings.warn(f"{error} The report is of what results.json would hold.", stacklevel=2)
        written: Path = VIEWS["html"](self, path)
        return written


def evaluated_of(folder: StudyFolder, facts: Facts) -> Evaluated:
    """What the answer of the study is about."""
    constant, planned = facts.data.get("constant", {}), facts.plan.seeds
    if not facts.settings.get("folds"):
        groups = folder.images.groups({split: facts.data["splits"][split]["count"] for split in facts.splits})
        return Evaluated(facts.splits, constant, groups, planned, facts.plan.until_decided, facts.plan.family)
    test, train = (facts.data["splits"][name]["count"] for name in ("test", "train"))
    return Evaluated(facts.splits, constant, planned=planned, family=facts.plan.family, sizes=(test, train))


def read_answer(
    folder: StudyFolder,
    facts: Facts,
    settings: Settings | None = None,
    reference: str = BASE,
) -> Answer:
    """The answer from a study's folder, finished or not.

    Args:
        settings: if at hand; None: as the facts tell.
        reference: what the arms are compared with.

    Raises:
        UserError: a file that all of it depends on is damaged, or there is no such arm. A damaged trial is part of the
            answer.
    """
    with folder.naming_damage():
        settings = settings or Settings.from_dict(facts.settings)
        metric, own = settings.measure.metric, TASKS[settings.fixed["task"]].metrics[0]
        evaluated, first = evaluated_of(folder, facts), settings.sweep.points[0]
        models = {arm.name: facts.models[model_name(first, arm.name)] for arm in settings.every_arm}
    if reference not in (names := [arm.name for arm in settings.every_arm]):
        raise UserError(f"The study has no arm {reference!r}. {nearest(reference, names)}")
    if reference != BASE and settings.design:
        raise UserError("A factorial study compares each change with its absence: leave the reference out.")
    state, shown = StudyState(folder, settings, evaluated), (metric.name, own.name)
    records = state.answered if settings.sweep else state.records
    logged = {trial: read_curves(folder.trial(trial), shown) for trial in records}
    curves = next((name for name in shown if any(name in one for one in logged.values())), None)
    records = {t: replace(record, curve=logged[t].get(curves or "", Curve())) for t, record in records.items()}
    records = dict(_with_steps_to_base(state, records, _metric_of(curves or metric.name)))
    taken = () if settings.sweep else tuple(looks(state))
    over = over_settings_at(state, reference) if settings.sweep else None
    decision = over.decision if over else _decision(state, reference, taken)
    effects = None if settings.design is None else _factorial(state, taken)
    arms = {arm.name: _arm(state, models[arm.name], records, arm) for arm in settings.every_arm}
    base = arms.pop(reference)
    known_costs = costs_of(folder, settings)
    base_cost, arm_costs = known_costs[settings.sweep.points[0]]
    shows_costs = reference == BASE and "base" not in dict(settings.sweep.fields)
    others = dict.fromkeys(name for arm in (base, *arms.values()) for name in arm.other_metrics)
    shown_decision = _of_changes(decision, effects) if effects else decision
    counted = outcome_doubts(shown_decision, base.counted, _metric_of(curves) if curves else None)
    doubts = (*planning_doubts(state, facts), *counted)
    stopped = {arm for look in taken for arm in look.stopped}
    return Answer(
        created=facts.created,
        metric=metric,
        splits=state.splits if any(one.images for one in records.values()) else state.splits[-1:],
        margin=settings.margin,
        base=base,
        arms=tuple(
            replace(arm, effect=decision.effects.get(name), cost=arm_costs.get(name) if shows_costs else None)
            for name, arm in arms.items()
        ),
        decision=decision,
        complete=len(stopped) == len(settings.arms)
        or all(record.ended or trial.arm.name in stopped for trial, record in state.records.items()),
        command=facts.command,
        data=facts.data,
        settings=facts.settings,
        resolved=facts.resolved,
        environment=facts.environment,
        warnings=(*doubts, *facts.data.get("warnings", ()), *facts.warnings, *outcomes(state)),
        doubts=doubts,
        other_metrics={name: _metric_of(name) for name in others},
        base_cost=base_cost if shows_costs else None,
        factorial=effects,
        confirmed=_confirmed(folder, effects) if effects else None,
        sweep=tuple(_setting(state, point, *known_costs[point]) for point in settings.sweep.points if point),
        over_settings=over,
        looks=taken,
        tuned=None if settings.sweep else settings.grid.to_dict() or None,
        curves=_metric_of(curves) if curves else None,
        samples=tuple(folder.samples()),
        path=folder.path,
    )


def _decision(state: StudyState, reference: str, taken: Sequence[Look]) -> Decision:
    """At the last look of a study that runs until it is decided, else on all there is."""
    if reference == BASE and taken and isinstance(taken[-1].decision, Decision):
        return taken[-1].decision
    return decision_at(state, state.settings.seeds, base=reference)


def _of_changes(runs: Decision, found: Factorial) -> Decision:
    """The decision of the runs with the effects of the changes instead."""
    notes = (*found.notes, *filter(None, [found.prediction]))
    more: dict[str, Any] = {"best": (), "ruled_out": (), "pairs": {}, "look": found.look}
    return replace(runs, effects=dict(found.effects), family=len(found.effects), notes=notes, **more)


def _factorial(state: StudyState, taken: Sequence[Look]) -> Factorial:
    last = taken[-1].decision if taken else None
    return last if isinstance(last, Factorial) else factorial_at(state, state.settings.seeds)


def _confirmed(folder: StudyFolder, found: Factorial) -> Effect | None:
    """What the best combination did on fresh seeds; None: it was not trained on them, or not on all."""
    name = "+".join(found.best)
    path = folder.confirmation(name)
    try:
        facts = path.facts() if found.best else None
        answer = read_answer(path, facts) if facts else None
    except UserError as error:  # the study itself is not damaged
        warnings.warn(f"What was confirmed is not known: {error}", stacklevel=2)
        return None
    return answer.effects.get(name) if answer and answer.complete else None


def _arm(state: StudyState, model: ModelFacts, records: Mapping[Trial, TrialRecord], arm: Arm) -> ArmAnswer:
    """Scores are means over the settings, where there are several: of a seed that has ended under each."""
    settings, metric, points = state.settings, state.settings.measure.name, state.settings.sweep.points
    known: dict[str, dict[int, list[float]]] = {metric: {}}
    for seed in settings.seeds:
        trials = [state.trial(setting, arm.name, seed) for setting in points]
        finished = [records[one] for one in trials if one and records[one].status == "finished"]
        for record in finished if len(finished) == len(points) else ():
            for name, value in record.metrics.items():
                known.setdefault(name, {}).setdefault(seed, []).append(value)
    means = {name: {seed: math.fsum(own) / len(own) for seed, own in seeds.items()} for name, seeds in known.items()}
    scores = means.pop(metric)
    return ArmAnswer(
        name=arm.name,
        changes=arm.text,
        recipe=dict(arm.recipe),
        model=model,
        scores={seed: scores.get(seed) for seed in settings.seeds},
        other_metrics=means,
        trials=tuple(record for trial, record in records.items() if trial.arm == arm),
        tuning=None if settings.sweep else tuning_of(settings, state.selections[AS_IS, arm.name]),
    )


def model_name(setting: Point, arm: str) -> str:
    """What study.json calls the model of an arm: in a sweep it may be another under each setting."""
    return ", ".join(filter(None, (str(setting), arm)))


def _setting(
    state: StudyState, setting: Point, base_cost: BaseCost | None, costs: Mapping[str, ArmCost]
) -> SettingAnswer:
    scores: dict[str, dict[int, float | None]] = {arm.name: {} for arm in state.settings.every_arm}
    for trial, record in state.answered.items():
        if trial.setting == setting:
            scores[trial.arm.name][trial.seed] = record.score(state.settings.measure.name)
    return SettingAnswer(str(setting), setting.to_dict(), scores, base_cost, costs)


def _with_steps_to_base(
    state: StudyState, records: Mapping[Trial, TrialRecord], metric: Metric
) -> Iterator[tuple[Trial, TrialRecord]]:
    """Base's score at the end is the mean over its finished trials under the same setting."""
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
    """The metric of that name; what training measures beside those of the protocols is a loss."""
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
    bases = {(str(one.setting), one.seed): one.score(metric.name) for one in answer.base.counted}
    for arm in answer.every_arm:
        counted = {trial.folder for trial in arm.counted}
        on_val = {(str(p.values), seed): score for p in _points(arm) for seed, score in p.scores.items()}
        for trial in arm.trials:
            own = [show_value(trial.point[name]) for name in fields]
            chosen = [on_val.get((str(trial.point), trial.seed), "")] if fields else []
            values: list[Any] = [trial.metrics.get(name, "") if trial.folder in counted else "" for name in names]
            base = bases.get((str(trial.setting), trial.seed))
            apart = arm is not answer.base and values[0] != "" and base is not None
            gap = (POINTS if metric.unit == "%" else 1) * (values[0] - base) if apart else ""
            start = map(no_formula, [*(show_value(trial.setting[name]) for name in swept), arm.name, arm.changes, *own])
            place = [trial.steps_to_base, trial.wall_s, trial.folder]
            yield [*start, *chosen, trial.seed, trial.status, *values, gap, *place]


def _points(arm: ArmAnswer) -> tuple[PointScores, ...]:
    return arm.tuning.points if arm.tuning else ()


def _plain(value: Any) -> Any:
    """As JSON gives it back: what is not finite is None, fields are keys, what only the report needs is left out."""
    if isinstance(value, Decision | Effect | Factorial):
        return _plain(value.to_dict())
    if dataclasses.is_dataclass(value):
        shown = [one.name for one in dataclasses.fields(value) if one.metadata.get("json", True)]
        return {name: _plain(getattr(value, name)) for name in shown}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
