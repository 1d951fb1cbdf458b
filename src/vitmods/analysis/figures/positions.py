"""Figures of what positions read: attention distances and learned kernels.

Dynamic Token Normalization, Figures 2, 6 and 7; Dosovitskiy et al. (2021) for the mean attention distance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitmods.adapters.apply import as_vit
from vitmods.analysis.figure import (
    NARROW,
    Arrays,
    Examined,
    NotHere,
    by_block,
    colors,
    draw_lines,
    label,
    legend,
    markers,
    mosaic_place,
    own_range,
    panels,
    scale_bar,
    short,
    show_mosaic,
)
from vitmods.analysis.figures import paper_figure
from vitmods.analysis.figures.norms import FEW_HEADS, run_hooked
from vitmods.layers import Attention, DynamicTokenNorm, GatedPositions
from vitmods.model.vit import ViT
from vitmods.report.figures import INK, MUTED, PAPER
from vitmods.util.errors import UserError

Grid = tuple[int, int]
Unit = Literal["patches", "pixels"]


@torch.no_grad()
def kernel_images(model: ViT) -> dict[str, Tensor]:
    """The weights of each kernel P for the token in the middle of the grid: name of its module -> (H, rows, columns).

    The middle is the paper's token 91 of 14 x 14, counted from 0. Kernels are those of dynamic token norms and of
    positions in attention; with pooling they are over the pooled grid.

    Raises:
        NotHere: the model has none.
    """
    images = {}
    for name, (module, (rows, columns), _) in kernels_of(model).items():
        px, py = module.kernels((rows, columns))
        images[name] = (py[:, (rows - 1) // 2, :, None] * px[:, columns // 2, None, :]).float().cpu()
    if not images:
        raise NotHere("no position kernels: apply dtn or gpsa.")
    return images


def kernels_of(model: ViT) -> dict[str, tuple[Any, Grid, int]]:
    """The norms and parts of attention with a kernel over the grid, the product of one over rows and one over columns:
    name -> (module, the grid that the kernel is over, the side of its cells in tokens)."""
    kernels: dict[str, tuple[Any, Grid, int]] = {}
    rows, columns = model.vit_config.grid
    for name, module in model.named_modules():
        if isinstance(module, DynamicTokenNorm) and module.mixing.trade_off != 1 and module.mixing.band is None:
            pool = module.mixing.pools[0]
            kernels[name] = module, (rows // pool, columns // pool), pool
        elif isinstance(module, GatedPositions):
            kernels[name] = module, (rows, columns), 1
    return kernels


START = " at the start"
"""ends the names of kernels at step 0"""


def _kernels(subject: Examined) -> Arrays:
    trained, start = kernel_images(subject.vit), subject.vit_at_start
    before = {} if start is None else {f"{name}{START}": image for name, image in kernel_images(start).items()}
    return {**before, **trained}


TIES = 4
"""most equal largest weights that are marked: a kernel with more of them does not prefer a place"""


def largest_weights(kernel: Tensor) -> list[tuple[int, int]]:
    """The (row, column) of the largest weight of a kernel (rows, columns): several if they are equal up to rounding,
    none if more than four are."""
    largest = (kernel >= kernel.max() * (1 - 1e-4)).nonzero().tolist()
    return [(row, column) for row, column in largest] if len(largest) <= TIES else []


def mark_kernels(axes: Any, maps: Sequence[Tensor]) -> list[Any]:
    """Mark on a mosaic of kernels the tokens that read, and their largest weights; returns a handle for each."""
    from matplotlib.patheffects import withStroke

    _, rows, columns = maps[0].shape
    readers, largest = list[tuple[int, int]](), list[tuple[int, int]]()
    for r, kernels in enumerate(maps):
        for c, kernel in enumerate(kernels):
            top, left = mosaic_place(maps, r, c)
            readers.append((top + (rows - 1) // 2, left + columns // 2))
            largest += [(top + row, left + column) for row, column in largest_weights(kernel)]
    # A light mark with a dark edge stands out from every color of the map, in print and in dark mode.
    both: dict[str, Any] = {"ls": "none", "mec": PAPER, "mew": 1.0, "clip_on": False}
    both["path_effects"] = [withStroke(linewidth=2.6, foreground=INK)]
    marks = (
        ("token that reads", readers, {"marker": "s", "ms": 7, "mfc": "none"}),
        ("its largest weight", largest, {"marker": "o", "ms": 2.4, "mfc": PAPER}),
    )
    return [
        axes.plot([x for _, x in places], [y for y, _ in places], label=name, **both, **look)[0]
        for name, places, look in marks
    ]


@paper_figure("kernels", each=_kernels)
def draw_kernels(models: Mapping[str, Arrays]) -> Any:
    """Draw two mosaics for each model, at the start and trained, on the same scale, with marks as in the paper."""
    mosaics: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, images in models.items():
        start = {part.removesuffix(START): image for part, image in images.items() if part.endswith(START)}
        trained = {part: image for part, image in images.items() if not part.endswith(START)}
        mosaics[name] = {**({"start": start} if start else {}), "trained": trained}
    heads = max(len(image) for images in models.values() for image in images.values())
    layers = max(len(parts["trained"]) for parts in mosaics.values())
    counts = [len(parts) for parts in mosaics.values()]
    side = 56 if heads <= FEW_HEADS else 44
    width, height = max(NARROW, 60 + max(counts) * (40 + side * heads)), 90 + len(models) * (50 + side * layers)
    drawn, grid = panels(width, height, counts)
    part_names = {"norm1": "", "norm2": " MLP", "positions": " attn"}  # a layer can have two kernels
    for row, (name, parts) in zip(grid, mosaics.items(), strict=True):
        top = max(float(image.max()) for image in models[name].values())
        for axes, (when, images) in zip(row, parts.items(), strict=True):
            rows = [f"{short(part)}{part_names.get(part.rpartition('.')[2], '')}" for part in images]
            columns = [str(i + 1) for i in range(max(map(len, images.values())))]
            image = show_mosaic(axes, list(images.values()), rows, columns, vmin=0, vmax=top)
            label(axes, f"{name}, {when}" if len(parts) > 1 else name, "head")
            marks = mark_kernels(axes, list(images.values()))
        row[0].set_ylabel("layer", color=INK, fontsize=11)
        scale_bar(drawn, image, row, "weight of a token")
    legend(drawn, marks)
    return drawn


def mean_distance(weights: Tensor, grid: Grid, spacing: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """``(1 / T) sum_i sum_j weights[i, j] |p_i - p_j|`` with the places p of the tokens: (..., T, T) -> (...).

    Rows of ``weights`` sum to 1, tokens are row by row on ``grid`` (rows, columns); ``spacing`` is the distance between
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
    return (weights.flatten(-2) @ distances.flatten()) / len(places)


def attention_distance(model: nn.Module, images: Tensor, unit: Unit = "patches") -> dict[str, Tensor]:
    """The mean attention distance of each head, averaged over images: name of the attention module -> (H,).

    ``images`` (B, channels, height, width) as the model expects them; ``model`` is one that ``vitmods.apply`` accepts,
    and keeps its mode. Class and register tokens are without a place: they are left out, as queries and as what patch
    tokens read, and the other weights of a patch token are scaled to sum to 1. Distances are in sides of a patch or in
    pixels.

    Works image by image, so that it holds H N^2 weights at a time. Raises UserError without an image, and for a
    model that is folded or compiled.
    """
    if not len(images):
        raise UserError("The distance is a mean over images: pass at least one image.")
    vit, distances = as_vit(model), dict[str, Tensor]()
    spacing, grid = _spacing(vit, unit), vit.vit_config.grid
    patches = grid[0] * grid[1]

    def measure(name: str) -> Callable[..., None]:
        def hook(attention: Any, inputs: tuple[Tensor, ...]) -> None:
            heads = []
            for tokens in inputs[0].split(1):
                weights = attention.weights(tokens)[0, :, -patches:, -patches:]
                heads.append(mean_distance(weights / weights.sum(-1, keepdim=True), grid, spacing))
            distances[name] = torch.stack(heads).mean(0)

        return hook

    attentions = {name: module for name, module in vit.named_modules() if isinstance(module, Attention)}
    run_hooked(vit, images, [module.register_forward_pre_hook(measure(name)) for name, module in attentions.items()])
    if missing := [name for name in attentions if name not in distances]:
        raise UserError(
            f"{missing[0]} does not run separately here: measure the model before it is folded or compiled."
        )
    return distances


@torch.no_grad()
def kernel_distance(model: nn.Module, unit: Unit = "patches") -> dict[str, Tensor]:
    """The mean distance of each learned kernel P of positions: name of its module -> (H,).

    Kernels are those of dynamic token norms and of positions in attention; they do not depend on images. Raises
    UserError for a model without kernels.
    """
    vit = as_vit(model)
    down, across = _spacing(vit, unit)
    distances = {}
    for name, (module, grid, pool) in kernels_of(vit).items():
        spacing, heads = (down * pool, across * pool), zip(*module.kernels(grid), strict=True)
        distances[name] = torch.stack([mean_distance(torch.kron(py, px), grid, spacing) for px, py in heads])
    if not distances:
        raise UserError("The model does not have position kernels: apply dtn or gpsa, or use attention_distance.")
    return distances


def _spacing(vit: ViT, unit: Unit) -> tuple[float, float]:
    if unit not in ("patches", "pixels"):
        raise UserError(f"Distances are in patches or pixels, not '{unit}'.")
    rows, columns = vit.vit_config.patch_size
    return (float(rows), float(columns)) if unit == "pixels" else (1.0, 1.0)


EVEN = "even"
"""the distance if every token read all tokens alike, (1,)"""


def _distances(subject: Examined) -> Arrays:
    vit = subject.vit
    tokens = vit.vit_config.num_patches
    even = mean_distance(torch.full((tokens, tokens), 1 / tokens), vit.vit_config.grid)
    return {**attention_distance(vit, subject.seen), EVEN: even[None]}


@paper_figure("attention_distance", each=_distances)
def draw_distances(models: Mapping[str, Arrays], unit: Unit = "patches") -> Any:
    """Draw a line for each model, the mean over heads by layer, and a dot for each head.

    ``models`` maps a name to the result of ``attention_distance`` or ``kernel_distance`` in ``unit``; with an entry
    ``even``, the distance of even attention is a horizontal line. Save it with ``savefig("distances.svg")``.
    """
    by_layer = {name: {part: v for part, v in layers.items() if part != EVEN} for name, layers in models.items()}
    heads = {
        name: {block: torch.cat(branches) for block, branches in by_block(layers).items()}
        for name, layers in by_layer.items()
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
    for even in sorted({float(layers[EVEN]) for layers in models.values() if EVEN in layers}):
        axes.axhline(even, color=MUTED, lw=1, ls=(0, (1, 2)), zorder=1)
        axes.set_title("dotted: reading all patches alike", fontsize=10, color=MUTED, loc="right")
    own_range(axes, least=0.1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return drawn
