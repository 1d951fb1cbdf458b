"""The outputs of chosen blocks and masks of attention, with timm's names and arguments: what dense prediction and
``features_only`` read."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitmods.layers.attention import AttentionPool
from vitmods.layers.stems import Stem
from vitmods.model.config import ViTConfig
from vitmods.model.masks import Masks
from vitmods.model.sizes import Grid
from vitmods.ops.padding import padded
from vitmods.util.errors import UserError


class Intermediates(nn.Module):
    """What a ViT inherits to give the outputs of its blocks, and to be cut off behind one of them."""

    vit_config: ViTConfig
    _grid: Grid | None
    patch_embed: Stem
    blocks: nn.ModuleList
    norm: nn.Module
    fc_norm: nn.Module
    cls_token: nn.Parameter | None
    reg_token: nn.Parameter | None
    attn_pool: AttentionPool | None
    pre_logits: nn.Module | None

    def _embed(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def _prepend(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _run(self, index: int, x: Tensor, masks: Masks, for_head: bool = False) -> Tensor:
        raise NotImplementedError

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        raise NotImplementedError

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """The outputs of chosen blocks, as in timm: the last ``indices`` blocks, or those listed, or all.

        Returns (final tokens, list), or the list alone. Entries are (B, C, rows, columns), or (B, T, C) with
        ``output_fmt="NLC"``, paired with the prefix tokens (B, prefix, C) if asked for. With ``output_dict`` a
        dictionary of ``image_features``, ``image_intermediates`` and ``image_intermediates_prefix``. Raises ValueError
        on an unknown format or block.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt is 'NCHW' or 'NLC', got '{output_fmt}'.")
        take = self._block_indices(indices)
        x = self.patch_embed.as_images(x)
        grid, padding = self.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1])), self.patch_embed.padding(x)
        with self._around(padding):
            x, found, before = self._embed(x), [], []
            for i in range(max(take) + 1 if stop_early else len(self.blocks)):
                x = self._run_masked(i, x, Masks(attn_mask, is_causal, padding))
                if i not in take:
                    continue
                out, prefix = self.norm(x) if norm else x, self.vit_config.prefix_tokens(i)
                patches = out[:, prefix:]
                found.append(patches.mT.unflatten(2, grid).contiguous() if output_fmt == "NCHW" else patches)
                before.append(out[:, :prefix])
        with_prefix = return_prefix_tokens and self.vit_config.num_prefix_tokens > 0
        if output_dict:
            parts: dict[str, Any] = {"image_intermediates": found}
            if with_prefix:
                parts["image_intermediates_prefix"] = before
            return parts if intermediates_only else {**parts, "image_features": self.norm(x)}
        listed = list(zip(found, before, strict=True)) if with_prefix else found
        return listed if intermediates_only else (self.norm(x), listed)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        attn_mask: Tensor | None = None,
    ) -> Any:
        """``forward_intermediates`` under the name and with the arguments of DINO: the last ``n`` blocks or those
        listed, as (B, T, C), or with ``reshape`` as (B, C, rows, columns)."""
        form = "NCHW" if reshape else "NLC"
        return self.forward_intermediates(
            x, n, return_prefix_tokens, norm, output_fmt=form, intermediates_only=True, attn_mask=attn_mask
        )

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Takes off, in place, the blocks after the last of ``indices``, and if asked for the final norm, and the head
        with what pools for it; what is left gives the same intermediates. Returns the blocks' numbers.

        Raises ValueError on an unknown block, and UserError where the head would be left without its class token.
        """
        chosen, config = sorted(self._block_indices(indices)), self.vit_config
        depth = max(chosen) + 1
        pruned = _pruned(config, depth, prune_norm, prune_head)
        self.blocks = self.blocks[:depth]
        if not pruned.num_prefix_tokens:
            self.cls_token = self.reg_token = None
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.attn_pool, self.pre_logits, self.fc_norm = None, None, nn.Identity()
            self.reset_classifier(0, "")
        self.vit_config = pruned
        return chosen

    def _around(self, padding: Tensor | None) -> AbstractContextManager[None]:
        """Around whatever may read tokens that are padding; images have none."""
        return padded(padding) if self.patch_embed.sequences else nullcontext()

    def _run_masked(self, index: int, x: Tensor, masks: Masks, for_head: bool = False) -> Tensor:
        if masks.is_causal:
            self._check_causal(masks.attn_mask)
        return self._run(index, x, masks, for_head)

    def _check_causal(self, attn_mask: Tensor | None) -> None:
        if attn_mask is not None:
            raise UserError("is_causal is a mask of its own: give it or attn_mask, not both.")
        mixing = {type(m).__name__ for m in self.modules() if not getattr(m, "token_wise", True)}
        if mixing:
            raise UserError(f"{', '.join(sorted(mixing))} mixes tokens: with is_causal a token would see later ones.")

    def _block_indices(self, indices: int | Sequence[int] | None) -> set[int]:
        depth = len(self.blocks)
        if indices is None:
            return set(range(depth))
        chosen = range(depth - indices, depth) if isinstance(indices, int) else indices
        if not all(-depth <= i < depth for i in chosen) or not chosen:
            raise ValueError(f"indices must name some of the {depth} blocks, got {indices}.")
        return {i % depth for i in chosen}


def _pruned(config: ViTConfig, depth: int, norm: bool, head: bool) -> ViTConfig:
    """The first ``depth`` blocks of a model; ``norm`` takes its final norm off, ``head`` its pooling and head.

    Raises UserError where class and register tokens join the blocks later, and a head is left that reads them.
    """
    fields: dict[str, Any] = {"depth": depth}
    if config.drop_path_shape == "linear":  # the last block that is left keeps its rate
        fields["drop_path"] = config.drop_path * (depth - 1) / max(config.depth - 1, 1)
    for name in ("first_blocks", "positional"):
        part = getattr(config, name)
        if part is not None:
            fields[name] = replace(part, count=min(part.count, depth))
    if config.prefix_from >= depth:
        if not head:
            raise UserError(
                f"The class token joins at block {config.prefix_from}, after the blocks that are left: let "
                "prune_head take the head off too."
            )
        fields |= {"prefix_from": 0, "class_token": False, "reg_tokens": 0}
    if head:
        none = {"pool_norm": None, "representation": False, "norm_after_pool": False}
        fields |= {"num_classes": 0, "pool": "none", **none}
    if head if config.norm_after_pool else norm:
        fields["final_norm"] = None
    return config.with_(**fields)
