"""Settings as the shell writes them in parentheses: `dpn(before=false)`, `augreg(level=light1,warmup_epochs=2)`."""

from __future__ import annotations

import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from vitmods.util.errors import UserError, nearest


def split_form(text: str) -> tuple[str, str] | None:
    """Split `NAME` or `NAME(SETTINGS)` into (name, settings); None for anything else."""
    match = re.fullmatch(r"([\w-]+)\s*(?:\((.*)\))?", text.strip())
    return (match[1], match[2] or "") if match else None


def split_outside(text: str, mark: str) -> list[str]:
    """Split at marks (one character) outside of parentheses. Raises UserError if parentheses do not match."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if char == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth:
        raise UserError(f"The parentheses in '{text}' do not match. Write a change as in 'dpn(before=false)+rms'.")
    return [part.strip() for part in parts]


def read_settings(name: str, kind: str, inside: str, types: Mapping[str, Any]) -> dict[str, Any]:
    """Parse `a=1,b=false` by the types of the settings; a setting without a value is true.

    Args:
        name, kind: of what is set, for errors: `dpn`, `change`.
        inside: the text in the parentheses.
        types: setting -> its type: bool, int, float, anything else a word, each perhaps `| None`; or bool or a word;
            or one number or several, `(4,2,1)`.

    Raises:
        UserError: a setting is unknown (the nearest is named), is given twice, or has a value of another type.
    """
    settings: dict[str, Any] = {}
    for item in filter(None, split_outside(inside, ",")):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if key in settings:
            raise UserError(f"{name}({key}=...) is given twice: leave one out.")
        check_setting(kind, name, key, types)
        settings[key] = _value(f"{name}({key}=...)", types[key], value if equals else "true")
    return settings


def check_setting(kind: str, name: str, setting: str, settings: Collection[str]) -> None:
    """Raise UserError for a setting that a change or recipe does not have, naming the nearest."""
    if setting not in settings:
        hint = nearest(setting, settings) if settings else "It has none."
        raise UserError(f"The {kind} '{name}' does not have the setting '{setting}'. {hint}")


def _value(what: str, kind: Any, text: str) -> Any:
    wanted = next((t for t in typing.get_args(kind) if t in (int, float)), kind)  # of "int | None"
    if bool in typing.get_args(kind) and text.lower() in ("true", "false"):  # of "bool | a word"
        return text.lower() == "true"
    if wanted is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{what} is true or false, got '{text}'.")
        return text.lower() == "true"
    if text.startswith("(") and any(typing.get_origin(t) is tuple for t in typing.get_args(kind)):
        return tuple(
            _value(what, wanted, part) for part in split_outside(text.removeprefix("(").removesuffix(")"), ",")
        )
    if wanted in (int, float):
        try:
            return wanted(text)
        except ValueError:
            raise UserError(f"{what} is a number, got '{text}'.") from None
    return text


def without_options(words: Sequence[str], options: Collection[str]) -> Iterator[str]:
    """Yield the words of a command without these options and their values."""
    is_dropped = False
    for word in words:
        option, equals, _ = word.partition("=")
        if word.startswith("--"):
            is_dropped = option.replace("_", "-") in options
        if not is_dropped:
            yield word
        elif equals:  # its value; what follows is kept
            is_dropped = False
