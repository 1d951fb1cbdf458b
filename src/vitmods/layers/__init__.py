"""Modules that know tensors and nothing else; they accept what timm passes to embed_layer, norm_layer and block_fn."""

from .attention import Attention, AttentionPool
from .block import Block, BranchNorms
from .drop import DropPath, LayerScale
from .gated_positions import GatedPositions
from .mlp import Mlp
from .norms import DynamicTokenNorm, LayerNorm, RMSNorm, ScaleShift
from .parallel import ParallelBlock
from .stems import (
    DualPatchNormStem,
    HMLPStem,
    LeViTStem,
    LinearStem,
    LocalTransformerStem,
    Stem,
    TokensToTokenStem,
)

__all__ = [
    "Attention",
    "AttentionPool",
    "Block",
    "BranchNorms",
    "DropPath",
    "DualPatchNormStem",
    "DynamicTokenNorm",
    "GatedPositions",
    "HMLPStem",
    "LayerNorm",
    "LayerScale",
    "LeViTStem",
    "LinearStem",
    "LocalTransformerStem",
    "Mlp",
    "ParallelBlock",
    "RMSNorm",
    "ScaleShift",
    "Stem",
    "TokensToTokenStem",
]
