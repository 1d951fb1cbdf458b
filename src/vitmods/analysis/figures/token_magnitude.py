"""How large tokens are by head, before and after a norm (Dynamic Token Normalization, Figure 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitmods.analysis.figure import (
    INK,
    Arrays,
    NotHere,
    around_norms,
    blank,
    figure_kind,
    patch_tokens,
    scale_bar,
    show_mosaic,
)
from vitmods.model.vit import ViT

MOST_BESIDE = 4
"""heads of models that stand beside each other"""


def token_magnitudes(model: ViT, images: Tensor, block: int = 0) -> dict[str, Tensor]:
    """The norm of each patch token's channels of each head, on the grid: `before` and `after` the norm before attention
    of a block, (H, rows, columns), of the first image.

    Raises:
        NotHere: the model has no such block, or its blocks have no norm there.
    """
    _, before, after = of_block(model, images[:1], block)
    return {"before": _magnitudes(model, before), "after": _magnitudes(model, after)}


def of_block(model: ViT, images: Tensor, block: int) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """The norm before the (first) attention of a block, what goes in and what comes out, (B, N, C)."""
    if not 0 <= block < len(model.blocks):
        raise NotHere(f"it has {len(model.blocks)} blocks: --block is one of 1 to {len(model.blocks)}.")
    return next(found for name, found in around_norms(model, images).items() if name.startswith(f"blocks.{block}."))


def by_head(model: ViT, x: Tensor) -> Tensor:
    """Tokens (B, N, C) -> the patch tokens' channels of each head, (B, H, T, C / H)."""
    heads = model.vit_config.num_heads
    if x.shape[-1] % heads:
        raise NotHere(f"its {heads} heads do not divide the {x.shape[-1]} channels of the tokens.")
    found: Tensor = patch_tokens(model, x).float().unflatten(-1, (heads, -1)).transpose(1, 2)
    return found


def _magnitudes(model: ViT, x: Tensor) -> Tensor:
    found: Tensor = by_head(model, x)[0].norm(dim=-1).unflatten(-1, model.vit_config.grid).cpu()
    return found


@figure_kind(
    "token_magnitude",
    each=lambda one: token_magnitudes(one.vit, one.seen, one.block),
    title="Token magnitude by head, before and after a norm",
    source="Dynamic Token Normalization, Figure 1",
    needs="images",
    columns=("place", "head", "row", "column", "magnitude"),
    see="The norm of each token's channels of a head, for one image: light is large. LayerNorm leaves all tokens "
    "about equally large over the heads together; norms that look across tokens, as instance and dynamic "
    "token norms, keep the differences between places.",
)
def draw_magnitudes(found: Mapping[str, Arrays]) -> Any:
    """Two rows of maps a model. Colors are shares of the largest token of a row."""
    heads = max(len(maps["before"]) for maps in found.values())
    across = 2 if heads <= MOST_BESIDE and len(found) > 1 else 1
    down = -(-len(found) // across)
    drawn = blank(max(340, across * (60 + 76 * heads)), 60 + 195 * down)
    panels = drawn.subplots(down, across, squeeze=False).ravel()
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    for axes, (name, maps) in zip(panels, found.items()):
        scaled = [maps[place] / maps[place].max().clamp_min(1e-12) for place in ("before", "after")]
        numbers = [str(i + 1) for i in range(len(maps["before"]))]
        image = show_mosaic(axes, scaled, ["before", "after"], numbers, vmin=0, vmax=1)
        axes.set_title(name, color=INK, fontsize=11, loc="left", parse_math=False)
        axes.set_xlabel("head", color=INK, fontsize=11)
    scale_bar(drawn, image, list(panels), "magnitude, of the largest in the row")
    return drawn
