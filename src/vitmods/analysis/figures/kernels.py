"""The learned kernels P of positions as images (Dynamic Token Normalization, Figures 6 and 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitmods.analysis.figure import Arrays, Examined, NotHere, blank, figure_kind, scale_bar, short, show_mosaic
from vitmods.layers import DynamicTokenNorm, GatedPositions
from vitmods.model.vit import ViT
from vitmods.report.figures import INK


@torch.no_grad()
def kernel_images(model: ViT) -> dict[str, Tensor]:
    """What the token in the middle of the grid reads by each kernel P: name of its module -> (H, rows, columns).

    The middle is the paper's token 91 of 14 x 14, counted from 0. Kernels are those of dynamic token norms and of
    positions in attention; with pooling they are over the pooled grid.

    Raises:
        NotHere: the model has none.
    """
    found = {name: _middle(m, model.vit_config.grid) for name, m in model.named_modules() if has_kernel(m)}
    if not found:
        raise NotHere("it has no kernels of positions: apply dtn or gpsa.")
    return found


def has_kernel(module: torch.nn.Module) -> bool:
    """Whether it is a norm or a part of attention with a kernel over the grid, the product of one over rows and one
    over columns."""
    if isinstance(module, DynamicTokenNorm):
        return module.mixing.trade_off != 1 and module.mixing.band is None
    return isinstance(module, GatedPositions)


def kernel_grid(module: Any, grid: tuple[int, int]) -> tuple[tuple[int, int], int]:
    """The grid that the kernel of a module is over, and the side of its cells in tokens."""
    pool = module.mixing.pools[0] if isinstance(module, DynamicTokenNorm) else 1
    return (grid[0] // pool, grid[1] // pool), pool


def _middle(module: Any, grid: tuple[int, int]) -> Tensor:
    (rows, columns), _ = kernel_grid(module, grid)
    px, py = module.kernels((rows, columns))
    found: Tensor = py[:, (rows - 1) // 2, :, None] * px[:, columns // 2, None, :]
    return found.float().cpu()


def _kernels(one: Examined) -> Arrays:
    """Those of the start, where it is known, under names of their own."""
    trained, start = kernel_images(one.vit), one.vit_at_start
    before = {} if start is None else {f"{name} at the start": image for name, image in kernel_images(start).items()}
    return {**before, **trained}


@figure_kind(
    "kernels",
    each=_kernels,
    title="Kernels of positions, P",
    source="Dynamic Token Normalization, Figures 6 and 7",
    needs="weights",
    columns=("kernel", "head", "row", "column", "weight"),
    see="What the token in the middle of the grid reads by the kernel of each head (across) and layer (down), at "
    "the start of training, where that is known, and after it: light is more, on one scale a model. At the "
    "start heads look at neighbors, each at another; those beyond a square number of heads look everywhere.",
)
def draw_kernels(found: Mapping[str, Arrays]) -> Any:
    """Two mosaics a model, start and trained, on the same scale."""
    both = {name: _split(images) for name, images in found.items()}
    sides = max(len(parts) for parts in both.values())
    heads, layers = (max(f(parts["trained"]) for parts in both.values()) for f in (_heads, len))
    drawn = blank(max(360, 60 + sides * (40 + 44 * heads)), 70 + len(both) * (50 + 44 * layers))
    grid = drawn.subplots(len(both), sides, squeeze=False)
    for row, (name, parts) in zip(grid, both.items(), strict=True):
        top = max(float(image.max()) for images in parts.values() for image in images.values())
        for axes in row[len(parts) :]:
            axes.set_visible(False)
        for axes, (when, images) in zip(row, parts.items()):
            columns = [str(i + 1) for i in range(_heads(images))]
            image = show_mosaic(axes, list(images.values()), _labels(list(images)), columns, vmin=0, vmax=top)
            axes.set_title(
                f"{name}, {when}" if len(parts) > 1 else name, color=INK, fontsize=11, loc="left", parse_math=False
            )
            axes.set_xlabel("head", color=INK, fontsize=11)
        row[0].set_ylabel("layer", color=INK, fontsize=11)
        scale_bar(drawn, image, list(row), "weight of a token")
    return drawn


def _split(images: Arrays) -> dict[str, dict[str, Tensor]]:
    mark = " at the start"
    start = {name.removesuffix(mark): image for name, image in images.items() if name.endswith(mark)}
    trained = {name: image for name, image in images.items() if not name.endswith(mark)}
    return {**({"start": start} if start else {}), "trained": trained}


def _heads(images: Mapping[str, Tensor]) -> int:
    return max(map(len, images.values()))


def _labels(names: list[str]) -> list[str]:
    """The number of the layer, with the part where a layer has two kernels."""
    numbers = [short(name) for name in names]
    parts = {"norm1": "", "norm2": " MLP", "positions": " attn"}
    return [f"{number}{parts.get(name.rpartition('.')[2], '')}" for number, name in zip(numbers, names)]
