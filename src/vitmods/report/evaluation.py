"""Figures of an evaluation as files: SVG, PDF and PNG."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from vitmods.evals.accuracy import BINS
from vitmods.report.figures import FORMATS, clipped, figure, save_figure, style
from vitmods.stats.width import wilson

Colors = Mapping[str, str]
_NAMED_CLASSES, _COUNTED_CLASSES = 40, 20  # of a confusion matrix; more do not fit


def draw_evaluation(evaluation: Mapping[str, Any], folder: Path, prefix: str = "") -> list[Path]:
    """Draw the result of `evaluate` and return the files.

    Figures are named after their protocols: calibration, confusion, fewshot and corruptions.

    Raises:
        UserError: the folder cannot be written.
    """
    drawings: dict[str, Callable[[Mapping[str, Any], Colors], Any]] = {
        "calibration": _reliability,
        "confusion": _confusion,
        "fewshot": _fewshot,
        "corruptions": _corruptions,
    }
    protocols = evaluation["protocols"]
    names = [name for name in protocols if name in drawings and (name != "confusion" or "matrix" in protocols[name])]
    written, colors = [], light()
    for name in names:
        drawn = drawings[name](evaluation, colors)
        for kind in FORMATS:
            path = folder / f"{prefix}{name}.{kind}"
            save_figure(drawn, path)
            written.append(path)
    return written


def light() -> Colors:
    """Return the report's colors on white paper, by their names in its style sheet."""
    sheet = (files("vitmods.report") / "style.css").read_text()
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", sheet.partition("}")[0]))


def _reliability(evaluation: Mapping[str, Any], colors: Colors) -> Any:
    """Plot accuracy by confidence with an interval per bin, above the share of images with that confidence."""
    detail, rows = evaluation["protocols"]["calibration"], evaluation["protocols"]["calibration"]["reliability"]
    confidence, accuracy, dataset, number = (
        np.array([row[key] for row in rows]) for key in ("confidence", "accuracy", "images", "bin")
    )
    bars: dict[str, Any] = {"x": number / BINS, "width": 1 / BINS - 0.006, "align": "edge", "lw": 0}
    low, high = wilson(np.rint(accuracy * dataset), dataset)
    with figure(430, 510) as drawn:
        upper, lower = drawn.add_axes((0.14, 0.34, 0.82, 0.52)), drawn.add_axes((0.14, 0.1, 0.82, 0.17))
        upper.plot([0, 1], [0, 1], color=colors["muted"], lw=1.2, ls=(0, (4, 3)))
        upper.bar(height=accuracy, color=colors["accent"], **bars)
        upper.vlines(confidence, low, high, color=colors["arm"], lw=2.2)
        marks: dict[str, Any] = {"ms": 6.5, "mec": colors["paper"], "mew": 1.2, "clip_on": False}
        upper.plot(confidence, accuracy, "D", color=colors["arm"], **marks)
        upper.set(xlim=(0, 1), ylim=(0, 1.01))
        lower.bar(height=dataset / dataset.sum(), color=colors["base"], **bars)
        lower.set(xlim=(0, 1))
        lower.set_xlabel("confidence", color=colors["muted"], fontsize=12)
        for axes, label in ((upper, "accuracy"), (lower, "images")):
            style(axes, colors)
            axes.set_ylabel(label, color=colors["muted"], fontsize=12)
            for scale in (axes.xaxis, axes.yaxis):
                scale.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        text = f"ECE {100 * evaluation['metrics']['ece']:.1f} %; {detail['images']:,} images, 95 % intervals"
        _title(drawn, "Accuracy by confidence", text, colors)
        return drawn


def _confusion(evaluation: Mapping[str, Any], colors: Colors) -> Any:
    """Plot the shares of each true class, darker for more, with numbers if they fit."""
    detail = evaluation["protocols"]["confusion"]
    matrix, classes = np.array(detail["matrix"], dtype=float), detail["classes"]
    fractions = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    count = len(classes)
    cell = 34 if count <= _COUNTED_CLASSES else max(4, 640 // count)
    named = count <= _NAMED_CLASSES
    names = [clipped(str(name), 16) for name in classes] if named else []
    margin = 36 + (7 * max(map(len, names)) if named else 20)
    side, top = cell * count, 66
    width, height = max(margin + side + 24, 330), top + side + margin
    with figure(width, height) as drawn:
        axes = drawn.add_axes((margin / width, margin / height, side / width, side / height))
        _draw_matrix(axes, fractions, "arm", colors, names, names, numbers=count <= _COUNTED_CLASSES)
        for spine in axes.spines.values():
            spine.set(visible=True, color=colors["line"])
        axes.tick_params(axis="x", rotation=90 if named and max(map(len, names)) > 3 else 0)
        axes.set_xlabel("predicted class", color=colors["muted"], fontsize=12)
        axes.set_ylabel("true class", color=colors["muted"], fontsize=12)
        text = f"{detail['images']:,} images; percent of each true class"
        _title(drawn, "Confusion matrix", text, colors)
        return drawn


def _corruptions(evaluation: Mapping[str, Any], colors: Colors) -> Any:
    """Plot the error at each corruption and severity, and its mean."""
    detail = evaluation["protocols"]["corruptions"]
    names, severities = list(detail["errors"]), [str(severity) for severity in detail["severities"]]
    errors = np.array([detail["errors"][name] for name in names])
    table = np.column_stack([errors, errors.mean(axis=1)])
    order = np.argsort(-table[:, -1], kind="stable")
    table, labels = table[order], [names[i].replace("_", " ") for i in order]
    row, column, start, top, foot = 25, 52, 150, 70, 44
    width, height = max(470, start + column * table.shape[1] + 20), top + row * len(names) + foot
    with figure(width, height) as drawn:
        box = (start / width, foot / height, column * table.shape[1] / width, row * len(names) / height)
        axes = drawn.add_axes(box)
        _draw_matrix(axes, table, "hurts", colors, [*severities, "mean"], labels, numbers=True)
        axes.axvline(len(severities) - 0.5, color=colors["paper"], lw=4)
        axes.set_xlabel("severity", color=colors["muted"], fontsize=12)
        text = (
            f"percent of {detail['images']:,} images; without corruption {100 * detail['clean_error']:.1f} %, "
            f"mean {100 * table[:, -1].mean():.1f} %"
        )
        _title(drawn, "Error on corrupted images", text, colors)
        return drawn


def _fewshot(evaluation: Mapping[str, Any], colors: Colors) -> Any:
    """Plot accuracy by images per class: mean, interval, and a dot for each choice of images."""
    detail = evaluation["protocols"]["fewshot"]
    values = {
        int(shots): 100 * np.array(row["values"])
        for shots, row in sorted(detail["shots"].items(), key=lambda item: int(item[0]))
    }
    shots, means = list(values), [row.mean() for row in values.values()]
    with figure(470, 350) as drawn:
        axes = drawn.add_axes((0.125, 0.16, 0.845, 0.64))
        axes.set_xscale("log")
        for number, row in values.items():
            low, high = evaluation["intervals"][f"fewshot{number}"]
            axes.plot([number] * 2, [100 * low, 100 * high], color=colors["arm"], lw=2.6, solid_capstyle="round")
            axes.plot([number * 1.06] * len(row), row, "o", color=colors["arm"], ms=4, alpha=0.6, mew=0)
        axes.plot(shots, means, "-D", color=colors["arm"], lw=1.4, ms=7.5, mec=colors["paper"], mew=1.4)
        for number, mean in zip(shots, means, strict=True):
            axes.annotate(f"{mean:.1f}", (number, mean), (-9, 7), textcoords="offset points", ha="right", fontsize=11,
                          color=colors["ink"])  # fmt: skip
        style(axes, colors)
        axes.set_xticks(shots, labels=[str(number) for number in shots])
        axes.minorticks_off()
        axes.set(xlim=(min(shots) * 0.6, max(shots) * 1.5))
        axes.set_xlabel("training images per class", color=colors["muted"], fontsize=12)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        text = f"accuracy on {detail['images']:,} images; {detail['seeds']} choices, 95 % interval of their mean"
        _title(drawn, "Few-shot accuracy", text, colors)
        return drawn


def _draw_matrix(
    axes: Any, fractions: np.ndarray, shade: str, colors: Colors, columns: list[str], rows: list[str], numbers: bool
) -> None:
    """Fill each cell, darker for more, and write its percentage if `numbers`."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shades", [colors["paper"], colors[shade]])
    axes.imshow(fractions, cmap=shades, vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    style(axes, colors, grid=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks(range(len(columns)), labels=columns)
    axes.set_yticks(range(len(rows)), labels=rows)
    axes.tick_params(labelsize=11, colors=colors["ink"])
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # users choose the names: no mathematics between dollar signs
    for (row, column), fraction in np.ndenumerate(fractions) if numbers else ():
        if fraction >= 0.005:
            color = colors["paper"] if fraction > 0.7 else colors["ink"]
            axes.text(column, row, f"{100 * fraction:.0f}", ha="center", va="center_baseline", fontsize=11, color=color)


def _title(drawn: Any, title: str, text: str, colors: Colors) -> None:
    """Two lines at the top left, in units of the figure."""
    width, height = 72 * drawn.get_size_inches()
    drawn.text(12 / width, 1 - 22 / height, title, fontsize=14, color=colors["ink"])
    drawn.text(12 / width, 1 - 42 / height, text, fontsize=11, color=colors["muted"])
