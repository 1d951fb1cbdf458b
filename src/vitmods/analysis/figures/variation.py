"""How far tokens are from the mean that a norm subtracts (Dynamic Token Normalization, Figure 3b)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.analysis.figure import (
    Arrays,
    NotHere,
    blank,
    by_block,
    colors,
    figure_kind,
    from_zero,
    legend,
    markers,
    plain,
)
from vitmods.analysis.norms import around_norms, patch_tokens
from vitmods.layers import DynamicTokenNorm
from vitmods.layers.norms.batch import BatchNorm
from vitmods.layers.norms.contract import AffineNorm
from vitmods.model.vit import ViT

QUARTILES = (0.25, 0.5, 0.75)


def variation_coefficient(model: ViT, images: Tensor) -> dict[str, Tensor]:
    """Quartiles of ``|(x - mu) / x|`` over the values of patch tokens, with the mean mu that the norm before attention
    subtracts: the norm's name -> (3,), and the `quantile` that they are.

    The paper takes a norm of these ratios, which a few values near zero decide; the median does not hang on them.

    Raises:
        NotHere: a norm subtracts no mean, or one that is not known.
    """
    found = {}
    for name, (norm, x, _) in around_norms(model, images).items():
        x = x.double()
        ratio = ((x - subtracted_mean(norm, x)) / x).abs()
        found[name] = _quartiles(patch_tokens(model, ratio))
    return {**found, "quantile": torch.tensor(QUARTILES)}


def _quartiles(values: Tensor) -> Tensor:
    flat = values.flatten()
    flat = flat[flat.isfinite()].sort().values
    return flat[[round(q * (len(flat) - 1)) for q in QUARTILES]].cpu()


@torch.no_grad()
def subtracted_mean(norm: nn.Module, x: Tensor) -> Tensor:
    """The mean that a norm in evaluation mode subtracts from tokens (B, N, C), which broadcasts to them.

    Raises:
        NotHere: it subtracts none, or its kind is not known here.
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
    raise NotHere(f"its {type(norm).__name__} subtracts no mean that is known here.")


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
    """A line a model over layers with a band."""
    drawn = blank(400, 300)
    axes = plain(drawn.add_subplot(), "layer", "|(x − mean) / x|")
    shade, shape = colors(list(found)), markers(list(found))
    lines = []
    for name, arrays in found.items():
        blocks = by_block({part: v for part, v in arrays.items() if part != "quantile"})
        low, middle, high = torch.stack([torch.stack(own).mean(0) for own in blocks.values()], 1).tolist()
        places = list(blocks)
        axes.fill_between(places, low, high, color=shade[name], alpha=0.13, lw=0)
        lines += axes.plot(places, middle, color=shade[name], marker=shape[name], ms=5, lw=1.6, label=name)
    from_zero(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend(drawn, lines)
    return drawn
