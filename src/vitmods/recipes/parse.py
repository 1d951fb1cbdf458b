"""A recipe as the shell writes it: `deit`, `augreg(level=light1,epochs=30,warmup_epochs=3)`."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

from vitmods.recipes.recipe import Recipe
from vitmods.util.errors import UserError, nearest
from vitmods.util.shorthand import read_settings, split_form


def settings_of(function: Callable[..., Recipe]) -> dict[str, Any]:
    """name -> type of what may be given in the parentheses: the function's arguments but another recipe."""
    hints = typing.get_type_hints(function)
    return {name: kind for name, kind in hints.items() if name not in ("return", "like")}


def split_recipe(text: str) -> tuple[str, dict[str, Any]]:
    """The recipe's name and its settings.

    Raises:
        UserError: there is no such recipe or setting, naming the nearest, or a value is of another type.
    """
    from vitmods.recipes import RECIPES

    form = split_form(text)
    if form is None:
        raise UserError(f"'{text}' is not a recipe. Write its name, as in 'deit' or 'augreg(level=light1)'.")
    name, inside = form
    if name not in RECIPES:
        raise UserError(f"There is no recipe {name!r}. {nearest(name, RECIPES)} `vitmods recipes` lists all.")
    return name, read_settings(name, "recipe", inside, settings_of(RECIPES[name]))


def parse_recipe(text: str, **known: Any) -> Recipe:
    """The recipe that a short form names.

    Args:
        text: `NAME` or `NAME(SETTINGS)`.
        known: arguments, such as `model`, for the functions that have them, where the text gives no other; a model of
            None is one without a name.

    Raises:
        UserError: as `split_recipe`, or as the recipe's function.
    """
    from vitmods.recipes import FINETUNING, RECIPES

    name, settings = split_recipe(text)
    function = RECIPES[name]
    taken = {*settings_of(function), *(("like",) if name in FINETUNING else ())}
    if "model" in taken and "model" in known and known["model"] is None and "model" not in settings:
        raise UserError(f"The recipe {name!r} depends on the model: say which, as in {name}(model=S/16).")
    return function(**{key: value for key, value in known.items() if key in taken} | settings)
