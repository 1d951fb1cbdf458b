"""Fine-tuning: which parts are trained, what is kept of a task, and many tasks on one backbone. Imports when used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "MultiTask": "multitask",
    "ROLES": "roles",
    "Trained": "freeze",
    "load_delta": "delta",
    "parameter_roles": "roles",
    "save_delta": "delta",
    "train_only": "freeze",
    "what_is_trained": "freeze",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from .delta import load_delta as load_delta
    from .delta import save_delta as save_delta
    from .freeze import Trained as Trained
    from .freeze import train_only as train_only
    from .freeze import what_is_trained as what_is_trained
    from .multitask import MultiTask as MultiTask
    from .roles import ROLES as ROLES
    from .roles import parameter_roles as parameter_roles


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module 'vitmods.finetune' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
