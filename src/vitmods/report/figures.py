"""The plots of the report as inline SVG: effects with their intervals, learning curves, sweeps and tuning.

Colors and fonts come from the page, so plots follow its light or dark setting.
"""

from __future__ import annotations

import html
import io
import itertools
import re
import statistics
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from vitmods.report.text import chosen_text, numbers, of_metric, point_text, scale_of, score, tone, verdict_text
from vitmods.stats.verdict import FRACTION, Effect
from vitmods.study.grid import show_value
from vitmods.study.results import Tuning
from vitmods.study.state import TrialRecord
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError
from vitmods.util.remote import write_output

POINTS_PER_CURVE = 80
GAP = 0.8  # between the groups of a grid of several fields, in steps of a point
MOST_TICKS, MOST_GROUPS = 9, 4
LETTER = 6.9
"""Approximate width of a digit in pixels."""

INK, MUTED, LINE, PAPER = "#1b1f24", "#5a636e", "#dcdfe3", "#ffffff"
PALETTE = ("#6f7883", "#0b62a4", "#d55e00", "#008a64", "#b05594", "#b58900", "#2f9fd0", "#7a4d00")
"""Colors that color-blind readers can distinguish (after Okabe and Ito); gray, the first, is base's."""

# Matplotlib does not support CSS variables, so it draws with stand-ins that equal no other color of a figure.
_NAMES = ("ink", "muted", "line", "band", "base", "arm", "helps", "hurts", "same", "open", "paper")
COLOUR = {name: f"#0102{i:02x}" for i, name in enumerate(_NAMES, 16)}
_VARIABLE = {value: f"var(--{name})" for name, value in COLOUR.items()}
# The colors of figures of models, which are also written to files.
_VARIABLE |= {INK: "var(--ink)", MUTED: "var(--muted)", LINE: "var(--line)", PAPER: "var(--paper)"}
_VARIABLE |= {value: f"var(--s{i})" for i, value in enumerate(PALETTE)}


@contextmanager
def figure(width: float, height: float) -> Iterator[Any]:
    """Create an empty figure; sizes are in SVG units, about one per CSS pixel."""
    from matplotlib.figure import Figure

    with fixed_settings():
        yield Figure(figsize=(width / 72, height / 72), dpi=72)


@contextmanager
def fixed_settings() -> Iterator[None]:
    """Replace the user's matplotlib settings by fixed ones."""
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        # Matplotlib's own font lacks many scripts; the browser's do not.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        mpl.rcdefaults()
        mpl.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "vitmods",
                "pdf.fonttype": 42,  # text stays text
                "path.simplify": True,
                "axes.unicode_minus": True,
            }
        )
        yield


FORMATS = ("svg", "pdf", "png")
"""of figures as files; the same figure gives the same bytes"""
PIXELS_PER_INCH = 144
_WITHOUT_DATES: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


def file_of(drawn: Any, kind: str) -> bytes:
    """Return a figure as a file of one of `FORMATS`, on white paper unless the figure sets its own."""
    buffer = io.BytesIO()
    paper = drawn.get_facecolor() if drawn.get_facecolor()[3] else "white"
    with fixed_settings():
        drawn.savefig(buffer, format=kind, metadata=_WITHOUT_DATES[kind], facecolor=paper, dpi=PIXELS_PER_INCH)
    return buffer.getvalue()


def save_figure(drawn: Any, out: Path) -> None:
    """Write a figure in the format of the ending, at a path or an address. Raises UserError if the ending is none of
    `FORMATS`, or if the file cannot be written."""
    if out.suffix[1:].lower() not in FORMATS:
        raise UserError(f"{out.name}: a figure's file ends with .{', .'.join(FORMATS)}.")
    write_output(out, file_of(drawn, out.suffix[1:].lower()))


def recolor(drawn: Any, colors: Mapping[str, str]) -> None:
    """Replace the stand-ins of a figure by the colors of these names."""
    from matplotlib.colors import to_hex

    names = {value: name for name, value in COLOUR.items()}
    for artist in drawn.findobj():
        for part in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            value = getattr(artist, f"get_{part}", lambda: None)()
            if isinstance(value, str | tuple) and (name := names.get(to_hex(value))):
                getattr(artist, f"set_{part}")(colors[name])


class Inliner:
    """Turns the figures of one page into SVG elements with distinct ids."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self, drawn: Any, label: str, css_class: str = "") -> Markup:
        """Return the SVG element of a matplotlib figure; screen readers read `label`."""
        buffer, prefix = io.StringIO(), f"f{next(self._numbers)}-"
        with fixed_settings():
            drawn.savefig(buffer, format="svg", metadata=_WITHOUT_DATES["svg"], transparent=True)
        text = buffer.getvalue()
        start, end = text.index("<svg"), text.rindex("</svg>")
        opening, body = text[start:end].split(">", 1)
        view = re.search(r'viewBox="([^"]+)"', opening)
        assert view is not None, "matplotlib writes a viewBox"
        body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", body, flags=re.DOTALL)
        body = re.sub(r"<[^>]+>", lambda tag: _clean_tag(tag[0], prefix), body)
        body = re.sub(r">\s+<", "><", body).strip()
        name = html.escape(label, quote=True)
        return Markup(
            f'<svg class="{css_class}" viewBox="{_rounded(view[1])}" role="img" aria-label="{name}">{body}</svg>'
        )


def _clean_tag(tag: str, prefix: str) -> str:
    """Give an SVG tag the page's colors and fonts, unique ids, and one decimal."""
    tag = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', tag)
    tag = re.sub(r"url\(#", f"url(#{prefix}", tag)
    tag = re.sub(r'xlink:href="#', f'href="#{prefix}', tag)
    tag = re.sub(r"font: ((?:[a-z]+ |\d+ )*)([\d.]+)px [^;\"]*", r"font-size: \2px", tag)  # matplotlib before 3.10
    tag = re.sub(r"font-family: [^;\"]*; ?| transform=\"rotate\(-?0 [^\"]*\"", "", tag)
    tag = re.sub(r"#[0-9a-f]{6}\b", lambda color: _VARIABLE.get(color[0], color[0]), tag)
    if re.fullmatch(r'<g id="[^"]*"(/?)>', tag):
        tag = "" if tag.endswith("/>") else "<g>"  # nothing refers to ids of groups
    return re.sub(r"\s+", " ", _rounded(tag))


def _rounded(text: str) -> str:
    return re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", text)


def style(axes: Any, colors: Mapping[str, str] = COLOUR, grid: bool = True, labelsize: float = 11) -> None:
    """Draw a line at the bottom, light horizontal lines, and no other frame or ticks."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(colors["line"])
    axes.tick_params(colors=colors["muted"], length=0, pad=5, labelsize=labelsize)
    axes.patch.set_visible(False)
    if grid:
        axes.grid(axis="y", color=colors["line"], lw=0.8)
        axes.set_axisbelow(True)


def clipped(name: str, length: int) -> str:
    """Shorten a name to a number of characters, without control characters."""
    plain = "".join(" " if unicodedata.category(char).startswith("C") else char for char in name)
    return plain if len(plain) <= length else plain[: length - 1] + "…"


def forest(
    effects: Sequence[Effect], margin: float, metric: Metric, inline: Callable[[Any, str, str], Markup], narrow: bool
) -> Markup:
    """Plot one row per arm: a thin interval for new images, a thick one for these images, and the margin's band.

    Empty without effects.
    """
    if not effects:
        return Markup()
    width, row_height, foot = (350, 70, 46) if narrow else (860, 36, 50)
    height = row_height * len(effects) + foot + 8
    with figure(width, height) as drawn:
        longest = [max(len(text(effect)) for effect in effects) for text in (numbers, verdict_text)]
        verdict_at = 16 + LETTER * longest[0] + 16  # pixels right of the axes
        start, end = (8, 8) if narrow else (205, verdict_at + max(LETTER * longest[1], 108))
        axes = drawn.add_axes((start / width, foot / height, (width - start - end) / width, 1 - (foot + 8) / height))
        axes.set(xlim=_limits(effects, margin), ylim=(len(effects) - 0.5, -0.5), yticks=[])
        # On narrow screens two lines of text are above the interval, so the band and the line at zero stop below them.
        tops = [y + 0.12 for y in range(len(effects))] if narrow else [-0.5]
        for top in tops:
            axes.fill_between(
                [-margin, margin], top, top + (0.38 if narrow else len(effects)), color=COLOUR["band"], lw=0
            )
        for y, effect in enumerate(effects):
            axes.plot([0, 0], [y + 0.12 if narrow else y - 0.5, y + 0.5], color=COLOUR["muted"], lw=1.2)
            _draw_effect(axes, y + (0.29 if narrow else 0), effect)
            _label_effect(axes, y, effect, None if narrow else 1 + verdict_at / (width - start - end))
        style(axes, grid=False, labelsize=12)
        lower = "" if metric.higher_is_better else "; lower is better"
        axes.set_xlabel(f"effect, {of_metric(metric)}{lower}", color=COLOUR["muted"], fontsize=12, labelpad=6)
        label = "; ".join(f"{effect.arm}: {numbers(effect)}, {effect.verdict}" for effect in effects)
        return inline(drawn, f"Interval plot of the effects. {label}", "narrow" if narrow else "wide")


def has_arrows(effects: Sequence[Effect], margin: float) -> bool:
    """Return whether the interval plot has values outside, to which arrows point."""
    low, high = _limits(effects, margin) if effects else (0.0, 0.0)
    return any(min(_ends(effect)) < low or max(_ends(effect)) > high for effect in effects)


def _ends(effect: Effect) -> list[float]:
    return [v for v in (effect.effect, *effect.interval, effect.seeds_low, effect.seeds_high) if not np.isnan(v)]


def _limits(effects: Sequence[Effect], margin: float) -> tuple[float, float]:
    """Include all values, unless one arm would compress the others: values outside get an arrow."""
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
    low, high = axes.get_xlim()
    for end, marker, beyond in ((low, "<", min(_ends(effect)) < low), (high, ">", max(_ends(effect)) > high)):
        if beyond:
            axes.plot([end], [y], marker, color=color, ms=8, mew=0, clip_on=False)


def _label_effect(axes: Any, y: float, effect: Effect, verdict_at: float | None) -> None:
    """Write name, numbers and verdict: at `verdict_at`, right of the interval, or all above it if None."""
    color = COLOUR[tone(effect)]
    texts: list[tuple[float, float, str, str, str]] = (
        [
            (0, y - 0.31, clipped(effect.arm, 26), "left", COLOUR["ink"]),
            (1, y - 0.31, verdict_text(effect), "right", color),
            (1, y - 0.06, numbers(effect), "right", COLOUR["ink"]),
        ]
        if verdict_at is None
        else [
            (-0.03, y, clipped(effect.arm, 24), "right", COLOUR["ink"]),
            (1.03, y, numbers(effect), "left", COLOUR["ink"]),
            (verdict_at, y, verdict_text(effect), "left", color),
        ]
    )
    transform = axes.get_yaxis_transform()
    for x, height, text, align, fill in texts:
        # Users choose the names: no mathematics between dollar signs.
        axes.text(x, height, text, transform=transform, ha=align, va="center_baseline", fontsize=12.5, color=fill,
                  parse_math=False, clip_on=False)  # fmt: skip


class Axis(NamedTuple):
    """The horizontal axis of learning curves: field of the curve, its unit, label, and end of all panels."""

    key: str
    unit: float
    label: str
    end: float

    def values(self, trial: TrialRecord) -> np.ndarray:
        return np.array(getattr(trial.curve, self.key)) / self.unit


def axes_of(groups: Sequence[Sequence[TrialRecord]]) -> tuple[Axis, Axis]:
    """Return the axes for steps and for wall time, in a unit that fits the slowest arm; `groups`: trials per arm."""
    wall = max(statistics.median(np.nan_to_num(t.curve.wall_s[-1]) for t in group) for group in groups if group)
    step = max(float(trial.curve.step[-1]) for group in groups for trial in group)
    unit, name = (3600.0, "hours") if wall > 7200 else (60.0, "minutes") if wall > 120 else (1.0, "seconds")
    return Axis("step", 1.0, "step", step), Axis("wall_s", unit, f"{name} of wall time", float(wall) / unit)


def curve_panel(
    name: str, base: Sequence[TrialRecord], arm: Sequence[TrialRecord], axis: Axis, metric: Metric, inline: Inliner
) -> Markup:
    """Plot the evaluated trials of an arm over those of base.

    A line is the mean over finished seeds, a band their range; thin lines are other trials.
    """
    with figure(300, 190) as drawn:
        axes = drawn.add_axes((0.125, 0.2, 0.855, 0.77))
        for trials, color in ((base, "base"), (arm, "arm")):
            _draw_curves(axes, trials, axis, scale_of(metric), COLOUR[color])
        # Every score is on the panel, but a diverging trial must not flatten the others.
        steady = [trial for trial in (*base, *arm) if trial.status != "diverged"]
        if scores := [scale_of(metric) * value for trial in steady for value in trial.curve.score]:
            room = 0.05 * max(max(scores) - min(scores), 1.0 if metric.unit == "%" else 1e-3)
            axes.set_ylim(min(scores) - room, max(scores) + room)
        axes.set_xlim(0, 1.02 * axis.end or 1)
        axes.locator_params(nbins=5)
        style(axes)
        axes.set_xlabel(axis.label, color=COLOUR["muted"], fontsize=11, labelpad=3)
        ends = [
            f"{np.mean([scale_of(metric) * trial.curve.score[-1] for trial in trials]):.3g}" if trials else "none"
            for trials in (arm, base)
        ]
        label = f"Validation {metric.title} by {axis.label}. {name} ends at {ends[0]}, base at {ends[1]}."
        return inline(drawn, label, "panel")


def _draw_curves(axes: Any, trials: Sequence[TrialRecord], axis: Axis, scale: float, color: str) -> None:
    if finished := [trial for trial in trials if trial.status == "finished"]:
        x, scores = mean_curve(finished, axis)
        if len(finished) > 1:
            axes.fill_between(x, scale * scores.min(0), scale * scores.max(0), color=color, alpha=0.2, lw=0)
        dot = "o" if len(x) == 1 else None  # a line of one point would be invisible
        axes.plot(x, scale * scores.mean(0), color=color, lw=1.8, solid_joinstyle="round", marker=dot, ms=5)
    for trial in trials:
        if trial.status != "finished":
            x, y = axis.values(trial), scale * np.array(trial.curve.score)
            axes.plot(x, y, color=color, lw=0.9, ls=(0, (3, 2)))
            if trial.status != "unfinished":
                axes.plot(x[-1:], y[-1:], "x", color=COLOUR["hurts"], ms=7, mew=1.8)


def mean_curve(trials: Sequence[TrialRecord], axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """Return places on the axis, and the scores (seeds, places) there.

    Seeds are matched by evaluation, at their median place, so that a seed that ran on a busy machine does not cut off
    the last scores of the others.
    """
    shortest = min(len(trial.curve.score) for trial in trials)
    kept = np.unique(np.linspace(0, shortest - 1, min(shortest, POINTS_PER_CURVE)).round().astype(int))
    x = np.median([axis.values(trial)[kept] for trial in trials], axis=0)
    return x, np.array([np.array(trial.curve.score)[kept] for trial in trials])


def sweep_panel(
    name: str,
    settings: Sequence[str],
    base: Sequence[float | None],
    arm: Sequence[tuple[float | None, Effect | None]],
    metric: Metric,
    inline: Inliner,
) -> Markup:
    """Plot the means of base and an arm under each setting; bars are the effect's interval, from base's mean."""
    scale = scale_of(metric)
    with figure(300, 200) as drawn:
        axes = drawn.add_axes((0.14, 0.2, 0.845, 0.77))
        for means, color in ((base, "base"), ([mean for mean, _ in arm], "arm")):
            points = [(x, scale * mean) for x, mean in enumerate(means) if mean is not None]
            axes.plot(*zip(*points), color=COLOUR[color], lw=1.8, marker="o", ms=4) if points else None
        for x, (_, effect) in enumerate(arm):
            if effect is not None and not np.isnan(effect.half):
                low, high = (effect.base_mean + end for end in effect.interval)
                axes.plot([x, x], [low, high], color=COLOUR["arm"], lw=1.2)
        style(axes)
        axes.locator_params(axis="y", nbins=5)
        axes.set_xticks(range(len(settings)), [clipped(setting, 14) for setting in settings])
        axes.set_xlim(-0.4, len(settings) - 0.6)
        effects = [
            f"{setting}: {numbers(effect)}" for setting, (_, effect) in zip(settings, arm, strict=True) if effect
        ]
        return inline(drawn, f"{metric.title} under each setting. {name}: {'; '.join(effects)}.", "panel")


def tuning_panel(name: str, base: Tuning, arm: Tuning, metric: Metric, inline: Inliner) -> Markup:
    """Plot the metric on val at every point of a grid.

    Dots are seeds, a line is their mean along the last tuned field, a ring marks the chosen point.
    """
    values = [point.values for point in base.points]
    groups: list[list[float]] = []  # places on the axis; points that differ only in the last field are together
    place = 0.0
    for _, members in itertools.groupby(values, key=lambda fields: list(fields.values())[:-1]):
        groups.append([place + step for step, _ in enumerate(members)])
        place = groups[-1][-1] + 1 + GAP
    x = [place for group in groups for place in group]
    with figure(300, 200) as drawn:
        axes = drawn.add_axes((0.14, 0.29, 0.845, 0.68))
        for tuning, color in ((base, "base"), (arm, "arm")):
            _draw_tuning(axes, groups, tuning, scale_of(metric), COLOUR[color])
        _label_points(axes, values, groups, x)
        style(axes)
        axes.locator_params(axis="y", nbins=5)
        axes.set_xlim(x[0] - 0.5, x[-1] + 0.5)
        means = "; ".join(f"{point_text(point.values)}: {score(metric, point.mean)}" for point in arm.points)
        label = f"{metric.title} on val at every point. {name}: {means}. Chosen: {chosen_text(arm)}."
        return inline(drawn, label, "panel")


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
    """Label the axis with the last field's values, and below them those of the other fields if they fit."""
    fields = list(values[0])
    ticks = list(range(0, len(x), -(-len(x) // MOST_TICKS)))
    axes.set_xticks([x[i] for i in ticks], [show_value(values[i][fields[-1]]) for i in ticks])
    axes.set_xlabel(fields[-1], color=COLOUR["muted"], fontsize=11, labelpad=3 if len(fields) == 1 else 18)
    if len(fields) > 1 and len(groups) <= MOST_GROUPS:
        starts = [sum(map(len, groups[:i])) for i in range(len(groups))]
        for group, start in zip(groups, starts):
            text = point_text({name: values[start][name] for name in fields[:-1]})
            axes.text(sum(group) / len(group), -0.16, text, transform=axes.get_xaxis_transform(), ha="center", va="top",
                      fontsize=10, color=COLOUR["muted"], parse_math=False)  # fmt: skip
