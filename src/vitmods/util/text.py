"""Counts, times and sizes in words, text that is safe to display, and text without the paths of this machine."""

from __future__ import annotations

import html
import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


class Printed:
    """A notebook shows what `print` does."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def plural(count: int, singular: str, many: str | None = None) -> str:
    """Format a count with its noun: `1 seed`, `3 seeds`."""
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"


def listing(parts: Sequence[str], last: str = "and") -> str:
    """Join words: `a, b and c`; `last` is the word before the last."""
    return f" {last} ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 2 else parts)


def first_of(names: Sequence[str], shown: int = 5) -> str:
    """Join the first of several words: `a, b, c and 4 more`."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to `recipe.optimizer.lr` -> value."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: list(value) if isinstance(value, tuple) else value}
    return {
        name: leaf
        for key, inner in value.items()
        for name, leaf in flatten(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def about(count: float) -> int:
    """Round to two digits, as an estimate deserves: 16942 to 17000."""
    return int(float(f"{count:.2g}"))


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Group (name, text) pairs as text -> names."""
    names_by_text: dict[str, list[str]] = {}
    for name, text in pairs:
        names_by_text.setdefault(text, []).append(name)
    return names_by_text


def duration(seconds: float) -> str:
    """Format an estimated time: `40 s`, `12 min`, `3.5 h`, `9 days`."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 72 * 3600 else f"{seconds / 86400:,.0f} days"


def size(count: float) -> str:
    """Format bytes: `0.3 MB`, `64 MB`, `69 GB`."""
    return f"{count / 1e9:,.3g} GB" if count >= 0.9995e9 else f"{count / 1e6:,.3g} MB"


def printable(name: str) -> str:
    """A name that any terminal, table and UTF-8 file can take: bytes that are not text, and what moves the cursor, ends
    a line or turns the direction of writing, become backslash codes."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], name)


def single_line(text: str) -> str:
    """Replace control characters, which could move the cursor of a terminal, by spaces."""
    return "".join(" " if unicodedata.category(char) in ("Cc", "Cf") else char for char in text)


def no_formula(cell: Any) -> Any:
    """Text that a spreadsheet would run gets an apostrophe in front, as spreadsheets mark text; numbers stay."""
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


_BEFORE = r"(?:--?[\w-]+=)?(?:\w[\w+-]*:(?!//))*"  # an option, and kinds of data as of imagenet:/data/x
_ROOT = r"(?:(?:file|local)://)?(?:~[\w.-]*|\.{1,2})?/"
_IN_TEXT = re.compile(rf"(?<![\w.:/~-])({_BEFORE}){_ROOT}(?:[^\s'\",)]*/)*([^\s'\",)/]+)/?")
_QUOTED = re.compile(rf"(['\"])({_BEFORE})({_ROOT}(?:(?!\1)[^\n])*)\1")
_ALONE = re.compile(rf"({_BEFORE})({_ROOT}.*)", re.DOTALL)


def without_places(text: str) -> str:
    """Replace the paths in a text by `path/to/NAME`; paths with blanks only where they are quoted."""
    text = _QUOTED.sub(lambda match: f"{match[1]}{match[2]}{_named(match[3])}{match[1]}", text)
    return _IN_TEXT.sub(r"\1path/to/\2", text)


def without_place(value: Any) -> Any:
    """Replace paths in a value that may be a single path with blanks, and in lists and dictionaries."""
    if isinstance(value, str):
        alone = _ALONE.fullmatch(value)
        return alone[1] + _named(alone[2]) if alone else without_places(value)
    if isinstance(value, dict):
        return {name: without_place(item) for name, item in value.items()}
    return [without_place(item) for item in value] if isinstance(value, list | tuple) else value


def without_folders(name: str) -> str:
    """Return a name as it is, or of a path only its last part."""
    return str(without_place(name)).removeprefix("path/to/")


def public_command(command: str, leave_out: Sequence[str] = ()) -> str:
    """Return a command of vitmods or Python with its paths as `path/to/NAME`.

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
