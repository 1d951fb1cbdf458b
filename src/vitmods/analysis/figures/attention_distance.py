"""Mean attention distance: how far the heads of each layer look (Dosovitskiy et al., 2021; Shao et al., 2022, B.1)."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitmods.adapters.apply import as_vit
from vitmods.analysis.figure import Arrays, blank, by_block, colors, figure_kind, from_zero, legend, markers, plain
from vitmods.analysis.figures.kernels import has_kernel, kernel_grid
from vitmods.analysis.norms import run_hooked
from vitmods.layers import Attention
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError

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
    """A matplotlib figure of one line a model, the mean over heads by layer, and a dot a head.

    ``models`` maps a name to what ``attention_distance`` or ``kernel_distance`` gave in ``unit``. Save it with
    ``savefig("distances.svg")``.
    """
    drawn = blank(400, 300)
    axes = plain(drawn.add_subplot(), "layer", f"mean attention distance, {unit}")
    shade, shape = colors(list(models)), markers(list(models))
    lines = []
    for number, (name, layers) in enumerate(models.items()):
        heads = {block: torch.cat(branches) for block, branches in by_block(layers).items()}
        aside = 0.07 * (number - (len(models) - 1) / 2)  # dots of several models stand beside each other
        places = [block + aside for block in heads]
        means = [float(values.mean()) for values in heads.values()]
        lines += axes.plot(places, means, color=shade[name], marker=shape[name], ms=6, lw=1.6, label=name)
        for place, values in zip(places, heads.values(), strict=True):
            axes.plot([place] * len(values), values.tolist(), shape[name], color=shade[name], ms=4, alpha=0.5, mew=0)
    from_zero(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend(drawn, lines)
    return drawn
