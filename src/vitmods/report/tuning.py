"""The plot of a tuned study: the metric on validation at every point that was tried, an arm over base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from vitmods.report.figures import style
from vitmods.report.svg import COLOUR, Inliner, figure
from vitmods.stats.effects import scale_of
from vitmods.study.tuning import show_value
from vitmods.study.words import point_text, score
from vitmods.tasks.metrics import Metric

Tuning = Mapping[str, Any]
GAP = 0.8  # between the groups of a grid of several fields, in steps of a point
MOST_TICKS, MOST_GROUPS = 9, 4


def tuning_panel(name: str, base: Tuning, arm: Tuning | None, metric: Metric, on: str, inline: Inliner) -> Markup:
    """Dots: seeds. Line: the mean over seeds along the last field that is tuned. Ring: the chosen point.

    base, arm: `tuning` of results.json; `arm` None: base alone.
    """
    groups = _groups([point["values"] for point in base["points"]])
    x = [place for group in groups for place in group]
    with figure(300, 200) as drawn:
        axes = drawn.add_axes((0.14, 0.29, 0.845, 0.68))
        for tuning, color in ((base, "base"), (arm, "arm")):
            if tuning is not None:
                _draw(axes, groups, tuning, scale_of(metric.unit), COLOUR[color])
        values = [point["values"] for point in base["points"]]
        _label(axes, values, groups, x)
        style(axes)
        axes.locator_params(axis="y", nbins=5)
        axes.grid(axis="y", color=COLOUR["line"], lw=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(x[0] - 0.5, x[-1] + 0.5)
        axes.tick_params(labelsize=11)
        return inline(drawn, f"{metric.title} on {on} at every point. {_said(name, arm or base, metric)}", "panel")


def _groups(points: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Places on the axis; points that differ in the last field alone stand together."""
    groups: list[list[float]] = []
    place = 0.0
    for _, members in groupby(points, key=lambda values: list(values.values())[:-1]):
        size = len(list(members))
        groups.append([place + step for step in range(size)])
        place += size + GAP
    return groups


def _draw(axes: Any, groups: list[list[float]], tuning: Tuning, scale: float, color: str) -> None:
    points = iter(tuning["points"])
    for group in groups:
        here = [(place, next(points)) for place in group]
        means = [(place, scale * point["mean"]) for place, point in here if point["mean"] is not None]
        axes.plot(*zip(*means), color=color, lw=1.8, marker="o", ms=4) if means else None
        for place, point in here:
            scores = [scale * value for value in point["scores"].values() if value is not None]
            axes.plot([place] * len(scores), scores, "o", color=color, ms=3.4, alpha=0.45, mew=0)
            if point["values"] == tuning["chosen"] and point["mean"] is not None:
                axes.plot([place], [scale * point["mean"]], "o", mfc="none", color=color, ms=11, mew=1.8)


def _label(axes: Any, values: Sequence[Mapping[str, Any]], groups: list[list[float]], x: list[float]) -> None:
    """The last field's values on the axis, and below them those of the others, where there is room for them."""
    fields = list(values[0])
    step = -(-len(x) // MOST_TICKS)
    shown = list(range(0, len(x), step))
    axes.set_xticks([x[i] for i in shown], [show_value(values[i][fields[-1]]) for i in shown])
    axes.set_xlabel(fields[-1], color=COLOUR["muted"], fontsize=11, labelpad=3 if len(fields) == 1 else 18)
    if len(fields) > 1 and len(groups) <= MOST_GROUPS:
        starts = [sum(map(len, groups[:i])) for i in range(len(groups))]
        for group, start in zip(groups, starts):
            text = point_text({name: values[start][name] for name in fields[:-1]})
            axes.text(sum(group) / len(group), -0.16, text, transform=axes.get_xaxis_transform(), ha="center", va="top",
                      fontsize=10, color=COLOUR["muted"], parse_math=False)  # fmt: skip


def _said(name: str, tuning: Tuning, metric: Metric) -> str:
    record = "; ".join(f"{point_text(point['values'])}: {score(metric, point['mean'])}" for point in tuning["points"])
    chosen = "nothing yet" if tuning["chosen"] is None else point_text(tuning["chosen"])
    return f"{name}: {record}. Chosen: {chosen}."
