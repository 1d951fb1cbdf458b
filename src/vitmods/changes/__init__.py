"""Published design changes, one idea a file. A file put into this folder is found without being listed anywhere."""

from vitmods.changes.base import REGISTRY, Change, Preserves, Weights
from vitmods.changes.parse import LINEUPS, LineUp, parse_changes

globals().update({kind.__name__: kind for kind in REGISTRY.values()})

__all__ = [
    "LINEUPS",
    "REGISTRY",
    "Change",
    "LineUp",
    "Preserves",
    "Weights",
    "parse_changes",
    *(k.__name__ for k in REGISTRY.values()),
]
