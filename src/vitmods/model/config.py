"""A frozen description of a Vision Transformer: every slot that a change may fill, and nothing of PyTorch."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from vitmods.model.names import MODELS, SIZES, VIT5, parse_name, split_options
from vitmods.model.slots import (
    BranchConfig,
    FirstBlocks,
    NormConfig,
    PositionalConfig,
    StemConfig,
    parse,
)
from vitmods.ops.rotary import RopeConfig
from vitmods.util.errors import UserError, explaining, nearest
from vitmods.util.fields import check_types
from vitmods.util.limits import parse_json

__all__ = ["BranchConfig", "FirstBlocks", "NormConfig", "PositionalConfig", "RopeConfig", "StemConfig", "ViTConfig"]


@dataclass(frozen=True)
class ViTConfig:
    """Everything that defines a Vision Transformer's function.

    Sizes are in pixels, ``img_size`` and ``patch_size`` as (rows, columns); one number is for both. Defaults are
    ViT-S/16 as in timm. Raises UserError when the parts do not fit.
    """

    img_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)
    in_chans: int = 3
    num_classes: int = 1000
    embed_dim: int = 384
    depth: int = 12
    parallel: int = 1  # attention branches, and MLP branches, side by side in each block
    num_heads: int = 6
    head_dim: int | None = None  # channels of a head, where not embed_dim / num_heads
    mlp_dim: int = 1536
    mlp_kind: str = "mlp"  # one of vitmods.layers.MLPS
    qkv_bias: bool = True
    qk_norm: NormConfig | None = None
    proj_bias: bool = True  # biases of attention's output projection and of the MLP
    activation: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu"

    stem: StemConfig = field(default_factory=StemConfig)
    position: Literal["learn", "sincos2d", "sincos2d_centered", "sincos1d", "none"] = "learn"
    position_on_prefix: bool = True  # the class and register tokens have position entries too
    rope: RopeConfig | None = None
    rel_pos: Literal[False, True, "shared"] = False  # a learned bias of attention for each offset of two tokens
    position_norm: NormConfig | None = None
    position_norm_on_prefix: bool = False
    class_token: bool = True
    reg_tokens: int = 0
    register_neurons: bool = False  # registers are zeros, and take over chosen neurons of the patches
    mask_token: bool = False  # a learned token for patches that are masked
    prompts: int = 0  # learned tokens behind the patches that no head reads
    prompts_deep: bool = False  # each block has its own prompts, which take the place of the last one's
    prefix_from: int = 0  # the block before which the class and register tokens join the patch tokens

    attn: BranchConfig = field(default_factory=BranchConfig)
    mlp: BranchConfig = field(default_factory=BranchConfig)
    first_blocks: FirstBlocks | None = None
    positional: PositionalConfig | None = None
    head_scale: bool = False
    gate: Literal["none", "channel", "head"] = "none"  # of what the heads read
    value_mix: bool = False  # all blocks but the first mix the first one's values into theirs
    norm_scale: bool = False  # what a norm before a branch puts out is divided by the root of the block's number
    layer_scale: float | None = None
    residual_scale: bool = False  # a learned factor for each channel of the stream to which an MLP's output is added

    final_norm: NormConfig | None = field(default_factory=NormConfig)
    # "prefix": class and register tokens side by side; "token+avg": the class token beside the mean of the patches
    pool: Literal["token", "avg", "map", "none", "prefix", "token+avg"] = "token"
    pool_prefix: bool = False  # average and map pooling read the class and register tokens too
    norm_after_pool: bool = False  # the final norm reads the pooled token (timm's fc_norm)
    pool_norm: NormConfig | None = None  # the norm inside map pooling, where it is not as the final norm
    pool_mlp_dim: int | None = None  # the width of the MLP inside map pooling, where it is not mlp_dim
    pool_heads: int | None = None  # the number of heads of map pooling, where it is not num_heads
    representation: bool = False  # a linear layer and tanh before the head
    head_hidden: int | None = None  # or a linear layer to that width, and ReLU
    head_bias: float = 0.0  # initial bias of the head

    pos_drop: float = 0.0
    proj_drop: float = 0.0
    attn_drop: float = 0.0
    key_drop: float = 0.0  # of the first block (DropKey)
    key_drop_shape: Literal["decreasing", "constant"] = "decreasing"
    patch_drop: float = 0.0  # fraction of the patches of an image that training leaves out
    head_drop: float = 0.0
    drop_path: float = 0.0
    drop_path_shape: Literal["linear", "constant"] = "linear"
    dynamic_img_size: bool = False  # images of other sizes than img_size are taken too
    crop_border: bool = False  # rows and columns of pixels after the last whole patch are left out
    init: Literal["timm", "big_vision", "beit"] = "timm"

    def __post_init__(self) -> None:
        for name in ("img_size", "patch_size"):
            value = getattr(self, name)
            sides = tuple(value) if isinstance(value, list | tuple) else (value, value)
            if len(sides) != 2 or not all(isinstance(side, int) and 0 < side < 2**31 for side in sides):
                got = str(value)[:60]
                raise UserError(f"{name} must be one or two positive whole numbers (rows, columns), got {got}.")
            object.__setattr__(self, name, sides)
        check_types(self)
        _check(self)

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patch tokens."""
        return self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1]

    @property
    def reads_tokens(self) -> bool:
        """Whether its inputs are sequences of tokens (B, T), of any length up to ``img_size[1]``, and no images."""
        return self.stem.kind != "linear" and self.stem.facts.sequences

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix_tokens(self) -> int:
        return int(self.class_token) + self.reg_tokens

    @property
    def pooled_dim(self) -> int:
        """Channels of what pooling makes of the tokens."""
        parts = {"prefix": self.num_prefix_tokens, "token+avg": 2}
        return self.embed_dim * parts.get(self.pool, 1)

    def prefix_tokens(self, block: int) -> int:
        """The number of class and register tokens that the block of that index sees."""
        return self.num_prefix_tokens if block >= self.prefix_from else 0

    def branches(self, block: int) -> tuple[BranchConfig, BranchConfig]:
        """The norm slots of attention and MLP in the block of that index."""
        if self.first_blocks is not None and block < self.first_blocks.count:
            return self.first_blocks.attn, self.first_blocks.mlp
        return self.attn, self.mlp

    def key_drop_at(self, block: int) -> float:
        """DropKey's rate in the block of that index: falling evenly to 0 in the last one, or the same in all."""
        fraction = 1 - block / max(self.depth - 1, 1) if self.key_drop_shape == "decreasing" else 1.0
        return self.key_drop * fraction

    def norm_scale_at(self, block: int) -> float:
        """The factor of what norms before branches put out in the block of that index."""
        return (block + 1) ** -0.5 if self.norm_scale else 1.0

    @property
    def unrolled(self) -> "ViTConfig":
        """The sequential model that has the same branches, block after block."""
        return self._counted(1, lambda count: count * self.parallel)

    def rolled(self, k: int) -> "ViTConfig":
        """The inverse of ``unrolled``: every k blocks of a sequential model as the branches of one."""
        assert self.parallel == 1
        assert not any(count % k for count in self.counts.values()), self.counts
        return self._counted(k, lambda count: count // k)

    @property
    def counts(self) -> dict[str, int]:
        """Whatever is a number of blocks, under the name of its field."""
        parts = {"first_blocks": self.first_blocks, "positional": self.positional}
        counts = {name: part.count for name, part in parts.items() if part is not None}
        return {"depth": self.depth, "prefix_from": self.prefix_from, **counts}

    def _counted(self, parallel: int, change: Callable[[int], int]) -> "ViTConfig":
        changed: dict[str, Any] = {"parallel": parallel}
        for name, count in self.counts.items():
            part = getattr(self, name)
            changed[name] = change(count) if part == count else dataclasses.replace(part, count=change(count))
        return self.with_(**changed)

    def with_slots(
        self, attn: Callable[[BranchConfig], BranchConfig], mlp: Callable[[BranchConfig], BranchConfig]
    ) -> "ViTConfig":
        """A copy in which both branches of all blocks are edited, those of the first blocks too."""
        first = self.first_blocks
        if first is not None:
            first = dataclasses.replace(first, attn=attn(first.attn), mlp=mlp(first.mlp))
        return self.with_(attn=attn(self.attn), mlp=mlp(self.mlp), first_blocks=first)

    def with_(self, **overrides: Any) -> "ViTConfig":
        """A copy with some fields replaced; an unknown field raises UserError naming the nearest."""
        check_options(overrides)
        return dataclasses.replace(self, **overrides)

    def to_json(self) -> str:
        values = dataclasses.asdict(self)
        for name in ("prompts", "prompts_deep"):  # not in folders of trials that do without
            if not values[name]:
                del values[name]
        return json.dumps(values, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "ViTConfig":
        """The inverse of ``to_json``. Raises UserError on fields that this version does not know, or of other types."""
        return cls.from_dict(parse_json(text))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ViTConfig":
        # A word where a number belongs, no pairs of options.
        with explaining(lambda error: f"Invalid ViT settings: {error}.", TypeError, AttributeError, ValueError):
            config: ViTConfig = parse(cls, dict(values))
        return config

    @classmethod
    def from_name(cls, name: str, **overrides: Any) -> "ViTConfig":
        """The config of a name: ``S/16``, ``Ti/4``, ``S36/16`` (36 blocks), ``S18x2/16`` (18 blocks of two parallel
        branches), ``ViT5-S/16``, timm's ``vit_small_patch16_224``, or a whole model's (``T2T-14``).

        Widths, depths and heads as published (Steiner et al., 2022; ``mu`` is big_vision's smallest, for tests and
        digits; timm's names carry the input size). Fields may follow as options, ``B/16?activation=gelu_tanh``, and
        keywords replace fields. Raises UserError on an unknown name or field.
        """
        name, options = split_options(name)
        check_options(options | overrides)
        words = {field.name for field in dataclasses.fields(cls) if "none" in get_args(field.type)}
        options |= {option: "none" for option, value in options.items() if value is None and option in words}
        config = cls.from_dict({**fields_of_name(name), **options, **overrides})
        if name.startswith("ViT5-") and config.rope is not None:
            return config.with_(rope=replace(config.rope, reference=config.grid))
        return config


def fields_of_name(name: str) -> dict[str, Any]:
    """The fields that a name without options says."""
    if name in MODELS:
        return MODELS[name]
    if name.startswith("ViT5-"):
        return {**fields_of_name(name.removeprefix("ViT5-")), **VIT5}
    size, depth, parallel, patch, img_size = parse_name(name)
    width, usual_depth, mlp_dim, heads = SIZES[size]
    shape: dict[str, Any] = {
        "patch_size": patch,
        "embed_dim": width,
        "depth": usual_depth if depth is None else depth,
        "parallel": parallel,
        "num_heads": heads,
        "mlp_dim": mlp_dim,
    }
    return shape if img_size is None else {**shape, "img_size": img_size}


def check_options(options: Iterable[str]) -> None:
    """Raise UserError, with a list of all, for an option of a ViT's name that is not a field of its config."""
    names = [field.name for field in dataclasses.fields(ViTConfig)]
    for option in options:
        if option not in names:
            hint = nearest(option, names)
            every = "" if hint.startswith("Known") else f" All: {', '.join(names)}."
            raise UserError(f"A ViT does not have a setting '{option}'. {hint}{every}")


def _check(config: ViTConfig) -> None:
    for axis, side, patch in zip(("height", "width"), config.img_size, config.patch_size, strict=True):
        if side < patch or (side % patch and not config.crop_border):
            nearby = f"{side // patch * patch} or {(side // patch + 1) * patch}"
            if side < patch:
                nearby = f"{patch} or more, or a model with smaller patches"
            raise UserError(f"The image's {axis} {side} is not a multiple of the patch side {patch}; use {nearby}.")
    least = dict.fromkeys(
        ("in_chans", "embed_dim", "depth", "parallel", "num_heads", "mlp_dim", "head_dim", "pool_heads"), 1
    )
    for name, number in {**least, "num_classes": 0, "reg_tokens": 0, "prompts": 0}.items():
        value = getattr(config, name)
        if value is not None and value < number:
            raise UserError(f"{name} must be at least {number}, got {value}.")
    if config.stem.kind != "linear":
        config.stem.facts.check(config.embed_dim, config.patch_size)
    if config.layer_scale == 0:
        raise UserError("layer_scale=0 would cut every branch off: use None for none, or a small number as 1e-4.")
    if config.head_dim is None and config.embed_dim % config.num_heads:
        raise UserError(f"embed_dim {config.embed_dim} is not a multiple of num_heads {config.num_heads}.")
    for name in ("pos_drop", "proj_drop", "attn_drop", "key_drop", "patch_drop", "head_drop", "drop_path"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"{name} is a probability below 1, got {getattr(config, name)}.")
    if config.pool in ("token", "prefix", "token+avg") and not config.class_token:
        raise UserError(f"pool='{config.pool}' needs a class token: set class_token=True, or pool='avg' or 'map'.")
    if config.norm_after_pool and config.pool == "map":
        raise UserError("pool='map' has its own norm after pooling: set norm_after_pool=False.")
    if config.pooled_dim != config.embed_dim and (config.norm_after_pool or config.representation):
        raise UserError(
            f"pool='{config.pool}' feeds the head directly: set norm_after_pool and representation to False."
        )
    if config.pool_prefix and config.pool not in ("avg", "map"):
        raise UserError("pool_prefix is for average and map pooling: set pool='avg' or 'map', or leave it out.")
    if config.pool_norm and config.pool != "map":
        raise UserError("pool_norm is the norm inside map pooling: set pool='map', or leave it out.")
    if config.pool_mlp_dim is not None and (config.pool != "map" or config.pool_mlp_dim < 1):
        raise UserError("pool_mlp_dim is the width of the MLP inside map pooling, at least 1: set pool='map' too.")
    if config.pool_heads is not None and (config.pool != "map" or config.embed_dim % config.pool_heads):
        raise UserError("pool_heads is the number of heads of map pooling and divides embed_dim: set pool='map' too.")
    if config.mlp_kind != "mlp":
        from vitmods.layers import MLPS  # layers import torch

        MLPS[config.mlp_kind]
    if config.rope is not None:
        if (config.head_dim or config.embed_dim // config.num_heads) % 4:
            raise UserError("Rotary positions need heads with a multiple of 4 channels: set num_heads, or head_dim.")
        if config.rope.register_base is not None and math.isqrt(config.reg_tokens) ** 2 != config.reg_tokens:
            raise UserError(f"Registers turn as a square grid, and {config.reg_tokens} do not form one: use 4 or 9.")
    if config.patch_drop:
        _check_patch_drop(config)
    if config.prompts:
        _check_prompts(config)
    fixed, channels = config.position.startswith("sincos"), 2 if config.position == "sincos1d" else 4
    if fixed and config.embed_dim % channels:
        raise UserError(
            f"position='{config.position}' needs a width that is a multiple of {channels}, got {config.embed_dim}."
        )
    if config.head_hidden is not None and (config.head_hidden < 1 or config.representation):
        raise UserError("head_hidden is the width of a layer before the head, at least 1, without representation.")
    if config.reads_tokens and config.pool in ("avg", "map", "token+avg"):
        raise UserError(f"pool='{config.pool}' would count the padding of sequences: set pool='token', or 'none'.")
    if not 0 <= config.prefix_from < config.depth:
        raise UserError(
            f"prefix_from names one of the {config.depth} blocks, 0 to {config.depth - 1}, not {config.prefix_from}."
        )
    if config.prefix_from and (config.position_on_prefix or config.position_norm_on_prefix):
        raise UserError(
            "With prefix_from above 0 the class and register tokens come after the positions: set position_on_prefix "
            "and position_norm_on_prefix to False."
        )
    if config.rel_pos == "shared" and config.prefix_from:
        raise UserError("Blocks share relative positions where all see the same tokens: leave prefix_from at 0.")
    if config.parallel > 1 and any(b.after for i in (0, config.depth - 1) for b in config.branches(i)):
        raise UserError(
            "Parallel branches share one residual sum, and a norm after it (post-norm) is not published there: "
            "put the norm on the branches (placement with reading=branch), or before them."
        )
    if config.parallel > 1 and config.residual_scale:
        raise UserError(
            "Parallel branches share one residual sum, and a scale of it for each is not published: set "
            "residual_scale=False."
        )
    if config.parallel > 1 and (config.value_mix or config.norm_scale):
        raise UserError("Values of the first block and scales of norms are for blocks without parallel branches.")
    if config.value_mix and config.prefix_from:
        raise UserError("The first block has values of all tokens for the others where prefix_from is 0.")
    for part in (config.first_blocks, config.positional):
        if part is not None and part.count > config.depth:
            raise UserError(f"The first {part.count} blocks are more than the model's depth {config.depth}.")
    if fixed and config.position_on_prefix and config.num_prefix_tokens:
        raise UserError(
            f"position='{config.position}' does not have entries for class or register tokens: set "
            "position_on_prefix=False."
        )


def _norms_of_blocks(config: ViTConfig) -> list[NormConfig]:
    branches = (branch for i in range(config.depth) for branch in config.branches(i))
    return [n for b in branches for n in (b.before, b.inner, b.branch, b.after) if n is not None]


def _check_prompts(config: ViTConfig) -> None:
    """Prompts have no place, so nothing in a block may ask for it, or count the tokens."""
    mixing = [n.kind for n in _norms_of_blocks(config) if n.kind != "layer" and not n.facts.token_wise]
    others = {
        "rotary positions": config.rope,
        "relative positions": config.rel_pos,
        "positions in attention": config.positional,
        "values of the first block": config.value_mix,
        "registers that are not trained": config.register_neurons,
        "sequences": config.reads_tokens,
        f"the norm {mixing[0]}" if mixing else "": mixing,
    }
    if there := [name for name, is_there in others.items() if is_there]:
        raise UserError(f"prompts are tokens without a place, and this model has {there[0]}: train another part.")


def _check_patch_drop(config: ViTConfig) -> None:
    """Patches can be left out where they are made one by one and nothing reads them as a grid. Positions in attention
    know the place of each."""
    on_grid = [n.kind for n in _norms_of_blocks(config) if n.kind != "layer" and "grid_size" in n.facts.takes]
    if config.positional is not None or on_grid:
        raise UserError(
            f"patch_drop leaves patches out, and {'the norm ' + on_grid[0] if on_grid else 'attention with positions'} "
            "reads their whole grid: leave one of them out."
        )
    if config.stem.kind != "linear" and not config.stem.facts.patch_wise:
        raise UserError(f"patch_drop needs a stem that makes patches one by one, which '{config.stem.kind}' is not.")
    if round(config.num_patches * (1 - config.patch_drop)) < 1:
        raise UserError(f"patch_drop={config.patch_drop} leaves none of {config.num_patches} patches: give less.")
