"""Stems, one file each: pictures (B, channels, height, width) -> patch tokens (B, T, C) in row-major order."""

from .base import Stem, patchify
from .dual_patchnorm import DualPatchNormStem
from .hmlp import HMLPStem
from .levit import LeViTStem
from .linear import LinearStem
from .local import LocalTransformerStem
from .tokens_to_token import TokensToTokenStem

__all__ = [
    "DualPatchNormStem",
    "HMLPStem",
    "LeViTStem",
    "LinearStem",
    "LocalTransformerStem",
    "Stem",
    "TokensToTokenStem",
    "patchify",
]
