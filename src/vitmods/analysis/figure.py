"""What a figure of a paper is here: arrays of models, a drawing of them, and words; all are in one registry."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from vitmods.adapters.apply import as_vit
from vitmods.model.vit import ViT
from vitmods.report.figures import INK, LINE, MUTED, PALETTE
from vitmods.util.errors import UserError
from vitmods.util.registry import Registry
from vitmods.util.text import no_formula

Arrays = Mapping[str, Tensor]
"""Of one model: part (a module's name, say) -> values. An entry called as a column is that column's coordinate."""
Needs = Literal["weights", "images", "record", "scores", "time"]

MARKERS = "osD^vP*X"
SHADES = "cividis"
"""The map of colors of images: light is large, for color-blind readers and in print too."""
FIGURES: Registry[FigureKind] = Registry("figure", "vitmods.analysis.figures")


class NotHere(UserError):
    """A figure cannot be made of this model: the message says why."""


@dataclass(frozen=True)
class Examined:
    """A model that is looked into, and what is known of it.

    model:   in evaluation mode; None: there are no weights
    start:   the same at step 0; None: not known
    images:  (B, channels, height, width) as the model takes them; None: none were given
    record:  the rows of metrics.jsonl, as the training wrote them
    config:  of a vitmods ViT, as JSON has it
    score:   of the study's metric, as it is shown; None: not of a study
    block:   number of the block, from 0 on, of figures that show a single one
    seconds: how long each timing may take, about
    """

    name: str
    model: nn.Module | None = None
    start: nn.Module | None = None
    images: Tensor | None = None
    record: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    score: float | None = None
    block: int = 0
    seconds: float = 10.0

    @property
    def vit(self) -> ViT:
        """As a vitmods ViT. NotHere where it cannot be read as one."""
        return _as_vit(self.known)

    @property
    def vit_at_start(self) -> ViT | None:
        return None if self.start is None else _as_vit(self.start)

    @property
    def known(self) -> nn.Module:
        """The model, of any kind. NotHere where there are no weights."""
        if self.model is None:
            raise NotHere("its weights are not there: train it, or keep them (--keep-weights).")
        return self.model

    @property
    def seen(self) -> Tensor:
        """The images. NotHere where there are none."""
        if self.images is None:
            raise NotHere("it needs images: give them with --data.")
        return self.images


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure and its facts, which the command, the report, pages and tests read.

    needs:   what it is made of: the weights alone, images too, what training recorded, scores of a study, or timing
    columns: of its CSV file after the model: the part, the dimensions of the values, and the value itself
    see:     what to look for, in a sentence or two: the caption
    arrays:  of all models -> name -> arrays; it raises NotHere, or leaves out models with a reason in the second part
    draw:    the arrays of the models -> a matplotlib figure. NotHere where they have nothing to compare
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
        """Name -> arrays, of the models that have what it shows; name -> why not, of the others."""
        try:
            return self.arrays(models)
        except NotHere as reason:
            return {}, {one.name: str(reason) for one in models}

    def csv(self, found: Mapping[str, Arrays]) -> str:
        """The arrays as CSV, a row a value; dimensions without coordinates are numbered from 1."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["model", *self.columns])
        for name, arrays in found.items():
            for part, values in arrays.items():
                if part not in self.columns:
                    rows.writerows([no_formula(name), part, *row] for row in self._rows(values, arrays))
        return text.getvalue()

    def _rows(self, values: Tensor, arrays: Arrays) -> Iterator[list[Any]]:
        numbers = values.detach().double().cpu().numpy()
        axes = [
            arrays[name].tolist() if name in arrays else range(1, length + 1)
            for name, length in zip(self.columns[1:], numbers.shape)
        ]
        for index, value in np.ndenumerate(numbers):
            yield [*(axis[place] for axis, place in zip(axes, index, strict=True)), f"{value:.6g}"]


def figure_kind(
    name: str, *, each: Callable[[Examined], Arrays] | None = None, **facts: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the function that draws a figure, with its facts; `each` gives the arrays of one model."""

    def decorate(draw: Callable[..., Any]) -> Callable[..., Any]:
        arrays = facts.pop("arrays", None) or (lambda models: _each(models, each))
        FIGURES.add(name, FigureKind(name=name, draw=draw, arrays=arrays, **facts), origin=draw)
        return draw

    return decorate


def _each(models: Sequence[Examined], arrays: Any) -> tuple[dict[str, Arrays], dict[str, str]]:
    found, why = dict[str, Arrays](), dict[str, str]()
    for one in models:
        try:
            found[one.name] = arrays(one)
        except UserError as reason:
            why[one.name] = str(reason)
    return found, why


def compared(
    models: Sequence[Examined], but: Collection[str], words: str, arrays: Callable[[Examined], Arrays]
) -> tuple[dict[str, Arrays], dict[str, str]]:
    """What `FigureKind.arrays` gives, of the models whose configs are the first one's but for some settings.

    Args:
        but: names of these settings.
        words: they, as the reason of the other models says it.
        arrays: of one model.
    """

    def beside(one: Examined) -> dict[str, Any]:
        return {name: value for name, value in one.config.items() if name not in but}

    def of_one(one: Examined) -> Arrays:
        if beside(one) != beside(models[0]):
            raise NotHere(f"it differs from the first model in more than {words}.")
        return arrays(one)

    return _each(models, of_one)


def _as_vit(model: nn.Module) -> ViT:
    backbone: Any = getattr(model, "backbone", model)
    try:
        return as_vit(backbone)
    except UserError as reason:
        raise NotHere(f"it is no plain ViT that vitmods can read: {reason}") from None


def blank(width: float, height: float) -> Any:
    """An empty matplotlib figure of so many CSS pixels, whatever the reader's own settings."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams["figure.constrained_layout.w_pad"] = 0.06
        mpl.rcParams["figure.constrained_layout.h_pad"] = 0.06
        return Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")


def colors(names: Sequence[str]) -> dict[str, str]:
    """A color for each model; base, which comes first, is gray where there are others."""
    start = 0 if len(names) > 1 else 1
    return dict(zip(names, cycle(PALETTE[start:] + PALETTE[:start])))


def markers(names: Sequence[str]) -> dict[str, str]:
    """A shape for each model, so that color alone tells nothing."""
    return dict(zip(names, cycle(MARKERS)))


def plain(axes: Any, x: str = "", y: str = "", title: str = "") -> Any:
    """A quiet frame with labels; the axes again."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.tick_params(colors=MUTED, length=0, pad=4, labelsize=11)
    axes.set_xlabel(x, color=MUTED, fontsize=12)
    axes.set_ylabel(y, color=MUTED, fontsize=12)
    if title:
        axes.set_title(title, color=INK, fontsize=12, loc="left", parse_math=False)
    axes.grid(axis="y", color=LINE, lw=0.8)
    axes.set_axisbelow(True)
    return axes


def from_zero(axes: Any) -> None:
    """Values are read from 0 to a little above the largest."""
    top = float(axes.dataLim.y1)
    axes.set_ylim(0, 1.06 * top if top > 0 else 1.0)


def clipped(name: str, length: int = 16) -> str:
    """A name that has room beside a panel."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def legend(drawn: Any, handles: Sequence[Any], columns: int = 3) -> None:
    """One for all panels, below them, in as many columns as have room; none for a single model."""
    if len(handles) > 1:
        names = [clipped(handle.get_label(), 44) for handle in handles]
        room = int(72 * drawn.get_figwidth() / (52 + 7.2 * max(map(len, names))))
        columns = max(1, min(columns, room, len(names)))
        drawn.set_figheight(drawn.get_figheight() + 19 / 72 * (-(-len(names) // columns) - 1))
        rows = [k for column in range(columns) for k in range(column, len(names), columns)]  # it fills columns first
        handles, names = [handles[k] for k in rows], [names[k] for k in rows]
        drawn.legend(handles, names, loc="outside lower left", ncols=columns, frameon=False, fontsize=12,
                     labelcolor=INK)  # fmt: skip


def mosaic(maps: Sequence[Tensor]) -> np.ndarray:
    """Images (columns, h, w) a row, as one image with gaps (NaN) between them; all of one size."""
    _, h, w = maps[0].shape
    gap, most = max(1, round(0.12 * max(h, w))), max(map(len, maps))
    whole = np.full((len(maps) * (h + gap) - gap, most * (w + gap) - gap), math.nan, dtype=np.float32)
    for r, row in enumerate(maps):
        for c, image in enumerate(row.detach().float().cpu().numpy()):
            whole[r * (h + gap) : r * (h + gap) + h, c * (w + gap) : c * (w + gap) + w] = image
    return whole


def show_mosaic(axes: Any, maps: Sequence[Tensor], rows: Sequence[str], columns: Sequence[str], **how: Any) -> Any:
    """Draw `mosaic`, with a label for each row and column; `how` goes to imshow."""
    from matplotlib import colormaps

    _, h, w = maps[0].shape
    gap = max(1, round(0.12 * max(h, w)))
    shades = colormaps[how.pop("cmap", SHADES)].with_extremes(bad=(0, 0, 0, 0))
    image = axes.imshow(mosaic(maps), cmap=shades, interpolation="none", aspect="equal", **how)
    axes.set_xticks([i * (w + gap) + (w - 1) / 2 for i in range(len(columns))], columns)
    axes.set_yticks([i * (h + gap) + (h - 1) / 2 for i in range(len(rows))], rows)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(colors=MUTED, length=0, pad=3, labelsize=11)
    return image


def scale_bar(drawn: Any, image: Any, axes: Any, label: str) -> None:
    """What the colors mean."""
    bar = drawn.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=40, pad=0.06)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, length=0, labelsize=11)
    bar.set_label(label, color=MUTED, fontsize=11)


def by_block(layers: Arrays) -> dict[int, list[Tensor]]:
    """The number of a block, from 1 on -> what its layers have: one, or one of each parallel branch."""
    found: dict[int, list[Tensor]] = {}
    for name, values in layers.items():
        found.setdefault(int(short(name)), []).append(values.detach().float().cpu())
    return found


def short(name: str) -> str:
    """`blocks.3.attn` as `4`, and the end of other names."""
    parts = name.split(".")
    return str(int(parts[1]) + 1) if parts[0] == "blocks" and len(parts) > 1 and parts[1].isdigit() else parts[-1]
