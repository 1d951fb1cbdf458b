"""Stems, one file each: images (B, channels, height, width) -> patch tokens (B, T, C) in row-major order."""

from vitmods.layers.stems.base import STEMS, Stem, StemSize, patchify
from vitmods.layers.stems.dual_patchnorm import DualPatchNormStem
from vitmods.layers.stems.hmlp import HMLPStem
from vitmods.layers.stems.levit import LeViTStem
from vitmods.layers.stems.linear import LinearStem
from vitmods.layers.stems.local import LocalTransformerStem
from vitmods.layers.stems.tokens import TokenStem
from vitmods.layers.stems.tokens_to_token import TokensToTokenStem

__all__ = [
    "STEMS",
    "DualPatchNormStem",
    "HMLPStem",
    "LeViTStem",
    "LinearStem",
    "LocalTransformerStem",
    "Stem",
    "StemSize",
    "TokenStem",
    "TokensToTokenStem",
    "patchify",
]
