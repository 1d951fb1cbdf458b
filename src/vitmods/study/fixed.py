"""What every trial of a study has in common: base, recipe and images, resolved from what was given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.model.config import ViTConfig, check_options, fields_of_name
from vitmods.model.names import split_options, with_options
from vitmods.recipes import Recipe
from vitmods.recipes.recipe import fields_by_name
from vitmods.recipes.registry import network, split_recipe
from vitmods.recipes.schedule import WARMUPS
from vitmods.study.arms import FunctionSpec, base_function, is_foreign
from vitmods.study.cells import ImageOptions
from vitmods.study.defaults import Defaults, RecipeChoice, defaults_for
from vitmods.study.settings import SAYS_BASE
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from vitmods.model.vit import Resampling

USUAL_IMAGES = ImageOptions()


def paper_of(recipe: Recipe | RecipeChoice | str | None) -> str:
    """Return the recipe whose paper says what base is, as text; empty if none does."""
    if isinstance(recipe, Recipe):
        return recipe.paper
    return (recipe.name if isinstance(recipe, RecipeChoice) else recipe) or ""


def _describe_networks(bases: Iterable[str], paper: str) -> str:
    """Say what the paper of a recipe adds to the names of bases."""
    names: dict[str, list[str]] = {}
    for base in bases:
        names.setdefault(network(base, paper).partition("?")[2].replace("&", ", "), []).append(base)
    listed = "; ".join(f"{', '.join(plain)} with {options}" for options, plain in names.items())
    first = next(iter(names.values()))[0]
    return (
        f"Base is the ViT of the recipe {paper.partition('(')[0]}: {listed} (--base '{first}?' is the plain {first})."
    )


def one_spelling(base: str) -> str:
    """Write a ViT's name with the options that differ from what it says without them, in one order."""
    name, options = split_options(base)
    if is_foreign(base) or not options:
        return base if is_foreign(base) else name
    usual = json.loads(ViTConfig().to_json()) | fields_of_name(name)
    return with_options(name, {key: options[key] for key in sorted(options) if options[key] != usual.get(key, ...)})


def check_base(base: str, recipe: Recipe | None = None) -> None:
    """Raise UserError for a base that is not a ViT's name, and for options that it does not have or that the images or
    the recipe set. Models of other libraries have options of their own."""
    name, options = split_options(base)
    if is_foreign(base):
        return
    fields_of_name(name)
    check_options(options)
    for option in options:
        if option in ("img_size", "in_chans", "num_classes"):
            remedy = "" if option == "num_classes" else f" (--{option.replace('_', '-')})"
            raise UserError(f"{base}: {option} follows from the images{remedy}: leave it out of base.")
        if recipe is not None and option in recipe.model.to_config():
            raise UserError(f"{base}: the recipe sets {option} too: leave it out of base, and set it in the recipe.")


def open_settings(
    base: Any, recipe: Recipe | RecipeChoice | str | None, images: ImageOptions, start: str | Path | None
) -> frozenset[str]:
    """Return the names of settings, and of fields of the recipe, that are not given."""
    unset = {name for name in ("img_size", "in_chans") if getattr(images, name) is None}
    unset |= {"base"} if base is None and start is None else set()
    choice = RecipeChoice(recipe) if isinstance(recipe, str | None) else recipe
    if not isinstance(choice, RecipeChoice):
        return frozenset(unset)
    of_recipe = set(fields_by_name()) if choice.name is None else {"epochs", "steps", *WARMUPS}
    closed = {*choice.overrides, *(split_recipe(choice.name)[1] if choice.name else ())}
    if {"epochs", "steps"} & closed:  # the warm-up follows it
        closed |= {"epochs", "steps", *WARMUPS}
    return frozenset(unset | of_recipe - closed)


def fixed_settings(
    base: str | ViTConfig | Callable[..., nn.Module] | None,
    data: str | Path,
    recipe: Recipe | RecipeChoice | str | None,
    images: ImageOptions = USUAL_IMAGES,
    *,
    task: str = "classification",
    start: str | Path | None = None,
    positions: Resampling = "bicubic",
    defaults: Defaults | None = None,
    paper: str | None = None,
    swept: Sequence[str] = (),
) -> tuple[dict[str, Any], Defaults, str]:
    """Return what every trial of a study has in common, in JSON's types; None becomes what fits the images.

    Also returns what fits the images (`defaults`, if it is known), and notes on what was chosen, with the reasons.
    paper: the recipe whose paper says what base is (`network`); None: `recipe`. swept: the bases of a sweep.
    """
    from vitmods.tasks.base import TASKS, make_task

    kind = TASKS[task]
    if not isinstance(base, str | ViTConfig | None):
        if hasattr(base, "forward") or not callable(base):
            raise UserError(
                f"base is a ViT's name, a ViTConfig, or a function (num_classes, img_size, in_chans) -> nn.Module that "
                f"makes new models, not a {type(base).__name__}: every trial starts with the weights of its seed."
            )
        base = FunctionSpec.of(base)
    if function := base_function(base):
        function.load()
    if isinstance(base, str):
        check_base(base)
    paper = paper_of(recipe) if paper is None else paper
    if start is not None and base is not None:
        raise UserError(f"{SAYS_BASE}: drop --base.")
    if isinstance(recipe, str | None):
        recipe = RecipeChoice(recipe)
    if isinstance(recipe, Recipe):
        make_task(task, recipe)  # a UserError where it does not suit the task, before the images are listed
    suited = defaults = defaults or defaults_for(str(data), images)
    started, pixels, reason = {}, {}, ""
    named_model = base if isinstance(base, str) else defaults.base if base is None else None
    if start is not None:
        from vitmods.study.checkpoints import Start  # imports torch, so only here: --help does without

        trained, checkpoint, base = Start.of(str(start), positions)
        started["start"], named_model, shape = trained.record(), None, checkpoint.settings
        defaults = replace(defaults, img_size=tuple(shape["img_size"]), in_chans=shape["in_chans"])
        pixels = {name: tuple(getattr(checkpoint.recipe.augment, name)) for name in ("mean", "std")}
    size = defaults.img_size if images.img_size is None else images.img_size
    sides = (size,) if isinstance(size, int) else tuple(size)
    if isinstance(recipe, RecipeChoice):
        recipe, reason = recipe.resolve(kind, defaults, max(sides), named_model, pixels)
    base = defaults.base if base is None else base
    if isinstance(base, str) and start is None:
        given = [name for name in swept or (base,) if network(name, paper) != name]
        reason = " ".join(filter(None, (reason, _describe_networks(given, paper) if given else "")))
        base = one_spelling(network(base, paper))
        for name in swept or (base,):
            check_base(name, recipe)
            if "?" in name and not is_foreign(name):  # wrong values, before images are read
                ViTConfig.from_name(name, img_size=(sides[0], sides[-1]))
    chosen = {field.name: getattr(images, field.name) for field in fields(ImageOptions)}
    chosen |= {"img_size": [sides[0], sides[-1]]}
    chosen |= {"in_chans": defaults.in_chans if images.in_chans is None else images.in_chans}
    made = make_task(task, recipe)
    made.check_size((sides[0], sides[-1]))  # a UserError where they do not suit the task
    if made.needs_trained_backbone and start is None and not (isinstance(base, str) and "pretrained=1" in base):
        raise UserError(
            f"With this recipe the task {task} does not train the model itself: start from trained weights (--from in "
            "`vitmods compare`, --model in `vitmods finetune`)."
        )
    recorded = {name: value for name, value in chosen.items() if value is not None or name.startswith("limit_")}
    settings = {"task": task, "data": str(data), **recorded, **started}
    settings |= {"base": base if isinstance(base, str) else json.loads(base.to_json()), "recipe": recipe.to_dict()}
    in_json: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    if isinstance(base, FunctionSpec):
        in_json["base"] = base  # which remembers its function
    return in_json, suited, reason
