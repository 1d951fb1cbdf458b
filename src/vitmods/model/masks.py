"""Patches that are left out, or that the mask token stands in for."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.fx import Proxy

from vitmods.model.sizes import reads_grid
from vitmods.ops.padding import Padding
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.model.vit import ViT


class Masks(NamedTuple):
    """What a block's attention may not look at: ``attn_mask`` as attention takes it, with ``is_causal`` what comes
    later, and ``padding`` (B, T), True for patch tokens that only fill sequences up."""

    attn_mask: Tensor | None = None
    is_causal: bool = False
    padding: Tensor | None = None

    def of(self, x: Tensor) -> Tensor | None:
        """All of them as one mask, for tokens (B, N, C)."""
        mask = self.attn_mask
        if self.is_causal:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if self.padding is None:
            return mask
        keys = ~Padding(self.padding).of(x)[:, None, None]
        if mask is None or mask.dtype == torch.bool:
            return keys if mask is None else mask & keys
        return mask.masked_fill(~keys, -torch.inf)


def patch_dropout(model: "ViT", images: Tensor) -> Tensor | None:
    """Patches that patch dropout leaves in this batch, (B, K) in the order of the grid; None for all."""
    rate = model.vit_config.patch_drop
    if not (model.training and rate):
        return None
    if isinstance(images, Proxy):
        raise UserError("torch.fx cannot trace patch dropout: trace the model in evaluation, or with patch_drop=0.")
    rows, columns = model.patch_embed.dynamic_feat_size((images.shape[-2], images.shape[-1]))
    kept = max(1, round(int(rows * columns) * (1 - rate)))  # a traced size is a tensor
    order = torch.rand(len(images), rows * columns, device=images.device).argsort(dim=1)
    return order[:, :kept].sort(dim=1).values


def visible_patches(model: "ViT", images: Tensor, keep: Tensor, mask: Tensor | None, drawn: bool) -> Tensor:
    """Tokens of the visible patches alone, (B, K, C); ``drawn`` by the model itself, or the caller's."""
    if mask is not None:
        raise UserError("Give keep (visible patches alone) or mask (mask tokens in their place), not both.")
    on_grid = {type(module).__name__ for module in reads_grid(model)}
    if on_grid:
        raise UserError(
            f"{', '.join(sorted(on_grid))} reads the whole grid of patches, which visible ones alone do not form: "
            "use mask, which keeps all tokens in place."
        )
    visible: Tensor = model.patch_embed(images, keep, drawn=True) if drawn else model.patch_embed(images, keep)
    return visible


def masked(model: "ViT", x: Tensor, mask: Tensor) -> Tensor:
    """Patch tokens (B, T, C), with the mask token where ``mask`` (B, T) is True."""
    if model.mask_token is None:
        raise UserError("mask needs a learned mask token: build the model with mask_token=True.")
    if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        raise UserError(f"mask is boolean and {tuple(x.shape[:2])} here, not {mask.dtype} {tuple(mask.shape)}.")
    return torch.where(mask[..., None], model.mask_token.to(x.dtype), x)
