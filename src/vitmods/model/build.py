"""From the slots of a config to the modules that fill them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.layers import (
    AttentionPool,
    Block,
    BranchNorms,
    DualPatchNormStem,
    GatedPositions,
    HMLPStem,
    LeViTStem,
    LinearStem,
    LocalTransformerStem,
    Mlp,
    ParallelBlock,
    Stem,
    TokensToTokenStem,
    norms,
)
from vitmods.layers.position import sincos2d
from vitmods.model.config import BranchConfig, NormConfig, ViTConfig

NORMS: dict[str, Any] = {
    "layer": norms.LayerNorm,
    "rms": norms.RMSNorm,
    "scale": norms.ScaleNorm,
    "batch": norms.BatchNorm,
    "instance": norms.InstanceNorm,
    "group": norms.GroupNorm,
    "power": norms.PowerNorm,
    "switchable": norms.SwitchableNorm,
    "dynamic_token": norms.DynamicTokenNorm,
}


def norm_factory(config: NormConfig | None, **model: Any) -> Any:
    """From a slot's config to a callable that takes the number of channels, or None for an empty slot.

    ``model`` is what the slot knows of the model; a norm gets of it what its class names in ``takes``.
    """
    if config is None:
        return None
    if config.kind == "scale_shift":
        return norms.ScaleShift
    norm = NORMS[config.kind]
    taken = {name: model[name] for name in getattr(norm, "takes", ()) if name in model}
    return partial(norm, eps=config.eps, affine=config.affine, **(taken | dict(config.options)))


def _branch_norms(branch: BranchConfig, config: ViTConfig, index: int) -> BranchNorms:
    prefix = config.prefix_tokens(index)
    model = {"num_heads": config.num_heads, "grid_size": config.grid, "prefix_tokens": prefix}
    slots = (branch.before, branch.inner, branch.branch, branch.after)
    return BranchNorms(*(norm_factory(norm, **model) for norm in slots))


def make_norm(config: NormConfig | None, dim: int, **model: Any) -> nn.Module:
    """The module of a norm slot over ``dim`` channels; the identity where the slot is empty."""
    factory = norm_factory(config, **model)
    return factory(dim) if factory else nn.Identity()


def make_stem(config: ViTConfig) -> Stem:
    """From images (B, in_chans, height, width) to patch tokens (B, T, C), with the norms that its slots name."""
    stem = config.stem
    sizes: dict[str, Any] = {
        "img_size": config.img_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_chans,
        "embed_dim": config.embed_dim,
        "bias": stem.bias,
        "norm_layer": norm_factory(stem.after),
    }
    if stem.kind == "t2t":
        return TokensToTokenStem(**sizes)
    if stem.kind == "local":
        return LocalTransformerStem(**sizes)
    if stem.kind in ("hmlp", "levit"):
        kind: Any = HMLPStem if stem.kind == "hmlp" else LeViTStem
        return kind(inner_norm=norm_factory(stem.inner), **sizes)
    if stem.before is None:
        return LinearStem(gelu=stem.gelu, **sizes)
    return DualPatchNormStem(norm_before=norm_factory(stem.before), gelu=stem.gelu, **sizes)


def make_block(config: ViTConfig, index: int) -> Block | ParallelBlock:
    """The block of that index, with its norm slots and its fraction of the drop path rate."""
    if config.parallel == 1:
        return _make_branches(config, index)
    return ParallelBlock([_make_branches(config, index) for _ in range(config.parallel)])


def _make_branches(config: ViTConfig, index: int) -> Block:
    """One attention and one MLP branch."""
    attn, mlp = config.branches(index)
    fraction = index / max(config.depth - 1, 1) if config.drop_path_shape == "linear" else 1.0
    return Block(
        config.embed_dim,
        config.num_heads,
        mlp_ratio=(config.mlp_dim + 0.5) / config.embed_dim,  # the block rounds down; mlp_dim / embed_dim may lose one
        qkv_bias=config.qkv_bias,
        qk_norm_layer=norm_factory(config.qk_norm),
        proj_drop=config.proj_drop,
        attn_drop=config.attn_drop,
        init_values=config.layer_scale,
        drop_path=config.drop_path * fraction,
        act_layer=_activation(config),
        attn_norms=_branch_norms(attn, config, index),
        mlp_norms=_branch_norms(mlp, config, index),
        head_scale=config.head_scale,
        positions=_positions(config, index),
    )


def _positions(config: ViTConfig, index: int) -> Any:
    """What mixes positions into the attention of the block of that index."""
    found = config.positional
    if found is None or index >= found.count:
        return None
    place = (config.num_heads, config.grid, config.prefix_tokens(index))
    return partial(GatedPositions, *place, init=found.init, gate=found.gate)


def _activation(config: ViTConfig) -> Any:
    return partial(nn.GELU, approximate="tanh" if config.activation == "gelu_tanh" else "none")


def make_attn_pool(config: ViTConfig) -> AttentionPool:
    """Map pooling, (B, T, C) -> (B, C)."""
    mlp = Mlp(config.embed_dim, config.mlp_dim, act=_activation(config)())
    norm = config.pool_norm or config.final_norm or NormConfig()
    return AttentionPool(config.embed_dim, config.num_heads, mlp, make_norm(norm, config.embed_dim))


def initial_positions(config: ViTConfig) -> Tensor | None:
    """Positions (1, entries, C) before any training: zeros to be drawn, the fixed table, or None."""
    if config.position == "none":
        return None
    if config.position.startswith("sincos2d"):
        return sincos2d(config.grid, config.embed_dim, centered=config.position.endswith("centered"))
    entries = config.num_prefix_tokens if config.position_on_prefix else 0
    return torch.zeros(1, entries + config.num_patches, config.embed_dim)


def timm_cfg(config: ViTConfig, stem: Stem) -> dict[str, Any]:
    """What timm's tools read as ``pretrained_cfg``: input size, normalization, names of first and last layer."""
    return {
        "url": "",
        "num_classes": config.num_classes,
        "input_size": (config.in_chans, *config.img_size),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "first_conv": f"patch_embed.{stem.first_layer}",
        "classifier": "head",
    }
