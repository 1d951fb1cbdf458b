"""The results of each arm: its trials with their curves, scores, points and costs."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vitmods.evals.protocols import metric_named
from vitmods.stats.decision import Decision
from vitmods.stats.verdict import Effect
from vitmods.study.arms import BASE, Arm
from vitmods.study.cells import Trial
from vitmods.study.grid import AS_IS, Point, mean_of
from vitmods.study.settings import Settings
from vitmods.study.state import Curve, StudyState, TrialRecord, at_the_edge, read_curves
from vitmods.study.store import ModelFacts, StudyFolder, read_object
from vitmods.tasks.base import TASKS
from vitmods.tasks.metrics import Metric
from vitmods.util.address import named
from vitmods.util.errors import UserError


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
    trained: int | None = None
    """number of trained parameters, which is what a task adds to its base; None if it was not counted"""
    compiled_step: CostRatio | None = None
    """on a GPU, where trials are compiled: `train_step` is not"""
    host_bound: bool = False
    """whether a training step on a GPU takes about as long as the host takes to start its operations"""

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
    trained: int | None = None
    compiled_step_s: float | None = None


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
    """The scores and costs under one setting; `Answer.each` has the effects.

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


def with_curves(state: StudyState, spare: Container[Trial]) -> tuple[dict[Trial, TrialRecord], Metric | None]:
    """Add the learning curves of the study's metric, or else of the task's, whichever was logged; returns that too."""
    settings, folder = state.settings, state.folder
    metric = settings.measure.metric
    names = (metric.name, TASKS[settings.fixed["task"]].metrics[0].name)
    logged = {trial: {} if trial in spare else read_curves(folder.trial(trial), names) for trial in state.records}
    name = next((name for name in names if any(name in curves for curves in logged.values())), "")
    records = {
        trial: replace(record, curve=logged[trial].get(name, Curve()), counted=trial in state.answered)
        for trial, record in state.records.items()
    }
    records = dict(_with_steps_to_base(state, records, metric_called(name or metric.name)))
    return records, metric_called(name) if name else None


def arm_answer(
    state: StudyState,
    model: ModelFacts,
    records: Mapping[Trial, TrialRecord],
    arm: Arm,
    decision: Decision,
    costs: Mapping[str, ArmCost],
) -> ArmAnswer:
    """Collect the results of an arm; under several settings, the means of the seeds that have ended under each."""
    settings, metric, points = state.settings, state.settings.measure.name, state.settings.sweep.points
    values: dict[str, dict[int, list[float]]] = {metric: {}}
    for seed in settings.seeds_of(arm.name):
        there = [setting for setting in points if settings.design.trains(settings, setting, arm.name, seed)]
        trials = [state.trial(setting, arm.name, seed) for setting in there]
        finished = [records[trial] for trial in trials if trial and records[trial].status == "finished"]
        for record in finished if len(finished) == len(there) else ():
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
        effect=decision.effects.get(arm.name),
        cost=costs.get(arm.name),
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


def metric_called(name: str) -> Metric:
    """Return the metric of that name; a name that protocols do not know is a loss that training measures."""
    try:
        return metric_named(name)
    except UserError:
        return Metric(name, name, "", higher_is_better=False, unit="")


def setting_answer(
    state: StudyState, setting: Point, base_cost: BaseCost | None, costs: Mapping[str, ArmCost]
) -> SettingAnswer:
    """Collect the results under a setting of a sweep."""
    settings, metric = state.settings, state.settings.measure.name
    scores: dict[str, dict[int, float | None]] = {arm.name: {} for arm in settings.every_arm}
    for trial, record in state.answered.items():
        if trial.setting == setting:
            scores[trial.arm.name][trial.seed] = record.score(metric)
    tuning = {arm.name: _tuning(state, setting, arm) for arm in settings.every_arm} if settings.tune else {}
    return SettingAnswer(str(setting), setting.to_dict(), scores, tuning, base_cost, costs)
