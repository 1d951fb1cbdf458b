"""Base alone: the reference of later studies of the same images and recipe."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vitmods.stats.sample_size import sd_range
from vitmods.stats.verdict import POINTS_PER_FRACTION
from vitmods.study.bases import base_name
from vitmods.study.state import Curve, StudyState, read_curves
from vitmods.tasks.metrics import Metric
from vitmods.util.address import named
from vitmods.util.text import duration, listing, plural

SHOWN = (0.1, 0.25, 0.5, 1.0)
"""parts of a training whose score is printed"""


@dataclass(frozen=True)
class Reference:
    """The trials of base in a study's folder.

    scores:  seed -> the metric on the answer's images; None if the trial diverged
    spread:  standard deviation of a trial, in the metric's unit, and the ends of its 80 % range; None for one trial
    trial_s: median seconds of a trial
    curve:   the mean over trials on val
    """

    folder: str
    model: str
    metric: Metric
    scores: Mapping[int, float | None]
    mean: float | None
    spread: tuple[float, float, float] | None
    trial_s: float | None
    curve: Curve
    failed: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the content of base.json."""
        return {"schema": 1, **asdict(self), "folder": None, "metric": self.metric.name}

    def __str__(self) -> str:
        unit = " points" if self.metric.unit == "%" else f" {self.metric.unit}".rstrip()
        mean = "unknown" if self.mean is None else self.metric.shown(self.mean)
        lines = [f"{self.model}, {plural(len(self.scores), 'seed')}: {self.metric.title} {mean}"]
        if self.spread:
            sd, low, high = self.spread
            lines[0] += f", sd of a trial {sd:.2g}{unit} (80 % range {low:.2g} to {high:.2g})"
        if steps := self.curve.step:
            places = [min(range(len(steps)), key=lambda i: abs(steps[i] - part * steps[-1])) for part in SHOWN]
            points = [f"{self.metric.shown(self.curve.score[i])} at step {steps[i]:,}" for i in dict.fromkeys(places)]
            lines.append(f"On val: {listing(points)}.")
        if self.trial_s is not None:
            lines.append(f"A trial takes {duration(self.trial_s)}. Studies next to {self.folder} reuse these trials.")
        return "\n".join([f"{lines[0]}.", *lines[1:]])


def describe_base(state: StudyState) -> Reference:
    """Describe the trials of base alone."""
    settings, metric = state.settings, state.settings.measure.metric
    records = [record for record in state.answered.values() if record.ended]
    scores = {record.seed: record.score(metric.name) for record in records}
    finite = [score for score in scores.values() if score is not None]
    scale = POINTS_PER_FRACTION if metric.unit == "%" else 1
    sd = scale * statistics.stdev(finite) if len(finite) > 1 else math.nan
    curves = [read_curves(state.folder.path / record.folder, (metric.name,)) for record in records]
    walls = [record.wall_s for record in records if record.wall_s]
    return Reference(
        named(state.folder.path),
        base_name(settings.fixed["base"]),
        metric,
        scores,
        statistics.fmean(finite) if finite else None,
        (sd, *sd_range(sd, len(finite) - 1)) if sd > 0 else None,
        statistics.median(walls) if walls else None,
        mean_curve([by_name[metric.name] for by_name in curves if metric.name in by_name]),
        [f"{record}: {record.message}" for record in state.records.values() if record.status in ("failed", "damaged")],
    )


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Average curves of the same steps."""
    same = [curve for curve in curves if curve.step == curves[0].step]
    if not same:
        return Curve()
    wall, score = (
        tuple(map(statistics.fmean, zip(*columns))) for columns in ([c.wall_s for c in same], [c.score for c in same])
    )
    return Curve(same[0].step, wall, score)
