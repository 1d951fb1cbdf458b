"""Reading a command's options with tyro, and the options that several commands share."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import tyro

from vitmods.recipes import TASK_PARTS, Recipe
from vitmods.recipes.recipe import PARTS, check_fields, fields_by_name
from vitmods.recipes.registry import parse_recipe, split_recipe
from vitmods.study.defaults import DIGITS, RecipeChoice
from vitmods.study.plan import ImageOptions
from vitmods.util.errors import SAID_IN, UserError, nearest
from vitmods.util.files import expand_user, similar_folder
from vitmods.util.text import printable

T = TypeVar("T")
HELP_ALL = "--help-all"


@dataclass(frozen=True)
class _Source:
    data: str = "digits"
    """digits, a folder of class folders or of shards, a CSV file of labels, torchvision:NAME?root=FOLDER, hf:NAME, or
    wds:SHARDS"""
    task: str = "classification"
    """what is learned: classification (one class an image), multilabel (any number of labels), or another task
    (docs/tasks.md)"""


@dataclass(frozen=True)
class DataOptions(ImageOptions, _Source):
    """The images. Defaults of the other options follow from them."""


def parse(kind: type[T], arguments: Sequence[str], command: str, common: str = "") -> T:
    """Parse the options of `command`. Exits as tyro does: 0 after --help, 2 after an error, which it prints.

    common: the options that --help shows; --help-all shows all of them. Empty: --help shows all.
    """
    _check_names(kind, arguments, command)
    shell_kind: type[Any] = kind
    options_of_recipe = _training_options(arguments) if "training" in shell_kind.__dataclass_fields__ else None
    if options_of_recipe is not None:
        training_field = [("training", type(options_of_recipe), field(default=options_of_recipe))]
        shell_kind = make_dataclass(
            kind.__name__, training_field, bases=(kind,), frozen=True, kw_only=True, namespace={"__doc__": kind.__doc__}
        )
    with_help = ["--help" if word == HELP_ALL else word for word in arguments]
    style = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    cli = partial(tyro.cli, shell_kind, args=with_help, prog=f"vitmods {command}", config=style)
    if HELP_ALL in arguments or not (common and {"-h", "--help"} & set(arguments)):
        options = dict(vars(cli()))
        if options_of_recipe is not None:
            training = options["training"]
            words = {word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
            overrides = {
                name: getattr(getattr(training, part) if part else training, leaf)
                for name, (part, leaf, _) in fields_by_name().items()
                if name in words or f"no_{name}" in words
            }
            options["training"] = RecipeChoice(options["recipe"], overrides)
            if options["recipe"] is not None:
                split_recipe(options["recipe"])
        _check_places(options)
        return kind(**options)
    # tyro draws boxes where the encoding has them. On wide terminals it puts two in a row: `_shortened` needs one.
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(min(shutil.get_terminal_size().columns, 100))
    try:
        with redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) as text, suppress(SystemExit):
            cli()
    finally:
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    text.seek(0)
    shortened = _shortened(text.read(), common.split())
    if not (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf"):
        shortened = re.sub("[╭╮╰╯│─]", " ", shortened)
    print(shortened)
    raise SystemExit(0)


def option_names(kind: type[Any]) -> set[str]:
    """List the options of a command, as the shell writes them without dashes; quick, since tyro is not asked."""
    names = set[str]()
    hints = get_type_hints(kind, include_extras=True)
    for item in fields(kind):
        if item.name == "training":  # fields of the recipe and of the tasks' parts
            recipe = set(fields_by_name())
            names |= recipe | {f"no-{name}" for name in recipe}
            continue
        hint, *extras = get_args(hints[item.name]) if get_origin(hints[item.name]) is Annotated else (hints[item.name],)
        if is_dataclass(hint):
            names |= option_names(cast(type[Any], hint))
            continue
        confs = [extra for extra in extras if hasattr(extra, "aliases")]
        spellings = [conf.name for conf in confs if conf.name] or [item.name]
        aliases = [alias for conf in confs for alias in conf.aliases or ()]
        names |= {*spellings, *(alias.lstrip("-") for alias in aliases)} | {
            f"no-{name}" for name in spellings if hint is bool
        }
    return {name.replace("_", "-") for name in names}


def _check_names(kind: type[Any], arguments: Sequence[str], command: str) -> None:
    """Raise UserError for the first misspelt option, before the others are read."""
    words = [
        word[2:].partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--") and word != "--"
    ]
    options = {*option_names(kind), "help", HELP_ALL[2:]} if words else set()
    for word in words:
        if word not in options and not word.startswith("tyro-"):
            hint = nearest(word, options)
            hint = re.sub(r"'([^']+)'\?$", r"--\1?", hint) if hint.startswith("Did") else ""
            raise UserError(
                f"Unknown option --{word}. {hint} `vitmods {command} --help-all` lists all.".replace("  ", " ")
            )


_PLACES = ("start", "model", "folder", "checkpoint", "checkpoints", "target", "images", "source", "scores")


def _check_places(options: Mapping[str, Any]) -> None:
    """Raise UserError for a file or folder that does not exist next to one with a similar name.

    Other names are left to what reads them: they may be models of a library or addresses.
    """
    values = [options.get(name) for name in _PLACES]
    values += [options["dataset"].data] if "dataset" in options else [options.get("data")]
    for value in values:
        for place in value if isinstance(value, tuple) else (value,):
            text = str(place) if isinstance(place, str | Path) else ""
            is_plain = os.sep in text and not set(":*[") & set(text)  # not an address or a pattern
            if is_plain and (hint := similar_folder(expand_user(text.partition("?")[0]))):
                raise UserError(f"{printable(text)} does not exist. {hint}")


def _training_options(arguments: Sequence[str]) -> Any:
    """Return a Recipe as the shell reads it, with the values of --recipe for --help, and the parts of all tasks.

    Fields are checked one by one: which recipe they override may follow from the data, so it is not known yet.
    """
    name = next((word for word in re.findall(r"--recipe(?:=|\0)([^\0]*)", "\0".join(arguments))), "default")
    recipe = Recipe()
    with suppress(UserError):  # reported when the options are read
        recipe = parse_recipe(name, like=recipe)
    unchecked = {"__post_init__": check_fields}
    shell_parts = []
    for part, kind in {**PARTS, **TASK_PARTS}.items():
        shell_kind = make_dataclass(
            kind.__name__, (), bases=(kind,), frozen=True, namespace={**unchecked, "__doc__": kind.__doc__}
        )
        values = recipe.part(kind) if part in TASK_PARTS else getattr(recipe, part)
        shell_parts.append((part, shell_kind, field(default=shell_kind(**vars(values)))))
    namespace = {**unchecked, "__doc__": Recipe.__doc__}
    shell_recipe = make_dataclass("Recipe", shell_parts, bases=(Recipe,), frozen=True, namespace=namespace)
    plain = {name: value for name, value in vars(recipe).items() if name not in PARTS}
    return shell_recipe(**plain)


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
    selected = [line for name in ("help", *common) for line in options[name]]
    footer = f"{HELP_ALL} shows the other {len(options) - len(common) - 1} options, grouped by what they set."
    return "".join([head, lines[0], *selected, lines[-1], footer])


def rows_and_columns(img_size: Sequence[int]) -> tuple[int, int]:
    """Read --img-size, one side or rows and columns. Raises UserError for more numbers."""
    if not 1 <= len(img_size) <= 2:
        raise UserError(f"--img-size is one side, or rows and columns, got {len(img_size)} numbers.")
    return img_size[0], img_size[-1]


def readable_folder(data: str, *parts: str) -> Path:
    """`runs/` and a name made of these parts; the same command always gets the same folder, so that it resumes."""
    source = Path(data.partition("?")[0]).name  # torchvision:CIFAR10?root=... has its folder behind the mark
    words = (re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in (source, *parts))
    return Path("runs") / "-".join(word for word in words if word)


def announce(what: str, folder: str, time: str = "The time left follows from the first steps.") -> None:
    """Print on stderr what a command trains, where the results go, and what is known of the time.

    This comes first: importing torch and listing images take seconds. Of processes that train together, one prints it.
    """
    if os.environ.get("RANK", "0") == "0" and SAID_IN not in os.environ:
        lines = (f"{what}.", f"Results: {folder}. {time}")
        print("\n".join(map(printable, lines)), file=sys.stderr, flush=True)


def expected_folder(out: Path | None, data: str, *parts: str) -> str:
    """Name the folder of the results before the images are listed; an empty part is the base that fits them."""
    if out is not None:
        return str(out)
    usual = DIGITS.base if data == "digits" else "MODEL"
    folder = str(readable_folder(data, *(part or usual for part in parts)))
    return folder if all(parts) or data == "digits" else f"{folder}, where MODEL is what fits the images"


def note(message: str) -> None:
    """Print a line on stderr that is not an error."""
    print(f"note: {message}", file=sys.stderr)
