"""Figures of a study's scores against the size of models: parallel branches and stems.

Three things everyone should know about ViTs, Figures 1 to 3 and 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from vitmods.analysis.figure import (
    Arrays,
    Examined,
    NotHere,
    blank,
    clipped,
    colors,
    compared,
    figure_kind,
    markers,
    plain,
)
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.report.figures import INK

Point = dict[str, float]
SIZES = ("depth", "parallel", "embed_dim", "num_heads", "mlp_dim", "drop_path", "first_blocks", "prefix_from")


def branches_of(one: Examined) -> dict[str, torch.Tensor]:
    """`width`, `blocks` (pairs of attention and MLP), `branches` side by side, and the `score`; 0-d.

    Raises:
        NotHere: the model is not a vitmods ViT, or does not have a score.
    """
    if "depth" not in one.config:
        raise NotHere("it is not a vitmods ViT, whose branches are counted.")
    if one.score is None:
        raise NotHere("it does not have a score: this is a figure of a study.")
    branches = int(one.config.get("parallel", 1))
    values = {"width": one.config["embed_dim"], "blocks": int(one.config["depth"]) * branches, "branches": branches}
    return {name: torch.tensor(float(value)) for name, value in {**values, "score": one.score}.items()}


def _branches(models: Sequence[Examined]) -> tuple[dict[str, Arrays], dict[str, str]]:
    found, why = compared(models, SIZES, "size and branches", branches_of)
    if len({float(one["branches"]) for one in found.values()}) < 2:
        if why:
            raise NotHere("; ".join(f"{name}: {reason}" for name, reason in why.items()))
        raise NotHere("all have the same number of branches: compare with the arm parallel, or parallel(branches=3).")
    return found, why


@figure_kind(
    "branches",
    arrays=_branches,
    title="Score against parallel branches",
    source="Three things everyone should know about ViTs, Figures 1 to 3",
    needs="scores",
    columns=("quantity", "value"),
    see="Models of the same blocks (pairs of attention and MLP), put side by side in one, two or more branches; where "
    "numbers of blocks differ, also the score by blocks, in sequence and in parallel. In the paper two branches are "
    "best for 36 and 60 blocks, and small models of up to 24 blocks are better in sequence.",
)
def draw_branches(found: Mapping[str, Arrays]) -> Any:
    """A line for each width and number of blocks; beside it, if blocks differ, a line for each number of branches."""
    points = [{name: float(value) for name, value in arrays.items()} for arrays in found.values()]
    by_blocks = len({(p["width"], p["blocks"]) for p in points}) > 1
    drawn = blank(640 if by_blocks else 400, 300)
    left, *right = drawn.subplots(1, 1 + by_blocks, squeeze=False, sharey=True)[0]
    plain(left, "branches", "score")
    _lines(left, points, lambda p: f"{p['blocks']:.0f} blocks of width {p['width']:.0f}", "branches")
    left.set_xticks(sorted({p["branches"] for p in points}))
    for axes in right:
        plain(axes, "blocks")
        _lines(axes, points, _sides, "blocks")
        axes.set_xticks(sorted({p["blocks"] for p in points}))
    return drawn


def _sides(point: Point) -> str:
    return f"{point['branches']:.0f} side by side" if point["branches"] > 1 else "in sequence"


def _lines(axes: Any, points: Sequence[Point], label: Any, x: str) -> None:
    groups = {name: list(own) for name, own in groupby(sorted(points, key=lambda p: (label(p), p[x])), key=label)}
    shade, shape = colors(["", *groups]), markers(list(groups))
    for name, own in groups.items():
        axes.plot([p[x] for p in own], [p["score"] for p in own], color=shade[name], marker=shape[name], ms=6, lw=1.6,
                  label=name)  # fmt: skip
    axes.legend(frameon=False, fontsize=11, labelcolor=INK)


def stem_cost(one: Examined) -> dict[str, torch.Tensor]:
    """`macs`, multiply-adds of the whole model for an image, and the `score`; 0-d.

    Raises:
        NotHere: the model is not a vitmods ViT, or does not have a score.
    """
    if "stem" not in one.config:
        raise NotHere("it is not a vitmods ViT, whose multiply-adds are counted.")
    if one.score is None:
        raise NotHere("it does not have a score: this is a figure of a study.")
    macs = count_macs(ViTConfig.from_dict(one.config))
    return {"macs": torch.tensor(macs, dtype=torch.float64), "score": torch.tensor(one.score, dtype=torch.float64)}


def _stems(models: Sequence[Examined]) -> tuple[dict[str, Arrays], dict[str, str]]:
    found, why = compared(models, ("stem", "depth"), "its stem and depth", stem_cost)
    if len({repr(one.config["stem"]) for one in models if one.name in found}) < 2:
        raise NotHere("its models have one stem: compare with the arms hmlp, stem(kind=levit) and dpn.")
    return found, why


@figure_kind(
    "stems",
    arrays=_stems,
    title="Score of stems against multiply-adds",
    source="Three things everyone should know about ViTs, Figure 6",
    needs="scores",
    columns=("quantity", "value"),
    see="The score of models that differ in their stem alone (or in a block more, where an arm has one) by the "
    "multiply-adds of the whole model. Up and to the left is better. In the paper hMLP gains at 0.8 % more, a "
    "convolutional stem at 8.5 %.",
)
def draw_stems(found: Mapping[str, Arrays]) -> Any:
    """A labeled point a model."""
    drawn = blank(400, 300)
    macs = {name: float(one["macs"]) for name, one in found.items()}
    unit, word = next((u, w) for u, w in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")) if max(macs.values()) >= u)
    axes = plain(drawn.add_subplot(), f"multiply-adds of an image, {word}", "score")
    shade, shape = colors(list(found)), markers(list(found))
    for name, one in found.items():
        point = macs[name] / unit, float(one["score"])
        axes.plot(*zip(point), shape[name], color=shade[name], ms=8, label=name)
        axes.annotate(
            clipped(name, 24), point, (7, 5), textcoords="offset points", fontsize=11, color=INK, parse_math=False
        )
    axes.margins(0.16, 0.14)
    return drawn
