"""Studies: arms times seeds on one data set, their effects, and the page that reports them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitmods.study.arms import Arm
    from vitmods.study.result import StudyResult
    from vitmods.study.stats import Effect
    from vitmods.study.study import Study

_HOME = {"Arm": "plan", "Effect": "stats", "Study": "study", "StudyResult": "result"}

__all__ = ["Arm", "Effect", "Study", "StudyResult"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module 'vitmods.study' has no attribute '{name}'")
