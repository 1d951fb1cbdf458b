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
    Kinds,
    Layout,
    Size,
    Table,
    count_blocks,
    image_size,
    need,
    rows_of,
    write_tensors,
)
from vitmods.adapters.transfer import check_readable, fields, read_weights, refuse_slots
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig, StemConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError

_POSITIONS = ("pos_embedding", "Transformer/pos_embedding", "Transformer/posembed_input/pos_embedding")
_NORM = NormConfig("layer", 1e-6)


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
    ones. ``settings`` are fields of ViTConfig that are known to be otherwise (``in_chans`` for a Dual PatchNorm stem).

    Raises UserError when something is missing, left over or cannot be reported.
    """
    inside = unstack(tensors)
    asked = {"num_heads": num_heads, "in_chans": settings.pop("in_chans", None)}
    config = infer_config(source, inside, img_size, asked["in_chans"] or 3, NormConfig("layer", eps))
    for name, value in asked.items():
        if value not in (None, getattr(config, name)):
            raise UserError(f"{source} says {name}={getattr(config, name)}, not {value}: leave it out.")
    config = config.with_(**settings)
    assumed = [f"eps of all norms {eps:g}"]
    if "activation" not in settings:
        assumed.append("activation=gelu_tanh")
    if img_size is None:
        assumed.append(f"img_size={config.img_size}")
    names = table(config, inside)
    return read_weights(source, config, lambda ours: rows_of(ours, names), inside, None, assumed)


def to_big_vision(model: ViT) -> dict[str, Tensor]:
    """A big_vision checkpoint's tensors by flat name, with ``params/`` before it.

    The class token's position, which big_vision no longer has, is added to the token itself. Raises UserError naming
    the slots that big_vision's ViT does not have.
    """
    config, weights = model.vit_config, dict(model.state_dict())
    norm = _NORM if config.stem.before is not None or config.stem.after is not None else None
    nearest = ViTConfig(  # a checkpoint does not contain dropout
        **fields(config, "img_size patch_size in_chans num_classes embed_dim depth num_heads mlp_dim representation"),
        **fields(config, "position_on_prefix pos_drop proj_drop attn_drop head_drop drop_path drop_path_shape"),
        activation="gelu_tanh",
        stem=StemConfig(before=norm, after=norm),
        position="sincos2d" if config.position == "sincos2d" else "learn",
        class_token=config.pool == "token",
        pool="avg" if config.pool == "none" else config.pool,
    )
    refuse_slots("big_vision", config, nearest)
    check_readable("The model", model)
    if config.position == "learn" and config.position_on_prefix and config.class_token:
        weights["cls_token"] = weights["cls_token"] + weights["pos_embed"][:, :1]
        weights["pos_embed"] = weights["pos_embed"][:, 1:]
    written = write_tensors(rows_of(weights, table(config)), weights)
    return {f"params/{name}": tensor.detach().cpu() for name, tensor in written.items()}


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


def infer_config(
    source: str, tensors: Mapping[str, Tensor], img_size: Size = None, in_chans: int = 3, norm: NormConfig = _NORM
) -> ViTConfig:
    """The config that follows from names and shapes. Raises UserError when none does."""
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
    around, slots = norm if dual else None, BranchConfig(before=norm)
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
        stem=StemConfig(before=around, after=around),
        attn=slots,
        mlp=slots,
        final_norm=norm,
        position="learn" if table is not None else "sincos2d",
        position_on_prefix=on_prefix,
        class_token=token,
        pool="token" if token else "map" if any(name.startswith("MAPHead_0/") for name in tensors) else "avg",
        representation="pre_logits/kernel" in tensors,
        init="big_vision",
    )


def table(config: ViTConfig, tensors: Iterable[str] = ()) -> Table:
    """Our names and big_vision's. Names that had other forms once are taken from ``tensors``."""
    tensors, heads = set(tensors), config.num_heads
    old = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel" in tensors
    attn, second, mlp = ("1", "2", "3") if old else ("0", "1", "0")
    norm: Kinds = {"weight": ("/scale", SAME), "bias": ("/bias", SAME)}
    linear: Kinds = {"weight": ("/kernel", TRANSPOSED), "bias": ("/bias", SAME)}
    # The map from heads: a kernel (H, D, C) there.
    out: Kinds = {
        "weight": ("/kernel", Layout(lambda x: x.flatten(0, 1).T, lambda x: (x.T.reshape(heads, -1, x.shape[0]),))),
        "bias": ("/bias", SAME),
    }
    kernel = Layout(lambda x: x.permute(3, 2, 0, 1), lambda x: (x.permute(2, 3, 1, 0),))
    stem: Table = {"patch_embed.proj": (("embedding",), {"weight": ("/kernel", kernel), "bias": ("/bias", SAME)})}
    if config.stem.before is not None or config.stem.after is not None:
        stem = _dual_patchnorm(*config.patch_size, config.in_chans) | {"patch_embed.norm": (("ln1",), norm)}
    block, pool = "Transformer/encoderblock_*", "MAPHead_0"
    attention, pooling = (f"{at}/MultiHeadDotProductAttention_{n}" for at, n in ((block, attn), (pool, "0")))
    return {
        **stem,
        "cls_token": "cls",
        "pos_embed": next((name for name in _POSITIONS if name in tensors), _POSITIONS[0]),
        "blocks.*.norm1": ((f"{block}/LayerNorm_0",), norm),
        "blocks.*.attn.qkv": (tuple(f"{attention}/{part}" for part in ("query", "key", "value")), _to_heads(heads, 3)),
        "blocks.*.attn.proj": ((f"{attention}/out",), out),
        "blocks.*.norm2": ((f"{block}/LayerNorm_{second}",), norm),
        "blocks.*.mlp.fc1": ((f"{block}/MlpBlock_{mlp}/Dense_0",), linear),
        "blocks.*.mlp.fc2": ((f"{block}/MlpBlock_{mlp}/Dense_1",), linear),
        "norm": (("Transformer/encoder_norm",), norm),
        "attn_pool.latent": f"{pool}/probe",
        "attn_pool.q": ((f"{pooling}/query",), _to_heads(heads, 1)),
        "attn_pool.kv": ((f"{pooling}/key", f"{pooling}/value"), _to_heads(heads, 2)),
        "attn_pool.proj": ((f"{pooling}/out",), out),
        "attn_pool.norm": ((f"{pool}/LayerNorm_0",), norm),
        "attn_pool.mlp.fc1": ((f"{pool}/MlpBlock_0/Dense_0",), linear),
        "attn_pool.mlp.fc2": ((f"{pool}/MlpBlock_0/Dense_1",), linear),
        "pre_logits": (("pre_logits",), linear),
        "head": (("head",), linear),
    }


def _dual_patchnorm(rows: int, columns: int, channels: int) -> dict[str, tuple[tuple[str, ...], Kinds]]:
    """The norm before the projection and the projection, a dense layer. A patch's values are in the order row, column,
    channel there and channel, row, column here."""
    pixels = Layout(
        lambda x: x.reshape(rows, columns, channels).permute(2, 0, 1).reshape(-1),
        lambda x: (x.reshape(channels, rows, columns).permute(1, 2, 0).reshape(-1),),
    )
    kernel = Layout(
        lambda x: x.reshape(rows, columns, channels, -1).permute(3, 2, 0, 1),
        lambda x: (x.permute(2, 3, 1, 0).reshape(-1, x.shape[0]),),
    )
    return {
        "patch_embed.norm_before": (("ln0",), {"weight": ("/scale", pixels), "bias": ("/bias", pixels)}),
        "patch_embed.proj": (("dense",), {"weight": ("/kernel", kernel), "bias": ("/bias", SAME)}),
    }


def _to_heads(heads: int, parts: int) -> Kinds:
    """Maps to heads: kernels (C, H, D) and biases (H, D) there; one map with the parts below each other here."""
    kernels = Layout(
        lambda *each: torch.cat([kernel.flatten(1).T for kernel in each]),
        lambda x: tuple(part.T.reshape(part.shape[1], heads, -1) for part in x.chunk(parts)),
    )
    biases = Layout(
        lambda *each: torch.cat([bias.flatten() for bias in each]),
        lambda x: tuple(part.reshape(heads, -1) for part in x.chunk(parts)),
    )
    return {"weight": ("/kernel", kernels), "bias": ("/bias", biases)}
