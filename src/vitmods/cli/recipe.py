"""`vitmods recipes` lists the recipes; `vitmods recipe show` resolves one for a data set, a batch size and a model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitmods.cli.options import HELP_ALL, parse
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from vitmods.recipes import Recipe
    from vitmods.recipes.schedule import Resolved

SMALL = 5_000  # images, for recipes that are not for one data set


@dataclass(frozen=True)
class Recipes:
    """List the recipes: what each is for, its paper, its data, and the number to expect.

    Their settings are written in parentheses: --recipe "augreg(level=light1,epochs=30,warmup_epochs=3)".

    examples:
      vitmods recipes
      vitmods recipe show a2 --model B/16
      vitmods compare --data path/to/images --recipe "augreg(level=light1,epochs=30,warmup_epochs=3)" --arms dpn
    """

    json: bool = False
    """print JSON, for programs"""


@dataclass(frozen=True)
class Show:
    """Show a recipe resolved: steps, warm-up, learning rates after batch scaling, decay, augmentation, model settings.

    examples:
      vitmods recipe show a2 --model B/16 --data-size 1281167 --batch 4096
      vitmods recipe show "augreg(level=light1,epochs=30,warmup_epochs=3)" --data-size 5000 --batch 64
      vitmods recipe show deit --model S/16 --json
    """

    recipe: Annotated[str, tyro.conf.Positional]
    """a name of `vitmods recipes`, with settings in parentheses if any"""
    model: str | None = None
    """a ViT as Ti/16, S/16, B/16, with options if any; None: the recipe's own"""
    data_size: int | None = None
    """training images; None: those of the paper's data set, else 5,000"""
    batch: int | None = None
    """images per step; None: the recipe's"""
    epochs: int | None = None
    """passes over the images; None: the recipe's"""
    json: bool = False
    """print JSON, for programs"""


def main(arguments: Sequence[str]) -> int:
    """Run `vitmods recipe show`; returns the exit code."""
    if arguments[:1] == ["show"]:
        arguments = arguments[1:]
    elif not {"-h", "--help", HELP_ALL} & set(arguments):
        raise UserError("Say which recipe: `vitmods recipe show NAME`; `vitmods recipes` lists the names.")
    options = parse(Show, arguments, "recipe show")
    from vitmods.model.config import ViTConfig
    from vitmods.recipes import evidence
    from vitmods.recipes.registry import (
        Evidence,
        architecture,
        check_agree,
        network,
        parse_recipe,
        split_recipe,
        usual_model,
    )
    from vitmods.recipes.schedule import LENGTHS, WARMUPS, lr_at, overridden, resolve

    # Options are arguments of the recipe's function, or fields of the recipe where the function lacks them.
    name, settings = split_recipe(options.recipe)
    values = {"model": options.model, "epochs": options.epochs, "batch_size": options.batch}
    values = {key: value for key, value in values.items() if value is not None}
    check_agree(options.recipe, values)
    images = options.data_size or evidence(name).images or SMALL
    fields = {key: value for key, value in (settings | values).items() if key in (*LENGTHS, *WARMUPS)}
    recipe = overridden(parse_recipe(options.recipe, **values), fields, images)
    model = options.model or settings.get("model") or usual_model(name)
    length, of_model = resolve(recipe, images), {} if "?" in model else architecture(name, model, settings)
    config = {**of_model, **recipe.model.to_config()}
    ViTConfig.from_name(model, **config)  # refuses a name that is not a ViT's
    facts: dict[str, Any] = {"name": name, "model": model, "images": images, "resolved": asdict(length)}
    facts["learning_rates"] = {f"{part} %": lr_at(length, length.steps * part // 100) for part in (0, 10, 50, 100)}
    known, base = evidence(name), network(model, options.recipe)
    words = ["vitmods", "train", "--data", "path/to/images", "--base", base, "--recipe", options.recipe]
    words += ["--task", known.task] if known.task != Evidence.task else []
    words += [
        word for key, value in values.items() if key != "model" for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    facts["command"] = known.command if known.trained else shlex.join(words)
    if options.json:
        print(json.dumps({**facts, "architecture": of_model, "recipe": recipe.to_dict()}, indent=1))
    else:
        written = (f"{key}={json.dumps(value) if isinstance(value, str) else value}" for key, value in config.items())
        _print(name, recipe, length, facts, f"vm.vit({', '.join([json.dumps(model), *written])})")
    return 0


_LOSSES = {
    "softmax": "cross-entropy",
    "sigmoid": "binary cross-entropy, summed over classes",
    "bce": "binary cross-entropy, mean over classes; every class of a mixed image counts as whole",
}


def _print(name: str, recipe: Recipe, length: Resolved, facts: Mapping[str, Any], model: str) -> None:
    """Print what the recipe is, then its parts; rows without a value are left out. model: the call that makes it."""
    from rich.console import Console
    from rich.text import Text

    from vitmods.recipes.registry import evidence, summary

    known, augment, optimizer = evidence(name), recipe.augment, recipe.optimizer
    repeats = f", {augment.repeats} of an image in an epoch" if augment.repeats > 1 else ""
    scaled = f" ({optimizer.lr:g} for a batch of {optimizer.lr_batch:,})" if optimizer.lr_batch is not None else ""
    lowest = f", down to {length.min_lr:g}" if length.min_lr else ""
    betas = f"betas {optimizer.beta1:g}, {optimizer.beta2:g}, eps {optimizer.adam_eps:g}"
    moments = f"momentum {optimizer.momentum:g}" if optimizer.name == "sgd" else betas
    if optimizer.moment == "bfloat16":
        moments += f", {'momentum' if optimizer.name == 'sgd' else 'first moment'} in bfloat16"
    decay = f"{optimizer.weight_decay:g} times the learning rate" if optimizer.weight_decay else "none"
    if optimizer.weight_decay_end is not None:
        decay += f", along a cosine to {optimizer.weight_decay_end:g} times it"
    clipped = "each parameter's" if optimizer.clip_each else "global"
    if optimizer.name == "adamw" and optimizer.weight_decay:
        alone = optimizer.weight_decay * length.lr
        decay += f"; {alone:.3g} where it is not multiplied, as in big_vision"
    (low, high), (narrow, wide) = augment.crop_scale, augment.crop_ratio
    area = f"{100 * low:g} to {100 * high:g} % of the area, aspect {narrow:.3g} to {wide:.3g}"
    crops = {"none": "resized only", "pad": "padded by an eighth, cut at random", "random_resized": area}
    operations = ""
    if augment.randaugment is not None:
        count, magnitude = augment.randaugment
        noise = f" +- {augment.randaugment_noise:g}" if augment.randaugment_noise else ""
        operations = f"{count} operations of {augment.randaugment_space}, magnitude {magnitude:g}{noise}"
    mixed = {"mixup": augment.mixup, "CutMix": augment.cutmix}
    mean, std = (
        f"{values[0]:g}" if len(values) == 1 else f"({', '.join(f'{value:g}' for value in values)})"
        for values in (augment.mean, augment.std)
    )
    sections: dict[str, dict[str, str]] = {
        "": {"paper": known.paper, "data": known.data, "expected": known.expected},
        "length": {
            "images": f"{facts['images']:,}",
            "batch": f"{recipe.batch_size:,}",
            "steps": f"{length.steps:,}: {length.epochs:,.4g} epochs of {length.steps_per_epoch:,}",
            "warm-up": f"{length.warmup_steps:,.0f} steps, {100 * length.warmup_steps / length.steps:.3g} % of all",
            "views": f"{length.images_seen:,}{repeats}",
        },
        "learning rate": {
            "highest": f"{length.lr:.4g}{scaled}",
            "schedule": recipe.schedule.name.replace("_", " ") + lowest,
            **{f"at {fraction}": f"{rate:.4g}" for fraction, rate in facts["learning_rates"].items()},
        },
        "optimizer": {
            {"adamw": "AdamW", "sgd": "SGD", "lamb": "LAMB"}[optimizer.name]: moments,
            "decay": decay,
            "clipping": "none" if optimizer.clip_norm is None else f"at {clipped} norm {optimizer.clip_norm:g}",
            "trains": recipe.train if recipe.train != "all" else "",
            "layer decay": "" if optimizer.layer_decay is None else f"{optimizer.layer_decay:g}",
            "precision": recipe.precision if recipe.precision != "32-true" else "",
        },
        "loss": {
            recipe.loss.name: _LOSSES[recipe.loss.name],
            "smoothing": f"{recipe.loss.label_smoothing:g}" if recipe.loss.label_smoothing else "",
        },
        "augmentation": {
            "crop": crops.get(augment.crop, f"{area}, sampled as in TensorFlow"),
            "flip": f"{augment.flip:g}" if augment.flip else "none",
            "resizing": augment.resample,
            "RandAugment": operations,
            "erasing": f"{augment.erasing:g}" if augment.erasing else "",
            "mixing": " or ".join(f"{kind} {alpha:g}" for kind, alpha in mixed.items() if alpha),
            "pixels": f"(x - {mean}) / {std} of x in [0, 1]",
        },
        "evaluation": {
            "crop": f"at the center, {100 * augment.eval_crop:.4g} % of the resized image's short side",
            "weights": f"moving average, decay {recipe.ema:g}" if recipe.ema is not None else "the last",
        },
        "model": {"call": model, "command": facts["command"]},
        "not stated": {"": known.not_stated},
    }
    console = Console()
    console.print(Text.assemble((name, "bold cyan"), "  ", (summary(name), "bold")))
    table = _grid(3)
    for part, rows in sections.items():
        filled = {field: value for field, value in rows.items() if value}
        if filled:
            table.add_row()
        for field, value in filled.items():
            table.add_row(Text(part, style="bold"), Text(field, style="cyan"), Text(value))
            part = ""
    console.print(table)


def _grid(columns: int) -> Table:
    """Make a table without lines, whose last column wraps."""
    from rich.table import Column, Table

    return Table.grid(*(Column(no_wrap=i + 1 < columns) for i in range(columns)), padding=(0, 2, 0, 0))


def list_recipes(arguments: Sequence[str]) -> int:
    """Run `vitmods recipes`; returns the exit code."""
    options = parse(Recipes, arguments, "recipes")
    from vitmods.recipes import RECIPES, evidence
    from vitmods.recipes.registry import arguments as arguments_of
    from vitmods.recipes.registry import summary

    groups: dict[str, list[dict[str, Any]]] = {}
    for name in RECIPES:
        facts = evidence(name)
        kind = "of papers" if facts.paper else "for small budgets"
        values = {key: value for key, value in asdict(facts).items() if not callable(value)}
        groups.setdefault(kind + (", for trained weights" if facts.trained else ""), []).append(
            {"name": name, "summary": summary(name), **values, "arguments": arguments_of(name)}
        )
    if options.json:
        print(json.dumps([entry for group in groups.values() for entry in group], indent=1))
        return 0
    from rich import box
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, group in groups.items():
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 1, 0))
        table.add_column("recipe", no_wrap=True, min_width=17)
        table.add_column(title, ratio=1)
        for entry in group:
            record = _grid(2)
            for label in ("paper", "data", "expected", "settings"):
                value = ", ".join(entry["arguments"]) if label == "settings" else entry[label]
                if value:
                    record.add_row(Text(label, style="cyan"), Text(value, style="dim" if label == "settings" else ""))
            table.add_row(Text(entry["name"], style="bold"), Group(Text(entry["summary"], style="bold"), record))
        console.print(table)
    console.print("vitmods recipe show NAME prints all of a recipe, resolved for a data set.", style="dim")
    return 0
