"""What goes into the norms of a ViT and what comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitmods.adapters.transfer import evaluating
from vitmods.analysis.figure import NotHere
from vitmods.model.vit import ViT


def patch_tokens(vit: ViT, x: Tensor) -> Tensor:
    """Of tokens (B, N, C), those on the grid (B, T, C)."""
    return x[:, x.shape[1] - vit.vit_config.num_patches :]


def around_norms(vit: ViT, images: Tensor) -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Name -> (module, what goes in, what comes out), (B, N, C) each, of the norm before attention in each block.

    NotHere where a block has none there.
    """
    norms = dict(_attention_norms(vit))
    found: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            found[name] = module, inputs[0].detach(), out.detach()

        return hook

    handles = [norm.register_forward_hook(keep(name)) for name, norm in norms.items()]
    run_hooked(vit, images, handles)
    missed = [name for name in norms if name not in found]
    if missed:
        raise NotHere(f"{missed[0]} does not run by itself: look at the model before it is folded.")
    return found


def run_hooked(vit: ViT, images: Tensor, handles: Sequence[RemovableHandle]) -> None:
    """A forward pass without gradients over images (B, channels, height, width), which the hooks hear; then they are
    removed, and the model is in the mode that it was in."""
    try:
        with torch.no_grad(), evaluating(vit):
            vit.forward_features(images)
    finally:
        for handle in handles:
            handle.remove()


def _attention_norms(vit: ViT) -> Iterator[tuple[str, nn.Module]]:
    for index, block in enumerate(vit.blocks):
        branches: Any = getattr(block, "attns", None)
        named = [("norm1", getattr(block, "norm1", None))]
        if branches is not None:
            named = [(f"attns.{k}.norm", branch.norm) for k, branch in enumerate(branches)]
        for name, norm in named:
            if norm is None or isinstance(norm, nn.Identity):
                raise NotHere(f"block {index + 1} has no norm before attention.")
            yield f"blocks.{index}.{name}", norm
