"""Recipes by name, the evidence for each, and a recipe as the shell writes it: `augreg(level=light1,epochs=30)`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from vitmods.model.names import SIZES, parse_name, split_options, with_options
from vitmods.recipes.recipe import Recipe
from vitmods.recipes.schedule import LONGEST_WARMUP
from vitmods.util.errors import UserError, nearest
from vitmods.util.registry import Registry
from vitmods.util.shorthand import read_settings, split_form

P = ParamSpec("P")
Architecture = Callable[[str, Mapping[str, Any]], dict[str, Any]]
RECIPES: Registry[Callable[..., Recipe]] = Registry(
    "recipe",
    "vitmods.recipes",
    "vitmods.papers.recipes",
    "vitmods.tasks.*.recipes",
    advice="`vitmods recipes` lists all; settings follow in parentheses.",
)


@dataclass(frozen=True)
class Evidence:
    """The evidence for a recipe's values; empty fields are unknown."""

    data: str
    """the data that it is for"""
    expected: str
    """the number to expect, with its source"""
    paper: str = ""
    command: str = ""
    """that trains as the paper does"""
    not_stated: str = ""
    """by the paper, and the values used instead"""
    weights: str = ""
    """requirements on the trained weights that it starts from"""
    trained: bool = False
    """whether it starts from trained weights"""
    model: str = ""
    """the ViT that it is usually for; empty: the default of its argument `model`, or any"""
    images: int | None = None
    """training images of the paper's data set"""
    task: str = "classification"
    """the task that it trains"""
    architecture: Mapping[str, Any] | Architecture | None = None
    """fields of a ViTConfig that the paper's models have and the name of the size does not say; or a function of the
    model's name and the recipe's settings that gives them"""


_EVIDENCE: dict[Callable[..., Recipe], Evidence] = {}


def recipe(**facts: Any) -> Callable[[Callable[P, Recipe]], Callable[P, Recipe]]:
    """Registers a function that returns a complete Recipe under its own name; ``facts`` are fields of `Evidence`."""
    known = Evidence(**facts)

    def decorate(function: Callable[P, Recipe]) -> Callable[P, Recipe]:
        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> Recipe:
            given = inspect.signature(function).bind(*args, **kwargs).arguments if known.paper else {}
            settings = ",".join(
                f"{name}={value}" for name, value in given.items() if isinstance(value, str | int | float)
            )
            paper = f"{function.__name__}({settings})" if known.paper else ""
            return dataclasses.replace(function(*args, **kwargs), paper=paper)

        _EVIDENCE[named] = known
        return RECIPES.add(function.__name__, named, origin=function)

    return decorate


def evidence(name: str) -> Evidence:
    """The evidence for the recipe of that name. UserError for an unknown one."""
    return _EVIDENCE[RECIPES[name]]


def summary(name: str) -> str:
    """Return the first sentence of the recipe's docstring."""
    return (inspect.getdoc(RECIPES[name]) or "").partition("\n")[0].replace("`", "").rstrip(".")


def arguments(name: str) -> list[str]:
    """List the settings for the parentheses with their defaults, as Python writes them."""
    parameters = inspect.signature(RECIPES[name]).parameters.values()
    return [f"{a.name}={a.default}" if a.default not in (None, "") else a.name for a in parameters if a.name != "like"]


def usual_model(name: str) -> str:
    """The model that a recipe is shown for when nothing is said, e.g. `B/16`."""
    argument = inspect.signature(RECIPES[name]).parameters.get("model")
    return (evidence(name).model or "Ti/16") if argument is None else str(argument.default)


def architecture(name: str, model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ViTConfig that the paper's models have and the size's name does not say, for a recipe with these
    settings and a ViT, e.g. `B/16`."""
    facts = evidence(name).architecture or {}
    return facts(model, settings) if callable(facts) else dict(facts)


def network(base: str, recipe: str) -> str:
    """The name of the ViT that the paper of a recipe trains: a size such as `B/16`, with what the paper's models have
    as options. Names with options, timm's, and those of whole models are taken as they are.

    recipe: its name, with settings if any; empty: none.
    """
    if not recipe or not re.fullmatch(rf"({'|'.join(map(re.escape, SIZES))})(\d+(x\d+)?)?/\d+", base):
        return base
    name, settings = split_recipe(recipe)
    return with_options(base, architecture(name, base, settings))


def settings_of(function: Callable[..., Recipe]) -> dict[str, Any]:
    """name -> type of the settings for the parentheses: the function's arguments except another recipe."""
    hints = typing.get_type_hints(function)
    return {name: kind for name, kind in hints.items() if name not in ("return", "like")}


def split_recipe(text: str) -> tuple[str, dict[str, Any]]:
    """The recipe's name and its settings. UserError for an unknown recipe or setting, naming the nearest, and for a
    value of another type."""
    form = split_form(text)
    if form is None:
        raise UserError(f"'{text}' is not a recipe. Write its name, as in 'deit' or 'augreg(level=light1)'.")
    name, inside = form
    return name, read_settings(name, "recipe", inside, settings_of(RECIPES[name]))


def check_agree(text: str, options: Mapping[str, Any]) -> None:
    """Raise UserError if `NAME(SETTINGS)` and the options of the command line set an argument to different values."""
    name, settings = split_recipe(text)
    for key, value in options.items():
        if settings.get(key, value) != value:
            raise UserError(f"{name}({key}={settings[key]}) and the option for {key}, {value}, differ: leave one out.")


def parse_recipe(text: str, **defaults: Any) -> Recipe:
    """The recipe of `NAME` or `NAME(SETTINGS)`. UserError as `split_recipe`, or as the recipe's function.

    defaults: arguments, such as `model` or `epochs`, for the functions that have them; the text wins. A model of None
    is one without a name. The default warm-up of a function is shortened for a shorter training.
    """
    name, settings = split_recipe(text)
    function = RECIPES[name]
    parameters = inspect.signature(function).parameters
    if "model" in parameters and defaults.get("model", "") is None and "model" not in settings:
        raise UserError(f"The recipe {name!r} depends on the model: name it, as in {name}(model=S/16).")
    chosen = {key: value for key, value in defaults.items() if key in parameters and value is not None} | settings
    for unit in ("epochs", "steps"):
        usual = parameters[f"warmup_{unit}"].default if f"warmup_{unit}" in parameters else None
        if usual and unit in chosen:
            longest = LONGEST_WARMUP * chosen[unit]
            chosen.setdefault(f"warmup_{unit}", min(usual, int(longest) if unit == "steps" else longest))
    return function(**chosen)


T = TypeVar("T")


_SHAPE = ("embed_dim", "depth", "parallel", "num_heads", "mlp_dim")
"""options of a ViT's name that make it another size"""


def size_of(model: str) -> str:
    """`B` of `B/16`; with another depth `B36`, with parallel branches `B18x2`. UserError for other names."""
    size, depth, parallel, _, _ = parse_name(model)
    shape = {name: value for name, value in split_options(model)[1].items() if name in _SHAPE}
    return with_options(f"{size}{depth or ''}{f'x{parallel}' if parallel > 1 else ''}", shape)


def size_and_patch(model: str) -> str:
    """`S/16`, also of timm's `vit_small_patch16_224`."""
    return f"{size_of(model)}/{parse_name(model)[3]}"


def published(table: Mapping[str, T], key: str, what: str, remedy: str) -> T:
    """Look a model up in a paper's table. Raises UserError, with the remedy, if the paper does not have it."""
    if key not in table:
        raise UserError(f"No {what} is published for {key}, only for {', '.join(table)}. {remedy}")
    return table[key]


def one_of(name: str, word: str, table: Mapping[str, T]) -> T:
    """Look a word up. Raises UserError that names the nearest one."""
    if word not in table:
        raise UserError(f"Unknown {name} {word!r}. {nearest(word, table)}")
    return table[word]
