"""Changes as the shell writes them: ``dpn``, ``placement(attn=post,mlp=pre+post)``, joined by +."""

import dataclasses
import typing
from typing import Any

from vitmods.changes.base import REGISTRY, Change
from vitmods.changes.lineups import LINEUPS, refuse_lineup
from vitmods.util.errors import UserError, nearest
from vitmods.util.shorthand import read_settings, split_form


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
    form = split_form(text)
    if form is None:
        raise UserError(f"'{text}' is not a change. Write its short name, as in 'dpn' or 'dpn(before=false)'.")
    name, inside = form[0].lower(), form[1]
    known = _known()
    if name not in known:
        refuse_lineup(name)
        hint = nearest(name, [*known, *LINEUPS])
        raise UserError(f"There is no change '{name}'. {hint} `vitmods changes` lists all.")
    kind, fields = known[name]
    hints = typing.get_type_hints(kind)
    types = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return kind(**fields | read_settings(kind.name, "change", inside, types))
