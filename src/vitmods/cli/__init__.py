"""The shell: `vitmods COMMAND`. This file only finds the command, so that `vitmods --help` needs no heavy import."""

from __future__ import annotations

import errno
import importlib
import os
import shlex
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vitmods import __version__
from vitmods.util.address import check_spelling
from vitmods.util.errors import UserError, said
from vitmods.util.files import lenient_output, remedy
from vitmods.util.text import printable

COMMANDS = {
    "compare": "train a base ViT and changed ones with paired seeds; say which change helps and what it costs",
    "improve": "a better model out of a folder of images: try, confirm, train on all, write",
    "base": "train base alone, as the reference of later studies next to it; report its spread, curve and time",
    "train": "train one arm with one seed",
    "pretrain": "train one arm without labels, by DINO or another task",
    "finetune": "adapt trained weights to other images: all of them, or attention alone",
    "analyse": "look inside models: the figures of the papers, with numbers and captions",
    "evaluate": "evaluate trained weights: accuracy, calibration, few-shot, corruptions",
    "predict": "name the classes of images by a trained model, with probabilities",
    "report": "rebuild results and report.html from a study's folder",
    "evidence": "what several studies show together: each change by data set, and on other data sets",
    "decide": "verdicts on scores of your own, from a CSV file: arm, seed, score",
    "changes": "list the design changes: paper, what they preserve, cost, published gain",
    "paper": "list published tables, show one, run it again on your own images: paper show, paper run",
    "recipes": "list the recipes: paper, data, expected number",
    "recipe": "show a recipe resolved for a data set: steps, learning rates, augmentation",
    "diff": "show what an arm alters in a model, without training",
    "data": "check a folder of images and show what was found; `data pack`: write it as shards",
    "bench": "speed and memory of models side by side, paired and interleaved",
    "export": "write a model for other programs: torch, ONNX, safetensors, or a folder for the Hub",
}

ELSEWHERE = {
    "analyse": "vitmods.analysis.command:main",
    "decide": "vitmods.cli.report:decide_scores",
    "diff": "vitmods.cli.changes:show_diff",
    "paper": "vitmods.papers.command:main",
    "pretrain": "vitmods.cli.train:pretrain",
    "recipes": "vitmods.cli.recipe:list_recipes",
}
"""commands that are not the `main` of a file of this package"""

HELP = """\
usage: vitmods COMMAND [OPTIONS]

Which published design change helps a Vision Transformer on your images, and
what does it cost?

commands:
{commands}

options:
  -h, --help  this text, or with a command its main options and examples
  --help-all  with a command: every option with its default; with --task TASK
              also those of a task
  --version   print the version
  --tyro-print-completion SHELL
              print what completes commands and options in bash, zsh or fish
              (docs/cli.md)
  --debug     with any command: show the full traceback of an error
  --plugin M  with any command: import the module or file M first, which adds
              norms, changes, tasks and more; may be given several times

examples:
  vitmods compare     # handwritten digits, no download, a few minutes
  vitmods compare --data path/to/images --arms dpn rms dpn+rms --seeds 5
  vitmods data path/to/images
"""

COMPLETION = "--tyro-print-completion"
USAGE, INTERRUPTED = 2, 130
INSTALL = {"torch": "pip install torch, or the build for your GPU from https://pytorch.org/get-started/locally"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (a trial failed), 2 (an error, on stderr), 130 (stopped)."""
    with lenient_output(), ending_cleanly():
        return _run(list(sys.argv[1:] if argv is None else argv))


class Terminated(KeyboardInterrupt):
    """A process manager's signal, outside of the loops that answer one (`vitmods.train.interrupt`)."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.exit_code = 128 + signum


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does, also in its first seconds; but for one of several
    processes, for which what started them speaks."""
    is_main = threading.current_thread() is threading.main_thread() and "RANK" not in os.environ
    numbers = [signal.SIGTERM, signal.SIGHUP] if is_main else []
    before = {number: signal.SIG_DFL for number in numbers if signal.getsignal(number) is signal.SIG_DFL}

    def stop(signum: int, frame: FrameType | None) -> None:
        for number in before:  # a second one does not cut off the answer to the first
            signal.signal(number, signal.SIG_IGN)
        raise Terminated(signum)

    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(arguments: list[str]) -> int:
    typed, arguments = arguments, [argument for argument in arguments if argument != "--debug"]
    plugins: list[str] = []
    for place in reversed([i for i, word in enumerate(arguments) if word.split("=")[0] == "--plugin"]):
        name = arguments.pop(place).partition("=")[2] or (arguments.pop(place) if place < len(arguments) else "")
        plugins.insert(0, name)
    try:
        for word in arguments:
            check_spelling(word.partition("=")[2] if word.startswith("--") else word)
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:2], "--help"]
        if not arguments or arguments[0] in ("-h", "--help"):
            rows = []
            for name, summary in COMMANDS.items():
                rows += textwrap.wrap(summary, 80, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12)
            print(HELP.format(commands="\n".join(rows)), end="", flush=True)
            return 0
        if arguments[0] == "--version":
            print(f"vitmods {__version__}")
            return 0
        if arguments[0] == COMPLETION:
            from vitmods.cli.options import print_completion

            print_completion({name: _options_of(name) for name in COMMANDS}, arguments)
        if plugins:
            from vitmods.util.registry import load_plugins

            load_plugins(plugins)
        command = find_command(arguments[0])
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _print_error(f"warning: {message}")
            code = command(arguments[1:])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        message = f"Stopped. What was done is saved; to resume: {shlex.join(['vitmods', *typed])}"
        if not said(message):
            _print_error(f"\n{message}")
        return getattr(stop, "exit_code", INTERRUPTED)
    except SystemExit as stop:  # tyro's, after help or an error that it printed
        return int(stop.code or 0)
    except Exception as error:
        if "--debug" in typed:
            raise
        message = _explain(error)
        if not said(message, getattr(error, "repeats", False)):  # by another process of the same training
            _print_error(f"vitmods {arguments[0] if arguments else ''}: {message}")
        return USAGE


def find_command(name: str) -> Callable[[Sequence[str]], int]:
    """Import a command: a function of its arguments that returns the exit code. Raises UserError for unknown names."""
    if name not in COMMANDS:
        from vitmods.cli.slips import unknown_command

        raise UserError(unknown_command(name, COMMANDS))
    module, _, function = ELSEWHERE.get(name, f"vitmods.cli.{name}:main").partition(":")
    return getattr(importlib.import_module(module), function)


def _options_of(command: str) -> type[Any]:
    """Return the class of a command's options."""
    name = {"diff": "DiffOptions", "paper": "List", "recipe": "Show"}.get(command, command.capitalize())
    return getattr(sys.modules[find_command(command).__module__], name)


def _explain(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"The name {str(error.filename)[:60]}... is too long for this system: give a shorter one."
    if isinstance(error, OSError) and error.errno and error.filename:
        return f"Cannot use {printable(str(error.filename))}: {remedy(error)}."
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("vitmods"):
        package = error.name.partition(".")[0]
        if package in INSTALL:
            return f"The package {package} is not installed: {INSTALL[package]}"
        return f"The module {error.name} cannot be imported: install its package, or add its folder to PYTHONPATH."
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}\nThis was not foreseen; with --debug the command shows where it happened."


def _print_error(text: str) -> None:
    """Print on stderr, without the control characters of names in the text."""
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr)
