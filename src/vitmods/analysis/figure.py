"""Figures of papers for any model: arrays, their drawing and a caption, all in one registry."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from vitmods.adapters.apply import as_vit
from vitmods.model.vit import ViT
from vitmods.report.figures import INK, LINE, MUTED, PALETTE, clipped, style
from vitmods.util.errors import UserError
from vitmods.util.registry import Registry
from vitmods.util.text import grouped, no_formula

Arrays = Mapping[str, Tensor]
"""The values of one model by part, such as the name of a module. An entry named like a column is its coordinate."""
Needs = Literal["weights", "images", "record", "scores", "time"]

MARKERS = "osD^vP*X"
LINES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 3)), (0, (4, 1)))
"""Styles of lines, so that they differ in grayscale print."""
SHADES = "cividis"
"""Color map of images: light is large, for color-blind readers and in print too."""
NARROW = 360
"""Width in pixels of a figure of one panel: on a phone it is hardly smaller."""
FIGURES: Registry[FigureKind] = Registry("figure", "vitmods.analysis.figures")


class NotHere(UserError):
    """A figure cannot be made for this model; the message says why."""


@dataclass(frozen=True)
class Examined:
    """A model to draw figures of.

    model:   in evaluation mode; None: without weights
    start:   the same at step 0; None: unknown
    images:  (B, channels, height, width), the model's inputs; None: none were given
    record:  the rows of metrics.jsonl, written by the training
    config:  of a vitmods ViT, as in JSON
    score:   the study's metric as shown to people, whose name and unit are `metric`; None: not part of a study
    interval: (low, high) of the score where its difference from base's is known: that of the effect, from base's mean
    block:   index of the block for figures of a single one
    head:    whether gradients include the head's
    seconds: approximate limit of each timing
    """

    name: str
    model: nn.Module | None = None
    start: nn.Module | None = None
    images: Tensor | None = None
    record: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    score: float | None = None
    metric: str = "score"
    interval: tuple[float, float] | None = None
    block: int = 0
    head: bool = False
    seconds: float = 10.0

    @property
    def vit(self) -> ViT:
        """The model as a vitmods ViT. NotHere if it cannot be read as one."""
        return _as_vit(self.known)

    @property
    def vit_at_start(self) -> ViT | None:
        return None if self.start is None else _as_vit(self.start)

    @property
    def known(self) -> nn.Module:
        """The model, of any kind. NotHere without weights."""
        if self.model is None:
            raise NotHere("weights were not kept: train again, or keep them (--keep-weights).")
        return self.model

    @property
    def seen(self) -> Tensor:
        """The images. NotHere without any."""
        if self.images is None:
            raise NotHere("no images: set them with --data.")
        return self.images


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure and its facts, for the command, the report, pages and tests.

    needs:   weights, images too, what training recorded, scores of a study, or time for measurements
    columns: of its CSV file after the model: the part, the dimensions of the values, and the value
    see:     the caption: what to look for, in a sentence or two
    arrays:  models -> (name -> arrays, name -> reason of each model left out); may raise NotHere
    draw:    name -> arrays -> a matplotlib figure. NotHere if there is nothing to compare
    """

    name: str
    title: str
    source: str
    needs: Needs
    columns: tuple[str, ...]
    see: str
    arrays: Callable[[Sequence[Examined]], tuple[dict[str, Arrays], dict[str, str]]]
    draw: Callable[[Mapping[str, Arrays]], Any]

    def of(self, *models: Examined) -> tuple[dict[str, Arrays], dict[str, str]]:
        """Return the arrays by name of model, and the reason by name for models without any."""
        try:
            return self.arrays(models)
        except NotHere as reason:
            return {}, {model.name: str(reason) for model in models}

    def csv(self, models: Mapping[str, Arrays]) -> str:
        """Write the arrays as CSV, one value per row; dimensions without coordinates are numbered from 1.

        A dimension of length 1 that is longer in other parts of the model stays empty: the value is of all of it.
        """
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["model", *self.columns])
        for name, arrays in models.items():
            parts = {part: values for part, values in arrays.items() if part not in self.columns}
            longest = {axis: max(sizes) for axis, *sizes in zip(self.columns[1:], *(v.shape for v in parts.values()))}
            for part, tensor in parts.items():
                values = tensor.detach().double().cpu().numpy()
                axes = [
                    [""] if length == 1 < longest[axis]
                    else arrays[axis].tolist() if axis in arrays
                    else range(1, length + 1)
                    for axis, length in zip(self.columns[1:], values.shape)
                ]  # fmt: skip
                for index, value in np.ndenumerate(values):
                    places = [axis[place] for axis, place in zip(axes, index, strict=True)]
                    rows.writerow([no_formula(name), part, *places, f"{value:.6g}"])
        return text.getvalue()


def figure_kind(
    name: str, *, each: Callable[[Examined], Arrays] | None = None, **facts: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function that draws a figure, with its facts; `each` returns the arrays of one model."""

    def decorate(draw: Callable[..., Any]) -> Callable[..., Any]:
        arrays = facts.pop("arrays", None) or (lambda models: _each(models, each))
        FIGURES.add(name, FigureKind(name=name, draw=draw, arrays=arrays, **facts), origin=draw)
        return draw

    return decorate


def _each(models: Sequence[Examined], arrays: Any) -> tuple[dict[str, Arrays], dict[str, str]]:
    by_name, reasons = dict[str, Arrays](), dict[str, str]()
    for model in models:
        try:
            by_name[model.name] = arrays(model)
        except UserError as reason:
            reasons[model.name] = str(reason)
    return by_name, reasons


def compared(
    models: Sequence[Examined], but: Collection[str], words: str, arrays: Callable[[Examined], Arrays]
) -> tuple[dict[str, Arrays], dict[str, str]]:
    """Return `FigureKind.arrays` of the models whose configs equal the first one's except for some settings.

    Args:
        but: names of these settings.
        words: these settings in words, for the reason why other models are left out.
        arrays: of one model.
    """

    def others(model: Examined) -> dict[str, Any]:
        return {name: value for name, value in model.config.items() if name not in but}

    def of_one(model: Examined) -> Arrays:
        if others(model) != others(models[0]):
            raise NotHere(f"differs from the first model in more than {words}.")
        return arrays(model)

    return _each(models, of_one)


def _as_vit(model: nn.Module) -> ViT:
    backbone: Any = getattr(model, "backbone", model)
    try:
        return as_vit(backbone)
    except UserError as reason:
        raise NotHere(f"not a plain ViT that vitmods can read: {reason}") from None


def blank(width: float, height: float) -> Any:
    """Make an empty matplotlib figure, in CSS pixels, independent of the user's settings."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams["figure.constrained_layout.w_pad"] = 0.06
        mpl.rcParams["figure.constrained_layout.h_pad"] = 0.06
        return Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")


def panels(width: float, height: float, counts: Sequence[int], **settings: Any) -> tuple[Any, list[list[Any]]]:
    """A blank figure and its rows of panels, counts[i] in row i; settings go to `Figure.subplots`."""
    drawn = blank(width, height)
    grid = drawn.subplots(len(counts), max(counts), squeeze=False, **settings)
    for row, count in zip(grid, counts, strict=True):
        for axes in row[count:]:
            axes.set_visible(False)
    return drawn, [list(row[:count]) for row, count in zip(grid, counts, strict=True)]


def label(axes: Any, title: str, x: str = "", color: str = INK) -> None:
    """Write a small title, without mathematics since users choose the names, and the label of the x axis."""
    axes.set_title(title, color=color, fontsize=11, loc="left", parse_math=False)
    axes.set_xlabel(x, color=color, fontsize=11)


def colors(names: Sequence[str]) -> dict[str, str]:
    """Choose a color for each model; base, the first of several, is gray."""
    start = 0 if len(names) > 1 else 1
    return dict(zip(names, cycle(PALETTE[start:] + PALETTE[:start])))


def markers(names: Sequence[str]) -> dict[str, str]:
    """Choose a marker for each model, so that color is not the only difference."""
    return dict(zip(names, cycle(MARKERS)))


def dashes(names: Sequence[str]) -> dict[str, Any]:
    """Choose a style of lines for each model."""
    return dict(zip(names, cycle(LINES)))


def plain(axes: Any, x: str = "", y: str = "", title: str = "") -> Any:
    """Give axes a plain frame and labels; returns the axes."""
    style(axes, {"line": LINE, "muted": MUTED})
    axes.set_xlabel(x, color=MUTED, fontsize=12)
    axes.set_ylabel(y, color=MUTED, fontsize=12)
    if title:
        axes.set_title(title, color=INK, fontsize=12, loc="left", parse_math=False)
    return axes


def draw_lines(x: str, y: str, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], **style: Any) -> Any:
    """Draw a line for each model, with a vertical axis from 0 and a legend; `style` goes to plot.

    Models differ in color, marker and style of line.

    Args:
        x, y: labels of the axes.
        lines: model -> its places and values.
    """
    drawn = blank(NARROW, 290)
    axes = plain(drawn.add_subplot(), x, y)
    shade, shape, dash = colors(list(lines)), markers(list(lines)), dashes(list(lines))
    handles: list[Any] = []
    for name, line in lines.items():
        look = {"color": shade[name], "marker": shape[name], "ls": dash[name], "ms": 5, "lw": 1.6, "label": name}
        handles += axes.plot(*line, **look | style)
    from_zero(axes)
    legend(drawn, handles)
    return drawn


def from_zero(axes: Any) -> None:
    """Show values from 0 to a little above the largest."""
    top = float(axes.dataLim.y1)
    axes.set_ylim(0, 1.06 * top if top > 0 else 1.0)


def legend(drawn: Any, handles: Sequence[Any], columns: int = 3) -> None:
    """Add one legend below all panels, in as many columns as fit; none for a single model."""
    if len(handles) > 1:
        names = [clipped(str(handle.get_label()), 44) for handle in handles]
        room = int(72 * drawn.get_figwidth() / (52 + 7.2 * max(map(len, names))))
        columns = max(1, min(columns, room, len(names)))
        drawn.set_figheight(drawn.get_figheight() + 19 / 72 * (-(-len(names) // columns) - 1))
        rows = [k for column in range(columns) for k in range(column, len(names), columns)]  # it fills columns first
        handles, names = [handles[k] for k in rows], [names[k] for k in rows]
        drawn.legend(handles, names, loc="outside lower left", ncols=columns, frameon=False, fontsize=12,
                     labelcolor=INK)  # fmt: skip


def own_range(axes: Any, least: float = 0.0) -> None:
    """Show the range of the data, which does not include 0, and at least this much of the axis."""
    low, high = axes.dataLim.intervaly
    room = max(0.06 * (high - low), (least - (high - low)) / 2)
    axes.set_ylim(low - room, high + room)
    axes.ticklabel_format(axis="y", useOffset=False)


def log_axis(axes: Any) -> None:
    """Make the vertical axis logarithmic, with plain numbers at as many ticks as its range allows.

    Values of 0, which it does not have, leave gaps.
    """
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log", nonpositive="mask")
    axes.autoscale(axis="y")
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


def note_missing(drawn: Any, reasons: Mapping[str, str]) -> None:
    """Write under the panels of a figure which models it lacks, and why: reasons as `FigureKind.of` returns them.

    A remedy, which follows a colon, is left out.
    """
    if not reasons:
        return
    causes = grouped((name, reason.partition(": ")[0].rstrip(".")) for name, reason in reasons.items())
    width = 72 * drawn.get_figwidth()
    lines = [
        line
        for cause, names in causes.items()
        for line in textwrap.wrap(
            f"Not available for {', '.join(clipped(name, 24) for name in names)}: {cause}.", max(20, int(width / 6.3))
        )
    ]
    drawn.set_figheight(drawn.get_figheight() + (14 * len(lines) + 6) / 72)
    # The title of a legend, for which the layout makes room.
    place: dict[str, Any] = {"loc": "outside lower left", "frameon": False}
    box = drawn.legends[0] if drawn.legends else drawn.legend([], [], **place)
    box.set_title("\n".join(lines), prop={"size": 10.5})
    box.set_alignment("left")
    box.get_title().set(color=MUTED, parse_math=False, linespacing=1.25)


def mosaic_place(maps: Sequence[Tensor], row: int, column: int) -> tuple[int, int]:
    """Return where the first pixel of an image is in `mosaic`: (row, column)."""
    _, h, w = maps[0].shape
    gap = max(1, round(0.12 * max(h, w)))
    return row * (h + gap), column * (w + gap)


def mosaic(maps: Sequence[Tensor]) -> np.ndarray:
    """Join rows of images (columns, h, w), all of one size, into one image with gaps (NaN) between them."""
    _, h, w = maps[0].shape
    bottom, right = mosaic_place(maps, len(maps) - 1, max(map(len, maps)) - 1)
    image = np.full((bottom + h, right + w), math.nan, dtype=np.float32)
    for r, row in enumerate(maps):
        for c, panel in enumerate(row.detach().float().cpu().numpy()):
            top, left = mosaic_place(maps, r, c)
            image[top : top + h, left : left + w] = panel
    return image


def show_mosaic(axes: Any, maps: Sequence[Tensor], rows: Sequence[str], columns: Sequence[str], **style: Any) -> Any:
    """Draw `mosaic`, with a label for each row and column; `style` goes to imshow."""
    from matplotlib import colormaps

    _, h, w = maps[0].shape
    shades = colormaps[style.pop("cmap", SHADES)].with_extremes(bad=(0, 0, 0, 0))
    image = axes.imshow(mosaic(maps), cmap=shades, interpolation="none", aspect="equal", **style)
    axes.set_xticks([mosaic_place(maps, 0, i)[1] + (w - 1) / 2 for i in range(len(columns))], columns)
    axes.set_yticks([mosaic_place(maps, i, 0)[0] + (h - 1) / 2 for i in range(len(rows))], rows)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(colors=MUTED, length=0, pad=3, labelsize=11)
    return image


def scale_bar(drawn: Any, image: Any, axes: Any, label: str) -> None:
    """Add a bar that explains the colors."""
    bar = drawn.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=40, pad=0.06)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, length=0, labelsize=11)
    bar.set_label(label, color=MUTED, fontsize=11)


def by_block(layers: Arrays) -> dict[int, list[Tensor]]:
    """Number of a block, from 1 on -> the values of its layers: one, or one for each parallel branch."""
    blocks: dict[int, list[Tensor]] = {}
    for name, values in layers.items():
        blocks.setdefault(int(short(name)), []).append(values.detach().float().cpu())
    return blocks


def short(name: str) -> str:
    """Shorten `blocks.3.attn` to `4`, and other names to their last part."""
    parts = name.split(".")
    return str(int(parts[1]) + 1) if parts[0] == "blocks" and len(parts) > 1 and parts[1].isdigit() else parts[-1]
