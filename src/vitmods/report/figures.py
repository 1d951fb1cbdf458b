"""The plots of the report: effects with their intervals, and learning curves."""

from __future__ import annotations

import statistics
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from vitmods.report.load import Curve
from vitmods.report.svg import COLOUR, Inliner, figure
from vitmods.stats.effects import FRACTION, Effect
from vitmods.study.words import GLYPHS, numbers

POINTS_A_CURVE = 80


@dataclass(frozen=True)
class Row:
    """An arm of the interval plot: its effect and the differences of its single seeds, in points."""

    name: str
    effect: Effect
    seeds: Sequence[float]


LETTER = 6.9
"""pixels that a character of the numbers takes, about"""


def forest(rows: Sequence[Row], margin: float, metric: str, inline: Inliner, narrow: bool) -> Markup:
    """One line an arm: the interval, the mean, a dot a seed, and the band of losses within the margin.

    `metric` says what is counted, e.g. `points of top-1`.
    """
    width, row_height, foot = (350, 58, 46) if narrow else (860, 36, 50)
    height = row_height * len(rows) + foot + 8
    with figure(width, height) as drawn:
        longest = max(len(numbers(row.effect)) for row in rows)
        verdict_at = 12 + LETTER * longest + 10  # pixels from the axes' right edge
        left, right = (8, 8) if narrow else (205, verdict_at + 83)
        axes = drawn.add_axes((left / width, foot / height, (width - left - right) / width, 1 - (foot + 8) / height))
        axes.set(xlim=_limits(rows, margin), ylim=(len(rows) - 0.5, -0.5), yticks=[])
        higher = rows[0].effect.higher_is_better
        axes.axvspan(*((-margin, 0) if higher else (0, margin)), color=COLOUR["band"], lw=0)
        axes.axvline(0, color=COLOUR["muted"], lw=1.2)
        for y, row in enumerate(rows):
            _draw_effect(axes, y + (0.16 if narrow else -0.06), row)
            _label_effect(axes, y, row, None if narrow else 1 + verdict_at / (width - left - right))
        style(axes)
        lower = "" if higher else "; lower is better"
        axes.set_xlabel(f"difference to base, {metric}{lower}", color=COLOUR["muted"], fontsize=12, labelpad=6)
        axes.tick_params(labelsize=12)
        label = "; ".join(f"{row.name}: {numbers(row.effect)}" for row in rows)
        return inline(drawn, f"Interval plot of the effects, {metric}. {label}", "narrow" if narrow else "wide")


def _limits(rows: Sequence[Row], margin: float) -> tuple[float, float]:
    """All values, unless one arm would press the others flat: what lies outside gets an arrow."""
    ends = [[v for v in (row.effect.low, row.effect.high, *row.seeds) if not np.isnan(v)] for row in rows]
    lows, highs = [min(values) for values in ends], [max(values) for values in ends]
    enough = 3 * statistics.median(max(abs(low), abs(high)) for low, high in zip(lows, highs))
    shortest = max(1.5 * margin, 0.1 if rows[0].effect.unit == FRACTION else 0.001)
    low = min([-shortest, *(low for low in lows if low >= -enough)])
    high = max([shortest, *(high for high in highs if high <= enough)])
    room = 0.04 * (high - low)
    return low - room, high + room


def _draw_effect(axes: Any, y: float, row: Row) -> None:
    effect, color = row.effect, COLOUR[row.effect.verdict.replace(" ", "-")]
    if effect.has_interval:
        axes.plot([effect.low, effect.high], [y, y], color=color, lw=2.6, solid_capstyle="round")
    axes.plot(row.seeds, [y + 0.24] * len(row.seeds), "o", color=color, ms=4, alpha=0.6, mew=0)
    axes.plot([effect.mean], [y], "D", color=color, ms=7.5, mec=COLOUR["paper"], mew=1.4)
    values = [v for v in (effect.low, effect.high, effect.mean) if not np.isnan(v)]
    left, right = axes.get_xlim()
    for end, marker, beyond in ((left, "<", min(values) < left), (right, ">", max(values) > right)):
        if beyond:
            axes.plot([end], [y], marker, color=color, ms=8, mew=0, clip_on=False)


def _label_effect(axes: Any, y: float, row: Row, verdict_at: float | None) -> None:
    """Name, numbers and verdict; without a place for the verdict all stand above the interval."""
    effect = row.effect
    verdict = f"{GLYPHS[effect.verdict]} {effect.verdict}"
    color = COLOUR[effect.verdict.replace(" ", "-")]
    texts: list[tuple[float, float, str, str, str]] = (
        [(0, y - 0.2, clipped(row.name, 20), "left", COLOUR["ink"]), (1, y - 0.2, numbers(effect), "right", color)]
        if verdict_at is None
        else [
            (-0.03, y, clipped(row.name, 24), "right", COLOUR["ink"]),
            (1.03, y, numbers(effect), "left", COLOUR["ink"]),
            (verdict_at, y, verdict, "left", color),
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
class Axis:
    """The axis of a learning curve: which array of the curve, its unit, the label, and where all panels end."""

    key: str
    unit: float
    label: str
    end: float


def axes_of(groups: Sequence[Sequence[Curve]]) -> tuple[Axis, Axis]:
    """By step, and by wall time in a unit that fits the longest arm; `groups` are the curves of each arm."""
    wall = max(statistics.median(_last(curve.wall) for curve in group) for group in groups if group)
    step = max(float(curve.step[-1]) for group in groups for curve in group)
    unit, name = (3600.0, "hours") if wall > 7200 else (60.0, "minutes") if wall > 120 else (1.0, "seconds")
    return Axis("step", 1.0, "step", step), Axis("wall", unit, f"{name} of wall time", wall / unit)


def _last(values: np.ndarray) -> float:
    return 0.0 if np.isnan(values[-1]) else float(values[-1])


def score_limits(base: Sequence[Curve]) -> tuple[float, float] | None:
    """Scores from two fifths of base's way upwards, so that the differences of the end can be seen."""
    if not base:
        return None
    late = np.concatenate([curve.score[2 * len(curve.score) // 5 :] for curve in base])
    low, high = float(late.min()), float(late.max())
    room = max(high - low, 1.0)
    return low - 0.05 * room, high + 0.15 * room


def curve_panel(
    name: str, base: Sequence[Curve], arm: Sequence[Curve], axis: Axis, metric: str, inline: Inliner
) -> Markup:
    """Arm over base: mean and range over the finished seeds; other trials as thin lines."""
    with figure(300, 190) as drawn:
        axes = drawn.add_axes((0.125, 0.2, 0.855, 0.77))
        for curves, color in ((base, "base"), (arm, "arm")):
            _draw_curves(axes, curves, axis, COLOUR[color])
        limits = score_limits(base) or score_limits(arm)
        if limits:
            finals = [float(curve.score.max()) for curve in arm]
            low = min([limits[0], *(final - 0.1 * (limits[1] - limits[0]) for final in finals)])
            high = max([limits[1], *finals])
            axes.set_ylim(max(low, 0), min(high, 101))
        axes.set_xlim(0, 1.02 * axis.end or 1)
        axes.locator_params(nbins=5)
        style(axes)
        axes.grid(axis="y", color=COLOUR["line"], lw=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel(axis.label, color=COLOUR["muted"], fontsize=11, labelpad=3)
        axes.tick_params(labelsize=11)
        ends = [f"{np.mean([c.score[-1] for c in group]):.1f}" if group else "none" for group in (arm, base)]
        label = f"Validation {metric} by {axis.label}. {name} ends at {ends[0]}, base at {ends[1]} points."
        return inline(drawn, label, "panel")


def _draw_curves(axes: Any, curves: Sequence[Curve], axis: Axis, color: str) -> None:
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


def _common(curves: Sequence[Curve], axis: Axis) -> tuple[np.ndarray, np.ndarray]:
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
