"""Published design changes, one idea per file. A file put into this folder is found without being listed anywhere."""

from vitmods.changes.base import REGISTRY, Change, Preserves, Weights
from vitmods.changes.compose import conflicts
from vitmods.changes.controls import CONTROLS
from vitmods.changes.parse import parse_changes

__all__ = ["CONTROLS", "REGISTRY", "Change", "Preserves", "Weights", "conflicts", "parse_changes"]


def __getattr__(name: str) -> type[Change]:
    """The class of a registered change."""
    for kind in () if name.startswith("_") else REGISTRY.values():
        if kind.__name__ == name:
            return kind
    raise AttributeError(f"module {__name__} has no attribute {name}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(kind.__name__ for kind in REGISTRY.values())])
