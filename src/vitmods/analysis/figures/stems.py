"""Accuracy of stems against multiply-adds (Three things everyone should know about ViTs, Figure 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def stem_cost(one: Examined) -> dict[str, torch.Tensor]:
    """`macs`, multiply-adds of the whole model for an image, and the `score`; 0-d.

    Raises:
        NotHere: the model is no vitmods ViT, or has no score.
    """
    if "stem" not in one.config:
        raise NotHere("it is no vitmods ViT, whose multiply-adds are counted.")
    if one.score is None:
        raise NotHere("it has no score: this is a figure of a study.")
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
