"""Modules that know tensors and nothing else; the norms accept what timm passes to norm_layer."""

from vitmods.layers.attention import Attention, AttentionPool, AttentionSlots
from vitmods.layers.block import Block, BlockConfig, BranchNorms
from vitmods.layers.drop import DropKey, DropPath, LayerScale
from vitmods.layers.mlp import MLPS, Mlp, QuickGELU, SwiGLU
from vitmods.layers.norms import *  # noqa: F403
from vitmods.layers.norms import __all__ as _norms
from vitmods.layers.parallel import ParallelBlock
from vitmods.layers.position import RelativePositionBias, RotaryPositions
from vitmods.layers.positional_attention import GatedPositions
from vitmods.layers.stems import (
    STEMS,
    DualPatchNormStem,
    HMLPStem,
    LeViTStem,
    LinearStem,
    LocalTransformerStem,
    Stem,
    StemSize,
    TokensToTokenStem,
)

__all__ = [
    "MLPS",
    "STEMS",
    "Attention",
    "AttentionPool",
    "AttentionSlots",
    "Block",
    "BlockConfig",
    "BranchNorms",
    "DropKey",
    "DropPath",
    "DualPatchNormStem",
    "GatedPositions",
    "HMLPStem",
    "LayerScale",
    "LeViTStem",
    "LinearStem",
    "LocalTransformerStem",
    "Mlp",
    "ParallelBlock",
    "QuickGELU",
    "RelativePositionBias",
    "RotaryPositions",
    "Stem",
    "StemSize",
    "SwiGLU",
    "TokensToTokenStem",
    *_norms,
]
