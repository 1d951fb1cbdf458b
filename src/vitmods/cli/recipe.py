"""`vitmods recipe show`: a recipe resolved for a data set, a batch size and a model, as a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitmods.cli.options import HELP_ALL, parse
from vitmods.util.errors import UserError
from vitmods.util.text import duration, plural

if TYPE_CHECKING:
    from vitmods.recipes import Augment, Recipe
    from vitmods.recipes.schedule import Resolved
    from vitmods.study.cost import Rehearsal

Row = tuple[str, str]

SMALL = 5_000  # images, for recipes that are not for one data set


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

    @property
    def config(self) -> dict[str, Any]:
        """Fields of a ViTConfig besides the name of its size."""
        return {**self.architecture, **self.recipe.model.to_config()}


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if arguments[:1] == ["show"]:
        arguments = arguments[1:]
    elif not {"-h", "--help", HELP_ALL} & set(arguments):
        raise UserError("Say which recipe: `vitmods recipe show NAME`; `vitmods recipes` lists the names.")
    options = parse(Show, arguments, "recipe show")
    from vitmods.model.config import ViTConfig
    from vitmods.recipes import evidence

    shown = _resolve(options)
    # refuses a name that is not a ViT's, and images that it cannot cut
    config = ViTConfig.from_name(shown.model, img_size=options.img_size, num_classes=options.classes, **shown.config)
    rehearsal = None
    if options.dry_run:
        from vitmods.study.cost import rehearse
        from vitmods.train.device import resolve as device_of

        rehearsal = rehearse(config, shown.recipe, device_of(options.device), evidence(shown.name).task)
    if not options.json:
        print_recipe(shown, rehearsal)
        return 0
    facts: dict[str, Any] = {
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
        facts["rehearsal"] = {**asdict(rehearsal), "step_s": rehearsal.step_s, "run_s": run_s}
    print(json.dumps(facts, indent=1))
    return 0


def _resolve(options: Show) -> Shown:
    """Apply the options as arguments of the recipe's function, or as fields of the recipe where it lacks them."""
    from vitmods.recipes import RECIPES, evidence
    from vitmods.recipes.registry import architecture, parse_recipe, settings_of, split_recipe, usual_model
    from vitmods.recipes.schedule import resolve

    name, settings = split_recipe(options.recipe)
    values = {"model": options.model, "epochs": options.epochs, "batch_size": options.batch}
    values = {key: value for key, value in values.items() if value is not None}
    for key, value in values.items():
        if settings.get(key, value) != value:
            raise UserError(f"{name}({key}={settings[key]}) and the option for {key}, {value}, differ: leave one out.")
    fields = {key: value for key, value in values.items() if key not in ("model", *settings_of(RECIPES[name]))}
    lengths = {} if options.epochs is None else {"steps": None}
    recipe = parse_recipe(options.recipe, **values).with_(accumulate=options.accumulate, **fields, **lengths)
    model = options.model or settings.get("model") or usual_model(name)
    images = options.data_size or evidence(name).images or SMALL
    return Shown(name, model, images, recipe, resolve(recipe, images), architecture(name, model, settings))


def print_recipe(shown: Shown, rehearsal: Rehearsal | None) -> None:
    """Print what the recipe is, then its parts, then the rehearsal if there was one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vitmods.recipes.registry import evidence, summary

    facts, recipe, length = evidence(shown.name), shown.recipe, shown.length
    repeats = f", {recipe.augment.repeats} of an image in an epoch" if recipe.augment.repeats > 1 else ""
    parts = f" in {recipe.accumulate} parts of {recipe.part_size:,}" if recipe.accumulate > 1 else ""
    settings = {"": shown.model, **shown.config}
    texts = {name: f'"{value}"' if isinstance(value, str) else repr(value) for name, value in settings.items()}
    call = [f"{name}={text}" if name else text for name, text in texts.items()]
    sections: dict[str, list[Row]] = {
        "": [("paper", facts.paper), ("data", facts.data), ("expected", facts.expected)],
        "length": [
            ("images", f"{shown.images:,}"),
            ("batch", f"{recipe.batch_size:,}{parts}"),
            ("steps", f"{length.steps:,}: {length.epochs:,.4g} epochs of {length.steps_per_epoch:,}"),
            ("warm-up", f"{length.warmup_steps:,.0f} steps, {100 * length.warmup_steps / length.steps:.3g} % of all"),
            ("views", f"{length.images_seen:,}{repeats}"),
        ],
        "learning rate": _rates(shown),
        "optimizer": _optimizer(recipe, length.lr),
        "loss": [
            (recipe.loss.name, _LOSSES[recipe.loss.name]),
            ("smoothing", f"{recipe.loss.label_smoothing:g}" if recipe.loss.label_smoothing else ""),
        ],
        "augmentation": _augmentation(recipe.augment),
        "evaluation": [
            ("crop", f"at the center, {100 * recipe.augment.eval_crop:.4g} % of the resized image's short side"),
            ("weights", f"moving average, decay {recipe.ema:g}" if recipe.ema is not None else "the last"),
        ],
        "model": [("call", f"vm.vit({', '.join(call)})")],
        "not stated": [("", facts.not_stated)],
        "here": [] if rehearsal is None else _rehearsal(shown, rehearsal),
    }
    console = Console()
    console.print(Text.assemble((shown.name, "bold cyan"), "  ", (summary(shown.name), "bold")))
    table = Table.grid(padding=(0, 2, 0, 0))
    for column in ("part", "field", "value"):
        table.add_column(column, no_wrap=column != "value")
    for part, rows in sections.items():
        rows = [row for row in rows if row[1]]
        if rows:
            table.add_row()
        for number, (field, value) in enumerate(rows):
            table.add_row(Text(part if number == 0 else "", style="bold"), Text(field, style="cyan"), Text(value))
    console.print(table)


_LOSSES = {
    "softmax": "cross-entropy",
    "sigmoid": "binary cross-entropy, summed over classes",
    "bce": "binary cross-entropy, mean over classes; every class of a mixed image counts as whole",
}


def _rates(shown: Shown) -> list[Row]:
    recipe, length, base = shown.recipe, shown.length, shown.recipe.optimizer
    scaled = f" ({base.lr:g} for a batch of {base.lr_batch:,})" if base.lr_batch is not None else ""
    lowest = f", down to {length.min_lr:g}" if length.min_lr else ""
    return [
        ("highest", f"{length.lr:.4g}{scaled}"),
        ("schedule", recipe.schedule.name.replace("_", " ") + lowest),
        *((f"at {fraction}", f"{rate:.4g}") for fraction, rate in shown.rates().items()),
    ]


def _optimizer(recipe: Recipe, lr: float) -> list[Row]:
    optimizer = recipe.optimizer
    name, decay = optimizer.name, optimizer.weight_decay
    settings = f"betas {optimizer.beta1:g}, {optimizer.beta2:g}, eps {optimizer.adam_eps:g}"
    if name == "sgd":
        settings = f"momentum {optimizer.momentum:g}"
    if optimizer.moment == "bfloat16":
        settings += f", {'momentum' if name == 'sgd' else 'first moment'} in bfloat16"
    alone = f"; {decay * lr:.3g} where it is not multiplied, as in big_vision" if name == "adamw" else ""
    return [
        ({"adamw": "AdamW", "sgd": "SGD", "lamb": "LAMB"}[name], settings),
        ("decay", f"{decay:g} times the learning rate{alone}" if decay else "none"),
        ("clipping", "none" if optimizer.clip_norm is None else f"at global norm {optimizer.clip_norm:g}"),
        ("trains", recipe.train if recipe.train != "all" else ""),
        ("layer decay", "" if optimizer.layer_decay is None else f"{optimizer.layer_decay:g}"),
        ("precision", recipe.precision if recipe.precision != "32-true" else ""),
    ]


def _augmentation(augment: Augment) -> list[Row]:
    (low, high), (narrow, wide) = augment.crop_scale, augment.crop_ratio
    area = f"{100 * low:g} to {100 * high:g} % of the area, aspect {narrow:.3g} to {wide:.3g}"
    crops = {
        "none": "resized only",
        "pad": "padded by an eighth, cut at random",
        "random_resized": area,
        "inception": f"{area}, sampled as in TensorFlow",
    }
    operations = ""
    if augment.randaugment is not None:
        count, magnitude = augment.randaugment
        noise = f" +- {augment.randaugment_noise:g}" if augment.randaugment_noise else ""
        operations = f"{count} operations of {augment.randaugment_space}, magnitude {magnitude:g}{noise}"
    mixed = {"mixup": augment.mixup, "CutMix": augment.cutmix}

    def values(numbers: tuple[float, ...]) -> str:
        text = ", ".join(f"{number:g}" for number in numbers)
        return text if len(numbers) == 1 else f"({text})"

    return [
        ("crop", crops[augment.crop]),
        ("flip", f"{augment.flip:g}" if augment.flip else "none"),
        ("resizing", augment.resample),
        ("RandAugment", operations),
        ("erasing", f"{augment.erasing:g}" if augment.erasing else ""),
        ("mixing", " or ".join(f"{name} {alpha:g}" for name, alpha in mixed.items() if alpha)),
        ("pixels", f"(x - {values(augment.mean)}) / {values(augment.std)} of x in [0, 1]"),
    ]


def _rehearsal(shown: Shown, rehearsal: Rehearsal) -> list[Row]:
    cut = f"{plural(rehearsal.parts, 'part')} of {rehearsal.part:,}"
    some = f", {rehearsal.computed:,} of them computed" if rehearsal.computed < rehearsal.parts else ""
    run_s = rehearsal.step_s * shown.length.steps
    return [
        ("a step", f"{duration(rehearsal.step_s)}: {cut}{some}; update {duration(rehearsal.update_s)}"),
        ("speed", f"{shown.recipe.batch_size / rehearsal.step_s:,.3g} images/s"),
        ("memory", f"{rehearsal.peak / 2**30:.3g} GiB of tensors at most"),
        ("whole run", f"about {duration(run_s)}, plus reading, augmenting and evaluating"),
    ]
