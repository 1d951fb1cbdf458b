"""Fine-tuning: which parts are trained, what is kept of a task, and many tasks on one backbone. Imports when used."""

from typing import TYPE_CHECKING

from vitmods.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _HOME)
