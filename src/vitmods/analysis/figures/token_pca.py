"""Tokens in their first two principal components, before and after a norm (Dynamic Token Normalization, Figure 9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitmods.analysis.figure import Arrays, NotHere, blank, clipped, colors, figure_kind, plain
from vitmods.analysis.figures.token_magnitude import MOST_BESIDE, PLACES, around_a_norm
from vitmods.model.vit import ViT
from vitmods.report.figures import INK


def principal_components(tokens: Tensor) -> Tensor:
    """Tokens (..., T, D) in the two directions in which they differ most, (..., T, 2), about their mean.

    The sign of a component, which is free, is such that its largest entry is positive. Raises NotHere for fewer than
    two channels or tokens.
    """
    if min(tokens.shape[-2:]) < 2:
        raise NotHere("principal components need two tokens and two channels of a head at least.")
    centered = (tokens - tokens.mean(-2, keepdim=True)).double()
    u, s, _ = torch.linalg.svd(centered, full_matrices=False)
    found = u[..., :2] * s[..., None, :2]
    largest = found.gather(-2, found.abs().argmax(-2, keepdim=True))
    signed: Tensor = found * torch.where(largest < 0, -1.0, 1.0)
    return signed


def token_components(model: ViT, images: Tensor, block: int = 0) -> dict[str, Tensor]:
    """Patch tokens of the first image by head, `before` and `after` the norm before attention of a block: (H, T, 2)
    each, in their own principal components.

    Raises:
        NotHere: the model has no such block or norm.
    """
    return around_a_norm(model, images, block, principal_components)


@figure_kind(
    "token_pca",
    each=lambda one: token_components(one.vit, one.seen, one.block),
    title="Tokens in two principal components, before and after a norm",
    source="Dynamic Token Normalization, Figure 9",
    needs="images",
    columns=("place", "head", "token", "component", "value"),
    see="The tokens of one image in the two directions in which they differ most, for each head. Panels before the "
    "norm have one scale in each model, those after it the same in all models. In the paper tokens are closer to each "
    "other after a dynamic token norm than after LayerNorm.",
)
def draw_components(found: Mapping[str, Arrays]) -> Any:
    """For each model panels before and after the norm, one a head; beside each other where these are few."""
    heads = max(len(parts["before"]) for parts in found.values())
    beside = heads <= MOST_BESIDE
    rows, columns = (len(found), 2 * heads) if beside else (2 * len(found), heads)
    drawn = blank(max(360, 70 + 95 * columns), 40 + 105 * rows)
    grid = drawn.subplots(rows, columns, squeeze=False).reshape(len(found), 2, heads)
    shade = colors(list(found))
    after = max(float(parts["after"].abs().max()) for parts in found.values())
    for (name, parts), both in zip(found.items(), grid, strict=True):
        for row, place in zip(both, PLACES, strict=True):
            reach = 1.08 * (after if place == "after" else float(parts[place].abs().max())) or 1.0
            _draw_row(row, parts[place], reach, shade[name])
        both[0][0].set_ylabel(clipped(name) if beside else f"{clipped(name)}\nbefore", fontsize=11, parse_math=False)
        both[1][0].set_ylabel("" if beside else "\nafter", fontsize=11)
    for row, place in zip(grid[0][: 1 + beside], PLACES):
        for index, axes in enumerate(row):
            first = f"{place}, head 1" if beside else "head 1"
            axes.set_title(str(index + 1) if index else first, fontsize=11, loc="left", color=INK)
    return drawn


def _draw_row(row: Any, heads: Tensor, reach: float, shade: str) -> None:
    for axes in row[len(heads) :]:
        axes.set_visible(False)
    for index, (axes, points) in enumerate(zip(row, heads)):
        plain(axes)
        axes.plot(*points.T.tolist(), "o", color=shade, ms=3.4, alpha=0.7, mew=0, rasterized=len(points) > 400)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], aspect="equal")
        axes.locator_params(axis="y", nbins=3)
        axes.tick_params(labelleft=index == 0)
