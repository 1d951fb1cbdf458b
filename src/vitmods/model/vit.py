"""The reference Vision Transformer: a config, its slots filled with modules, and the forward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.checkpoint import checkpoint

from vitmods.layers.attention import Attention
from vitmods.layers.position import RelativePositionBias, RotaryPositions, positions_on_grid, resample
from vitmods.model.build import (
    initial_positions,
    make_attn_pool,
    make_block,
    make_norm,
    make_stem,
    timm_cfg,
)
from vitmods.model.config import ViTConfig
from vitmods.model.forms import BlockRunner, default_forms
from vitmods.model.init import initialize
from vitmods.model.tracing import given, keep_whole, scriptable
from vitmods.ops.padding import Padding, padded
from vitmods.util.errors import UserError, nearest

torch.fx.wrap("positions_on_grid")  # what it does depends on the size of the images
Resampling = Literal["bicubic", "bilinear"]
Grid = tuple[int, int]
_IN_ATTENTION = RotaryPositions, RelativePositionBias
"""know the place of each patch, also of some of them"""


def _read_grid(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the norms and positions in attention that have to know the rows and columns of the tokens."""
    return (module for module in model.modules() if "grid_size" in getattr(module, "takes", ()))


def _set_grid(model: nn.Module, grid: Grid) -> None:
    for module in _read_grid(model):
        module.grid_size = grid  # type: ignore[assignment]


@contextmanager
def _only(model: nn.Module, keep: Tensor | None) -> Iterator[None]:
    """Inside it, positions in attention are those of the patches `keep` (B, K); None: all."""
    modules = [] if keep is None else [m for m in model.modules() if isinstance(m, _IN_ATTENTION)]
    if modules and isinstance(keep, Proxy):
        raise UserError("torch.fx cannot trace positions in attention of visible patches alone: leave keep out.")
    for module in modules:
        module.keep = keep
    try:
        yield
    finally:
        for module in modules:
            module.keep = None


class BlockInputs(NamedTuple):
    """Inputs of a block besides its tokens.

    attn_mask: as attention takes it. is_causal: later tokens are masked too. padding: (B, T), True for patch tokens
    that only fill sequences up. values: (B, H, N, D), those of the first block, where the others mix them into theirs.
    keep: (B, K), the patches that are there.
    """

    attn_mask: Tensor | None = None
    is_causal: bool = False
    padding: Tensor | None = None
    values: Tensor | None = None
    keep: Tensor | None = None

    def of(self, x: Tensor) -> Tensor | None:
        """Combine them to one mask for tokens (B, N, C)."""
        mask = self.attn_mask
        if self.is_causal:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if self.padding is None:
            return mask
        keys = ~Padding(self.padding).of(x)[:, None, None]
        if mask is None or mask.dtype == torch.bool:
            return keys if mask is None else mask & keys
        return mask.masked_fill(~keys, -torch.inf)


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
    ``forms`` runs the blocks; None calls each block as it is written. The package's default gives the same in less time
    (of the last block ``forward`` then computes only what the head reads; docs/training.md).

    Both take masks. ``attn_mask`` is for attention, True or 0 where a token may look, and ``is_causal`` lets it look at
    no later token. Two are for masked pre-training: ``keep`` (B, K) names the visible patches of each image; the
    others are not computed, and the patch tokens are K, in its order (He et al., 2022, MAE). ``mask`` (B, T) is True
    where the learned mask token replaces a patch (Bao et al., 2022, BEiT; the config's ``mask_token`` makes one). With
    both, the stem computes ``keep`` alone, and the mask token replaces all others too: the same, in less time, where
    ``keep`` holds all that is not masked and tokens do not depend on other patches. UserError says what does not fit.
    Training with the config's ``patch_drop`` draws a ``keep`` where none of them is given (``forward_intermediates``
    does not).

    Where the stem reads tokens, x is (B, T) of any T up to the config's length. Nothing looks at token 0, padding.

    With the config's ``dynamic_img_size`` images may have any size that patches fill, another at each call: positions
    are resampled for them (bicubic, as in timm; fixed tables are computed), and norms that read the grid follow.

    torch.fx traces the model, in the mode that it is in, with what it is called with; ``torch.jit.script`` takes that
    graph.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.vit_config = config
        self.changes: tuple[Any, ...] = ()  # what `apply` did to get here, in order
        dim = config.embed_dim
        self.patch_embed = make_stem(config)
        self.patch_embed.strict_img_size = not config.dynamic_img_size
        self.patch_embed.crop_border = config.crop_border
        self._reads_tokens = config.reads_tokens
        self._grid: Grid | None = None  # of the images that are in the model, where they may have any size
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, config.reg_tokens, dim)) if config.reg_tokens else None
        if config.register_neurons:
            del self.reg_token
            self.register_buffer("reg_token", torch.zeros(1, config.reg_tokens, dim))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.mask_token else None
        layers = config.depth if config.prompts_deep else 1
        self.prompts = nn.Parameter(torch.zeros(layers, config.prompts, dim)) if config.prompts else None
        positions = initial_positions(config)
        self._set_positions(None if positions is None else positions.to(torch.get_default_dtype()))
        self.pos_drop = nn.Dropout(config.pos_drop)
        self.norm_pre = make_norm(config.position_norm, dim)
        self.blocks = nn.ModuleList(make_block(config, i) for i in range(config.depth))
        if config.rel_pos == "shared":
            first, *others = (module for module in self.blocks.modules() if isinstance(module, Attention))
            for attention in others:
                attention.rel_pos = first.rel_pos
        self.norm = nn.Identity() if config.norm_after_pool else make_norm(config.final_norm, dim)
        self.attn_pool = make_attn_pool(config) if config.pool == "map" else None
        self.fc_norm = make_norm(config.final_norm, dim) if config.norm_after_pool else nn.Identity()
        width = self.head_hidden_size
        hidden = config.representation or config.head_hidden
        self.pre_logits = nn.Linear(config.pooled_dim, width) if hidden else None
        self.head_drop = nn.Dropout(config.head_drop)
        self.head = nn.Linear(width, config.num_classes) if config.num_classes else nn.Identity()
        self.grad_checkpointing = False
        self.forms: BlockRunner | None = default_forms()
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": dim, "reduction": max(config.patch_size)} for i in range(config.depth)
        ]
        self.pretrained_cfg = self.default_cfg = timm_cfg(config, self.patch_embed)
        initialize(self)

    # Attributes that timm's tools read.
    num_classes = property(lambda self: self.vit_config.num_classes)
    in_chans = property(lambda self: self.vit_config.in_chans)
    embed_dim = property(lambda self: self.vit_config.embed_dim)
    num_features = property(lambda self: self.vit_config.embed_dim)
    head_hidden_size = property(lambda self: self.vit_config.head_hidden or self.vit_config.pooled_dim)
    num_prefix_tokens = property(lambda self: self.vit_config.num_prefix_tokens)
    global_pool = property(lambda self: "" if self.vit_config.pool == "none" else self.vit_config.pool)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """As any module; Hugging Face's names of inputs get an error that helps."""
        if given_names := sorted({"pixel_values", "labels", "input_ids"} & keywords.keys()):
            raise UserError(
                f"A vitmods ViT is called as model(images) and computes no loss, so it takes no {given_names[-1]}=. "
                "vm.apply(model, ..., in_place=True) keeps the class of a Hugging Face model, which the Trainer trains."
            )
        return super().__call__(*args, **keywords)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        keep: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """(B, in_chans, height, width) -> (B, num_classes); with ``pool="none"`` (B, N, num_classes)."""
        is_traced = isinstance(x, Proxy)  # a graph is asked for any block's output
        return self.forward_head(self._tokens(x, given(attn_mask, is_causal, keep, mask), for_head=not is_traced))

    def forward_features(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        keep: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """(B, in_chans, height, width) -> all tokens (B, N, C) after the final norm, prefix tokens first."""
        return self._tokens(x, given(attn_mask, is_causal, keep, mask))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, N, C) -> logits (B, num_classes), or the pooled features (B, C) that the head reads."""
        x = self.fc_norm(self._pool(x))
        if self.pre_logits is not None:
            x = self.pre_logits(x)
            x = torch.relu(x) if self.vit_config.head_hidden else torch.tanh(x)
        features: Tensor = self.head_drop(x)
        return features if pre_logits else self.head(features)

    @torch.no_grad()
    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Draws all weights anew, in place: by the config's rule, or by ``mode`` ("timm", "big_vision", "beit"), which
        the config then has. With ``needs_reset`` norms, scales and buffers start anew too: what ``to_empty`` has
        brought from the meta device is then as a new model. Raises UserError for another mode."""
        if mode:
            self.vit_config = self.vit_config.with_(init=mode)
        if not needs_reset:
            initialize(self)
            return
        fresh = ViT(self.vit_config)
        start = dict([*fresh.named_parameters(), *fresh.named_buffers()])
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            tensor.copy_(start[name])

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are matrices but not weights: positions and tokens."""
        stem = {f"patch_embed.{name}" for name in self.patch_embed.no_weight_decay()}
        within = {
            name
            for name, _ in self.named_parameters()
            if name.endswith(("rope.freqs", "rel_pos.table", "value_mix.weight"))
        }
        return {"pos_embed", "cls_token", "reg_token", "mask_token", "prompts"} | stem | within

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that assign each parameter to the stem or a block, for layer-wise decay as in timm."""
        return {
            "stem": r"^cls_token|^reg_token|^mask_token|^prompts|^pos_embed|^patch_embed|^norm_pre",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm|^fc_norm|^attn_pool|^pre_logits", (99999,))],
        }

    def __prepare_scriptable__(self) -> nn.Module:
        return scriptable(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the input of each block and run the block again in backward."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh head for another number of classes (0: no head), and another pooling if given ("" for none)."""
        pool = self.vit_config.pool if global_pool is None else (global_pool or "none")
        if pool == "map" and self.attn_pool is None:
            raise UserError("Map pooling has learned weights: build the model with pool='map' instead.")
        none = {} if pool == "map" else dict.fromkeys(("pool_norm", "pool_mlp_dim", "pool_heads"))
        prefix = self.vit_config.pool_prefix and pool in ("avg", "map")
        self.vit_config = self.vit_config.with_(num_classes=num_classes, pool=pool, pool_prefix=prefix, **none)
        named = {name: value for name, value in self.pretrained_cfg.items() if name != "label_names"}
        self.pretrained_cfg = self.default_cfg = named
        if pool != "map":
            self.attn_pool = None
        weight = next(self.parameters())
        head = nn.Linear(self.head_hidden_size, num_classes) if num_classes else nn.Identity()
        self.head = head.to(device=weight.device, dtype=weight.dtype).train(self.training)
        if num_classes:
            initialize(self, only="head")

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
        positions: Resampling = "bicubic",
        dynamic_img_size: bool | None = None,
    ) -> None:
        """Another image or patch size, keeping all weights: learned positions are resampled (``bicubic`` as timm,
        ``bilinear`` with aligned corners as big_vision), the projection and the gain of a patch norm are resized with
        the patch. ``dynamic_img_size`` says whether images of other sizes are taken too. Raises UserError when the
        sizes do not fit or the resampling is unknown."""
        if positions not in get_args(Resampling):
            hint = nearest(str(positions), get_args(Resampling))
            raise UserError(f"Positions cannot be resampled by '{positions}'. {hint}")
        old = self.vit_config
        new = old.with_(
            img_size=img_size or old.img_size,
            patch_size=patch_size or old.patch_size,
            dynamic_img_size=old.dynamic_img_size if dynamic_img_size is None else dynamic_img_size,
        )
        self.patch_embed.set_input_size(new.img_size, new.patch_size)
        self.patch_embed.strict_img_size = not new.dynamic_img_size
        self.vit_config, self._grid = new, None
        _set_grid(self, new.grid)
        for module in self.modules():
            if isinstance(module, _IN_ATTENTION):
                module.set_grid(new.grid)
        if self.pos_embed is None or new.grid == old.grid:
            return
        if old.position != "learn":
            fixed = initial_positions(new)
            assert fixed is not None
            self._set_positions(fixed.to(self.pos_embed))
            return
        prefix = old.num_prefix_tokens if old.position_on_prefix else 0
        trained = self.pos_embed.requires_grad
        self._set_positions(resample(self.pos_embed.detach(), old.grid, new.grid, prefix, positions == "bilinear"))
        self.pos_embed.requires_grad_(trained)

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

        Returns (final tokens, list), or only the list. Entries are (B, C, rows, columns), or (B, T, C) with
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
            x, outputs, prefixes = self._embed(x), [], []
            masks = BlockInputs(attn_mask, is_causal, padding, self._first_values(x))
            for i in range(max(take) + 1 if stop_early else len(self.blocks)):
                x = self._run(i, x, masks)
                if i not in take:
                    continue
                out, prefix = self.norm(x) if norm else x, self.vit_config.prefix_tokens(i)
                patches = out[:, prefix : prefix + grid[0] * grid[1]]  # prompts come behind
                outputs.append(patches.mT.unflatten(2, grid).contiguous() if output_fmt == "NCHW" else patches)
                prefixes.append(out[:, :prefix])
        with_prefix = return_prefix_tokens and self.vit_config.num_prefix_tokens > 0
        if output_dict:
            parts: dict[str, Any] = {"image_intermediates": outputs}
            if with_prefix:
                parts["image_intermediates_prefix"] = prefixes
            return parts if intermediates_only else {**parts, "image_features": self.norm(x)}
        listed = list(zip(outputs, prefixes, strict=True)) if with_prefix else outputs
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
        if config.prompts_deep:
            assert self.prompts is not None
            self.prompts = nn.Parameter(self.prompts.detach()[:depth], self.prompts.requires_grad)
        if not pruned.num_prefix_tokens:
            self.cls_token = self.reg_token = None
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.attn_pool, self.pre_logits, self.fc_norm = None, None, nn.Identity()
            self.reset_classifier(0, "")
        self.vit_config = pruned
        return chosen

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ViT":
        """A fixed table is computed anew for another type: ``double()`` of a float32 table would keep its rounding."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.pos_embed is not None and self.vit_config.position != "learn":
            table = initial_positions(self.vit_config)
            assert table is not None
            self._set_positions(table.to(self.pos_embed.device, self.pos_embed.dtype))
        return self

    def _set_positions(self, positions: Tensor | None) -> None:
        if self.vit_config.position == "learn":
            assert positions is not None
            self.pos_embed = nn.Parameter(positions)
        else:
            self.register_buffer("pos_embed", positions, persistent=False)

    def _tokens(self, images: Tensor, masks: tuple[Any, ...], for_head: bool = False) -> Tensor:
        """All tokens after the final norm; ``for_head``: those that the head reads."""
        attn_mask, is_causal, keep, mask = masks
        images = self.patch_embed.as_images(images)
        padding, last = self.patch_embed.padding(images), len(self.blocks) - 1
        with self._around(padding):
            drawn = self._draw_patches(images) if keep is None and mask is None else None
            keep = keep if drawn is None else drawn
            x = self._embed(images, keep, mask, drawn is not None)
            visible = keep if mask is None else None
            run_masks = BlockInputs(attn_mask, is_causal, padding, self._first_values(x), visible)
            for i in range(last + 1):
                x = self._run(i, x, run_masks, for_head=for_head and i == last)
            tokens: Tensor = self.norm(x)
        return tokens

    def _embed(
        self, images: Tensor, keep: Tensor | None = None, mask: Tensor | None = None, drawn: bool = False
    ) -> Tensor:
        """Images -> tokens with positions (B, prefix + T, C), or (B, prefix + K, C) where ``keep``, the caller's or
        ``drawn`` here, is (B, K)."""
        keep_whole(images)
        config = self.vit_config
        if config.dynamic_img_size or self._reads_tokens:
            self._grid = self._grid_of(images)
        if keep is None:
            x = self.patch_embed(images)
        else:
            if mask is None:
                self.check_visible()
            drawn = drawn or mask is not None  # the caller's as well: a check of values would wait for a GPU
            x = self.patch_embed(images, keep, drawn=True) if drawn else self.patch_embed(images, keep)
        if mask is not None:
            if self.mask_token is None:
                raise UserError("mask needs a learned mask token: build the model with mask_token=True.")
            rows, columns = self.patch_embed.dynamic_feat_size((images.shape[-2], images.shape[-1]))
            shape = images.shape[0], rows * columns
            if mask.dtype != torch.bool or mask.shape != shape:
                raise UserError(f"mask is boolean and {shape} here, not {mask.dtype} {tuple(mask.shape)}.")
            token = self.mask_token.to(x.dtype)
            if keep is not None:
                x, keep = token.expand(*shape, -1).scatter(1, keep[..., None].expand_as(x), x), None
            x = torch.where(mask[..., None], token, x)
        of_prefix: Tensor | None = None
        if self.pos_embed is not None:
            of_prefix, positions = self._positions_for(images)
            if keep is not None:  # not positions[0, keep]: with several threads its gradient is not repeatable
                positions = positions.expand(len(keep), -1, -1).gather(1, keep[..., None].expand_as(x))
            x = x + positions
        if not config.position_norm_on_prefix:
            x = self.norm_pre(x)
        if config.prefix_from == 0:
            x = self._prepend(x, of_prefix)
        if config.position_norm_on_prefix:
            x = self.norm_pre(x)
        return self.pos_drop(x)

    def _draw_patches(self, images: Tensor) -> Tensor | None:
        """The patches that patch dropout leaves in this batch, (B, K) in the order of the grid; None for all."""
        rate = self.vit_config.patch_drop
        if not (self.training and rate):
            return None
        if isinstance(images, Proxy):
            raise UserError("torch.fx cannot trace patch dropout: trace the model in evaluation, or with patch_drop=0.")
        rows, columns = self.patch_embed.dynamic_feat_size((images.shape[-2], images.shape[-1]))
        count = max(1, round(int(rows * columns) * (1 - rate)))  # a traced size is a tensor
        order = torch.rand(len(images), rows * columns, device=images.device).argsort(dim=1)
        return order[:, :count].sort(dim=1).values

    def check_visible(self) -> None:
        """Raise UserError if blocks cannot compute the visible patches without the others."""
        if on_grid := {type(m).__name__ for m in _read_grid(self) if not isinstance(m, _IN_ATTENTION)}:
            raise UserError(
                f"{', '.join(sorted(on_grid))} reads the whole grid of patches, which the visible ones do not form: "
                "use mask, which keeps all tokens in place."
            )

    def _grid_of(self, images: Tensor) -> Grid | None:
        """The (rows, columns) of patches that norms and positions in attention have to know; None if none does."""
        reads = next(_read_grid(self), None)
        if reads is None:
            return None
        if isinstance(images, Proxy):
            raise UserError(
                f"{type(reads).__name__} reads the grid, which torch.fx does not know where images may have any size: "
                "call set_input_size(dynamic_img_size=False) first."
            )
        return self.patch_embed.dynamic_feat_size((images.shape[-2], images.shape[-1]))

    def _positions_for(self, images: Tensor) -> tuple[Tensor | None, Tensor]:
        """The positions of prefix tokens, if they have any, (1, prefix, C), and of the images' patches, (1, T, C)."""
        assert self.pos_embed is not None
        config = self.vit_config
        of_prefix, positions = None, self.pos_embed
        if config.position_on_prefix:
            prefix = config.num_prefix_tokens
            of_prefix, positions = positions.split([prefix, positions.shape[1] - prefix], dim=1)
        if self._reads_tokens:
            return of_prefix, positions[:, : images.shape[-1]]
        if not config.dynamic_img_size:
            return of_prefix, positions
        grid = self.patch_embed.dynamic_feat_size((images.shape[-2], images.shape[-1]))
        return of_prefix, positions_on_grid(positions, config.grid, grid, config.position)

    def _prepend(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """The class and register tokens, with their positions if they have any, before the patch tokens."""
        prefix: list[Tensor] = [t for t in (self.cls_token, self.reg_token) if t is not None]
        if not prefix:
            return x
        tokens = torch.cat(prefix, dim=1)
        if positions is not None:
            tokens = tokens + positions
        return torch.cat([tokens.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)

    def _around(self, padding: Tensor | None) -> AbstractContextManager[None]:
        """Return a context that gives norms the padding of sequences; images do not have any."""
        return padded(padding) if self.patch_embed.sequences else nullcontext()

    def _run(self, index: int, x: Tensor, masks: BlockInputs, for_head: bool = False) -> Tensor:
        """Run the block of that index; ``for_head``: only the head reads its output."""
        if masks.is_causal:
            if masks.attn_mask is not None:
                raise UserError("is_causal already sets the mask: give it or attn_mask, not both.")
            if mixing := {type(m).__name__ for m in self.modules() if not getattr(m, "token_wise", True)}:
                names = ", ".join(sorted(mixing))
                raise UserError(f"{names} mixes tokens: with is_causal a token would see later ones.")
        if index == self.vit_config.prefix_from > 0:
            x = self._prepend(x)
        count, is_deep = self.vit_config.prompts, self.vit_config.prompts_deep
        if self.prompts is not None:
            if masks.of(x) is not None:
                raise UserError(
                    "Masks of attention are for tokens in order, and prompts have no place: leave them out."
                )
            for_head = False
            if is_deep or index == 0:
                x = torch.cat([x, self.prompts[index].to(x.dtype).expand(x.shape[0], -1, -1)], dim=1)
        if self.grad_checkpointing and torch.is_grad_enabled():
            x = checkpoint(self._run_block, index, x, masks, for_head, self._grid, use_reentrant=False)
        else:
            x = self._run_block(index, x, masks, for_head, self._grid)
        return x[:, :-count] if count and (is_deep or index == len(self.blocks) - 1) else x

    def _run_block(self, index: int, x: Tensor, masks: BlockInputs, for_head: bool, grid: Grid | None) -> Tensor:
        """Run a block; with a mask on its attention it is called without fast forms."""
        if grid is not None:
            _set_grid(self.blocks[index], grid)
        with self._around(masks.padding), _only(self.blocks[index], masks.keep):
            attn_mask = masks.of(x)
            if masks.values is not None and index > 0:
                return self.blocks[index](x, attn_mask=attn_mask, values=masks.values)
            if attn_mask is None and self.forms is not None:
                return self.forms.run(self, index, x, for_head)
            return self.blocks[index](x) if attn_mask is None else self.blocks[index](x, attn_mask=attn_mask)

    def _first_values(self, x: Tensor) -> Tensor | None:
        if not self.vit_config.value_mix:
            return None
        if self._grid is not None:
            _set_grid(self.blocks[0], self._grid)
        block: Any = self.blocks[0]
        return block.first_values(x)

    def _pool(self, x: Tensor) -> Tensor:
        pool, prefix = self.vit_config.pool, self.vit_config.num_prefix_tokens
        if pool == "none":
            return x
        if pool == "map":
            assert self.attn_pool is not None
            return self.attn_pool(x if self.vit_config.pool_prefix else x[:, prefix:])
        if pool == "token":
            return x[:, 0]
        if pool == "prefix":
            return x[:, :prefix].flatten(1)
        mean = (x if self.vit_config.pool_prefix else x[:, prefix:]).mean(1)
        return torch.cat([x[:, 0], mean], dim=1) if pool == "token+avg" else mean

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
        fields |= dict.fromkeys(("pool_norm", "pool_mlp_dim", "pool_heads"))
        fields |= dict.fromkeys(("pool_prefix", "representation", "norm_after_pool"), False)
        fields |= {"num_classes": 0, "pool": "none"}
    if head if config.norm_after_pool else norm:
        fields["final_norm"] = None
    return config.with_(**fields)
