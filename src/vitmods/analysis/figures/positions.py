"""Figures of what positions read: attention distances and learned kernels.

Dynamic Token Normalization, Figures 2, 6 and 7; Dosovitskiy et al. (2021) for the mean attention distance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitmods.adapters.apply import as_vit
from vitmods.analysis.figure import (
    Arrays,
    Examined,
    NotHere,
    blank,
    by_block,
    colors,
    draw_lines,
    figure_kind,
    from_zero,
    markers,
    scale_bar,
    short,
    show_mosaic,
)
from vitmods.analysis.figures.norms import run_hooked
from vitmods.layers import Attention, DynamicTokenNorm, GatedPositions
from vitmods.model.vit import ViT
from vitmods.report.figures import INK
from vitmods.util.errors import UserError


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


Grid = tuple[int, int]
Unit = Literal["patches", "pixels"]


def mean_distance(weights: Tensor, grid: Grid, spacing: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """``(1 / T) sum_i sum_j weights[i, j] |p_i - p_j|`` with the places p of the tokens: (..., T, T) -> (...).

    Rows of ``weights`` sum to 1, tokens lie row by row on ``grid`` (rows, columns); ``spacing`` is the distance between
    neighbors down and across, in the unit of the result. Raises UserError when T is not rows * columns.
    """
    rows, columns = grid
    if weights.shape[-2:] != (rows * columns,) * 2:
        raise UserError(f"Weights over a grid of {rows} x {columns} end in two sides of {rows * columns} tokens.")
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    y = torch.arange(rows, device=weights.device, dtype=weights.dtype) * spacing[0]
    x = torch.arange(columns, device=weights.device, dtype=weights.dtype) * spacing[1]
    places = torch.cartesian_prod(y, x)
    distances = torch.linalg.vector_norm(places[:, None] - places, dim=-1)
    found: Tensor = (weights.flatten(-2) @ distances.flatten()) / len(places)
    return found


def attention_distance(model: nn.Module, images: Tensor, unit: Unit = "patches") -> dict[str, Tensor]:
    """The mean attention distance of each head, averaged over images: name of the attention module -> (H,).

    ``images`` (B, channels, height, width) as the model takes them; ``model`` is one that ``vitmods.apply`` takes, left
    in its mode. Class and register tokens have no place: they are left out, as queries and as what patch tokens read,
    and what is left of a patch token's weights is scaled to sum to 1. Distances are in sides of a patch or in pixels.

    Works image by image, so that it holds H N^2 weights at a time. Raises UserError without an image, and for a
    model that is folded or compiled.
    """
    if not len(images):
        raise UserError("The distance is a mean over images, and none is given: give at least one.")
    vit, found = as_vit(model), dict[str, Tensor]()
    spacing = _spacing(vit, unit)
    attentions = {name: module for name, module in vit.named_modules() if isinstance(module, Attention)}
    handles = [
        module.register_forward_pre_hook(_measure(name, vit.vit_config.grid, spacing, found))
        for name, module in attentions.items()
    ]
    run_hooked(vit, images, handles)
    if missed := [name for name in attentions if name not in found]:
        raise UserError(f"{missed[0]} does not run by itself here: measure the model before it is folded or compiled.")
    return found


def _measure(name: str, grid: Grid, spacing: tuple[float, float], found: dict[str, Tensor]) -> Callable[..., None]:
    def hook(attention: Any, inputs: tuple[Tensor, ...]) -> None:
        patches = grid[0] * grid[1]
        heads = []
        for tokens in inputs[0].split(1):
            weights = attention.weights(tokens)[0, :, -patches:, -patches:]
            heads.append(mean_distance(weights / weights.sum(-1, keepdim=True), grid, spacing))
        found[name] = torch.stack(heads).mean(0)

    return hook


@torch.no_grad()
def kernel_distance(model: nn.Module, unit: Unit = "patches") -> dict[str, Tensor]:
    """The mean distance of each learned kernel P of positions: name of its module -> (H,).

    Kernels are those of dynamic token norms and of positions in attention; they depend on no image. Raises UserError
    for a model without any.
    """
    vit = as_vit(model)
    spacing = _spacing(vit, unit)
    found = {name: _of_kernel(m, vit.vit_config.grid, spacing) for name, m in vit.named_modules() if has_kernel(m)}
    if not found:
        raise UserError("The model has no kernels of positions: apply dtn or gpsa, or use attention_distance.")
    return found


def _of_kernel(module: Any, grid: Grid, spacing: tuple[float, float]) -> Tensor:
    grid, pool = kernel_grid(module, grid)
    heads = zip(*module.kernels(grid), strict=True)
    spacing = (spacing[0] * pool, spacing[1] * pool)
    return torch.stack([mean_distance(torch.kron(py, px), grid, spacing) for px, py in heads])


def _spacing(vit: ViT, unit: Unit) -> tuple[float, float]:
    if unit not in ("patches", "pixels"):
        raise UserError(f"Distances are in patches or pixels, not '{unit}'.")
    rows, columns = vit.vit_config.patch_size
    return (float(rows), float(columns)) if unit == "pixels" else (1.0, 1.0)


@figure_kind(
    "attention_distance",
    each=lambda one: attention_distance(one.vit, one.seen),
    title="Mean attention distance by head and layer",
    source="Dynamic Token Normalization, Figure 2",
    needs="images",
    columns=("attention", "head", "distance in patches"),
    see="How far the tokens lie that each head reads, on average: a dot a head, a line through the means of "
    "layers. In the paper most heads of a ViT with LayerNorm look far; with norms across tokens some heads of "
    "early layers look near.",
)
def draw_distances(models: Mapping[str, Arrays], unit: Unit = "patches") -> Any:
    """Draw a line for each model, the mean over heads by layer, and a dot for each head.

    ``models`` maps a name to what ``attention_distance`` or ``kernel_distance`` gave in ``unit``. Save it with
    ``savefig("distances.svg")``.
    """
    heads = {
        name: {block: torch.cat(branches) for block, branches in by_block(layers).items()}
        for name, layers in models.items()
    }
    places = {  # dots of several models are side by side
        name: [block + 0.07 * (number - (len(models) - 1) / 2) for block in heads[name]]
        for number, name in enumerate(models)
    }
    means = {name: (places[name], [float(values.mean()) for values in heads[name].values()]) for name in models}
    drawn = draw_lines("layer", f"mean attention distance, {unit}", means, ms=6)
    axes, shade, shape = drawn.axes[0], colors(list(models)), markers(list(models))
    for name, blocks in heads.items():
        for place, values in zip(places[name], blocks.values(), strict=True):
            axes.plot([place] * len(values), values.tolist(), shape[name], color=shade[name], ms=4, alpha=0.5, mew=0)
    from_zero(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return drawn
