"""LayerNorm becomes RMSNorm in a pre-norm transformer of any library, and its outputs stay the same.

The mathematics is that of `vitmods.model.rms_conversion`: where all that writes to the stream has zero mean over
channels, nothing is left for LayerNorm to center. Here the norms of the blocks keep their biases, and all other norms
stay: a final LayerNorm computes the same of a centered stream.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters.anatomy import Anatomy, eps_of, is_below, is_map, widths, within
from vitmods.changes.insertions import Branch, Parts
from vitmods.layers.norms import NORMS, CenteredLayerNorm, RMSNorm
from vitmods.model.rms_conversion import centered, split_gain, to_double
from vitmods.util.errors import NoEffect, NotRecognized


class BiasedRMSNorm(RMSNorm):
    """RMSNorm with the bias of the LayerNorm that it replaces: ``gamma * x / sqrt(mean(x^2) + eps) + beta``."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias.to(x.dtype)


def rms_swaps(anatomy: Anatomy, parts: Parts) -> dict[str, nn.Module]:
    """The modules to put in, by name: RMSNorms before the branches, and LayerNorms with a centered output before the
    blocks.

    Raises NotRecognized where a branch reads the stream without a norm, and NoEffect where all of these are RMSNorms.
    """
    swaps: dict[str, nn.Module] = {}
    dims = {branch.dim for branch in parts.branches}
    for branch in parts.branches:
        if branch.norm is None:
            raise NotRecognized(f"a norm before {branch.module} is not recognized")
        old = anatomy.modules[branch.norm]
        if isinstance(old, nn.LayerNorm):
            eps, affine = eps_of(old), old.elementwise_affine
            biased = affine and old.bias is not None
            swaps[branch.norm] = BiasedRMSNorm(branch.dim, eps) if biased else RMSNorm(branch.dim, eps, affine=affine)
    if not swaps:
        raise NoEffect("the norms before all branches are not LayerNorms already")
    embed = [site.name for site in anatomy.sites if site.role == "embed"]
    for name in (*embed, *(n for n in anatomy.modules if n.endswith(".norm_after"))):  # Dual PatchNorm's too
        old = anatomy.modules[name]
        if isinstance(old, nn.LayerNorm) and old.normalized_shape[-1] in dims:
            new = swaps[name] = CenteredLayerNorm(old.normalized_shape[-1], eps_of(old), old.elementwise_affine)
            new.bias = new.bias if old.bias is not None else None
    return swaps


@torch.no_grad()
def center_stream(anatomy: Anatomy, parts: Parts, called: Mapping[str, int]) -> list[str]:
    """Center what writes to the residual stream, in place: the last projections of the branches, with their
    LayerScale, the last map before the blocks, tokens and positions. Returns the names of these weights.
    ``called`` is the order in which modules end."""
    modules, dims = anatomy.modules, {branch.dim for branch in parts.branches}
    names: list[str] = []
    for block in parts.blocks:
        branches = [branch for branch in parts.branches if branch.block == block]
        gains = _layer_scales(anatomy, block, branches)
        names += gains
        for branch, gain in zip(branches, gains.values() or [None] * len(branches), strict=True):
            names += _center_map(branch.projection, modules[branch.projection], gain)
    maps = sorted((name for name in called if is_map(modules[name])), key=called.__getitem__)
    inside = next(i for i, name in enumerate(maps) if any(name.startswith(f"{block}.") for block in parts.blocks))
    first = called[maps[inside]]
    if inside and widths(modules[maps[inside - 1]])[1] in dims:
        names += _center_map(maps[inside - 1], modules[maps[inside - 1]], None)
    for owner, module in modules.items():
        before_blocks = owner == "" or called.get(owner, first) < first
        around_blocks = any(within(block, owner) for block in parts.blocks)
        in_block = any(is_below(owner, block) for block in parts.blocks if block)
        if in_block or not (before_blocks or around_blocks) or is_map(module) or _is_norm(module):
            continue
        for name, values in (*module.named_parameters(owner, False), *module.named_buffers(owner, False)):
            if values.ndim > 1 and values.shape[-1] in dims and values.is_floating_point():
                exact = to_double(values)
                new = centered(exact, -1)
                saved = name.rpartition(".")[2] not in module._non_persistent_buffers_set
                if not saved and not new.allclose(exact):
                    raise NotRecognized(f"{name} is not saved with the weights: a loaded model would lack the change")
                values.copy_(new.to(values))
                names.append(name)
    return names


def _layer_scales(anatomy: Anatomy, block: str, branches: list[Branch]) -> dict[str, nn.Parameter]:
    """The factors of these branches by name, in order; empty if they do not have any."""
    gains = {
        name: parameter
        for owner, module in anatomy.modules.items()
        if f"{owner}.".startswith(f"{block}.") and not (is_map(module) or _is_norm(module) or owner in anatomy.rms)
        for name, parameter in module.named_parameters(owner, False)
        if "bias" not in name and parameter.ndim and parameter.numel() == parameter.shape[-1] == branches[0].dim
    }
    if len(gains) not in (0, len(branches)):
        raise NotRecognized(f"the factors of the branches of {block} are not recognized")
    return gains


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, (nn.LayerNorm, nn.BatchNorm1d, *(kind.module for kind in NORMS.values())))


def _center_map(name: str, module: Any, gain: nn.Parameter | None) -> list[str]:
    """Change a linear map, and the LayerScale behind it, so that what they write has zero mean over channels. Returns
    the names of its weights."""
    before, after = split_gain(gain)
    for kind, values in module.named_parameters(recurse=False):
        axis = 1 if kind == "weight" and type(module).__name__ == "Conv1D" else 0
        scaled = to_double(values).movedim(axis, -1) * before
        values.copy_((centered(scaled, -1) / after).movedim(-1, axis).to(values))
    if gain is not None and gain.any():
        gain.copy_(after.view(gain.shape).to(gain))
    return [f"{name}.{kind}" for kind, _ in module.named_parameters(recurse=False)]
