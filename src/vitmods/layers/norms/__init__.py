"""Normalizers of tokens, one file each. Contract: (B, N, C) or (B, rows, columns, C) in and out, float32 statistics,
output in the input's type, explicit eps; ``token_wise`` says whether a token's output depends on that token alone."""

from .dynamic_token import DynamicTokenNorm
from .layer import LayerNorm
from .rms import RMSNorm, rms_norm
from .scale_shift import ScaleShift

__all__ = ["DynamicTokenNorm", "LayerNorm", "RMSNorm", "ScaleShift", "rms_norm"]
