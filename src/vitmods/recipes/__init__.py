"""Recipes: functions that return a complete `Recipe`, registered with what is known of them."""

from collections.abc import Callable

from vitmods.recipes.augreg import augreg, augreg_21k
from vitmods.recipes.better_plain import better_plain
from vitmods.recipes.big_vision_transfer import high_res_finetune, vtab
from vitmods.recipes.defaults import default, digits, finetune, finetune_sgd, plain, small_images
from vitmods.recipes.deit import deit, deit_384
from vitmods.recipes.dynamic_token_norm import dtn
from vitmods.recipes.jft import jft
from vitmods.recipes.levit import levit
from vitmods.recipes.pvt import pvt
from vitmods.recipes.recipe import (
    Augment,
    Detection,
    Loss,
    ModelSettings,
    Optimizer,
    Recipe,
    Schedule,
    Segmentation,
    weight_decay_from_big_vision,
)
from vitmods.recipes.registry import RECIPES, Evidence, evidence
from vitmods.recipes.small_data import small_data
from vitmods.recipes.sun397 import SUN397_GRIDS, sun397
from vitmods.recipes.swin import swin
from vitmods.recipes.three_things import a2
from vitmods.recipes.transfer import transfer

__all__ = [
    "RECIPES",
    "SUN397_GRIDS",
    "Augment",
    "Detection",
    "Evidence",
    "Loss",
    "ModelSettings",
    "Optimizer",
    "Recipe",
    "Schedule",
    "Segmentation",
    "a2",
    "augreg",
    "augreg_21k",
    "better_plain",
    "default",
    "deit",
    "deit_384",
    "digits",
    "dtn",
    "evidence",
    "finetune",
    "finetune_sgd",
    "high_res_finetune",
    "jft",
    "levit",
    "plain",
    "pvt",
    "small_data",
    "small_images",
    "sun397",
    "swin",
    "transfer",
    "vtab",
    "weight_decay_from_big_vision",
]


def __getattr__(name: str) -> Callable[..., Recipe]:
    """Recipes of tasks and of plugins, which register elsewhere."""
    if name.startswith("_") or name not in RECIPES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return RECIPES[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *RECIPES})
