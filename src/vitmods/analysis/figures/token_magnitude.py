"""How large tokens are by head, before and after a norm (Dynamic Token Normalization, Figure 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from vitmods.analysis.figure import Arrays, NotHere, blank, figure_kind, scale_bar, show_mosaic
from vitmods.analysis.norms import around_norms, patch_tokens
from vitmods.model.vit import ViT
from vitmods.report.figures import INK

PLACES = ("before", "after")
MOST_BESIDE = 4
"""heads of what stands beside each other"""


def token_magnitudes(model: ViT, images: Tensor, block: int = 0) -> dict[str, Tensor]:
    """The norm of each patch token's channels of each head, on the grid: `before` and `after` the norm before attention
    of a block, (H, rows, columns), of the first image.

    Raises:
        NotHere: the model has no such block, or its blocks have no norm there.
    """
    grid = model.vit_config.grid
    return around_a_norm(model, images, block, lambda heads: heads.norm(dim=-1).unflatten(-1, grid))


def around_a_norm(model: ViT, images: Tensor, block: int, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """`of` the channels of each head of the first image's patch tokens, (H, T, C / H), `before` and `after` the norm
    before the (first) attention of a block."""
    if not 0 <= block < len(model.blocks):
        raise NotHere(f"it has {len(model.blocks)} blocks: --block is one of 1 to {len(model.blocks)}.")
    norms = around_norms(model, images[:1])
    _, *both = next(found for name, found in norms.items() if name.startswith(f"blocks.{block}."))
    heads = model.vit_config.num_heads
    if both[0].shape[-1] % heads:
        raise NotHere(f"its {heads} heads do not divide the {both[0].shape[-1]} channels of the tokens.")
    tokens = [patch_tokens(model, x)[0].float().unflatten(-1, (heads, -1)).transpose(0, 1) for x in both]
    return {place: of(x).cpu() for place, x in zip(PLACES, tokens, strict=True)}


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
        scaled = [maps[place] / maps[place].max().clamp_min(1e-12) for place in PLACES]
        numbers = [str(i + 1) for i in range(len(maps["before"]))]
        image = show_mosaic(axes, scaled, PLACES, numbers, vmin=0, vmax=1)
        axes.set_title(name, color=INK, fontsize=11, loc="left", parse_math=False)
        axes.set_xlabel("head", color=INK, fontsize=11)
    scale_bar(drawn, image, list(panels), "magnitude, of the largest in the row")
    return drawn
