"""Recipes: functions that return a complete `Recipe`. Their docstrings give the source, the data and what to expect."""

from collections.abc import Callable

from vitmods.recipes.defaults import default, digits, finetune, finetune_sgd, plain, small_pictures
from vitmods.recipes.recipe import Recipe, weight_decay_from_big_vision

RECIPES: dict[str, Callable[..., Recipe]] = {
    "default": default,
    "small_pictures": small_pictures,
    "digits": digits,
    "plain": plain,
}
FINETUNING: dict[str, Callable[..., Recipe]] = {"finetune": finetune, "finetune_sgd": finetune_sgd}
"""of trained weights; they take the recipe whose augmentation they use"""
RECIPES |= FINETUNING

__all__ = [
    "FINETUNING",
    "RECIPES",
    "Recipe",
    "default",
    "digits",
    "finetune",
    "finetune_sgd",
    "plain",
    "small_pictures",
    "weight_decay_from_big_vision",
]
