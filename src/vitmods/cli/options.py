"""Reading a command's options with tyro, and the options that several commands share."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from vitmods.data.splits import SplitOptions
from vitmods.recipes import RECIPES, TASK_PARTS, Recipe
from vitmods.recipes.registry import parse_recipe, split_recipe
from vitmods.study.arms import BASE
from vitmods.study.defaults import ORDINARY, Defaults, defaults_for
from vitmods.study.plan import measure_of
from vitmods.util.errors import UserError

T = TypeVar("T")
HELP_ALL = "--help-all"

_STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)


@dataclass(frozen=True)
class _ImageArguments:
    data: str = "digits"
    """digits, a folder of class folders or of shards, a CSV file of labels, torchvision:NAME?root=FOLDER, hf:NAME, or
    wds:SHARDS"""
    task: str = "classification"
    """what is learned: classification (one class an image), multilabel (any number of labels), or another task
    (docs/tasks.md)"""
    img_size: tuple[int, ...] = (8,)
    """image side, or rows and columns, in pixels"""
    in_chans: int = 1
    """channels that the model reads: 3 (RGB) or 1 (gray)"""
    unreadable: Literal["stop", "skip"] = "stop"
    """images that cannot be read stop the run before training, or are left out and reported"""


@dataclass(frozen=True)
class DataOptions(SplitOptions, _ImageArguments):
    """The images. Defaults of the other options follow from them."""


@dataclass(frozen=True)
class Asked:
    """What the defaults of all other options follow from, so that it is read before them; None: not given."""

    data: str | None = None
    recipe: str | None = None
    task: str | None = None
    base: str | None = None
    model: str | None = None
    start: Annotated[str | None, tyro.conf.arg(name="from")] = None
    arms: tuple[str, ...] = ()
    sweep: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    budget: str | None = None
    metric: str | None = None
    epochs: int | None = None
    warmup_epochs: float | None = None
    warmup_steps: int | None = None
    quiet: bool = False
    help: Annotated[bool, tyro.conf.arg(aliases=["-h", "--help-all"])] = False


def asked_for(
    arguments: Sequence[str],
    command: str,
    kind: type[T] | None = None,
    check: Callable[[T], object] = lambda options: None,
) -> Asked:
    """Parse the options that set defaults. Exits, as `parse` does, if the line does not fit a `kind`, and calls `check`
    with the options: before a data set is listed, which may take minutes."""
    found, _ = tyro.cli(
        Asked, args=list(arguments), prog=f"vitmods {command}", return_unknown_args=True, add_help=False, config=_STYLE
    )
    if kind is not None and not found.help and found.data not in (None, "digits"):
        with redirect_stderr(io.StringIO()) as said:
            try:
                options = parse(kind, arguments, command)
            except SystemExit:
                wrong = said.getvalue()
            else:
                wrong = ""
                check(options)
        if wrong and "recipe:" not in wrong:  # values of a recipe may suit the one that the data ask for
            parse(kind, arguments, command)
    return found


def defaults_from(asked: Asked, start: str | None = None) -> tuple[Defaults, DataOptions, str, Recipe]:
    """What the data, the recipe and a checkpoint on the command line make the defaults of all other options."""
    data = asked.data or "digits"
    normalized: dict[str, Any] = {}
    if asked.recipe is not None:  # a UserError for a name that does not exist, before the data set is listed
        _ = RECIPES[split_recipe(asked.recipe)[0]]
    if asked.task is not None:
        _ = measure_of(asked.task).metric
    try:
        defaults = defaults_for(data)
        if start:
            defaults, normalized = _fits_checkpoint(defaults, start)
    except UserError:
        if not asked.help:  # help is given whatever else is wrong
            raise
        defaults = ORDINARY
    size = defaults.img_size
    options = DataOptions(
        data,
        img_size=(size,) if isinstance(size, int) else size,
        in_chans=defaults.in_chans,
    )
    usual, fitted = defaults.recipe_name, None
    if asked.task is not None:
        from vitmods.tasks.base import TASKS  # torch, which the shell's help does without

        usual, fitted = TASKS[asked.task].usual_recipe or usual, TASKS[asked.task].fitted
    name = asked.recipe or ("finetune" if start else usual)
    model = None if start else asked.base or defaults.base
    recipe = parse_recipe(name, like=RECIPES[usual](), model=model)
    recipe = recipe if fitted is None else fitted(recipe)
    return defaults, options, name, _in_other_units(recipe, asked).with_(**normalized)


def _in_other_units(recipe: Recipe, asked: Asked) -> Recipe:
    """What the command line says in epochs takes the place of what the recipe says in steps, and the other way."""
    pairs = (("epochs", "steps"), ("warmup_epochs", "warmup_steps"), ("warmup_steps", "warmup_epochs"))
    return recipe.with_(**{replaced: None for option, replaced in pairs if getattr(asked, option) is not None})


def _fits_checkpoint(defaults: Defaults, start: str) -> tuple[Defaults, dict[str, Any]]:
    """What fits the images, in the checkpoint's size and channels, and its mean and std for the recipe."""
    from vitmods.adapters import open_checkpoint
    from vitmods.study.checkpoints import arms_in, checkpoint_of

    found = arms_in(start)
    model = open_checkpoint(checkpoint_of(found[BASE].start or start if found else start))
    shaped = replace(defaults, base=start, img_size=model.vit_config.img_size, in_chans=model.vit_config.in_chans)
    values = {name: tuple(model.pretrained_cfg[name]) for name in ("mean", "std")}
    return shaped, {name: value[:1] if len(set(value)) == 1 else value for name, value in values.items()}


def parse(
    kind: type[T], arguments: Sequence[str], command: str, default: T | None = None, common: Sequence[str] = ()
) -> T:
    """Parse the options of `command`. Exits as tyro does: 0 after --help, 2 after an error, which it prints.

    common: the options that --help shows; --help-all shows all of them. Empty: --help shows all.
    """
    shell_kind, values = _with_task_parts(kind, default)
    words = ["--help" if word == HELP_ALL else word for word in arguments]
    cli = partial(tyro.cli, shell_kind, args=words, prog=f"vitmods {command}", config=_STYLE, **values)
    if HELP_ALL in arguments or not (common and {"-h", "--help"} & set(arguments)):
        options: T = cli()
        if shell_kind is kind:
            return options
        recipe = dict(vars(vars(options)["training"]))
        recipe["task_parts"] = tuple(recipe.pop(name) for name in TASK_PARTS)
        return kind(**{**vars(options), "training": Recipe(**recipe)})
    # tyro draws boxes where the encoding has them. On wide terminals it puts two in a row: `_shortened` needs one.
    narrow = {"COLUMNS": str(min(shutil.get_terminal_size().columns, 100))}
    with patched_environment(narrow), redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) as text:
        try:
            cli()
        except SystemExit as end:
            if end.code:
                raise
    text.seek(0)
    shortened = _shortened(text.read(), common)
    if not (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf"):
        shortened = re.sub("[╭╮╰╯│─]", " ", shortened)
    print(shortened)
    raise SystemExit(0)


def _with_task_parts(kind: type[Any], default: Any) -> tuple[type[Any], dict[str, Any]]:
    """Options whose recipe (`training`) has a field for each part that tasks and plugins registered, and a default."""
    if "training" not in kind.__dataclass_fields__:
        return kind, {} if default is None else {"default": default}
    parts = [(name, part, field(default_factory=part)) for name, part in TASK_PARTS.items()]
    recipe_kind = make_dataclass("Recipe", parts, bases=(Recipe,), frozen=True, namespace={"__doc__": Recipe.__doc__})
    fields = [("training", recipe_kind)]
    wider = make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True, namespace={"__doc__": kind.__doc__})
    if default is None:
        return wider, {}
    recipe: Recipe = default.training
    training = recipe_kind(**vars(recipe), **{name: recipe.part(part) for name, part in TASK_PARTS.items()})
    return wider, {"default": wider(**{**vars(default), "training": training})}


@contextmanager
def patched_environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables, and restore them at the end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _shortened(text: str, common: Sequence[str]) -> str:
    """Reduce tyro's help to the text before its boxes, and one box with the entries of some options."""
    head, *lines = re.split(r"^(?=[╭│╰])", text, flags=re.MULTILINE)
    entries: list[list[str]] = []
    for line in lines:
        if line.startswith(("╭", "╰")):
            entries.append([])  # the description of a box belongs to no entry
        elif re.match(r"│ --?\w", line):
            entries.append([line])
        else:
            entries[-1].append(line)
    options = {
        match[1]: entry for entry in entries if entry and (match := re.match(r"│ (?:-h, )?--([\w-]+)", entry[0]))
    }
    shown = [line for name in ("help", *common) for line in options[name]]
    footer = f"{HELP_ALL} shows the other {len(options) - len(common) - 1} options, grouped by what they set."
    return "".join([head, lines[0], *shown, lines[-1], footer])


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
