"""The figures of published tables: our intervals below the published differences, and the gain by arm and model.

Drawn in colors that pages replace by their own, light or dark, and that files keep. Models differ by their marker too,
so that the figures can be read in gray.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from vitmods.papers.table import ComparedArm, Comparison, Published, Table, published
from vitmods.report.figures import INK, LETTER, LINE, MUTED, PALETTE, Inliner, clipped, figure, style
from vitmods.study.arms import BASE
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.stats.verdict import Effect
    from vitmods.study.answer import Answer

MARKERS = "osv^Dp>"
COLORS = {"ink": INK, "muted": MUTED, "line": LINE}
OURS = PALETTE[1]
_PLACEMENTS = "other placements"


def _models(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the marker and the color of each model. Blue is left for our own results."""
    colors = (INK, *PALETTE[2:])
    return {name: (MARKERS[i % len(MARKERS)], colors[i % len(colors)]) for i, name in enumerate(dict.fromkeys(names))}


def _write(axes: Any, x: float, y: float, text: str, **settings: Any) -> None:
    """Write text as it is: no mathematics between dollar signs."""
    axes.text(x, y, text, **{"fontsize": 12, "color": INK, "parse_math": False, "clip_on": False, **settings})


def draw_comparison(comparison: Comparison, inline: Inliner, narrow: bool) -> Markup:
    """Plot one row per arm: the published differences by model with their ±, and below them our interval.

    Empty without a row. Arms of the table that the study lacks, or for which the paper prints no number, are named.
    """
    rows = [row for row in comparison.rows if not row.setting and not math.isnan(row.interval[0])]
    if not rows:
        return Markup()
    models = _models([_model(number) for row in rows for number in row.published])
    notes = missing_arms(comparison.table, [row.arm for row in rows])
    width, left = (350, 10) if narrow else (860, 150)
    legend = _lines([*models, "ours, 95 % interval"], (width - left - 20) / LETTER - 3)
    text = [line for note in notes for line in textwrap.wrap(note, int((width - 20) / (LETTER * 0.88)))]
    height_of_row, head = (58 if narrow else 46), 20 * len(legend) + 12
    foot = 46 + 15 * len(text)
    height = head + height_of_row * len(rows) + foot
    with figure(width, height) as drawn:
        axes = drawn.add_axes((left / width, foot / height, 1 - (left + 14) / width, 1 - (head + foot) / height))
        low, high = _limits(rows)
        axes.set(xlim=(low, high), ylim=(len(rows) - 0.5, -0.5), yticks=[])
        axes.axvline(0, color=MUTED, lw=1.2)
        for y, row in enumerate(rows):
            _draw_row(axes, y, row, models, narrow)
        style(axes, COLORS, grid=False, labelsize=12)
        unit = comparison.table.unit
        axes.set_xlabel(clipped(f"difference, {unit}", 48 if narrow else 90), color=MUTED, fontsize=12, labelpad=5)
        _draw_legend(axes, legend, models, height)
        for i, line in enumerate(text):
            drawn.text(10 / width, (foot - 52 - 15 * i) / height, line, fontsize=10.5, color=MUTED, parse_math=False)
        label = "; ".join(
            f"{row.arm}: ours {row.ours}, published {', '.join(number.text for number in row.published)}"
            for row in rows
        )
        return inline(
            drawn, f"Published differences and ours. {' '.join([label, *notes])}", "narrow" if narrow else "wide"
        )


def _model(number: Published) -> str:
    return number.where.partition(", ")[0]


def _lines(names: Sequence[str], width: float) -> list[list[str]]:
    """Divide the entries of a legend into lines of a number of letters."""
    lines: list[list[str]] = [[]]
    for name in names:
        if lines[-1] and sum(len(other) + 4 for other in lines[-1]) + len(name) > width:
            lines.append([])
        lines[-1].append(name)
    return lines


def _draw_legend(axes: Any, lines: list[list[str]], models: Mapping[str, tuple[str, str]], height: float) -> None:
    top = axes.get_position().y1 * height  # in points of the figure, as sizes are
    for i, names in enumerate(lines):
        x = axes.get_position().x0 * axes.figure.get_figwidth() * 72 + 4
        y = (top + 20 * (len(lines) - i) - 8) / height
        for name in names:
            marker, color = models.get(name, ("D", OURS))
            place = x / (axes.figure.get_figwidth() * 72)
            axes.plot([place], [y], marker, color=color, ms=6, mew=0, transform=axes.figure.transFigure, clip_on=False)
            _write(axes, place + 9 / (axes.figure.get_figwidth() * 72), y, name, fontsize=11, color=MUTED,
                   va="center_baseline", transform=axes.figure.transFigure)  # fmt: skip
            x += (len(name) + 4) * LETTER * 0.92


def _limits(rows: Sequence[ComparedArm]) -> tuple[float, float]:
    """Include all published differences, and our intervals unless one would compress the others."""
    ends = [end for row in rows for end in row.interval]
    limit = 3 * statistics.median(map(abs, ends))
    values = [0.0, *(max(-limit, min(limit, end)) for end in ends)]
    for row in rows:
        values += [n.difference + sign * n.plus_minus for n in row.published for sign in (-1, 1)]
    room = 0.05 * (max(values) - min(values) or 1.0)
    return min(values) - room, max(values) + room


def _draw_row(axes: Any, y: float, row: ComparedArm, models: Mapping[str, tuple[str, str]], narrow: bool) -> None:
    transform = axes.get_yaxis_transform()
    place = (0, y - 0.32, "left") if narrow else (-0.02, y, "right")
    _write(axes, place[0], place[1], clipped(row.arm, 24), ha=place[2], va="center_baseline", transform=transform)
    names = list(models)
    for number in row.published:
        marker, color = models[_model(number)]
        offset = (
            y + (0.0 if narrow else -0.16) + 0.2 * ((names.index(_model(number)) + 0.5) / len(names) - 0.5)
        )  # models do not hide others
        error = number.plus_minus
        axes.errorbar([number.difference], [offset], xerr=[error] if error else None, fmt=marker, color=color, ms=5,
                      mew=0, elinewidth=1.1)  # fmt: skip
    (low, high), (start, end), below = row.interval, axes.get_xlim(), y + (0.32 if narrow else 0.22)
    axes.plot([max(low, start), min(high, end)], [below, below], color=OURS, lw=2.2, solid_capstyle="butt")
    for place_of_arrow, marker, beyond in ((start, "<", low < start), (end, ">", high > end)):
        if beyond:
            axes.plot([place_of_arrow], [below], marker, color=OURS, ms=8, mew=0, clip_on=False)
    if start <= row.value <= end:
        axes.plot([row.value], [below], "D", color=OURS, ms=7, mew=0)
    if y:
        axes.axhline(y - 0.5, color=LINE, lw=0.8)


def missing_arms(table: Table, compared: Sequence[str]) -> list[str]:
    """Name the arms of a table that a comparison lacks: those that the study lacks or that are without an interval,
    and those without a published number."""
    assert table.study is not None
    names = [text.partition("=")[0] for text in table.study.arms.values()]
    unprinted = [name for name in names if not published(table, name)]
    absent = [name for name in names if name not in compared and name not in unprinted]
    notes = (("Without an interval here: ", absent), ("Without a published number: ", unprinted))
    return [f"{words}{', '.join(arms)}." for words, arms in notes if arms]


def draw_gains(table: Table, answer: Answer | None = None) -> Any:
    """Draw the gain of each arm over base by model, as Figure 1 of Dual PatchNorm does; a matplotlib figure.

    Without an answer the published gains; with the answer of a study its own, with intervals. Placements of norms share
    one marker. Arms without a number are named. Raises UserError without any number.
    """
    study = table.study
    if study is None:
        raise UserError(f"{table.name} cannot be drawn: {' '.join(table.needs)}")
    texts = {text.partition("=")[0]: text for text in study.every_arm}
    points: dict[str, dict[str, tuple[float, float]]] = {}
    if answer is None:
        for arm in texts:
            numbers: dict[str, Published] = {}
            for number in published(table, arm):
                numbers.setdefault(number.where, number)
            if numbers:
                points[arm] = {model: (number.difference, number.plus_minus) for model, number in numbers.items()}
        source, unit = "published", table.unit
    else:
        points = _of_study(answer)
        source, unit = f"{answer.data['name']}, 95 % intervals", answer.metric.title
    if not points:
        raise UserError(
            f"{table.name} has no printed gain to draw. Draw those of a study of its arms: `vitmods paper show "
            f"{table.name} --study FOLDER --out {table.name}.svg`."
        )
    columns = list(dict.fromkeys(model for gains in points.values() for model in gains))
    groups = {arm: _PLACEMENTS if "placement(" in texts.get(arm, "") else arm for arm in points}
    models = _models(list(dict.fromkeys(groups.values())))
    missing = [arm for arm in texts if arm not in points and arm != study.reference]
    width, foot = 860, 64
    note = textwrap.wrap(f"Without a number: {', '.join(missing)}.", 118) if missing else []
    legend = _lines(list(models), (width - 90) / LETTER)
    head = 20 * len(legend) + 34
    height = 300 + head + foot + 15 * len(note)
    with figure(width, height) as drawn:
        bottom = foot + 15 * len(note)
        axes = drawn.add_axes((64 / width, bottom / height, 1 - 80 / width, 1 - (bottom + head) / height))
        step = 0.7 / max(1, len(points))
        for i, (arm, gains) in enumerate(points.items()):
            marker, color = models[groups[arm]]
            x = [columns.index(model) + step * (i - (len(points) - 1) / 2) for model in gains]
            values, errors = zip(*gains.values(), strict=True)
            axes.errorbar(x, values, yerr=errors, fmt=marker, color=color, ms=6, mew=0, elinewidth=1)
        axes.axhline(0, color=MUTED, lw=1.2)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_xticks(range(len(columns)), [clipped(name, max(6, 100 // len(columns))) for name in columns])
        style(axes, COLORS, labelsize=11)
        axes.set_ylabel(clipped(f"gain over {study.reference or BASE}, points", 44), color=MUTED, fontsize=11)
        _draw_legend(axes, legend, models, height)
        drawn.text(64 / width, 1 - 20 / height, clipped(f"{table.title}: {source} ({unit})", 110), fontsize=12.5,
                   color=INK, parse_math=False)  # fmt: skip
        for i, line in enumerate(note):
            drawn.text(64 / width, (bottom - 52 - 15 * i) / height, line, fontsize=10.5, color=MUTED, parse_math=False)
        return drawn


def _of_study(answer: Answer) -> dict[str, dict[str, tuple[float, float]]]:
    """Return arm -> model or setting -> the effect and the half-width of its interval, in percent for fractions."""

    def point(effect: Effect) -> tuple[float, float]:
        scale = 100.0 if not effect.unit else 1.0
        return scale * effect.effect, scale * effect.half

    points: dict[str, dict[str, tuple[float, float]]] = {}
    for name, effects in answer.each.items():
        for arm, effect in effects.items():
            if effect.n and not math.isnan(effect.half):
                points.setdefault(arm, {})[name or answer.base.model.name] = point(effect)
    return points
