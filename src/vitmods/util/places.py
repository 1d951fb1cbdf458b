"""Paths of this machine in what others will read: they say nothing to them, and may say too much."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

_BEFORE = r"(?:--?[\w-]+=)?(?:\w[\w+-]*:(?!//))*"  # an option, and kinds of data as of imagenet:/data/x
_ROOT = r"(?:(?:file|local)://)?(?:~[\w.-]*|\.{1,2})?/"
_IN_TEXT = re.compile(rf"(?<![\w.:/~-])({_BEFORE}){_ROOT}(?:[^\s'\",)]*/)*([^\s'\",)/]+)/?")
_QUOTED = re.compile(rf"(['\"])({_BEFORE})({_ROOT}(?:(?!\1)[^\n])*)\1")
_ALONE = re.compile(rf"({_BEFORE})({_ROOT}.*)", re.DOTALL)


def without_places(text: str) -> str:
    """Paths in a text as `path/to/NAME`; one with blanks where it is quoted."""
    text = _QUOTED.sub(lambda found: f"{found[1]}{found[2]}{_named(found[3])}{found[1]}", text)
    return _IN_TEXT.sub(r"\1path/to/\2", text)


def without_place(value: Any) -> Any:
    """The same of a value that may be one path, blanks and all; of what lists and dictionaries hold; others stay."""
    if isinstance(value, str):
        alone = _ALONE.fullmatch(value)
        return alone[1] + _named(alone[2]) if alone else without_places(value)
    if isinstance(value, dict):
        return {name: without_place(one) for name, one in value.items()}
    return [without_place(one) for one in value] if isinstance(value, list | tuple) else value


def public_command(command: str, leave_out: Sequence[str] = ()) -> str:
    """A command of this library, or Python's, with its paths as `path/to/NAME`.

    leave_out: options of a command that are left out with their values
    """
    try:
        words = shlex.split(command) if command.startswith("vitmods ") else None
    except ValueError:
        words = None
    if words is None:
        return without_places(command)
    kept = [
        word
        for word, before in zip(words, ["", *words], strict=False)
        if not {word.partition("=")[0], before} & set(leave_out)
    ]
    return shlex.join(map(without_place, kept))


def _named(path: str) -> str:
    name = path.rstrip("/").rpartition("/")[2]
    return f"path/to/{name}" if name not in ("", ".", "..", "~") else path
