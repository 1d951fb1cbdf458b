"""Recipes: functions that return a complete `Recipe`. Their docstrings give the source, the data and what to expect."""

from collections.abc import Callable

from vitmods.recipes.augreg import augreg, augreg_21k
from vitmods.recipes.better_plain import better_plain
from vitmods.recipes.big_vision_transfer import high_res_finetune, vtab
from vitmods.recipes.defaults import default, digits, finetune, finetune_sgd, plain, small_images
from vitmods.recipes.deit import deit, deit_384
from vitmods.recipes.recipe import (
    Augment,
    Loss,
    ModelSettings,
    Optimizer,
    Recipe,
    Schedule,
    weight_decay_from_big_vision,
)
from vitmods.recipes.small_data import small_data
from vitmods.recipes.sun397 import SUN397_GRIDS, sun397
from vitmods.recipes.three_things import a2
from vitmods.recipes.transfer import transfer

OURS: dict[str, Callable[..., Recipe]] = {
    "default": default,
    "small_images": small_images,
    "small_data": small_data,
    "digits": digits,
    "plain": plain,
}
"""for small budgets; they reproduce no paper"""
PAPERS: dict[str, Callable[..., Recipe]] = {
    "augreg": augreg,
    "augreg_21k": augreg_21k,
    "better_plain": better_plain,
    "deit": deit,
    "a2": a2,
    "sun397": sun397,
}
"""of papers, for new weights"""
FINETUNING: dict[str, Callable[..., Recipe]] = {"finetune": finetune, "finetune_sgd": finetune_sgd}
"""of trained weights; they take the recipe whose augmentation they use"""
PAPERS_FINETUNING: dict[str, Callable[..., Recipe]] = {
    "high_res_finetune": high_res_finetune,
    "deit_384": deit_384,
    "transfer": transfer,
    "vtab": vtab,
}
"""of papers, for trained weights"""
RECIPES: dict[str, Callable[..., Recipe]] = {**OURS, **PAPERS, **FINETUNING, **PAPERS_FINETUNING}

__all__ = [
    "FINETUNING",
    "RECIPES",
    "SUN397_GRIDS",
    "Augment",
    "Loss",
    "ModelSettings",
    "Optimizer",
    "Recipe",
    "Schedule",
    "a2",
    "augreg",
    "augreg_21k",
    "better_plain",
    "default",
    "deit",
    "deit_384",
    "digits",
    "finetune",
    "finetune_sgd",
    "high_res_finetune",
    "plain",
    "small_data",
    "small_images",
    "sun397",
    "transfer",
    "vtab",
    "weight_decay_from_big_vision",
]
