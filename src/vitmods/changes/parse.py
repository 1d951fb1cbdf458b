"""Changes as the shell writes them: ``dpn``, ``placement(attn=post,mlp=pre+post)``, joined by +."""

import dataclasses
import re
import typing
from typing import Any

from ..errors import UserError, nearest
from .base import REGISTRY, Change
from .lineups import LINEUPS, refuse_lineup


def parse_changes(text: str) -> tuple[Change, ...]:
    """The changes that a short form names, in order; "" and "base" name none.

    Raises UserError on an unknown change, field or value, naming the nearest known one.
    """
    text = text.strip()
    if text in ("", "base"):
        return ()
    return tuple(_parse_one(part) for part in _split(text))


def _split(text: str) -> list[str]:
    """Parts between the plus signs that are outside of parentheses."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if char == "+" and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth:
        raise UserError(f"The parentheses in '{text}' do not match. Write a change as in 'dpn(before=false)+rms'.")
    return [part.strip() for part in parts]


def _known() -> dict[str, tuple[type[Change], dict[str, Any]]]:
    known: dict[str, tuple[type[Change], dict[str, Any]]] = {}
    for name, kind in REGISTRY.items():
        known[name] = (kind, {})
        known |= {short: (kind, dict(fields)) for short, fields in kind.short_forms.items()}
    return known


def _parse_one(text: str) -> Change:
    match = re.fullmatch(r"([\w-]*)\s*(?:\((.*)\))?", text)
    if not match or not match[1]:
        raise UserError(f"'{text}' is not a change. Write its short name, as in 'dpn' or 'dpn(before=false)'.")
    name, inside = match[1].lower(), match[2] or ""
    known = _known()
    if name not in known:
        refuse_lineup(name)
        hint = nearest(name, [*known, *LINEUPS])
        raise UserError(f"There is no change '{name}'. {hint} `vitmods changes` lists all.")
    kind, fields = known[name]
    seen: set[str] = set()
    for item in filter(None, (part.strip() for part in inside.split(","))):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if key in seen:
            raise UserError(f"{kind.name}({key}=...) is given twice: leave one out.")
        seen.add(key)
        fields[key] = _value(kind, key, value if equals else "true")
    return kind(**fields)


def _value(kind: type[Change], key: str, text: str) -> Any:
    types = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    if key not in names:
        hint = nearest(key, names) if names else "It has none."
        raise UserError(f"The change '{kind.name}' has no setting '{key}'. {hint}")
    wanted = next((t for t in typing.get_args(types[key]) if t in (int, float)), types[key])  # of "int | None"
    if wanted is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{kind.name}({key}=...) is true or false, got '{text}'.")
        return text.lower() == "true"
    if wanted in (int, float):
        try:
            return wanted(text)
        except ValueError:
            raise UserError(f"{kind.name}({key}=...) is a number, got '{text}'.") from None
    return text
