"""The reference Vision Transformer: a config, its slots filled with modules, and the forward pass."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitmods.layers.position import resample
from vitmods.model.build import (
    Forms,
    default_forms,
    initial_positions,
    make_attn_pool,
    make_block,
    make_norm,
    make_stem,
    timm_cfg,
)
from vitmods.model.config import ViTConfig
from vitmods.model.init import initialize
from vitmods.util.errors import UserError, nearest

Resampling = Literal["bicubic", "bilinear"]


def vit(config: ViTConfig | str = "S/16", **overrides: Any) -> "ViT":
    """A Vision Transformer from a size name ("S/16", "Ti/4", "vit_small_patch16_224") or a config.

    Keywords replace fields of the config (``num_classes=37, img_size=(192, 256)``). Raises UserError on an unknown
    name or field, or when the parts do not fit.
    """
    config = ViTConfig.from_name(config, **overrides) if isinstance(config, str) else config.with_(**overrides)
    return ViT(config)


class ViT(nn.Module):
    """A Vision Transformer with timm's parameter names and model contract; ``vit_config`` describes it completely.

    Images (B, in_chans, height, width) -> logits (B, num_classes); ``forward_features`` gives all tokens (B, N, C).
    ``forms`` runs the blocks: by default ``vitmods.fast.Forms()``, which gives the same in less time (of the last block
    ``forward`` then computes only what the head reads); None calls each block as it is written.

    Both take one of two keywords for masked pre-training. ``keep`` (B, K) names the visible patches of each image;
    the others are not computed, and the patch tokens are K, in its order (He et al., 2022, MAE). ``mask`` (B, T) is
    True where the learned mask token stands in for a patch (Bao et al., 2022, BEiT; the config's ``mask_token`` makes
    one). UserError says what does not fit.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.vit_config = config
        self.changes: tuple[Any, ...] = ()  # what `apply` did to get here, in order
        dim = config.embed_dim
        self.patch_embed = make_stem(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.reg_tokens, dim)) if config.reg_tokens else None
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.mask_token else None
        self._set_positions(initial_positions(config))
        self.pos_drop = nn.Dropout(config.pos_drop)
        self.norm_pre = make_norm(config.position_norm, dim)
        self.blocks = nn.ModuleList(make_block(config, i) for i in range(config.depth))
        self.norm = nn.Identity() if config.norm_after_pool else make_norm(config.final_norm, dim)
        self.attn_pool = make_attn_pool(config) if config.pool == "map" else None
        self.fc_norm = make_norm(config.final_norm, dim) if config.norm_after_pool else nn.Identity()
        self.pre_logits = nn.Linear(dim, dim) if config.representation else None
        self.head_drop = nn.Dropout(config.head_drop)
        self.head = nn.Linear(dim, config.num_classes) if config.num_classes else nn.Identity()
        self.grad_checkpointing = False
        self.forms: Forms | None = default_forms()
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": dim, "reduction": max(config.patch_size)} for i in range(config.depth)
        ]
        self.pretrained_cfg = self.default_cfg = timm_cfg(config, self.patch_embed)
        initialize(self)

    # What timm's tools read.
    num_classes = property(lambda self: self.vit_config.num_classes)
    in_chans = property(lambda self: self.vit_config.in_chans)
    embed_dim = property(lambda self: self.vit_config.embed_dim)
    num_features = property(lambda self: self.vit_config.embed_dim)
    head_hidden_size = property(lambda self: self.vit_config.embed_dim)
    num_prefix_tokens = property(lambda self: self.vit_config.num_prefix_tokens)
    global_pool = property(lambda self: "" if self.vit_config.pool == "none" else self.vit_config.pool)

    def forward(self, x: Tensor, *, keep: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """(B, in_chans, height, width) -> (B, num_classes); with ``pool="none"`` (B, N, num_classes)."""
        x = self._embed(x, keep, mask)
        for i in range(len(self.blocks)):
            x = self._run(i, x, for_head=i == len(self.blocks) - 1)
        return self.forward_head(self.norm(x))

    def forward_features(self, x: Tensor, *, keep: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """(B, in_chans, height, width) -> all tokens (B, N, C) after the final norm, prefix tokens first."""
        x = self._embed(x, keep, mask)
        for i in range(len(self.blocks)):
            x = self._run(i, x)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, N, C) -> logits (B, num_classes), or the pooled features (B, C) that the head reads."""
        x = self.fc_norm(self._pool(x))
        if self.pre_logits is not None:
            x = torch.tanh(self.pre_logits(x))
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The outputs of chosen blocks, as in timm: the last ``indices`` blocks, or those listed, or all.

        Returns (final tokens, list), or the list alone. Entries are (B, C, rows, columns), or (B, T, C) with
        ``output_fmt="NLC"``, paired with the prefix tokens (B, prefix, C) if asked for. Raises ValueError on an
        unknown format or block.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt is 'NCHW' or 'NLC', got '{output_fmt}'.")
        take = self._block_indices(indices)
        grid = self.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        x, found = self._embed(x), []
        for i in range(max(take) + 1 if stop_early else len(self.blocks)):
            x = self._run(i, x)
            if i not in take:
                continue
            prefix = self.vit_config.num_prefix_tokens if i >= self.vit_config.prefix_from else 0
            out = self.norm(x) if norm else x
            patches = out[:, prefix:]
            if output_fmt == "NCHW":
                patches = patches.transpose(1, 2).unflatten(2, grid).contiguous()
            found.append((patches, out[:, :prefix]) if return_prefix_tokens and prefix else patches)
        return found if intermediates_only else (self.norm(x), found)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are matrices but not weights: positions and tokens."""
        stem = {f"patch_embed.{name}" for name in self.patch_embed.no_weight_decay()}
        return {"pos_embed", "cls_token", "reg_token", "mask_token"} | stem

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that assign each parameter to the stem or a block, for layer-wise decay as in timm."""
        return {
            "stem": r"^cls_token|^reg_token|^mask_token|^pos_embed|^patch_embed|^norm_pre",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm|^fc_norm|^attn_pool|^pre_logits", (99999,))],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep the input of each block alone and run the block again in backward."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh head for another number of classes (0: no head), and another pooling if given ("" for none)."""
        pool = self.vit_config.pool if global_pool is None else (global_pool or "none")
        if pool == "map" and self.attn_pool is None:
            raise UserError("Map pooling has weights of its own: build the model with pool='map' instead.")
        pool_norm = self.vit_config.pool_norm if pool == "map" else None
        self.vit_config = self.vit_config.with_(num_classes=num_classes, pool=pool, pool_norm=pool_norm)
        if pool != "map":
            self.attn_pool = None
        weight = next(self.parameters())
        head = nn.Linear(self.vit_config.embed_dim, num_classes) if num_classes else nn.Identity()
        self.head = head.to(device=weight.device, dtype=weight.dtype).train(self.training)
        if num_classes:
            initialize(self, only="head")

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
        positions: Resampling = "bicubic",
    ) -> None:
        """Another image or patch size, keeping all weights: learned positions are resampled (``bicubic`` as timm,
        ``bilinear`` with aligned corners as big_vision), the projection and the gain of a patch norm are resized with
        the patch. Raises UserError when the sizes do not fit or the resampling is unknown."""
        if positions not in get_args(Resampling):
            known = get_args(Resampling)
            raise UserError(f"Positions cannot be resampled by '{positions}'. {nearest(str(positions), known)}")
        old = self.vit_config
        new = old.with_(img_size=img_size or old.img_size, patch_size=patch_size or old.patch_size)
        self.patch_embed.set_input_size(new.img_size, new.patch_size)
        self.vit_config = new
        for module in self.modules():
            if "grid_size" in getattr(module, "takes", ()):
                module.grid_size = self.vit_config.grid  # type: ignore[assignment]
        if self.pos_embed is None or self.vit_config.grid == old.grid:
            return
        prefix = old.num_prefix_tokens if old.position_on_prefix else 0
        if old.position != "learn":
            fixed = initial_positions(self.vit_config)
            assert fixed is not None
            self._set_positions(fixed.to(self.pos_embed))
            return
        trained = self.pos_embed.requires_grad
        aligned = positions == "bilinear"
        self._set_positions(resample(self.pos_embed.detach(), old.grid, self.vit_config.grid, prefix, aligned))
        self.pos_embed.requires_grad_(trained)

    def _set_positions(self, positions: Tensor | None) -> None:
        if self.vit_config.position == "learn":
            assert positions is not None
            self.pos_embed = nn.Parameter(positions)
        else:
            self.register_buffer("pos_embed", positions, persistent=False)

    def _embed(self, images: Tensor, keep: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Images -> tokens with positions (B, prefix + T, C), or (B, prefix + K, C) where ``keep`` is (B, K)."""
        config = self.vit_config
        x = self.patch_embed(images) if keep is None else self._visible(images, keep, mask)
        if mask is not None:
            x = self._masked(x, mask)
        entries = config.num_prefix_tokens if config.position_on_prefix else 0
        if self.pos_embed is not None:
            positions = self.pos_embed[:, entries:]
            x = x + (positions if keep is None else positions[0, keep])
        if not config.position_norm_on_prefix:
            x = self.norm_pre(x)
        if config.prefix_from == 0:
            x = self._prepend(x)
        if config.position_norm_on_prefix:
            x = self.norm_pre(x)
        return self.pos_drop(x)

    def _visible(self, images: Tensor, keep: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            raise UserError("Give keep (visible patches alone) or mask (mask tokens in their place), not both.")
        on_grid = {type(m).__name__ for m in self.modules() if "grid_size" in getattr(m, "takes", ())}
        if on_grid:
            raise UserError(
                f"{', '.join(sorted(on_grid))} reads the whole grid of patches, which visible ones alone do not form: "
                "use mask, which keeps all tokens in place."
            )
        return self.patch_embed(images, keep)

    def _masked(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.mask_token is None:
            raise UserError("mask needs a learned mask token: build the model with mask_token=True.")
        if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
            raise UserError(f"mask is boolean and {tuple(x.shape[:2])} here, not {mask.dtype} {tuple(mask.shape)}.")
        return torch.where(mask[..., None], self.mask_token.to(x.dtype), x)

    def _prepend(self, x: Tensor) -> Tensor:
        """The class and register tokens, with their positions if they have any, before the patch tokens."""
        prefix: list[Tensor] = [t for t in (self.cls_token, self.reg_token) if t is not None]
        if not prefix:
            return x
        tokens = torch.cat(prefix, dim=1)
        if self.vit_config.position_on_prefix and self.pos_embed is not None:
            tokens = tokens + self.pos_embed[:, : self.vit_config.num_prefix_tokens]
        return torch.cat([tokens.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)

    def _run(self, index: int, x: Tensor, for_head: bool = False) -> Tensor:
        """The block of that index; ``for_head`` says that nothing but the head reads its output."""
        if index == self.vit_config.prefix_from > 0:
            x = self._prepend(x)
        if self.grad_checkpointing and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._run_block, index, x, for_head, use_reentrant=False)
            return out
        return self._run_block(index, x, for_head)

    def _run_block(self, index: int, x: Tensor, for_head: bool) -> Tensor:
        if self.forms is not None:
            return self.forms.run(self, index, x, for_head)
        out: Tensor = self.blocks[index](x)
        return out

    def _pool(self, x: Tensor) -> Tensor:
        pool, prefix = self.vit_config.pool, self.vit_config.num_prefix_tokens
        if pool == "none":
            return x
        if pool == "map":
            assert self.attn_pool is not None
            return self.attn_pool(x[:, prefix:])
        if pool == "token":
            return x[:, 0]
        return x[:, prefix:].mean(1)

    def _block_indices(self, indices: int | Sequence[int] | None) -> set[int]:
        depth = len(self.blocks)
        if indices is None:
            return set(range(depth))
        chosen = range(depth - indices, depth) if isinstance(indices, int) else indices
        if not all(-depth <= i < depth for i in chosen) or not chosen:
            raise ValueError(f"indices must name some of the {depth} blocks, got {indices}.")
        return {i % depth for i in chosen}
