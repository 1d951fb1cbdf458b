"""Published design changes, one idea a file. A file put into this folder is found without being listed anywhere."""

from importlib import import_module
from pkgutil import iter_modules

from vitmods.changes.base import REGISTRY, Change, Preserves, Weights
from vitmods.changes.lineups import LINEUPS, LineUp
from vitmods.changes.parse import parse_changes

for _module in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")

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
