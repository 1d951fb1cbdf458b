"""Base alone: its scores, their spread, curve and time, for studies next to it that reuse its trials."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from vitmods.study.design import DESIGNS, Design
from vitmods.util.errors import UserError
from vitmods.util.text import duration, listing, plural

if TYPE_CHECKING:
    from vitmods.stats.decision import Decision
    from vitmods.study.questions import Look, Question
    from vitmods.study.settings import Settings
    from vitmods.study.state import StudyState, TrialRecord
    from vitmods.tasks.metrics import Metric

SHOWN = (0.1, 0.25, 0.5, 1.0)  # parts of a training whose score is told


@DESIGNS.register("base")
class BaseAlone(Design):
    """Base without arms."""

    name = "base"
    is_implied = True
    excludes: ClassVar[Mapping[str, str]] = {
        **Design.excludes,
        "until_decided": "Base alone decides nothing: set the number of trials with --seeds, not --until-decided.",
    }

    @classmethod
    def plan(cls, settings: Settings) -> BaseAlone:
        if settings.arms:
            raise UserError("Base alone is a study of its own: `vitmods base`, or in Python arms=None.")
        return cls()

    def questions(self, state: StudyState, looks: Sequence[Look], base: str) -> tuple[Decision, dict[str, Question]]:
        """Return what is known of base, without an effect."""
        from vitmods.stats.decision import Decision
        from vitmods.stats.sequential import ALPHA
        from vitmods.study.bases import base_name
        from vitmods.study.questions import Question

        nan, settings, metric = math.nan, state.settings, state.settings.measure.metric
        nothing = Decision({}, base, (), (), {}, nan, nan, nan, 0, ALPHA, "", False, settings.generalize, ())
        ended = {trial: record for trial, record in state.answered.items() if record.ended}
        walls = [record.wall_s for record in ended.values() if record.wall_s]
        time = [f"a trial takes {duration(statistics.median(walls))}"] if walls else []
        reached = []
        for point in settings.sweep.points:
            records = [record for trial, record in ended.items() if trial.setting == point]
            start = settings.fixed.get("start")
            model = start["source"] if start else base_name(settings.fixed["base"])
            reached.append(f"{point or model}: {_described(records, metric)}")
        summary = Question(
            "arm",
            "differences to base",
            {"": {}},
            against=base,
            notes=tuple(_lost(state)),
            scope="; ".join(reached),
            facts=(*_curve(state, [*ended.values()], metric), *time),
            advice=("Compare arms in a folder next to this one, which reuses these trials and trains arms alone.",),
        )
        return nothing, {"base": summary}


def _lost(state: StudyState) -> Iterator[str]:
    """Yield how many trials have no score."""
    records = [*state.answered.values()]
    for status in ("diverged", "failed", "damaged"):
        if count := sum(record.status == status for record in records):
            yield f"{count} of {plural(len(records), 'trial')} {'are ' * (status == 'damaged')}{status}"


def _described(records: Sequence[TrialRecord], metric: Metric) -> str:
    """Return `top-1 accuracy 93.1 % over 16 seeds, sd of a trial 0.6 points (80 % range 0.5 to 0.8)`."""
    from vitmods.stats.sample_size import sd_range
    from vitmods.stats.verdict import POINTS_PER_FRACTION

    scores = [score for record in records if (score := record.score(metric.name)) is not None]
    scale, unit = (POINTS_PER_FRACTION, "points") if metric.unit == "%" else (1, metric.unit)
    if not scores:
        return f"{metric.title} unknown"
    mean = f"{metric.title} {metric.shown(statistics.fmean(scores))} over {plural(len(scores), 'seed')}"
    if len(scores) < 2 or not (sd := scale * statistics.stdev(scores)) > 0:
        return mean
    low, high = sd_range(sd, len(scores) - 1)
    return f"{mean}, {f'sd of a trial {sd:.2g} {unit}'.rstrip()} (80 % range {low:.2g} to {high:.2g})"


def _curve(state: StudyState, records: Sequence[TrialRecord], metric: Metric) -> Iterator[str]:
    """Yield the mean score on val at some steps of the training."""
    from vitmods.study.state import read_curves

    found = (read_curves(state.folder.path / record.folder, (metric.name,)) for record in records)
    curves = [by_name[metric.name] for by_name in found if metric.name in by_name]
    same = [curve for curve in curves if curve.step == curves[0].step]
    if same:
        steps, scores = same[0].step, [*map(statistics.fmean, zip(*(curve.score for curve in same)))]
        places = [min(range(len(steps)), key=lambda i: abs(steps[i] - part * steps[-1])) for part in SHOWN]
        points = [f"{metric.shown(scores[i])} at step {steps[i]:,}" for i in dict.fromkeys(places)]
        yield f"on val {listing(points)}"
