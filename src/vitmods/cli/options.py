"""Reading a command's options with tyro, and the options that several commands share."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from vitmods.recipes import Recipe
from vitmods.recipes.parse import parse_recipe
from vitmods.study.arms import BASE
from vitmods.study.defaults import ORDINARY, Defaults, defaults_for
from vitmods.util.errors import UserError

T = TypeVar("T")

_BOX = re.compile("[\u2500-\u257f]")  # the frame that tyro draws around an error
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class DataOptions:
    """The images. Defaults of the other options follow from them."""

    data: str = "digits"
    """digits, a folder of class folders or of shards, a CSV file of labels, torchvision:NAME?root=FOLDER, hf:NAME, or
    wds:SHARDS"""
    task: str = "classification"
    """what is learned of them: classification (one class each) or multilabel (any number of labels)"""
    img_size: tuple[int, ...] = (8,)
    """image side, or rows and columns, in pixels"""
    in_chans: int = 1
    """channels that the model reads: 3 (RGB) or 1 (gray)"""
    unreadable: Literal["stop", "skip"] = "stop"
    """images that cannot be read stop the run before training, or are left out and reported"""
    limit_train: int | None = None
    """use only so many training images, classes in proportion"""
    limit_val: int | None = None
    """use only so many images for validation; where there is no such split, they are taken out of train"""
    split_seed: int = 0
    """for images that are not split yet: which split is made"""
    val_fraction: float = 0.1
    """fraction of the images for validation, where there is no such split"""
    test_fraction: float = 0.2
    """fraction of the images for the test, where there is no such split"""


@dataclass(frozen=True)
class MachineOptions:
    """How it is run here. None of this changes what comes out."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps"""
    data_workers: int = 0
    """threads that prepare images ahead, per trial"""
    checkpoint_minutes: float = 5.0
    """time between checkpoints of a trial"""
    quiet: bool = False
    """no progress on the error stream"""


RecipeOptions = Annotated[Recipe, tyro.conf.arg(name="")]


def defaults_from(arguments: Sequence[str], start: str | None = None) -> tuple[Defaults, DataOptions, str, Recipe]:
    """What --data, --recipe and a checkpoint on the command line make the defaults of all other options."""
    data, asked = peek(arguments, "data") or "digits", peek(arguments, "recipe")
    normalized: dict[str, Any] = {}
    try:
        defaults = defaults_for(data)
        if start:
            defaults, normalized = _fits_checkpoint(defaults, start)
    except UserError:
        if "-h" not in arguments and "--help" not in arguments:  # help is given whatever else is wrong
            raise
        defaults = ORDINARY
    size = defaults.img_size
    options = DataOptions(
        data,
        img_size=(size,) if isinstance(size, int) else size,
        in_chans=defaults.in_chans,
        val_fraction=defaults.val_fraction,
        test_fraction=defaults.test_fraction,
    )
    name = asked or ("finetune" if start else defaults.recipe_name)
    model = None if start else peek(arguments, "base") or defaults.base
    recipe = parse_recipe(name, like=defaults.recipe, model=model)
    if (task := peek(arguments, "task")) is not None:
        from vitmods.tasks.base import TASKS  # torch, which the shell's help does without

        recipe = TASKS[task].fitted(recipe)
    return defaults, options, name, _in_other_units(recipe, arguments).with_(**normalized)


def _in_other_units(recipe: Recipe, arguments: Sequence[str]) -> Recipe:
    """What the command line says in epochs takes the place of what the recipe says in steps, and the other way."""
    pairs = (("epochs", "steps"), ("warmup-epochs", "warmup_steps"), ("warmup-steps", "warmup_epochs"))
    given = [replaced for option, replaced in pairs if peek(arguments, option) is not None]
    return recipe.with_(**dict.fromkeys(given))


def _fits_checkpoint(defaults: Defaults, start: str) -> tuple[Defaults, dict[str, Any]]:
    """What fits the images, in the checkpoint's size and channels, and its mean and std for the recipe."""
    from vitmods.adapters import open_checkpoint
    from vitmods.study.checkpoints import arms_in, checkpoint_of

    found = arms_in(start)
    model = open_checkpoint(checkpoint_of(found[BASE].start or start if found else start))
    shaped = replace(defaults, base=start, img_size=model.vit_config.img_size, in_chans=model.vit_config.in_chans)
    values = {name: tuple(model.pretrained_cfg[name]) for name in ("mean", "std")}
    return shaped, {name: value[:1] if len(set(value)) == 1 else value for name, value in values.items()}


def parse(kind: type[T], arguments: Sequence[str], command: str, default: T | None = None) -> T:
    """Options of `command` as a `kind`. Exits after --help. UserError, in one paragraph, for what tyro refuses."""
    given: dict[str, Any] = {} if default is None else {"default": default}
    refused = io.StringIO()
    try:
        with contextlib.redirect_stderr(refused):
            return tyro.cli(
                kind,
                args=list(arguments),
                prog=f"vitmods {command}",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
                **given,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(_paragraph(refused.getvalue())) from None


def _paragraph(text: str) -> str:
    plain = _COLOUR.sub("", text).splitlines()
    lines = (_BOX.sub(" ", line).strip() for line in plain if not line.startswith("\u256d"))  # the title adds nothing
    words = " ".join(" ".join(line for line in lines if line).split())
    return re.sub(r"^Error parsing \w+: (?=recipe: )", "", words)  # tyro's name for a group of options says nothing


def peek(arguments: Sequence[str], option: str) -> str | None:
    """The value of `--option`, before the options are parsed: the defaults of the others depend on it."""
    for position, argument in enumerate(arguments):
        if argument == f"--{option}" and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"--{option}="):
            return argument.partition("=")[2]
    return None


def rows_and_columns(img_size: Sequence[int]) -> tuple[int, int]:
    """What --img-size says: one side, or rows and columns. Raises UserError for more."""
    if not 1 <= len(img_size) <= 2:
        raise UserError(f"--img-size is one side, or rows and columns, got {len(img_size)} numbers.")
    return img_size[0], img_size[-1]


def readable_folder(data: str, *parts: str) -> Path:
    """`runs/` and a name made of these parts; the same command always gets the same folder, so that it resumes."""
    source = Path(data.partition("?")[0]).name  # torchvision:CIFAR10?root=... has its folder behind the mark
    words = (re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in (source, *parts))
    return Path("runs") / "-".join(word for word in words if word)


def note(message: str) -> None:
    """A line on stderr that is no error."""
    print(f"note: {message}", file=sys.stderr)
