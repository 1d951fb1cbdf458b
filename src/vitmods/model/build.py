"""Make the modules that fill the slots of a config."""

from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.layers import (
    MLPS,
    Attention,
    AttentionPool,
    AttentionSlots,
    Block,
    BlockConfig,
    BranchNorms,
    DropKey,
    DualPatchNormStem,
    GatedPositions,
    Mlp,
    ParallelBlock,
    QuickGELU,
    RelativePositionBias,
    RotaryPositions,
    Stem,
    StemSize,
)
from vitmods.layers.norms import NORMS
from vitmods.layers.position import sincos1d, sincos2d
from vitmods.layers.registers import RegisterNeurons
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig


def norm_factory(config: NormConfig | None, **model: Any) -> Any:
    """From a slot's config to a callable that takes the number of channels, or None for an empty slot.

    ``model`` is what the slot knows of the model; a norm gets of it what it takes.
    """
    if config is None:
        return None
    return NORMS[config.kind].factory(config.eps, config.affine, dict(config.options), **model)


def make_norm(config: NormConfig | None, dim: int, **model: Any) -> nn.Module:
    """The module of a norm slot over ``dim`` channels; the identity where the slot is empty."""
    factory = norm_factory(config, **model)
    return factory(dim) if factory else nn.Identity()


def make_stem(config: ViTConfig) -> Stem:
    """From images (B, in_chans, height, width) to patch tokens (B, T, C), with the norms that its slots name."""
    stem = config.stem
    slots: dict[str, Any] = {"bias": stem.bias, "norm_layer": norm_factory(stem.after)}
    if stem.facts.inner:
        slots["inner_norm"] = norm_factory(stem.inner)
    if stem.gelu:
        slots["gelu"] = True
    if stem.before is not None:
        return DualPatchNormStem(stem_size(config), norm_before=norm_factory(stem.before), **slots)
    return stem.facts(stem_size(config), **slots)


def stem_size(config: ViTConfig) -> StemSize:
    return StemSize(config.img_size, config.patch_size, config.in_chans, config.embed_dim)


def make_block(config: ViTConfig, index: int) -> Block | ParallelBlock:
    """The block of that index, with its norm slots and its fraction of the drop path rate."""
    if config.parallel == 1:
        return Block(block_config(config, index))
    return ParallelBlock([Block(block_config(config, index)) for _ in range(config.parallel)])


def block_config(config: ViTConfig, index: int) -> BlockConfig:
    """Return the parts of the block of that index: one attention and one MLP branch."""
    attn, mlp = config.branches(index)
    kind = MLPS[config.mlp_kind]
    act = {"act": _activation(config)} if "act" in signature(kind).parameters else {}
    positional, prefix = config.positional, config.prefix_tokens(index)
    model = {"num_heads": config.num_heads, "grid_size": config.grid, "prefix_tokens": prefix}

    def norms(branch: BranchConfig) -> BranchNorms:
        slots = (branch.before, branch.inner, branch.branch, branch.after)
        return BranchNorms(*(norm_factory(norm, **model) for norm in slots))

    mlp_norms = norms(mlp)
    if config.register_neurons and prefix:
        mlp_norms = replace(
            mlp_norms, inner=partial(RegisterNeurons, registers=config.reg_tokens, prefix_tokens=prefix)
        )

    fraction = index / max(config.depth - 1, 1) if config.drop_path_shape == "linear" else 1.0

    def make_attn(dim: int, num_heads: int, norm: nn.Module) -> Attention:
        positions = None
        if positional is not None and index < positional.count:
            positions = GatedPositions(num_heads, config.grid, prefix, init=positional.init, gate=positional.gate)
        rope = None
        if config.rope is not None:
            head_dim, registers = config.head_dim or dim // num_heads, config.reg_tokens if prefix else 0
            rope = RotaryPositions(head_dim, num_heads, config.grid, prefix, registers, config.rope)
        slots = AttentionSlots(
            qk_norm=norm_factory(config.qk_norm),
            mask=DropKey(config.key_drop_at(index)) if config.key_drop else None,
            positions=positions,
            head_scale=config.head_scale,
            rope=rope,
            rel_pos=RelativePositionBias(num_heads, config.grid, prefix) if config.rel_pos else None,
            gate=config.gate,
            value_mix=config.value_mix and index > 0,
        )
        return Attention(
            dim,
            num_heads,
            slots,
            config.head_dim,
            config.qkv_bias,
            config.proj_bias,
            norm=norm,
            attn_drop=config.attn_drop,
            proj_drop=config.proj_drop,
        )

    return BlockConfig(
        config.embed_dim,
        config.num_heads,
        config.mlp_dim,
        attn=make_attn,
        mlp=partial(kind, bias=config.proj_bias, drop=config.proj_drop, **act),
        attn_norms=norms(attn),
        mlp_norms=mlp_norms,
        layer_scale=config.layer_scale,
        residual_scale=config.residual_scale,
        norm_scale=config.norm_scale_at(index),
        drop_path=config.drop_path * fraction,
    )


def _activation(config: ViTConfig) -> nn.Module:
    if config.activation == "quick_gelu":
        return QuickGELU()
    return nn.GELU(approximate="tanh" if config.activation == "gelu_tanh" else "none")


def make_attn_pool(config: ViTConfig) -> AttentionPool:
    """Map pooling, (B, T, C) -> (B, C)."""
    mlp = Mlp(config.embed_dim, config.pool_mlp_dim or config.mlp_dim, act=_activation(config))
    norm = config.pool_norm or config.final_norm or NormConfig()
    return AttentionPool(
        config.embed_dim, config.pool_heads or config.num_heads, mlp, make_norm(norm, config.embed_dim)
    )


def initial_positions(config: ViTConfig) -> Tensor | None:
    """Positions (1, entries, C) before any training: zeros to be drawn, the fixed table, or None."""
    if config.position == "none":
        return None
    if config.position == "sincos1d":
        return sincos1d(config.num_patches, config.embed_dim)
    if config.position.startswith("sincos2d"):
        return sincos2d(config.grid, config.embed_dim, centered=config.position.endswith("centered"))
    entries = config.num_prefix_tokens if config.position_on_prefix else 0
    return torch.zeros(1, entries + config.num_patches, config.embed_dim)


def timm_cfg(config: ViTConfig, stem: Stem) -> dict[str, Any]:
    """Return timm's ``pretrained_cfg``: input size, normalization, names of first and last layer."""
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
