"""`vitmods recipe show`: everything a recipe says, resolved for a data set, a batch size and a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitmods.cli.options import parse
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.model.config import ViTConfig
    from vitmods.recipes import Recipe
    from vitmods.recipes.length import Resolved
    from vitmods.study.rehearse import Rehearsal

SMALL = 5_000  # images, for recipes that belong to no data set


@dataclass(frozen=True)
class Show:
    """Show a recipe resolved: steps, warm-up, learning rates after batch scaling, decay, augmentation, model settings.

    examples:
      vitmods recipe show a2 --model B/16 --data-size 1281167 --batch 4096
      vitmods recipe show "augreg(level=light1,epochs=30,warmup_epochs=3)" --data-size 5000 --batch 64
      vitmods recipe show deit --model S/16 --dry-run
    """

    recipe: Annotated[str, tyro.conf.Positional]
    """a name of `vitmods recipes`, with settings in parentheses if any"""
    model: str | None = None
    """a ViT as Ti/16, S/16, B/16; None: the recipe's own"""
    data_size: int | None = None
    """training images; None: those of the paper's data set, else 5,000"""
    batch: int | None = None
    """images per step; None: the recipe's"""
    epochs: int | None = None
    """passes over the images; None: the recipe's"""
    img_size: int = 224
    """image side in pixels, for the rehearsal"""
    classes: int = 1000
    """classes, for the rehearsal"""
    accumulate: int = 1
    """parts that each batch is computed in; 1: in the rehearsal, as many as fit"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps, for the rehearsal"""
    dry_run: bool = False
    """make two steps at full shape on images of noise; show time, memory, and what the whole run would take here"""
    json: bool = False
    """print JSON, for programs"""


@dataclass(frozen=True)
class Shown:
    """A recipe with what follows from it."""

    name: str
    model: str
    images: int
    recipe: Recipe
    length: Resolved
    architecture: dict[str, Any]

    def rates(self) -> dict[str, float]:
        """Learning rate at 0, 10, 50 and 100 % of the steps."""
        from vitmods.recipes.length import lr_at

        return {
            f"{fraction} %": lr_at(self.length, self.length.steps * fraction // 100) for fraction in (0, 10, 50, 100)
        }


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if arguments[:1] == ["show"]:
        arguments = arguments[1:]
    elif not {"-h", "--help"} & set(arguments):
        raise UserError("Say which is shown: `vitmods recipe show NAME`; `vitmods recipes` lists the names.")
    options = parse(Show, arguments, "recipe show")
    shown = _resolved(options)
    rehearsal = _rehearse(shown, options) if options.dry_run else None
    if options.json:
        print(json.dumps(_for_programs(shown, rehearsal), indent=1))
        return 0
    from vitmods.cli.recipe_table import print_recipe

    print_recipe(shown, rehearsal)
    return 0


def _resolved(options: Show) -> Shown:
    from vitmods.recipes import evidence
    from vitmods.recipes.length import resolve
    from vitmods.recipes.registry import architecture, split_recipe, usual_model

    name, settings = split_recipe(options.recipe)
    recipe = _recipe(options, name, settings)
    model = options.model or settings.get("model") or usual_model(name)
    images = options.data_size or evidence(name).images or SMALL
    shown = Shown(name, model, images, recipe, resolve(recipe, images), architecture(name, model, settings))
    _config(shown, options)  # refuses a name that is no ViT's, and images that it cannot cut
    return shown


def _recipe(options: Show, name: str, settings: dict[str, Any]) -> Recipe:
    """With the options as arguments of the recipe's function where it has them, else as fields."""
    from vitmods.recipes import RECIPES
    from vitmods.recipes.registry import parse_recipe, settings_of

    asked = {"model": options.model, "epochs": options.epochs, "batch_size": options.batch}
    given = {key: value for key, value in asked.items() if value is not None}
    for key, value in given.items():
        if settings.get(key, value) != value:
            raise UserError(f"{name}({key}={settings[key]}) and the option for {key}, {value}, differ: leave one out.")
    others = {key: value for key, value in given.items() if key not in ("model", *settings_of(RECIPES[name]))}
    lengths = {} if options.epochs is None else {"steps": None}
    return parse_recipe(options.recipe, **given).with_(accumulate=options.accumulate, **others, **lengths)


def _config(shown: Shown, options: Show) -> ViTConfig:
    from vitmods.model.config import ViTConfig

    settings = {**shown.architecture, **shown.recipe.model.to_config()}
    return ViTConfig.from_name(shown.model, img_size=options.img_size, num_classes=options.classes, **settings)


def _rehearse(shown: Shown, options: Show) -> Rehearsal:
    from vitmods.recipes import evidence
    from vitmods.study.rehearse import rehearse
    from vitmods.train.device import resolve as device_of

    task = evidence(shown.name).task
    return rehearse(_config(shown, options), shown.recipe, device_of(options.device), task)


def _for_programs(shown: Shown, rehearsal: Rehearsal | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": shown.name,
        "model": shown.model,
        "images": shown.images,
        "resolved": asdict(shown.length),
        "learning_rates": shown.rates(),
        "architecture": shown.architecture,
        "recipe": shown.recipe.to_dict(),
    }
    if rehearsal is not None:
        run_s = rehearsal.step_s * shown.length.steps
        record["rehearsal"] = {**asdict(rehearsal), "step_s": rehearsal.step_s, "run_s": run_s}
    return record
