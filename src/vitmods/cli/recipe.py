"""`vitmods recipe show`: everything a recipe says, resolved for a data set, a batch size and a model.

A resolved recipe as a table for people.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitmods.cli.options import HELP_ALL, parse
from vitmods.util.errors import UserError
from vitmods.util.text import duration, plural

if TYPE_CHECKING:
    from vitmods.model.config import ViTConfig
    from vitmods.recipes import Recipe
    from vitmods.recipes.schedule import Resolved
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
        from vitmods.recipes.schedule import lr_at

        return {
            f"{fraction} %": lr_at(self.length, self.length.steps * fraction // 100) for fraction in (0, 10, 50, 100)
        }


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if arguments[:1] == ["show"]:
        arguments = arguments[1:]
    elif not {"-h", "--help", HELP_ALL} & set(arguments):
        raise UserError("Say which is shown: `vitmods recipe show NAME`; `vitmods recipes` lists the names.")
    options = parse(Show, arguments, "recipe show")
    shown = _resolved(options)
    rehearsal = _rehearse(shown, options) if options.dry_run else None
    if options.json:
        print(json.dumps(_for_programs(shown, rehearsal), indent=1))
        return 0

    print_recipe(shown, rehearsal)
    return 0


def _resolved(options: Show) -> Shown:
    from vitmods.recipes import evidence
    from vitmods.recipes.registry import architecture, split_recipe, usual_model
    from vitmods.recipes.schedule import resolve

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


Row = tuple[str, str]


def print_recipe(shown: Shown, rehearsal: Rehearsal | None) -> None:
    """Print what the recipe is, then its parts, then the rehearsal if there was one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vitmods.recipes.registry import evidence, summary

    record = evidence(shown.name)
    parts = {
        "": [("paper", record.paper), ("data", record.data), ("expected", record.expected)],
        "length": list(_length(shown)),
        "learning rate": list(_rates(shown)),
        "optimizer": list(_optimizer(shown)),
        "loss": list(_loss(shown.recipe)),
        "augmentation": list(_augmentation(shown.recipe)),
        "evaluation": [("crop", _crop_of_evaluation(shown.recipe)), ("weights", _evaluated(shown.recipe))],
        "model": list(_model(shown)),
        "not stated": [("", record.not_stated)],
        "here": [] if rehearsal is None else list(_rehearsal(shown, rehearsal)),
    }
    console = Console()
    console.print(Text.assemble((shown.name, "bold cyan"), "  ", (summary(shown.name), "bold")))
    table = Table.grid(padding=(0, 2, 0, 0))
    for column in ("part", "what", "value"):
        table.add_column(column, no_wrap=column != "value")
    for part, rows in parts.items():
        rows = [row for row in rows if row[1]]
        if rows:
            table.add_row()
        for number, (what, value) in enumerate(rows):
            table.add_row(Text(part if number == 0 else "", style="bold"), Text(what, style="cyan"), Text(value))
    console.print(table)


def _length(shown: Shown) -> Iterator[Row]:
    length, recipe = shown.length, shown.recipe
    yield "images", f"{shown.images:,}"
    parts = f" in {recipe.accumulate} parts of {recipe.part_size:,}" if recipe.accumulate > 1 else ""
    yield "batch", f"{recipe.batch_size:,}{parts}"
    yield "steps", f"{length.steps:,}: {length.epochs:,.4g} epochs of {length.steps_per_epoch:,}"
    yield "warm-up", f"{length.warmup_steps:,.0f} steps, {100 * length.warmup_steps / length.steps:.3g} % of all"
    yield (
        "views",
        f"{length.images_seen:,}"
        + (f", {recipe.augment.repeats} of an image in an epoch" if recipe.augment.repeats > 1 else ""),
    )


def _rates(shown: Shown) -> Iterator[Row]:
    recipe, length = shown.recipe, shown.length
    scaled = (
        f" ({recipe.optimizer.lr:g} for a batch of {recipe.optimizer.lr_batch:,})"
        if recipe.optimizer.lr_batch is not None
        else ""
    )
    yield "highest", f"{length.lr:.4g}{scaled}"
    yield "schedule", recipe.schedule.name.replace("_", " ") + (f", down to {length.min_lr:g}" if length.min_lr else "")
    for fraction, rate in shown.rates().items():
        yield f"at {fraction}", f"{rate:.4g}"


def _optimizer(shown: Shown) -> Iterator[Row]:
    recipe, name = shown.recipe, shown.recipe.optimizer.name
    betas = f"betas {recipe.optimizer.beta1:g}, {recipe.optimizer.beta2:g}, eps {recipe.optimizer.adam_eps:g}"
    stored = (
        f", {'momentum' if name == 'sgd' else 'first moment'} in bfloat16"
        if recipe.optimizer.moment == "bfloat16"
        else ""
    )
    settings = f"momentum {recipe.optimizer.momentum:g}" if name == "sgd" else betas
    yield {"adamw": "AdamW", "sgd": "SGD", "lamb": "LAMB"}[name], settings + stored
    multiplied = f"{recipe.optimizer.weight_decay:g} times the learning rate"
    of_big_vision = (
        f"; {recipe.optimizer.weight_decay * shown.length.lr:.3g} where it is not multiplied, as in big_vision"
    )
    yield "decay", multiplied + (of_big_vision if name == "adamw" else "") if recipe.optimizer.weight_decay else "none"
    yield "clipping", "none" if recipe.optimizer.clip_norm is None else f"at global norm {recipe.optimizer.clip_norm:g}"
    yield "trains", recipe.train if recipe.train != "all" else ""
    yield "layer decay", "" if recipe.optimizer.layer_decay is None else f"{recipe.optimizer.layer_decay:g}"
    yield "precision", recipe.precision if recipe.precision != "32-true" else ""


def _loss(recipe: Recipe) -> Iterator[Row]:
    kinds = {
        "softmax": "cross-entropy",
        "sigmoid": "binary cross-entropy, summed over classes",
        "bce": "binary cross-entropy, mean over classes; every class of a mixed image counts as whole",
    }
    yield recipe.loss.name, kinds[recipe.loss.name]
    yield "smoothing", f"{recipe.loss.label_smoothing:g}" if recipe.loss.label_smoothing else ""


def _augmentation(recipe: Recipe) -> Iterator[Row]:
    (low, high), (narrow, wide) = recipe.augment.crop_scale, recipe.augment.crop_ratio
    area = f"{100 * low:g} to {100 * high:g} % of the area, aspect {narrow:.3g} to {wide:.3g}"
    crops = {
        "none": "resized only",
        "pad": "padded by an eighth, cut at random",
        "random_resized": area,
        "inception": f"{area}, drawn as in TensorFlow",
    }
    yield "crop", crops[recipe.augment.crop]
    yield "flip", f"{recipe.augment.flip:g}" if recipe.augment.flip else "none"
    yield "resizing", recipe.augment.resample
    if recipe.augment.randaugment is not None:
        count, magnitude = recipe.augment.randaugment
        noise = f" +- {recipe.augment.randaugment_noise:g}" if recipe.augment.randaugment_noise else ""
        yield "RandAugment", f"{count} operations of {recipe.augment.randaugment_space}, magnitude {magnitude:g}{noise}"
    yield "erasing", f"{recipe.augment.erasing:g}" if recipe.augment.erasing else ""
    mixed = {"mixup": recipe.augment.mixup, "CutMix": recipe.augment.cutmix}
    yield "mixing", " or ".join(f"{name} {alpha:g}" for name, alpha in mixed.items() if alpha)
    yield "pixels", f"(x - {_values(recipe.augment.mean)}) / {_values(recipe.augment.std)} of x in [0, 1]"


def _values(numbers: tuple[float, ...]) -> str:
    text = ", ".join(f"{number:g}" for number in numbers)
    return text if len(numbers) == 1 else f"({text})"


def _crop_of_evaluation(recipe: Recipe) -> str:
    return f"at the center, {100 * recipe.augment.eval_crop:.4g} % of the resized image's short side"


def _evaluated(recipe: Recipe) -> str:
    return f"moving average, decay {recipe.ema:g}" if recipe.ema is not None else "the last"


def _model(shown: Shown) -> Iterator[Row]:
    settings = {**shown.architecture, **shown.recipe.model.to_config()}
    written = ", ".join([f'"{shown.model}"', *(f"{name}={_python(value)}" for name, value in settings.items())])
    yield "call", f"vm.vit({written})"


def _python(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _rehearsal(shown: Shown, rehearsal: Rehearsal) -> Iterator[Row]:
    cut = f"{plural(rehearsal.parts, 'part')} of {rehearsal.part:,}"
    some = f", {rehearsal.computed:,} of them computed" if rehearsal.computed < rehearsal.parts else ""
    yield "a step", f"{duration(rehearsal.step_s)}: {cut}{some}; update {duration(rehearsal.update_s)}"
    yield "speed", f"{shown.recipe.batch_size / rehearsal.step_s:,.3g} images/s"
    yield "memory", f"{rehearsal.peak / 2**30:.3g} GiB of tensors at most"
    run_s = rehearsal.step_s * shown.length.steps
    yield "whole run", f"about {duration(run_s)}; reading, augmenting and evaluating come on top"
