"""Figures of norms: what they do to tokens, and what they have learned.

Dynamic Token Normalization, Figures 1, 3b, 8 and 9; Dual PatchNorm, Figure 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitmods.adapters.transfer import evaluating
from vitmods.analysis.figure import (
    LINES,
    NARROW,
    Arrays,
    Examined,
    NotHere,
    by_block,
    colors,
    draw_lines,
    label,
    legend,
    own_range,
    panels,
    plain,
    scale_bar,
    short,
    show_mosaic,
)
from vitmods.analysis.figures import paper_figure
from vitmods.layers import DualPatchNormStem, DynamicTokenNorm
from vitmods.layers.norms.batch import BatchNorm
from vitmods.layers.norms.contract import AffineNorm
from vitmods.model.vit import ViT
from vitmods.report.figures import LINE, MUTED, PALETTE, clipped
from vitmods.train.loggers import LAMBDA, lambdas_of

NAME = 16
"""letters of a name next to a panel"""


def patch_tokens(vit: ViT, x: Tensor) -> Tensor:
    """Select the tokens on the grid, (B, T, C), from all tokens (B, N, C)."""
    return x[:, x.shape[1] - vit.vit_config.num_patches :]


def around_norms(vit: ViT, images: Tensor) -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Name -> (module, inputs, outputs), tokens (B, N, C), of the norm before attention in each block.

    NotHere if a block does not have one.
    """
    tokens: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            tokens[name] = module, inputs[0].detach(), out.detach()

        return hook

    norms: dict[str, nn.Module] = {}
    for index, block in enumerate(vit.blocks):
        named: dict[str, Any] = {"norm1": getattr(block, "norm1", None)}
        branches: Any = getattr(block, "attns", None)
        if branches is not None:
            named = {f"attns.{k}.norm": branch.norm for k, branch in enumerate(branches)}
        for name, norm in named.items():
            if norm is None or isinstance(norm, nn.Identity):
                raise NotHere(f"block {index + 1} does not have a norm before attention.")
            norms[f"blocks.{index}.{name}"] = norm
    run_hooked(vit, images, [norm.register_forward_hook(keep(name)) for name, norm in norms.items()])
    if missing := [name for name in norms if name not in tokens]:
        raise NotHere(f"{missing[0]} does not run by itself: look at the model before it is folded.")
    return tokens


def run_hooked(vit: ViT, images: Tensor, handles: Sequence[RemovableHandle]) -> None:
    """Run hooks on a forward pass without gradients over images (B, channels, height, width), then remove them. The
    model keeps its mode."""
    try:
        with torch.no_grad(), evaluating(vit):
            vit.forward_features(images)
    finally:
        for handle in handles:
            handle.remove()


QUARTILES = (0.25, 0.5, 0.75)
TRIMMED = 0.05
"""part of the channels of a token, those with the largest ratios, that its variation coefficient leaves out"""


def variation_coefficient(model: ViT, images: Tensor) -> dict[str, Tensor]:
    """The variation coefficient of patch tokens, with the mean mu that the norm before attention subtracts: the norm's
    name -> (3,), the quartiles over tokens, and the `quantile` of each.

    The coefficient of a token is the norm of ``|(x - mu) / x|`` over its C channels, divided by ``sqrt(C)`` so that
    widths compare. A few values of x near zero would dominate it: the largest 5 % of the ratios, at least one, are left
    out.

    Raises:
        NotHere: a norm does not subtract a mean, or an unknown one.
    """
    quartiles = {"quantile": torch.tensor(QUARTILES)}
    for name, (norm, x, _) in around_norms(model, images).items():
        x = x.double()
        ratio = patch_tokens(model, ((x - subtracted_mean(norm, x)) / x).abs()).flatten(0, -2)
        # The sort moves NaN, of 0 / 0, to the end like infinity.
        kept = ratio.sort(-1).values[:, : x.shape[-1] - math.ceil(TRIMMED * x.shape[-1])]
        coefficients = kept.square().mean(-1).sqrt()
        coefficients = coefficients[coefficients.isfinite()].sort().values
        if not len(coefficients):
            raise NotHere("more than 5 % of the channels of every token are 0.")
        quartiles[name] = coefficients[[round(q * (len(coefficients) - 1)) for q in QUARTILES]].cpu()
    return quartiles


@torch.no_grad()
def subtracted_mean(norm: nn.Module, x: Tensor) -> Tensor:
    """The mean that a norm in evaluation mode subtracts from tokens (B, N, C), which broadcasts to them.

    Raises:
        NotHere: it does not subtract one, or its kind is not known here.
    """
    if isinstance(norm, nn.LayerNorm):
        return x.mean(-1, keepdim=True)
    if isinstance(norm, BatchNorm):
        return norm.running_mean.to(x.dtype)
    if isinstance(norm, DynamicTokenNorm):
        return _mixed_mean(norm, x)
    if isinstance(norm, AffineNorm):
        mean = x.mean(1, keepdim=True)
        training = norm.training
        try:
            return norm.eval().statistics(mean, x.var(1, unbiased=False, keepdim=True), x.shape[1])[0]
        except NotImplementedError:
            pass
        finally:
            norm.train(training)
    raise NotHere(f"{type(norm).__name__} does not subtract a mean that is known here.")


def _mixed_mean(norm: DynamicTokenNorm, x: Tensor) -> Tensor:
    """``lambda mu_LN + (1 - lambda) P x`` of each head; LayerNorm's for prefix tokens."""
    if norm.mixing.band is not None or max(norm.mixing.pools) > 1 or norm.mixing.variant == "released":
        raise NotHere("the means of a dtn with a band, pooling or the released code's scaling are not known here.")
    prefix = norm.prefix_tokens
    grid = norm.grid_size or (1, x.shape[1] - prefix)
    px, py = (kernel.to(x) for kernel in norm.kernels(grid, x))
    heads = x[:, prefix:].unflatten(1, grid).unflatten(-1, (norm.num_heads, -1))
    across = torch.einsum("hrs,hcw,bswhd->brchd", py, px, heads).flatten(1, 2)
    within, fraction = x.mean(-1, keepdim=True), norm.lambdas()[0]
    weight = fraction.to(x).view(-1, 1) if isinstance(fraction, Tensor) else fraction
    mixed = (weight * within[:, prefix:, :, None] + (1 - weight) * across).flatten(-2)
    return torch.cat([within[:, :prefix].expand(-1, -1, x.shape[-1]), mixed], dim=1)


@paper_figure("variation", each=lambda subject: variation_coefficient(subject.vit, subject.seen))
def draw_variation(models: Mapping[str, Arrays]) -> Any:
    """Draw a line for each model over layers, with a band."""
    quartiles = {}
    for name, arrays in models.items():
        blocks = by_block({part: v for part, v in arrays.items() if part != "quantile"})
        quartiles[name] = list(blocks), torch.stack([torch.stack(b).mean(0) for b in blocks.values()], 1).tolist()
    lines = {name: (places, middle) for name, (places, (_, middle, _)) in quartiles.items()}
    drawn = draw_lines("layer", "norm of (x − mean) / x, by √C", lines)
    axes, shade = drawn.axes[0], colors(list(models))
    for name, (places, (low, _, high)) in quartiles.items():
        axes.fill_between(places, low, high, color=shade[name], alpha=0.13, lw=0)
    own_range(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return drawn


PLACES = ("before", "after")
FEW_HEADS = 4
"""heads in panels side by side"""


def token_magnitudes(model: ViT, images: Tensor, block: int = 0) -> dict[str, Tensor]:
    """The norm of each patch token's channels of each head, on the grid: `before` and `after` the norm before attention
    of a block, (H, rows, columns), of the first image.

    Raises:
        NotHere: the model does not have the block, or the block does not have the norm.
    """
    grid = model.vit_config.grid
    return {
        place: heads.norm(dim=-1).unflatten(-1, grid) for place, heads in around_a_norm(model, images, block).items()
    }


def around_a_norm(model: ViT, images: Tensor, block: int) -> dict[str, Tensor]:
    """The channels of each head of the first image's patch tokens, (H, T, C / H), `before` and `after` the norm before
    the (first) attention of a block."""
    if not 0 <= block < len(model.blocks):
        raise NotHere(f"only {len(model.blocks)} blocks: --block is one of 1 to {len(model.blocks)}.")
    norms = around_norms(model, images[:1])
    _, *both = next(norm for name, norm in norms.items() if name.startswith(f"blocks.{block}."))
    heads = model.vit_config.num_heads
    if both[0].shape[-1] % heads:
        raise NotHere(f"{heads} heads do not divide the {both[0].shape[-1]} channels of the tokens.")
    tokens = [patch_tokens(model, x)[0].float().unflatten(-1, (heads, -1)).transpose(0, 1) for x in both]
    return {place: x.cpu() for place, x in zip(PLACES, tokens, strict=True)}


@paper_figure("token_magnitude", each=lambda subject: token_magnitudes(subject.vit, subject.seen, subject.block))
def draw_magnitudes(models: Mapping[str, Arrays]) -> Any:
    """Draw two rows of maps for each model; colors are fractions of a row's largest token."""
    heads = max(len(maps["before"]) for maps in models.values())
    across = 2 if heads <= FEW_HEADS and len(models) > 1 else 1
    counts = [min(across, len(models) - start) for start in range(0, len(models), across)]
    drawn, rows = panels(max(340, across * (46 + 76 * heads)), 60 + 195 * len(counts), counts)
    grid = [axes for row in rows for axes in row]
    for axes, (name, maps) in zip(grid, models.items(), strict=True):
        scaled = [maps[place] / maps[place].max().clamp_min(1e-12) for place in PLACES]
        numbers = [str(i + 1) for i in range(len(maps["before"]))]
        image = show_mosaic(axes, scaled, PLACES, numbers, vmin=0, vmax=1)
        label(axes, name, "head")
    scale_bar(drawn, image, grid, "magnitude, of the largest in the row")
    return drawn


def principal_components(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (..., T, D) in the two directions in which they differ most, (..., T, 2), about their mean, and the part
    of their variance that each direction explains, (..., 2).

    The sign of a component, which is free, is such that its largest entry is positive. Raises NotHere for fewer than
    two channels or tokens.
    """
    if min(tokens.shape[-2:]) < 2:
        raise NotHere("principal components need two tokens and two channels of a head at least.")
    centered = (tokens - tokens.mean(-2, keepdim=True)).double()
    u, s, _ = torch.linalg.svd(centered, full_matrices=False)
    components = u[..., :2] * s[..., None, :2]
    largest = components.gather(-2, components.abs().argmax(-2, keepdim=True))
    variances = s.square()
    explained = variances[..., :2] / variances.sum(-1, keepdim=True).clamp_min(1e-300)
    return components * torch.where(largest < 0, -1.0, 1.0), explained


def token_components(model: ViT, images: Tensor, block: int = 0) -> dict[str, Tensor]:
    """Patch tokens of the first image by head, `before` and `after` the norm before attention of a block: (H, T, 2)
    each, in their own principal components; and `explained before` and `explained after`, the part of the variance of
    each component, (H, 1, 2).

    Raises:
        NotHere: the model does not have the block or norm.
    """
    both = {place: principal_components(x) for place, x in around_a_norm(model, images, block).items()}
    components = {place: points for place, (points, _) in both.items()}
    return components | {f"explained {place}": explained[:, None] for place, (_, explained) in both.items()}


@paper_figure("token_pca", each=lambda subject: token_components(subject.vit, subject.seen, subject.block))
def draw_components(models: Mapping[str, Arrays]) -> Any:
    """For each model panels before and after the norm, one a head; side by side if there are few."""
    heads = max(len(parts["before"]) for parts in models.values())
    in_one_row = heads <= FEW_HEADS
    rows, columns = (len(models), 2 * heads) if in_one_row else (2 * len(models), heads)
    drawn, grid = panels(max(NARROW, 40 + 112 * columns), 30 + 128 * rows, [columns] * rows)
    halves = [row[at : at + heads] for row in grid for at in range(0, columns, heads)]  # before and after in turn
    after = max(float(parts["after"].abs().max()) for parts in models.values())
    for at, (name, parts) in enumerate(models.items()):
        for row, place in zip(halves[2 * at :], PLACES):
            reach = 1.08 * (after if place == "after" else float(parts[place].abs().max())) or 1.0
            title = f"{clipped(name, NAME) if place == 'before' else ''}\n{place}, head 1"
            for axes in row[len(parts[place]) :]:
                axes.set_visible(False)
            for head, (axes, points) in enumerate(zip(row, parts[place])):
                first, second = (100 * parts[f"explained {place}"][head, 0]).tolist()
                plain(axes)
                label(axes, f"\n{head + 1}" if head else title)
                axes.set_xlabel(f"PC 1, {first:.0f} %", fontsize=9.5, color=MUTED, labelpad=1)
                axes.set_ylabel(f"PC 2, {second:.0f} %", fontsize=9.5, color=MUTED, labelpad=1)
                style = {"color": colors(list(models))[name], "ms": 3.4, "alpha": 0.7, "mew": 0}
                axes.plot(*points.T.tolist(), "o", **style, rasterized=len(points) > 400)
                axes.grid(axis="x", color=LINE, lw=0.8)
                axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
                tick = float(f"{0.75 * reach:.1g}")
                axes.set(xticks=(-tick, 0, tick), yticks=(-tick, 0, tick))
                for axis in (axes.xaxis, axes.yaxis):
                    axis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
                axes.tick_params(labelleft=not head, labelsize=9.5, pad=2)
    return drawn


STATISTICS = ("mean", "variance")


def trade_offs(model: ViT) -> dict[str, Tensor]:
    """`mean` and `variance` with the name of each dynamic token norm -> lambda of each head, (H,). 1 is LayerNorm, 0
    reads only other tokens.

    Raises:
        NotHere: the model does not have such a norm that learns them.
    """
    lambdas = {name: torch.tensor(values) for name, values in lambdas_of(model).items()}
    if not lambdas:
        raise NotHere("no dynamic token norm that learns lambda: apply dtn.")
    return lambdas


def trade_offs_over_training(record: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The same names -> (evaluations, H), and the `epoch` of each, of a training with `record=("lambdas",)`.

    Raises:
        NotHere: nothing was recorded.
    """
    rows = [row for row in record if LAMBDA in row]
    if not rows:
        raise NotHere("lambdas were not recorded: train with --record lambdas.")
    lambdas = {name: torch.tensor([row[LAMBDA][name] for row in rows]) for name in rows[-1][LAMBDA]}
    return {**lambdas, "epoch": torch.tensor([float(row["epoch"]) for row in rows])}


def _lambdas(subject: Examined) -> Arrays:
    """From the record, with the start in front; without a record from the weights at the start and at the end."""
    before = subject.vit_at_start
    start = {} if before is None else trade_offs(before)
    try:
        recorded = trade_offs_over_training(subject.record)
    except NotHere:
        end = trade_offs(subject.vit)
        if not start:  # the epoch of plain weights is unknown
            return {**{name: values[None] for name, values in end.items()}, "epoch": torch.full((1,), torch.nan)}
        last = max((float(row["epoch"]) for row in subject.record if "epoch" in row), default=1.0)
        pairs = {name: torch.stack([start[name], values]) for name, values in end.items()}
        return {**pairs, "epoch": torch.tensor([0.0, last])}
    first = {name: torch.cat([start[name][None], recorded[name]]) for name in start if name in recorded}
    return {**recorded, **first, "epoch": torch.cat([torch.zeros(int(bool(first))), recorded["epoch"]])}


@paper_figure("lambdas", each=_lambdas)
def draw_lambdas(models: Mapping[str, Arrays]) -> Any:
    """Draw one panel per layer, means above variances, one line per head."""
    parts = {}
    for name, arrays in models.items():
        for statistic in STATISTICS:
            prefix = f"{statistic} "
            layers = {part.removeprefix(prefix): v for part, v in arrays.items() if part.startswith(prefix)}
            if layers:
                parts[name, statistic] = layers
    most = max(map(len, parts.values()))
    width, height = max(360, 70 + 86 * most), 60 + 125 * len(parts)
    drawn, grid = panels(width, height, [len(layers) for layers in parts.values()], sharex=True, sharey=True)
    has_epochs = any(models[name]["epoch"].isfinite().any() for name, _ in parts)
    aside = 0.0 if has_epochs else 1.0  # without epochs, heads are next to each other
    handles: list[Any] = []
    for row, ((name, statistic), layers) in zip(grid, parts.items(), strict=True):
        epochs = models[name]["epoch"].nan_to_num(0.0)
        for axes, (norm, values) in zip(row, layers.items()):
            plain(axes, title=f"layer {short(norm)}" if axes is row[0] else short(norm))
            lines = []
            for head in range(values.shape[1]):
                place = head % (len(PALETTE) - 1)
                # Fewer colors than styles of lines: heads beyond the colors differ in the pair.
                style = {"color": PALETTE[1 + place], "ls": LINES[head % len(LINES)], "lw": 1.5, "ms": 4}
                marker = "o" if len(epochs) < 3 else None
                places = (epochs + aside * head).tolist()
                lines += axes.plot(places, values[:, head].tolist(), label=f"head {head + 1}", marker=marker, **style)
            handles = lines if len(lines) > len(handles) else handles
        row[0].set_ylabel(f"{clipped(name, NAME)}\nλ, {statistic}", fontsize=11, parse_math=False)
    grid[0][0].set_ylim(-0.03, 1.03)
    if has_epochs:
        grid[-1][0].set_xlabel("epoch", fontsize=11, color=MUTED)
        grid[-1][0].xaxis.get_major_locator().set_params(integer=True)
    else:
        grid[-1][0].set_xticks([])
    legend(drawn, handles, columns=6)
    return drawn


CHANNELS = {1: ("gray",), 3: ("red", "green", "blue")}


def first_norm_scales(model: ViT) -> Tensor:
    """The gain of each value of a patch, (channels, rows, columns) of a patch of any size.

    Raises:
        NotHere: the model does not have a norm on the pixels of a patch, or it does not learn a gain.
    """
    stem = model.patch_embed
    weight = getattr(stem.norm_before, "weight", None) if isinstance(stem, DualPatchNormStem) else None
    if weight is None:
        raise NotHere("no norm on the pixels of a patch that learns scales: apply dpn.")
    return weight.detach().float().cpu().unflatten(0, (stem.in_chans, *stem.patch_size))


def _scales(subject: Examined) -> Arrays:
    scales = first_norm_scales(subject.vit)
    return dict(zip(CHANNELS.get(len(scales), [str(i + 1) for i in range(len(scales))]), scales))


@paper_figure("first_norm", each=_scales)
def draw_first_norm(models: Mapping[str, Arrays]) -> Any:
    """Draw a row of images for each model; the range of a channel is below it."""
    counts = [len(channels) for channels in models.values()]
    drawn, grid = panels(40 + 190 * max(counts), 250 * len(models), counts)
    for row, (name, channels) in zip(grid, models.items(), strict=True):
        for axes, (channel, scales) in zip(row, channels.items(), strict=True):
            low, high = float(scales.min()), float(scales.max())
            is_flat = high - low < 1e-9
            show_mosaic(axes, [scales[None]], [], [], **({"vmin": low - 1, "vmax": low + 1} if is_flat else {}))
            title = f"{clipped(name, NAME)}: {channel}" if axes is row[0] else channel
            label(axes, title, f"{low:.3g}" if is_flat else f"{low:.3g} to {high:.3g}", MUTED)
    return drawn
