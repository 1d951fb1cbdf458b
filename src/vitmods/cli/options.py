"""Reading a command's options with tyro, and the options that several commands share."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from vitmods.cli.slips import refusal, what_is
from vitmods.recipes import TASK_PARTS, Recipe
from vitmods.recipes.recipe import PARTS, check_fields, fields_by_name
from vitmods.recipes.registry import parse_recipe
from vitmods.study.cells import ImageOptions
from vitmods.study.defaults import DIGITS, RecipeChoice
from vitmods.util.errors import SAID_IN, UserError
from vitmods.util.files import expand_user
from vitmods.util.text import listing, printable

T = TypeVar("T")
HELP_ALL = "--help-all"
STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)


def _join_lines_of_help() -> None:
    """Let tyro's help fill lines: it keeps a docstring's break before an indented line. Without effect if a version of
    tyro reads docstrings elsewhere."""
    module: Any = sys.modules.get("tyro._docstrings")
    if read := getattr(module, "parse_docstring_from_object", None):
        module.parse_docstring_from_object = lambda kind: {
            name: " ".join(text.split()) for name, text in read(kind).items()
        }


_join_lines_of_help()


@dataclass(frozen=True)
class _Source:
    data: str = "digits"
    """digits, clothes, a folder of class folders or shards, a CSV file of labels, torchvision:NAME?root=FOLDER,
    hf:NAME, or wds:SHARDS"""
    task: str = "classification"
    """what is learned: classification (one class an image), multilabel (any number of labels), or another task
    (docs/tasks.md)"""


@dataclass(frozen=True)
class DataOptions(ImageOptions, _Source):
    """The images. Defaults of the other options follow from them."""


def parse(kind: type[T], arguments: Sequence[str], command: str, common: str = "") -> T:
    """Parse the options of `command`. Exits as tyro does: 0 after --help, 2 after an error, which it prints.

    common: the options that --help shows; --help-all shows all but those of other tasks. Empty: --help shows all. A
        first word that is not an option is the folder of --data, for commands that have it.
    """
    has_images = "dataset" in getattr(kind, "__dataclass_fields__", ())
    if has_images and arguments and not arguments[0].startswith("-"):
        if any(word.partition("=")[0] == "--data" for word in arguments):
            raise UserError(f"The images are given twice: '{arguments[0]}' and --data.")
        known = {each.name.replace("_", "-") for each in fields(kind)}  # type: ignore[arg-type]
        if not os.path.exists(arguments[0]) and (hint := what_is(arguments[0], known)):
            raise UserError(f"The first word is the folder of the images, and {hint}")
        arguments = ["--data", *arguments]
    shows_all, shows_common = HELP_ALL in arguments, bool(common and {"-h", "--help"} & set(arguments))
    hidden = _read_by_other_tasks(kind, arguments, shows_all) if shows_all or shows_common else ()
    shell_kind, options_of_recipe = _for_shell(kind, arguments, hidden)
    with_help = ["--help" if word == HELP_ALL else word for word in arguments]
    cli = partial(tyro.cli, shell_kind, args=with_help, prog=f"vitmods {command}", config=STYLE)
    if shows_all or not shows_common:
        try:
            with redirect_stderr(io.StringIO()):
                options = dict(vars(cli()))
        except SystemExit as stop:
            if stop.code:
                # Again where nothing is drawn: tyro's boxes and colors follow the encoding and the terminal of stdout.
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as box, suppress(SystemExit):
                    cli()
                raise UserError(refusal(box.getvalue(), command, _names_of_options(cli))) from None
            if hidden:
                print(f"`vitmods {command} --task TASK {HELP_ALL}` also shows what only that task and metrics read:")
                print(f"{listing(['classification', *sorted(TASK_PARTS)], 'or')}.")
            raise
        if options_of_recipe is not None:
            training = options["training"]
            words = {word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
            overrides = {
                name: getattr(getattr(training, part) if part else training, leaf)
                for name, (part, leaf, _) in fields_by_name().items()
                if name in words or f"no_{name}" in words
            }
            options["training"] = RecipeChoice(options["recipe"], overrides)
        if has_images:
            _check_place(options["dataset"].data)
        paths = {name: value for name, value in options.items() if isinstance(value, Path) and str(value)[0] == "~"}
        return kind(**options | {name: expand_user(path) for name, path in paths.items()})
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


def _names_of_options(cli: Callable[..., Any]) -> set[str]:
    """The options of a command, as its help names them, without dashes."""
    with redirect_stdout(io.StringIO()) as text, suppress(SystemExit):
        cli(args=["--help"])
    # An option begins its line, but for a box and a short form; an indented one is in the text of another.
    return set(re.findall(r"^[^\w-]{0,2}(?:-\w, )?--([a-z][\w-]*)", text.getvalue(), re.MULTILINE))


def _check_place(data: str) -> None:
    """Raise UserError for a folder of images that does not exist, before anything is printed or imported for it."""
    if data != DataOptions.data and ":" not in data and not os.path.exists(expand_user(data)):
        from vitmods.data.sources import SOURCES, open_source

        if data not in SOURCES:
            open_source(data)


def print_completion(kinds: Mapping[str, type[Any]], arguments: Sequence[str]) -> None:
    """Print what tyro writes for a shell, the last argument, to complete the commands and options of `vitmods`. Exits.

    kinds: command -> the class of its options

    Raises UserError for another shell.
    """
    if arguments[-1] not in ("bash", "zsh", "fish"):
        raise UserError(f"{arguments[0]} needs the name of a shell: bash, zsh or fish.")
    commands = [Annotated[_for_shell(kind, ())[0], tyro.conf.subcommand(name)] for name, kind in kinds.items()]
    either: Any = reduce(or_, commands)
    tyro.cli(either, args=arguments, prog="vitmods", config=STYLE)


def _value_of(option: str, arguments: Sequence[str], usual: str) -> str:
    return next(iter(re.findall(rf"{option}(?:=|\0)([^\0]*)", "\0".join(arguments))), usual)


def _read_by_other_tasks(kind: type[Any], arguments: Sequence[str], named: bool) -> Collection[str]:
    """List the fields of a recipe that the task of --task does not read; without one, or if it does not matter, those
    that only some tasks read, and the protocols of metrics."""
    if "training" not in kind.__dataclass_fields__:
        return ()
    usual = getattr(kind.__dataclass_fields__["dataset"].default, "task", "")
    if named and (task := _value_of("--task", arguments, usual)):
        from vitmods.tasks.base import TASKS

        return TASKS[task].ignored_fields()
    return {"protocols", *(name for name, (part, *_) in fields_by_name().items() if part in TASK_PARTS)}


def _for_shell(kind: type[Any], arguments: Sequence[str], hidden: Collection[str] = ()) -> tuple[type[Any], Any]:
    """Return a command's class as tyro reads it, and the options of training in it, if it has them.

    hidden: fields of the recipe, and of the class, that --help leaves out.
    """
    if "training" not in kind.__dataclass_fields__:
        return kind, None
    options = _training_options(arguments, hidden)
    training = ("training", type(options), field(default=options))
    return _derived(kind, [training, *_suppressed(kind, hidden)], kw_only=True), options


def _training_options(arguments: Sequence[str], hidden: Collection[str]) -> Any:
    """Return a Recipe as the shell reads it, with the values of --recipe for --help, and the parts of all tasks.

    Fields are checked one by one: which recipe they override may follow from the data, so it is not known yet.
    """
    recipe = Recipe()
    with suppress(UserError):  # reported when the options are read
        recipe = parse_recipe(_value_of("--recipe", arguments, "default"), like=recipe)
    shell_parts, hidden_in = [], defaultdict[str, list[str]](list)
    for part, leaf, _ in (place for name, place in fields_by_name().items() if name in hidden):
        hidden_in[part].append(leaf)
    for part, kind in {**PARTS, **TASK_PARTS}.items():
        shell_kind = _derived(kind, _suppressed(kind, hidden_in[part]), __post_init__=check_fields)
        values = recipe.part(kind) if part in TASK_PARTS else getattr(recipe, part)
        shell_parts.append((part, shell_kind, field(default=shell_kind(**vars(values)))))
    shell_recipe = _derived(Recipe, [*shell_parts, *_suppressed(Recipe, hidden_in[""])], __post_init__=check_fields)
    plain = {name: value for name, value in vars(recipe).items() if name not in PARTS}
    return shell_recipe(**plain)


def _suppressed(kind: type[Any], names: Collection[str]) -> list[Any]:
    """Declare fields of a dataclass once more, for `_derived`, without a place in the help."""
    chosen = [item for item in fields(kind) if item.name in names]
    hints = get_type_hints(kind, include_extras=True) if chosen else {}
    return [
        (item.name, Annotated[hints[item.name], tyro.conf.Suppress],
         field(default=hints[item.name]() if item.default is MISSING else item.default))
        for item in chosen
    ]  # fmt: skip


def _derived(kind: type[Any], fields: Iterable[Any], kw_only: bool = False, **methods: Any) -> type[Any]:
    """Make a dataclass with more fields. It passes as a built-in class, whose source tyro does not search for comments:
    that is tyro's slowest step."""
    namespace = {"__doc__": kind.__doc__, **methods}
    made = make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True, kw_only=kw_only, namespace=namespace)
    made.__module__ = "builtins"
    return made


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
    selected = [_with_plain_values(line) for name in ("help", *common) for line in options[name]]
    footer = f"{HELP_ALL} shows the other {len(options) - len(common) - 1} options, grouped by what they set."
    selected = [line for line in selected if line.strip("│ \n")]
    return "".join([head, lines[0], *selected, lines[-1], footer])


_VALUES = (
    (r"(?:\{None\}\|)?\{?\[(\w+) \[\1 \.\.\.\]\]\}?", r"\1 ..."),
    (r"\{None\}\|(\w+)", r"\1"),
    (r"\(default: \)", ""),
)


def _with_plain_values(line: str) -> str:
    """Write `{None}|{[INT [INT ...]]}`, the values of an option, as `INT ...`, and leave out an empty default."""
    for pattern, plain in _VALUES:
        if match := re.search(pattern, line):
            line = line.replace(match[0], match.expand(plain).ljust(len(match[0])))
    return line


def rows_and_columns(img_size: Sequence[int]) -> tuple[int, int]:
    """Read --img-size, one side or rows and columns. Raises UserError for more numbers."""
    if not 1 <= len(img_size) <= 2:
        raise UserError(f"--img-size is one side, or rows and columns, got {len(img_size)} numbers.")
    return img_size[0], img_size[-1]


def with_key(source: str | None, key: str | None) -> str | None:
    """Return a checkpoint's name with the key of the model in it. UserError for a key without a checkpoint."""
    if key is not None and source is None:
        raise UserError("--key names one of several models in the file of --from: give that.")
    return source if key is None else f"{source}{',' if '?' in str(source) else '?'}key={key}"


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
