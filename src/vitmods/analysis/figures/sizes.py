"""Figures of a study's scores against the size of models: parallel branches and stems.

Three things everyone should know about ViTs, Figures 1 to 3 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vitmods.analysis.figure import Arrays, Examined, NotHere, blank, colors, compared, markers, plain
from vitmods.analysis.figures import paper_figure
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.report.figures import INK, clipped

Point = dict[str, float]
SIZES = ("depth", "parallel", "embed_dim", "num_heads", "mlp_dim", "drop_path", "first_blocks", "prefix_from")


def check_counted(subject: Examined, field: str, counted: str) -> float:
    """Return the score. NotHere without one, or if the model is not a vitmods ViT, whose config has the field."""
    if field not in subject.config:
        raise NotHere(f"it is not a vitmods ViT, whose {counted} are counted.")
    if subject.score is None:
        raise NotHere("it does not have a score: this is a figure of a study.")
    return subject.score


def branches_of(subject: Examined) -> dict[str, torch.Tensor]:
    """`width`, `blocks` (pairs of attention and MLP), `branches` side by side, and the `score`; 0-d. NotHere without
    them."""
    score, config = check_counted(subject, "depth", "branches"), subject.config
    branches = int(config.get("parallel", 1))
    values = (config["embed_dim"], int(config["depth"]) * branches, branches, score)
    names = ("width", "blocks", "branches", "score")
    return {name: torch.tensor(float(value)) for name, value in zip(names, values, strict=True)}


def _branches(models: Sequence[Examined]) -> tuple[dict[str, Arrays], dict[str, str]]:
    counted, reasons = compared(models, SIZES, "size and branches", branches_of)
    if len({float(arrays["branches"]) for arrays in counted.values()}) < 2:
        if reasons:
            raise NotHere("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
        raise NotHere("all have the same number of branches: compare with the arm parallel, or parallel(branches=3).")
    return counted, reasons


@paper_figure("branches", arrays=_branches)
def draw_branches(models: Mapping[str, Arrays]) -> Any:
    """A line for each width and number of blocks; next to it, if blocks differ, a line for each number of branches."""
    points: list[Point] = [{name: float(value) for name, value in arrays.items()} for arrays in models.values()]
    by_blocks = len({(p["width"], p["blocks"]) for p in points}) > 1
    drawn = blank(640 if by_blocks else 400, 300)
    first, *second = drawn.subplots(1, 1 + by_blocks, squeeze=False, sharey=True)[0]

    def draw(axes: Any, x: str, name_of: Callable[[Point], str]) -> None:
        groups: dict[str, list[Point]] = {}
        for point in sorted(points, key=lambda p: (name_of(p), p[x])):
            groups.setdefault(name_of(point), []).append(point)
        shade, shape = colors(["", *groups]), markers(list(groups))
        for name, group in groups.items():
            style = {"color": shade[name], "marker": shape[name], "ms": 6, "lw": 1.6}
            axes.plot([p[x] for p in group], [p["score"] for p in group], label=name, **style)
        axes.legend(frameon=False, fontsize=11, labelcolor=INK)
        axes.set_xticks(sorted({p[x] for p in points}))

    draw(plain(first, "branches", "score"), "branches", lambda p: f"{p['blocks']:.0f} blocks of width {p['width']:.0f}")
    names = {p["branches"]: f"{p['branches']:.0f} side by side" for p in points} | {1.0: "in sequence"}
    for axes in second:
        draw(plain(axes, "blocks"), "blocks", lambda p: names[p["branches"]])
    return drawn


def stem_cost(subject: Examined) -> dict[str, torch.Tensor]:
    """`macs`, multiply-adds of the whole model for an image, and the `score`; 0-d. NotHere without them."""
    score = check_counted(subject, "stem", "multiply-adds")
    values = {"macs": count_macs(ViTConfig.from_dict(subject.config)), "score": score}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def _stems(models: Sequence[Examined]) -> tuple[dict[str, Arrays], dict[str, str]]:
    costs, reasons = compared(models, ("stem", "depth"), "its stem and depth", stem_cost)
    if len({repr(subject.config["stem"]) for subject in models if subject.name in costs}) < 2:
        raise NotHere("its models have one stem: compare with the arms hmlp, stem(kind=levit) and dpn.")
    return costs, reasons


@paper_figure("stems", arrays=_stems)
def draw_stems(models: Mapping[str, Arrays]) -> Any:
    """Draw a labeled point for each model."""
    drawn = blank(400, 300)
    most = max(float(arrays["macs"]) for arrays in models.values())
    unit, word = next((u, w) for u, w in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")) if most >= u)
    axes = plain(drawn.add_subplot(), f"multiply-adds of an image, {word}", "score")
    shade, shape = colors(list(models)), markers(list(models))
    for name, arrays in models.items():
        point = float(arrays["macs"]) / unit, float(arrays["score"])
        axes.plot(*zip(point), shape[name], color=shade[name], ms=8, label=name)
        style = {"textcoords": "offset points", "fontsize": 11, "color": INK, "parse_math": False}
        axes.annotate(clipped(name, 24), point, (7, 5), **style)
    axes.margins(0.16, 0.14)
    return drawn
