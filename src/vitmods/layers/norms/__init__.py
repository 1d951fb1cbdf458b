"""Normalizers of tokens, one file each. Contract: (B, N, C) or (B, rows, columns, C) in and out, float32 statistics,
output in the input's type, explicit eps; ``token_wise`` says whether a token's output depends on that token alone."""

from vitmods.layers.norms.batch import BatchNorm
from vitmods.layers.norms.dynamic_token import DynamicTokenNorm
from vitmods.layers.norms.group import GroupNorm
from vitmods.layers.norms.instance import InstanceNorm
from vitmods.layers.norms.layer import LayerNorm
from vitmods.layers.norms.power import PowerNorm
from vitmods.layers.norms.rms import RMSNorm
from vitmods.layers.norms.scale import ScaleNorm
from vitmods.layers.norms.scale_shift import ScaleShift
from vitmods.layers.norms.switchable import SwitchableNorm

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
]
