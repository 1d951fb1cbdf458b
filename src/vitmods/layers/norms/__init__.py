"""Normalizers of tokens, one file each. Contract: (B, N, C) or (B, rows, columns, C) in and out, float32 statistics,
output in the input's type, explicit eps. Each registers in ``NORMS`` with its facts (``NormKind``)."""

from vitmods.layers.norms.batch import BatchNorm
from vitmods.layers.norms.contract import NORMS, NormKind, norm_kind
from vitmods.layers.norms.dynamic_token import DynamicTokenNorm
from vitmods.layers.norms.group import GroupNorm, InstanceNorm
from vitmods.layers.norms.layer import CenteredLayerNorm, LayerNorm, ScaleShift
from vitmods.layers.norms.power import PowerNorm
from vitmods.layers.norms.rms import RMSNorm
from vitmods.layers.norms.scale import ScaleNorm
from vitmods.layers.norms.squashing import DynamicErf, DynamicTanh
from vitmods.layers.norms.switchable import SwitchableNorm
from vitmods.layers.norms.whitening import Whitening
from vitmods.ops.token_mixing import TokenMixing

__all__ = [
    "NORMS",
    "BatchNorm",
    "CenteredLayerNorm",
    "DynamicErf",
    "DynamicTanh",
    "DynamicTokenNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "NormKind",
    "PowerNorm",
    "RMSNorm",
    "ScaleNorm",
    "ScaleShift",
    "SwitchableNorm",
    "TokenMixing",
    "Whitening",
    "norm_kind",
]
