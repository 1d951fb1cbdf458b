"""Stems, one file each: pictures (B, channels, height, width) -> patch tokens (B, T, C) in row-major order."""

from .dual_patchnorm import DualPatchNormStem
from .linear import LinearStem, patchify
from .tokens_to_token import TokensToTokenStem

__all__ = ["DualPatchNormStem", "LinearStem", "TokensToTokenStem", "patchify"]
