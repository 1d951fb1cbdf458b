"""Figures of norms: what they do to tokens, and what they have learned.

Dynamic Token Normalization, Figures 1, 3b, 8 and 9; Dual PatchNorm, Figure 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitmods.adapters.transfer import evaluating
from vitmods.analysis.figure import (
    Arrays,
    Examined,
    NotHere,
    blank,
    by_block,
    clipped,
    colors,
    draw_lines,
    figure_kind,
    from_zero,
    legend,
    plain,
    scale_bar,
    short,
    show_mosaic,
)
from vitmods.layers import DualPatchNormStem, DynamicTokenNorm
from vitmods.layers.norms.batch import BatchNorm
from vitmods.layers.norms.contract import AffineNorm
from vitmods.model.vit import ViT
from vitmods.report.figures import INK, MUTED, PALETTE
from vitmods.train.loggers import LAMBDA, lambdas_of


def patch_tokens(vit: ViT, x: Tensor) -> Tensor:
    """Select the tokens on the grid, (B, T, C), from all tokens (B, N, C)."""
    return x[:, x.shape[1] - vit.vit_config.num_patches :]


def around_norms(vit: ViT, images: Tensor) -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Name -> (module, inputs, outputs), tokens (B, N, C), of the norm before attention in each block.

    NotHere if a block does not have one.
    """
    norms: dict[str, nn.Module] = {}
    for index, block in enumerate(vit.blocks):
        branches: Any = getattr(block, "attns", None)
        named = [("norm1", getattr(block, "norm1", None))]
        if branches is not None:
            named = [(f"attns.{k}.norm", branch.norm) for k, branch in enumerate(branches)]
        for name, norm in named:
            if norm is None or isinstance(norm, nn.Identity):
                raise NotHere(f"block {index + 1} does not have a norm before attention.")
            norms[f"blocks.{index}.{name}"] = norm
    tokens: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            tokens[name] = module, inputs[0].detach(), out.detach()

        return hook

    handles = [norm.register_forward_hook(keep(name)) for name, norm in norms.items()]
    run_hooked(vit, images, handles)
    missed = [name for name in norms if name not in tokens]
    if missed:
        raise NotHere(f"{missed[0]} does not run by itself: look at the model before it is folded.")
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


def variation_coefficient(model: ViT, images: Tensor) -> dict[str, Tensor]:
    """Quartiles of ``|(x - mu) / x|`` over the values of patch tokens, with the mean mu that the norm before attention
    subtracts: the norm's name -> (3,), and the `quantile` of each.

    The paper uses a norm of these ratios, which depends on a few values near zero; the median does not.

    Raises:
        NotHere: a norm does not subtract a mean, or an unknown one.
    """
    quartiles = {}
    for name, (norm, x, _) in around_norms(model, images).items():
        x = x.double()
        ratio = ((x - subtracted_mean(norm, x)) / x).abs()
        flat = patch_tokens(model, ratio).flatten()
        flat = flat[flat.isfinite()].sort().values
        quartiles[name] = flat[[round(q * (len(flat) - 1)) for q in QUARTILES]].cpu()
    return {**quartiles, "quantile": torch.tensor(QUARTILES)}


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
    raise NotHere(f"its {type(norm).__name__} does not subtract a mean that is known here.")


def _mixed_mean(norm: DynamicTokenNorm, x: Tensor) -> Tensor:
    """``lambda mu_LN + (1 - lambda) P x`` of each head; LayerNorm's for prefix tokens."""
    if norm.mixing.band is not None or max(norm.mixing.pools) > 1 or norm.mixing.variant == "released":
        raise NotHere("the means of a dtn with a band, pooling or the released code's scaling are not known here.")
    prefix = norm.prefix_tokens
    grid = norm.grid_size or (1, x.shape[1] - prefix)
    px, py = (kernel.to(x) for kernel in norm.kernels(grid, x))
    heads = x[:, prefix:].unflatten(1, grid).unflatten(-1, (norm.num_heads, -1))
    around = torch.einsum("hrs,hcw,bswhd->brchd", py, px, heads).flatten(1, 2)
    own, fraction = x.mean(-1, keepdim=True), norm.lambdas()[0]
    weight = fraction.to(x).view(-1, 1) if isinstance(fraction, Tensor) else fraction
    mixed = (weight * own[:, prefix:, :, None] + (1 - weight) * around).flatten(-2)
    return torch.cat([own[:, :prefix].expand(-1, -1, x.shape[-1]), mixed], dim=1)


@figure_kind(
    "variation",
    each=lambda one: variation_coefficient(one.vit, one.seen),
    title="How far tokens are from what norms subtract",
    source="Dynamic Token Normalization, Figure 3 (b)",
    needs="images",
    columns=("norm", "quantile", "variation"),
    see="|(x - mean) / x| for the mean that the norm before attention subtracts, by layer: the median over values "
    "of tokens, and the middle half. Higher means that the mean says less of the token. In the paper instance "
    "norms are highest; LayerNorm's and dynamic token norms' are low.",
)
def draw_variation(found: Mapping[str, Arrays]) -> Any:
    """A line for each model over layers, with a band."""
    quartiles = {}
    for name, arrays in found.items():
        blocks = by_block({part: v for part, v in arrays.items() if part != "quantile"})
        quartiles[name] = list(blocks), torch.stack([torch.stack(own).mean(0) for own in blocks.values()], 1).tolist()
    lines = {name: (places, middle) for name, (places, (_, middle, _)) in quartiles.items()}
    drawn = draw_lines("layer", "|(x − mean) / x|", lines)
    axes, shade = drawn.axes[0], colors(list(found))
    for name, (places, (low, _, high)) in quartiles.items():
        axes.fill_between(places, low, high, color=shade[name], alpha=0.13, lw=0)
    from_zero(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return drawn


PLACES = ("before", "after")
MOST_BESIDE = 4
"""heads in panels side by side"""


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
    """For each model panels before and after the norm, one a head; beside each other if there are few."""
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
            _draw_components(row, parts[place], reach, shade[name])
        both[0][0].set_ylabel(clipped(name) if beside else f"{clipped(name)}\nbefore", fontsize=11, parse_math=False)
        both[1][0].set_ylabel("" if beside else "\nafter", fontsize=11)
    for row, place in zip(grid[0][: 1 + beside], PLACES):
        for index, axes in enumerate(row):
            first = f"{place}, head 1" if beside else "head 1"
            axes.set_title(str(index + 1) if index else first, fontsize=11, loc="left", color=INK)
    return drawn


def _draw_components(row: Any, heads: Tensor, reach: float, shade: str) -> None:
    for axes in row[len(heads) :]:
        axes.set_visible(False)
    for index, (axes, points) in enumerate(zip(row, heads)):
        plain(axes)
        axes.plot(*points.T.tolist(), "o", color=shade, ms=3.4, alpha=0.7, mew=0, rasterized=len(points) > 400)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], aspect="equal")
        axes.locator_params(axis="y", nbins=3)
        axes.tick_params(labelleft=index == 0)


LINES = ("-", "--", ":", "-.")
STATISTICS = ("mean", "variance")


def trade_offs(model: ViT) -> dict[str, Tensor]:
    """`mean` and `variance` with the name of each dynamic token norm -> lambda of each head, (H,). 1 is LayerNorm, 0
    reads other tokens alone.

    Raises:
        NotHere: the model has no such norm that learns them.
    """
    found = {name: torch.tensor(values) for name, values in lambdas_of(model).items()}
    if not found:
        raise NotHere("it has no dynamic token norm that learns lambda: apply dtn.")
    return found


def trade_offs_over_training(record: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The same names -> (evaluations, H), and the `epoch` of each, of a training with `record=("lambdas",)`.

    Raises:
        NotHere: nothing was recorded.
    """
    rows = [row for row in record if LAMBDA in row]
    if not rows:
        raise NotHere("its lambdas were not recorded: train it with --record lambdas.")
    names = rows[-1][LAMBDA]
    found = {name: torch.tensor([row[LAMBDA][name] for row in rows]) for name in names}
    return {**found, "epoch": torch.tensor([float(row["epoch"]) for row in rows])}


def _lambdas(one: Examined) -> Arrays:
    """From the record, with the start in front; without a record from the weights at the start and at the end.
    Of weights alone the epoch is not known, and no number."""
    before = one.vit_at_start
    start = {} if before is None else trade_offs(before)
    try:
        found = trade_offs_over_training(one.record)
    except NotHere:
        end = trade_offs(one.vit)
        if not start:
            return {**{name: values[None] for name, values in end.items()}, "epoch": torch.full((1,), torch.nan)}
        pairs = {name: torch.stack([start[name], values]) for name, values in end.items()}
        return {**pairs, "epoch": torch.tensor([0.0, _epochs(one.record)])}
    first = {name: torch.cat([start[name][None], found[name]]) for name in start if name in found}
    return {**found, **first, "epoch": torch.cat([torch.zeros(1), found["epoch"]]) if first else found["epoch"]}


def _epochs(record: Sequence[Mapping[str, Any]]) -> float:
    return max((float(row["epoch"]) for row in record if "epoch" in row), default=1.0)


@figure_kind(
    "lambdas",
    each=_lambdas,
    title="Lambda by head and layer over training",
    source="Dynamic Token Normalization, Figure 8",
    needs="weights",
    columns=("norm", "epoch", "head", "lambda"),
    see="The weight of LayerNorm's statistics in each head's norm, for the mean and for the variance: 1 is "
    "LayerNorm, below a head reads other tokens. In the paper heads of early layers go down, those of late "
    "layers stay up, and means differ more than variances. Without a record (--record lambdas) the line joins "
    "the start and the end, and of weights alone there is one point.",
)
def draw_lambdas(found: Mapping[str, Arrays]) -> Any:
    """A panel a layer, means above variances, a line a head."""
    parts = {(name, what): _layers(arrays, what) for name, arrays in found.items() for what in STATISTICS}
    parts = {key: layers for key, layers in parts.items() if layers}
    most = max(map(len, parts.values()))
    drawn = blank(max(360, 70 + 86 * most), 60 + 125 * len(parts))
    grid = drawn.subplots(len(parts), most, squeeze=False, sharex=True, sharey=True)
    known = any(found[name]["epoch"].isfinite().any() for name, _ in parts)
    handles: list[Any] = []
    for row, ((name, what), layers) in zip(grid, parts.items(), strict=True):
        for axes in row[len(layers) :]:
            axes.set_visible(False)
        for axes, (norm, values) in zip(row, layers.items()):
            plain(axes, title=f"layer {short(norm)}" if axes is row[0] else short(norm))
            lines = _draw_heads(axes, found[name]["epoch"].nan_to_num(0.0), values, aside=0.0 if known else 1.0)
            handles = lines if len(lines) > len(handles) else handles
        row[0].set_ylabel(f"{clipped(name)}\nλ, {what}", fontsize=11, parse_math=False)
    grid[0][0].set_ylim(-0.03, 1.03)
    if known:
        grid[-1][0].set_xlabel("epoch", fontsize=11, color=MUTED)
        grid[-1][0].xaxis.get_major_locator().set_params(integer=True)
    else:
        grid[-1][0].set_xticks([])
    legend(drawn, handles, columns=6)
    return drawn


def _layers(arrays: Arrays, what: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{what} "): v for name, v in arrays.items() if name.startswith(f"{what} ")}


def _draw_heads(axes: Any, epochs: Tensor, values: Tensor, aside: float) -> list[Any]:
    """`aside`: how far heads stand beside each other."""
    lines, shades = [], PALETTE[1:]
    for head in range(values.shape[1]):
        turn, place = divmod(head, len(shades))
        how = {"color": shades[place], "ls": LINES[turn % len(LINES)], "marker": "o" if len(epochs) < 3 else None}
        places = (epochs + aside * head).tolist()
        lines += axes.plot(places, values[:, head].tolist(), label=f"head {head + 1}", lw=1.5, ms=4, **how)
    return lines


CHANNELS = {1: ("gray",), 3: ("red", "green", "blue")}


def first_norm_scales(model: ViT) -> Tensor:
    """The gain of each value of a patch, (channels, rows, columns) of a patch of any size.

    Raises:
        NotHere: the model has no norm on the pixels of a patch, or it learns no gain.
    """
    stem = model.patch_embed
    weight = getattr(stem.norm_before, "weight", None) if isinstance(stem, DualPatchNormStem) else None
    if weight is None:
        raise NotHere("it has no norm on the pixels of a patch that learns scales: apply dpn.")
    found: Tensor = weight.detach().float().cpu().unflatten(0, (stem.in_chans, *stem.patch_size))
    return found


def _scales(one: Examined) -> Arrays:
    scales = first_norm_scales(one.vit)
    names = CHANNELS.get(len(scales), [str(i + 1) for i in range(len(scales))])
    return dict(zip(names, scales))


@figure_kind(
    "first_norm",
    each=_scales,
    title="Scales of the first norm",
    source="Dual PatchNorm, Figure 3",
    needs="weights",
    columns=("channel", "row", "column", "scale"),
    see="The scale that the norm on the pixels of a patch has learned for each pixel, an image a color channel; "
    "each has a scale of colors of its own, since channels differ in size. In the paper the centers and the "
    "corners of patches are weighted up.",
)
def draw_first_norm(found: Mapping[str, Arrays]) -> Any:
    """A row of images a model; the range of a channel stands below it."""
    most = max(map(len, found.values()))
    drawn = blank(40 + 190 * most, 250 * len(found))
    grid = drawn.subplots(len(found), most, squeeze=False)
    for row, (name, channels) in zip(grid, found.items(), strict=True):
        for axes in row[len(channels) :]:
            axes.set_visible(False)
        for axes, (channel, scales) in zip(row, channels.items()):
            low, high = float(scales.min()), float(scales.max())
            flat = high - low < 1e-9
            show_mosaic(axes, [scales[None]], [], [], **({"vmin": low - 1, "vmax": low + 1} if flat else {}))
            title = f"{clipped(name)}: {channel}" if axes is row[0] else channel
            axes.set_title(title, color=MUTED, fontsize=11, loc="left", parse_math=False)
            axes.set_xlabel(f"{low:.3g}" if flat else f"{low:.3g} to {high:.3g}", color=MUTED, fontsize=11)
    return drawn
