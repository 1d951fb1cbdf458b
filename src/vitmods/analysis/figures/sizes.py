"""Figures of a study's scores against the size of models: parallel branches and stems.

Three things everyone should know about ViTs, Figures 1 to 3 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from vitmods.analysis.figure import (
    NARROW,
    Arrays,
    Examined,
    NotHere,
    blank,
    colors,
    compared,
    dashes,
    legend,
    markers,
    plain,
)
from vitmods.analysis.figures import paper_figure
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.report.figures import INK, MUTED

Point = dict[str, float]
LOW, HIGH = ENDS = ("low", "high")
COUNTED, MACS = ("width", "blocks", "branches"), "macs"
SIZES = ("depth", "parallel", "embed_dim", "num_heads", "mlp_dim", "drop_path", "first_blocks", "prefix_from")


def scored(subject: Examined, field: str, counted: str) -> dict[str, float]:
    """Return the score under the name of its metric, and the ends of its interval as `low` and `high` if it has one.

    NotHere without a score, or if the model is not a vitmods ViT, whose config has the field.
    """
    if field not in subject.config:
        raise NotHere(f"not a vitmods ViT, whose {counted} are counted.")
    if subject.score is None:
        raise NotHere("no score: this is a figure of a study.")
    return {subject.metric: subject.score, **dict(zip(ENDS, subject.interval or ()))}


def metric_of(points: Iterable[Mapping[str, Any]], counted: Collection[str]) -> str:
    """Return the name of the score among the quantities of models."""
    return next(name for point in points for name in point if name not in (*counted, *ENDS))


def draw_interval(axes: Any, x: float, point: Mapping[str, Any], **style: Any) -> None:
    """Draw the interval of a point, if it has one, as a thin line with ends."""
    if LOW in point:
        axes.plot([x, x], [float(point[LOW]), float(point[HIGH])], "-", marker="_", ms=7, lw=1.2, **style)


def branches_of(subject: Examined) -> dict[str, torch.Tensor]:
    """`width`, `blocks` (pairs of attention and MLP), `branches` side by side, and the score; 0-d. NotHere without
    them."""
    score, config = scored(subject, "depth", "branches"), subject.config
    branches = int(config.get("parallel", 1))
    sizes = dict(zip(COUNTED, (config["embed_dim"], int(config["depth"]) * branches, branches), strict=True))
    return {name: torch.tensor(float(value)) for name, value in (sizes | score).items()}


def _branches(models: Sequence[Examined]) -> tuple[dict[str, Arrays], dict[str, str]]:
    counted, reasons = compared(models, SIZES, "size and branches", branches_of)
    if len({float(arrays["branches"]) for arrays in counted.values()}) < 2:
        if reasons:
            raise NotHere("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
        raise NotHere("the same number of branches in all: compare with the arm parallel, or parallel(branches=3).")
    return counted, reasons


@paper_figure("branches", arrays=_branches)
def draw_branches(models: Mapping[str, Arrays]) -> Any:
    """A line for each width and number of blocks; next to it, if blocks differ, a line for each number of branches."""
    points: list[Point] = [{name: float(value) for name, value in arrays.items()} for arrays in models.values()]
    by_blocks = len({(p["width"], p["blocks"]) for p in points}) > 1
    metric = metric_of(points, COUNTED)
    drawn = blank(640 if by_blocks else NARROW, 300)
    first, *second = drawn.subplots(1, 1 + by_blocks, squeeze=False, sharey=True)[0]

    def draw(axes: Any, x: str, name_of: Callable[[Point], str]) -> None:
        groups: dict[str, list[Point]] = {}
        for point in sorted(points, key=lambda p: (name_of(p), p[x])):
            groups.setdefault(name_of(point), []).append(point)
        shade, shape, dash = colors(["", *groups]), markers(list(groups)), dashes(list(groups))
        for name, group in groups.items():
            style = {"color": shade[name], "marker": shape[name], "ls": dash[name], "ms": 6, "lw": 1.6}
            axes.plot([p[x] for p in group], [p[metric] for p in group], label=name, **style)
            for point in group:
                draw_interval(axes, point[x], point, color=shade[name])
        axes.legend(frameon=False, fontsize=11, labelcolor=INK)
        axes.set_xticks(sorted({p[x] for p in points}))

    draw(plain(first, "branches", metric), "branches", lambda p: f"{p['blocks']:.0f} blocks of width {p['width']:.0f}")
    names = {p["branches"]: f"{p['branches']:.0f} side by side" for p in points} | {1.0: "in sequence"}
    for axes in second:
        draw(plain(axes, "blocks"), "blocks", lambda p: names[p["branches"]])
    return drawn


def stem_cost(subject: Examined) -> dict[str, torch.Tensor]:
    """`macs`, multiply-adds of the whole model for an image, and the score; 0-d. NotHere without them."""
    score = scored(subject, "stem", "multiply-adds")
    values = {MACS: count_macs(ViTConfig.from_dict(subject.config)), **score}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def _stems(models: Sequence[Examined]) -> tuple[dict[str, Arrays], dict[str, str]]:
    costs, reasons = compared(models, ("stem", "depth"), "its stem and depth", stem_cost)
    if len({repr(subject.config["stem"]) for subject in models if subject.name in costs}) < 2:
        raise NotHere("only one stem: compare with the arms hmlp, stem(kind=levit) and dpn.")
    return costs, reasons


DODGE = 11
"""pixels between models of (almost) the same multiply-adds"""


@paper_figure("stems", arrays=_stems)
def draw_stems(models: Mapping[str, Arrays]) -> Any:
    """Draw a point with its interval for each model, and a line at the first one's score, which intervals are of."""
    from matplotlib.transforms import ScaledTranslation

    drawn, metric = blank(NARROW, 300), metric_of(models.values(), [MACS])
    macs = {name: float(arrays[MACS]) for name, arrays in models.items()}
    most = max(macs.values())
    unit, word = next((u, w) for u, w in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")) if most >= u)
    axes = plain(drawn.add_subplot(), f"multiply-adds of an image, {word}", metric)
    axes.axhline(float(next(iter(models.values()))[metric]), color=MUTED, lw=1, ls=(0, (1, 2)), zorder=1)
    shade, shape = colors(list(models)), markers(list(models))
    handles: list[Any] = []
    # Models that would cover one another are side by side.
    near = 0.04 * max(most - min(macs.values()), 0.05 * most)
    for name, arrays in models.items():
        beside = [other for other in models if abs(macs[other] - macs[name]) <= near]
        aside = DODGE / 72 * (beside.index(name) - (len(beside) - 1) / 2)
        style = {"color": shade[name], "transform": axes.transData + ScaledTranslation(aside, 0, drawn.dpi_scale_trans)}
        draw_interval(axes, macs[name] / unit, arrays, **style)
        place = [macs[name] / unit], [float(arrays[metric])]
        axes.update_datalim([(macs[name] / unit, float(arrays[q])) for q in (metric, *ENDS) if q in arrays])
        handles += axes.plot(*place, ls="none", marker=shape[name], ms=8, label=name, **style)
    axes.margins(0.16, 0.1)
    axes.autoscale_view()
    axes.locator_params(axis="x", nbins=5)
    axes.ticklabel_format(useOffset=False)
    legend(drawn, handles)
    return drawn
