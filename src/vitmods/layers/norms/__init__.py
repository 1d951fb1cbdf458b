"""Normalizers of tokens, one file each. Contract: (B, N, C) or (B, rows, columns, C) in and out, float32 statistics,
output in the input's type, explicit eps; ``token_wise`` says whether a token's output depends on that token alone."""

from .batch import BatchNorm
from .dynamic_token import DynamicTokenNorm
from .group import GroupNorm
from .instance import InstanceNorm
from .layer import LayerNorm
from .power import PowerNorm
from .rms import RMSNorm, rms_norm
from .scale import ScaleNorm
from .scale_shift import ScaleShift
from .switchable import SwitchableNorm

__all__ = [
    "BatchNorm",
    "DynamicTokenNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "PowerNorm",
    "RMSNorm",
    "ScaleNorm",
    "ScaleShift",
    "SwitchableNorm",
    "rms_norm",
]
