"""big_vision's checkpoints (.npz, flat names of Flax) as a vitmods ViT and back, exactly.

Source: google-research/big_vision, models/vit.py: the current names, those of the first ViT code (Dosovitskiy et al.,
2021: other numbers inside a block, and positions that start with the class token's), blocks stacked for nn.scan, and
the stem of Dual PatchNorm under the names in its paper's listing (Kumar et al., 2023).
"""

from collections.abc import Iterable, Mapping
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from vitmods.adapters.tensors import (
    SAME,
    TRANSPOSED,
    Coverage,
    Layout,
    Row,
    Size,
    count_blocks,
    image_size,
    need,
    read_tensors,
    write_tensors,
)
from vitmods.adapters.transfer import build, check_readable, fields, refuse_slots
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig, StemConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError

_ANCHOR = "Transformer/encoder_norm/scale"
_POSITIONS = ("pos_embedding", "Transformer/pos_embedding", "Transformer/posembed_input/pos_embedding")
_NORM = NormConfig("layer", 1e-6)


def is_big_vision(tensors: Iterable[str]) -> bool:
    """Whether tensors have the names of big_vision."""
    return any(name.endswith(_ANCHOR) for name in tensors)


def read_big_vision(
    source: str,
    tensors: Mapping[str, Tensor],
    num_heads: int | None = None,
    img_size: Size = None,
    eps: float = 1e-6,
    **settings: Any,
) -> tuple[ViT, Coverage]:
    """A ViT from the flat tensors of a big_vision checkpoint, and the account of all tensors.

    The config follows from names and shapes; ``img_size`` is needed where the positions are not a square of learned
    ones. Tensors beside the model's own (``params/`` or ``params/img/`` before the names, or nothing) are left out.
    ``settings`` are fields of ViTConfig that are known to be otherwise (``in_chans`` for a Dual PatchNorm stem).

    Raises UserError when something is missing, left over or cannot be reported.
    """
    prefix = _prefix(source, tensors)
    named_tensors = unstack({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    asked = {"num_heads": num_heads, "in_chans": settings.pop("in_chans", None)}
    config = infer_config(source, named_tensors, img_size, asked["in_chans"] or 3)
    for name, value in asked.items():
        if value not in (None, getattr(config, name)):
            raise UserError(f"{source} says {name}={getattr(config, name)}, not {value}: leave it out.")
    config = _with_norm(config, NormConfig("layer", eps)).with_(**settings)
    outside = {n: f"outside the model's {prefix}" for n in tensors if not n.startswith(prefix)}
    assumed = [f"eps of all norms {eps:g}"]
    if "activation" not in settings:
        assumed.append("activation=gelu_tanh")
    if img_size is None:
        assumed.append(f"img_size={config.img_size}")
    named = named_tensors | {name: tensors[name] for name in outside}
    weights, coverage = read_tensors(source, rows(config, named_tensors), named, outside, assumed)
    return build(source, config, weights), coverage


def to_big_vision(model: ViT) -> dict[str, Tensor]:
    """A big_vision checkpoint's tensors by flat name, with ``params/`` before it.

    The class token's position, which big_vision no longer has, is added to the token itself. Raises UserError naming
    the slots that big_vision's ViT does not have.
    """
    config, weights = model.vit_config, dict(model.state_dict())
    refuse_slots("big_vision", config, _counterpart(config))
    check_readable("The model", model)
    if config.position == "learn" and config.position_on_prefix and config.class_token:
        weights["cls_token"] = weights["cls_token"] + weights["pos_embed"][:, :1]
        weights["pos_embed"] = weights["pos_embed"][:, 1:]
    written = write_tensors(rows(config), weights)
    return {f"params/{name}": tensor.detach().cpu() for name, tensor in written.items()}


def _counterpart(config: ViTConfig) -> ViTConfig:
    """The nearest config that big_vision's ViT builds. A checkpoint says nothing of dropout."""
    dual = config.stem.before is not None or config.stem.after is not None
    norm = _NORM if dual else None
    return ViTConfig(
        **fields(config, "img_size patch_size in_chans num_classes embed_dim depth num_heads mlp_dim representation"),
        **fields(config, "pos_drop proj_drop attn_drop head_drop drop_path drop_path_shape init head_bias"),
        activation="gelu_tanh",
        stem=StemConfig(before=norm, after=norm),
        position="sincos2d" if config.position == "sincos2d" else "learn",
        position_on_prefix=config.position_on_prefix,
        class_token=config.pool == "token",
        pool="avg" if config.pool == "none" else config.pool,
    )


def _with_norm(config: ViTConfig, norm: NormConfig) -> ViTConfig:
    dual = norm if config.stem.before else None
    slots = BranchConfig(before=norm)
    return config.with_(attn=slots, mlp=slots, final_norm=norm, stem=StemConfig(before=dual, after=dual))


def _prefix(source: str, tensors: Iterable[str]) -> str:
    prefixes = sorted(name.removesuffix(_ANCHOR) for name in tensors if name.endswith(_ANCHOR))
    if len(prefixes) != 1:
        raise UserError(f"{source} cannot be read: {_ANCHOR} is in it {len(prefixes)} times, expected once.")
    return prefixes[0]


def unstack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Blocks that are stacked along a first axis ("encoderblock/...") as one set of tensors a block."""
    unstacked = {}
    for name, tensor in tensors.items():
        if not name.startswith("Transformer/encoderblock/"):
            unstacked[name] = tensor
            continue
        name_in_block = name.removeprefix("Transformer/encoderblock/")
        unstacked |= {f"Transformer/encoderblock_{i}/{name_in_block}": part for i, part in enumerate(tensor)}
    return unstacked


def infer_config(source: str, tensors: Mapping[str, Tensor], img_size: Size = None, in_chans: int = 3) -> ViTConfig:
    """The config that names and shapes tell. Raises UserError when they do not."""
    dual = "dense/kernel" in tensors
    if dual:
        values, width = need(source, tensors, "dense/kernel", 2).shape
        side = isqrt(values // in_chans)
        if side * side * in_chans != values:
            raise UserError(
                f"{source}: {values} values are not a square patch with {in_chans} channels: give in_chans."
            )
        patch = (side, side)
    else:
        *sides, in_chans, width = need(source, tensors, "embedding/kernel", 4).shape
        patch = (sides[0], sides[1])
    block = "Transformer/encoderblock_0"
    number = "1" if f"{block}/MultiHeadDotProductAttention_1/query/kernel" in tensors else "0"
    query = need(source, tensors, f"{block}/MultiHeadDotProductAttention_{number}/query/kernel", 3)
    mlp = need(source, tensors, f"{block}/MlpBlock_{'3' if number == '1' else '0'}/Dense_0/kernel", 2)
    table = next((tensors[name] for name in _POSITIONS if name in tensors), None)
    token = "cls" in tensors
    size, on_prefix = image_size(source, None if table is None else table.shape[1], int(token), patch, img_size)
    norm = _NORM if dual else None
    return ViTConfig(
        img_size=size,
        patch_size=patch,
        in_chans=in_chans,
        num_classes=tensors["head/bias"].shape[0] if "head/bias" in tensors else 0,
        embed_dim=width,
        depth=count_blocks(source, list(tensors), "Transformer/encoderblock_"),
        num_heads=query.shape[1],
        mlp_dim=mlp.shape[1],
        activation="gelu_tanh",
        stem=StemConfig(before=norm, after=norm),
        position="learn" if table is not None else "sincos2d",
        position_on_prefix=on_prefix,
        class_token=token,
        pool="token" if token else "map" if any(name.startswith("MAPHead_0/") for name in tensors) else "avg",
        representation="pre_logits/kernel" in tensors,
        init="big_vision",
    )


def rows(config: ViTConfig, tensors: Iterable[str] = ()) -> list[Row]:
    """Our tensors and big_vision's. Names that had other forms once are taken from ``tensors``."""
    tensors = set(tensors)
    dim, heads = config.embed_dim, config.num_heads
    old = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel" in tensors
    attn, second, mlp = ("1", "2", "3") if old else ("0", "1", "0")
    pairs = [*stem_rows(config), *_norm_rows("norm", "Transformer/encoder_norm")]
    for i in range(config.depth):
        ours, theirs = f"blocks.{i}", f"Transformer/encoderblock_{i}"
        attention = f"{theirs}/MultiHeadDotProductAttention_{attn}"
        pairs += [
            *_norm_rows(f"{ours}.norm1", f"{theirs}/LayerNorm_0"),
            *_heads_rows(f"{ours}.attn.qkv", attention, ("query", "key", "value"), heads),
            *_out_rows(f"{ours}.attn.proj", f"{attention}/out", heads),
            *_norm_rows(f"{ours}.norm2", f"{theirs}/LayerNorm_{second}"),
            *_mlp_rows(f"{ours}.mlp", f"{theirs}/MlpBlock_{mlp}"),
        ]
    if config.position == "learn":
        pairs.append(Row("pos_embed", (next((name for name in _POSITIONS if name in tensors), _POSITIONS[0]),)))
    if config.class_token:
        pairs.append(Row("cls_token", ("cls",)))
    if config.pool == "map":
        attention = "MAPHead_0/MultiHeadDotProductAttention_0"
        pairs += [
            Row("attn_pool.latent", ("MAPHead_0/probe",)),
            *_heads_rows("attn_pool.q", attention, ("query",), heads),
            *_heads_rows("attn_pool.kv", attention, ("key", "value"), heads),
            *_out_rows("attn_pool.proj", f"{attention}/out", heads),
            *_norm_rows("attn_pool.norm", "MAPHead_0/LayerNorm_0"),
            *_mlp_rows("attn_pool.mlp", "MAPHead_0/MlpBlock_0"),
        ]
    if config.representation:
        pairs += _linear_rows("pre_logits", "pre_logits")
    if config.num_classes:
        pairs += _linear_rows("head", "head")
    assert dim % heads == 0
    return pairs


def stem_rows(config: ViTConfig) -> list[Row]:
    """The rows of the stem: a convolution, or Dual PatchNorm's norm, dense layer and norm."""
    if config.stem.before is None and config.stem.after is None:
        kernel = Layout(lambda x: x.permute(3, 2, 0, 1), lambda x: (x.permute(2, 3, 1, 0),))
        weight = Row("patch_embed.proj.weight", ("embedding/kernel",), kernel)
        return [weight, Row("patch_embed.proj.bias", ("embedding/bias",))]
    shape = (*config.patch_size, config.in_chans)
    return [
        Row("patch_embed.norm_before.weight", ("ln0/scale",), _pixels(shape)),
        Row("patch_embed.norm_before.bias", ("ln0/bias",), _pixels(shape)),
        Row("patch_embed.proj.weight", ("dense/kernel",), _dense_kernel(shape)),
        Row("patch_embed.proj.bias", ("dense/bias",)),
        *_norm_rows("patch_embed.norm", "ln1"),
    ]


def _pixels(shape: tuple[int, int, int]) -> Layout:
    """A patch's values: (row, column, channel) there, (channel, row, column) here, both as one axis."""
    rows, columns, channels = shape
    return Layout(
        lambda x: x.reshape(rows, columns, channels).permute(2, 0, 1).reshape(-1),
        lambda x: (x.reshape(channels, rows, columns).permute(1, 2, 0).reshape(-1),),
    )


def _dense_kernel(shape: tuple[int, int, int]) -> Layout:
    """(rows * columns * channels, C) there, a convolution's (C, channels, rows, columns) here."""
    return Layout(
        lambda x: x.reshape(*shape, -1).permute(3, 2, 0, 1),
        lambda x: (x.permute(2, 3, 1, 0).reshape(-1, x.shape[0]),),
    )


def _norm_rows(ours: str, theirs: str) -> list[Row]:
    return [Row(f"{ours}.weight", (f"{theirs}/scale",)), Row(f"{ours}.bias", (f"{theirs}/bias",))]


def _linear_rows(ours: str, theirs: str) -> list[Row]:
    return [Row(f"{ours}.weight", (f"{theirs}/kernel",), TRANSPOSED), Row(f"{ours}.bias", (f"{theirs}/bias",), SAME)]


def _mlp_rows(ours: str, theirs: str) -> list[Row]:
    return _linear_rows(f"{ours}.fc1", f"{theirs}/Dense_0") + _linear_rows(f"{ours}.fc2", f"{theirs}/Dense_1")


def _heads_rows(ours: str, theirs: str, parts: tuple[str, ...], heads: int) -> list[Row]:
    """Maps to heads: kernels (C, H, D) and biases (H, D) there; one map with the parts below each other here."""

    def write_kernels(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.T.reshape(part.shape[1], heads, -1) for part in x.chunk(len(parts)))

    kernels = Layout(lambda *each: torch.cat([kernel.flatten(1).T for kernel in each]), write_kernels)
    biases = Layout(
        lambda *each: torch.cat([bias.flatten() for bias in each]),
        lambda x: tuple(part.reshape(heads, -1) for part in x.chunk(len(parts))),
    )
    return [
        Row(f"{ours}.weight", tuple(f"{theirs}/{part}/kernel" for part in parts), kernels),
        Row(f"{ours}.bias", tuple(f"{theirs}/{part}/bias" for part in parts), biases),
    ]


def _out_rows(ours: str, theirs: str, heads: int) -> list[Row]:
    """The map from heads: a kernel (H, D, C) there."""
    kernel = Layout(lambda x: x.flatten(0, 1).T, lambda x: (x.T.reshape(heads, -1, x.shape[0]),))
    return [Row(f"{ours}.weight", (f"{theirs}/kernel",), kernel), Row(f"{ours}.bias", (f"{theirs}/bias",))]
