"""Recipes: functions that return a complete `Recipe`, registered with what is known of them.

Every registered recipe is an attribute of this module, those of papers, tasks and plugins too: `recipes.deit()` or
`from vitmods.recipes import deit`. They load when their name is used, so `import *` leaves them out.
"""

from collections.abc import Callable

from vitmods.recipes.defaults import default, digits, finetune, finetune_sgd, plain, small_data, small_images
from vitmods.recipes.recipe import (
    TASK_PARTS,
    Augment,
    Loss,
    ModelSettings,
    Optimizer,
    Recipe,
    Schedule,
    TaskPart,
    weight_decay_from_big_vision,
)
from vitmods.recipes.registry import RECIPES, Evidence, evidence

__all__ = [
    "RECIPES",
    "TASK_PARTS",
    "Augment",
    "Evidence",
    "Loss",
    "ModelSettings",
    "Optimizer",
    "Recipe",
    "Schedule",
    "TaskPart",
    "default",
    "digits",
    "evidence",
    "finetune",
    "finetune_sgd",
    "plain",
    "small_data",
    "small_images",
    "weight_decay_from_big_vision",
]


def __getattr__(name: str) -> Callable[..., Recipe]:
    if name.startswith("_") or name not in RECIPES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return RECIPES[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *RECIPES})
