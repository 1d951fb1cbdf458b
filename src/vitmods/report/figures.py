"""The plots of the report: effects with their intervals, learning curves, and what was tuned."""

from __future__ import annotations

import statistics
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from markupsafe import Markup

from vitmods.report.svg import COLOUR, Inliner, figure
from vitmods.report.text import GLYPHS, numbers, of_metric, point_text, scale_of, score, tone, verdict_text
from vitmods.stats.verdict import FRACTION, Effect
from vitmods.study.answer import Tuning
from vitmods.study.plan import show_value
from vitmods.study.state import TrialRecord
from vitmods.tasks.metrics import Metric

POINTS_A_CURVE = 80
GAP = 0.8  # between the groups of a grid of several fields, in steps of a point
MOST_TICKS, MOST_GROUPS = 9, 4


LETTER = 6.9
"""pixels that a character of the numbers takes, about"""


def forest(effects: Sequence[Effect], margin: float, metric: Metric, inline: Inliner, narrow: bool) -> Markup:
    """One line an arm: thin, the interval for new images; thick, that for these images alone; and the margin's band."""
    width, row_height, foot = (350, 58, 46) if narrow else (860, 36, 50)
    height = row_height * len(effects) + foot + 8
    with figure(width, height) as drawn:
        verdict_at = 16 + LETTER * max(len(numbers(effect)) for effect in effects) + 16  # pixels right of the axes
        left, right = (8, 8) if narrow else (205, verdict_at + 108)
        axes = drawn.add_axes((left / width, foot / height, (width - left - right) / width, 1 - (foot + 8) / height))
        axes.set(xlim=_limits(effects, margin), ylim=(len(effects) - 0.5, -0.5), yticks=[])
        axes.axvspan(-margin, margin, color=COLOUR["band"], lw=0)
        for y, effect in enumerate(effects):
            # Where the numbers stand above the interval the line at zero does not cross them.
            axes.plot([0, 0], [y if narrow else y - 0.5, y + 0.5], color=COLOUR["muted"], lw=1.2)
            _draw_effect(axes, y + (0.22 if narrow else 0), effect)
            _label_effect(axes, y, effect, None if narrow else 1 + verdict_at / (width - left - right))
        style(axes)
        lower = "" if metric.higher_is_better else "; lower is better"
        label = f"effect, {of_metric(metric)}{lower}"
        axes.set_xlabel(label, color=COLOUR["muted"], fontsize=12, labelpad=6)
        axes.tick_params(labelsize=12)
        label = "; ".join(f"{effect.arm}: {numbers(effect)}, {effect.verdict}" for effect in effects)
        return inline(drawn, f"Interval plot of the effects. {label}", "narrow" if narrow else "wide")


def _ends(effect: Effect) -> list[float]:
    return [v for v in (effect.effect, *effect.interval, effect.seeds_low, effect.seeds_high) if not np.isnan(v)]


def _limits(effects: Sequence[Effect], margin: float) -> tuple[float, float]:
    """All values, unless one arm would press the others flat: what lies outside gets an arrow."""
    lows, highs = ([end(_ends(effect)) for effect in effects] for end in (min, max))
    enough = 3 * statistics.median(max(abs(low), abs(high)) for low, high in zip(lows, highs))
    shortest = max(1.5 * margin, 0.1 if effects[0].unit == FRACTION else 0.001)
    low = min([-shortest, *(low for low in lows if low >= -enough)])
    high = max([shortest, *(high for high in highs if high <= enough)])
    room = 0.04 * (high - low)
    return low - room, high + room


def _draw_effect(axes: Any, y: float, effect: Effect) -> None:
    color = COLOUR[tone(effect)]
    axes.plot(effect.interval, [y, y], color=color, lw=1.8, solid_capstyle="butt")
    axes.plot([effect.seeds_low, effect.seeds_high], [y, y], color=color, lw=6, solid_capstyle="butt")
    axes.plot([effect.effect], [y], "D", color=color, ms=8, mec=COLOUR["paper"], mew=1.4)
    left, right = axes.get_xlim()
    for end, marker, beyond in ((left, "<", min(_ends(effect)) < left), (right, ">", max(_ends(effect)) > right)):
        if beyond:
            axes.plot([end], [y], marker, color=color, ms=8, mew=0, clip_on=False)


def _label_effect(axes: Any, y: float, effect: Effect, verdict_at: float | None) -> None:
    """Name, numbers and verdict; without a place for the verdict all stand above the interval."""
    color = COLOUR[tone(effect)]
    above = f"{GLYPHS[effect.verdict]} {numbers(effect)}"
    texts: list[tuple[float, float, str, str, str]] = (
        [(0, y - 0.2, clipped(effect.arm, 18), "left", COLOUR["ink"]), (1, y - 0.2, above, "right", color)]
        if verdict_at is None
        else [
            (-0.03, y, clipped(effect.arm, 24), "right", COLOUR["ink"]),
            (1.03, y, numbers(effect), "left", COLOUR["ink"]),
            (verdict_at, y, verdict_text(effect), "left", color),
        ]
    )
    transform = axes.get_yaxis_transform()
    for x, height, text, align, fill in texts:
        # Names are the user's: no mathematics between dollar signs.
        axes.text(x, height, text, transform=transform, ha=align, va="center_baseline", fontsize=12.5, color=fill,
                  parse_math=False, clip_on=False)  # fmt: skip


def clipped(name: str, length: int) -> str:
    """A name without control characters, cut to so many characters."""
    plain = "".join(" " if unicodedata.category(char).startswith("C") else char for char in name)
    return plain if len(plain) <= length else plain[: length - 1] + "…"


@dataclass(frozen=True)
class Line:
    """The learning curve of one trial: step, seconds, and the score as it is shown; of the same length."""

    status: str
    step: np.ndarray
    wall: np.ndarray
    score: np.ndarray

    @property
    def finished(self) -> bool:
        return self.status == "finished"


def lines(trials: Sequence[TrialRecord], metric: Metric) -> list[Line]:
    """Of the trials that have been evaluated yet."""
    known = [trial for trial in trials if trial.curve.step]
    return [
        Line(
            one.status,
            np.array(one.curve.step),
            np.array(one.curve.wall_s),
            scale_of(metric) * np.array(one.curve.score),
        )
        for one in known
    ]


@dataclass(frozen=True)
class Axis:
    """The axis of a learning curve: which array of the line, its unit, the label, and where all panels end."""

    key: str
    unit: float
    label: str
    end: float


def axes_of(groups: Sequence[Sequence[Line]]) -> tuple[Axis, Axis]:
    """By step, and by wall time in a unit that fits the longest arm; `groups` are the lines of each arm."""
    wall = max(statistics.median(_last(line.wall) for line in group) for group in groups if group)
    step = max(float(line.step[-1]) for group in groups for line in group)
    unit, name = (3600.0, "hours") if wall > 7200 else (60.0, "minutes") if wall > 120 else (1.0, "seconds")
    return Axis("step", 1.0, "step", step), Axis("wall", unit, f"{name} of wall time", wall / unit)


def _last(values: np.ndarray) -> float:
    return 0.0 if np.isnan(values[-1]) else float(values[-1])


def _score_limits(base: Sequence[Line], arm: Sequence[Line], metric: Metric) -> tuple[float, float] | None:
    """Scores from two fifths of base's way on, so that the differences of the end can be seen; the arm's best and the
    ends of its finished trials too."""
    shown = base or arm
    if not shown:
        return None
    late = np.concatenate([line.score[2 * len(line.score) // 5 :] for line in shown])
    room = max(float(late.max() - late.min()), 1.0 if metric.unit == "%" else 1e-3)
    best = [float(line.score.max() if metric.higher_is_better else line.score.min()) for line in arm]
    ends = [float(line.score[-1]) for line in arm if line.finished]
    low = min([float(late.min()) - 0.05 * room, *(one - 0.12 * room for one in (*best, *ends))])
    high = max([float(late.max()) + 0.15 * room, *best, *ends])
    return (max(low, 0.0), min(high, 101.0)) if metric.unit == "%" else (low, high)


def curve_panel(
    name: str, base: Sequence[Line], arm: Sequence[Line], axis: Axis, metric: Metric, inline: Inliner
) -> Markup:
    """Arm over base: mean and range over the finished seeds; other trials as thin lines."""
    with figure(300, 190) as drawn:
        axes = drawn.add_axes((0.125, 0.2, 0.855, 0.77))
        for one, color in ((base, "base"), (arm, "arm")):
            _draw_curves(axes, one, axis, COLOUR[color])
        if limits := _score_limits(base, arm, metric):
            axes.set_ylim(*limits)
        axes.set_xlim(0, 1.02 * axis.end or 1)
        axes.locator_params(nbins=5)
        style(axes)
        axes.grid(axis="y", color=COLOUR["line"], lw=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel(axis.label, color=COLOUR["muted"], fontsize=11, labelpad=3)
        axes.tick_params(labelsize=11)
        ends = [f"{np.mean([one.score[-1] for one in group]):.3g}" if group else "none" for group in (arm, base)]
        label = f"Validation {metric.title} by {axis.label}. {name} ends at {ends[0]}, base at {ends[1]}."
        return inline(drawn, label, "panel")


def _draw_curves(axes: Any, curves: Sequence[Line], axis: Axis, color: str) -> None:
    finished = [curve for curve in curves if curve.finished]
    if finished:
        x, scores = _common(finished, axis)
        if len(finished) > 1:
            axes.fill_between(x, scores.min(0), scores.max(0), color=color, alpha=0.2, lw=0)
        dot = "o" if len(x) == 1 else None  # a line of one point would not be seen
        axes.plot(x, scores.mean(0), color=color, lw=1.8, solid_joinstyle="round", marker=dot, ms=5)
    for curve in curves:
        if not curve.finished:
            x = getattr(curve, axis.key) / axis.unit
            axes.plot(x, curve.score, color=color, lw=0.9, ls=(0, (3, 2)))
            if curve.status != "unfinished":
                axes.plot(x[-1:], curve.score[-1:], "x", color=COLOUR["hurts"], ms=7, mew=1.8)


def _common(curves: Sequence[Line], axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """Places on the axis, and the scores (seeds, places) there, one for each evaluation or fewer.

    Seeds are matched evaluation by evaluation, at their median place: a seed that ran while the machine was busy must
    not cut off the others' last scores.
    """
    shortest = min(len(curve.score) for curve in curves)
    kept = np.unique(np.linspace(0, shortest - 1, min(shortest, POINTS_A_CURVE)).round().astype(int))
    x = np.median([getattr(curve, axis.key)[kept] / axis.unit for curve in curves], axis=0)
    return x, np.array([curve.score[kept] for curve in curves])


def style(axes: Any, colors: Mapping[str, str] = COLOUR) -> None:
    """A line below and no other frame, quiet ticks."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(colors["line"])
    axes.tick_params(colors=colors["muted"], length=0, pad=5)
    axes.patch.set_visible(False)


def sweep_panel(
    name: str,
    settings: Sequence[str],
    base: Sequence[float | None],
    arm: Sequence[tuple[float | None, Effect | None]],
    metric: Metric,
    inline: Inliner,
) -> Markup:
    """The mean under each setting of base, and of an arm, with the interval of its effect drawn from base's mean."""
    scale = scale_of(metric)
    with figure(300, 200) as drawn:
        axes = drawn.add_axes((0.14, 0.2, 0.845, 0.77))
        for means, color in ((base, "base"), ([mean for mean, _ in arm], "arm")):
            known = [(x, scale * mean) for x, mean in enumerate(means) if mean is not None]
            axes.plot(*zip(*known), color=COLOUR[color], lw=1.8, marker="o", ms=4) if known else None
        for x, (_, effect) in enumerate(arm):
            if effect is not None and not np.isnan(effect.half):
                low, high = (effect.base_mean + end for end in effect.interval)
                axes.plot([x, x], [low, high], color=COLOUR["arm"], lw=1.2)
        style(axes)
        axes.locator_params(axis="y", nbins=5)
        axes.set_xticks(range(len(settings)), [clipped(setting, 14) for setting in settings])
        axes.grid(axis="y", color=COLOUR["line"], lw=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(-0.4, len(settings) - 0.6)
        axes.tick_params(labelsize=11)
        found = [
            f"{setting}: {numbers(one)}" for setting, (_, one) in zip(settings, arm, strict=True) if one is not None
        ]
        return inline(drawn, f"{metric.title} under each setting. {name}: {'; '.join(found)}.", "panel")


def tuning_panel(name: str, base: Tuning, arm: Tuning, metric: Metric, inline: Inliner) -> Markup:
    """The metric on val at every point that was tried. Dots: seeds. Line: the mean over seeds along the last field that
    is tuned. Ring: the chosen point."""
    groups = _groups([point.values for point in base.points])
    x = [place for group in groups for place in group]
    with figure(300, 200) as drawn:
        axes = drawn.add_axes((0.14, 0.29, 0.845, 0.68))
        for tuning, color in ((base, "base"), (arm, "arm")):
            _draw_tuning(axes, groups, tuning, scale_of(metric), COLOUR[color])
        _label_points(axes, [point.values for point in base.points], groups, x)
        style(axes)
        axes.locator_params(axis="y", nbins=5)
        axes.grid(axis="y", color=COLOUR["line"], lw=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(x[0] - 0.5, x[-1] + 0.5)
        axes.tick_params(labelsize=11)
        record = "; ".join(f"{point_text(point.values)}: {score(metric, point.mean)}" for point in arm.points)
        chosen = "nothing yet" if arm.chosen is None else point_text(arm.chosen)
        label = f"{metric.title} on val at every point. {name}: {record}. Chosen: {chosen}."
        return inline(drawn, label, "panel")


def _groups(points: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Places on the axis; points that differ in the last field alone stand together."""
    groups: list[list[float]] = []
    place = 0.0
    for _, members in groupby(points, key=lambda values: list(values.values())[:-1]):
        size = len(list(members))
        groups.append([place + step for step in range(size)])
        place += size + GAP
    return groups


def _draw_tuning(axes: Any, groups: list[list[float]], tuning: Tuning, scale: float, color: str) -> None:
    points = iter(tuning.points)
    for group in groups:
        here = [(place, next(points)) for place in group]
        means = [(place, scale * point.mean) for place, point in here if point.mean is not None]
        axes.plot(*zip(*means), color=color, lw=1.8, marker="o", ms=4) if means else None
        for place, point in here:
            scores = [scale * value for value in point.scores.values() if value is not None]
            axes.plot([place] * len(scores), scores, "o", color=color, ms=3.4, alpha=0.45, mew=0)
            if point.values == tuning.chosen and point.mean is not None:
                axes.plot([place], [scale * point.mean], "o", mfc="none", color=color, ms=11, mew=1.8)


def _label_points(axes: Any, values: Sequence[Mapping[str, Any]], groups: list[list[float]], x: list[float]) -> None:
    """The last field's values on the axis, and below them those of the others, where there is room for them."""
    fields = list(values[0])
    shown = list(range(0, len(x), -(-len(x) // MOST_TICKS)))
    axes.set_xticks([x[i] for i in shown], [show_value(values[i][fields[-1]]) for i in shown])
    axes.set_xlabel(fields[-1], color=COLOUR["muted"], fontsize=11, labelpad=3 if len(fields) == 1 else 18)
    if len(fields) > 1 and len(groups) <= MOST_GROUPS:
        starts = [sum(map(len, groups[:i])) for i in range(len(groups))]
        for group, start in zip(groups, starts):
            text = point_text({name: values[start][name] for name in fields[:-1]})
            axes.text(sum(group) / len(group), -0.16, text, transform=axes.get_xaxis_transform(), ha="center", va="top",
                      fontsize=10, color=COLOUR["muted"], parse_math=False)  # fmt: skip
