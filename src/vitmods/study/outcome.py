"""The parts of an answer: what came out of an arm, of a setting, of the points that were tried, and what it costs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitmods.stats.verdict import Effect
from vitmods.study.facts import ModelFacts
from vitmods.study.plan import Settings
from vitmods.study.state import Selection, TrialRecord, at_the_edge
from vitmods.study.store import StudyFolder, read_object
from vitmods.study.tuning import Point, mean_of
from vitmods.util.address import named


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
