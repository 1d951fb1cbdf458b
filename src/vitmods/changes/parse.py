"""Changes as the shell writes them: ``dpn``, ``placement(attn=post,mlp=pre+post)``, joined by +."""

from collections.abc import Mapping
from typing import Any

from vitmods.changes.base import REGISTRY, Change
from vitmods.util.errors import UserError, unknown
from vitmods.util.shorthand import split_form, split_outside


def parse_changes(text: str) -> tuple[Change, ...]:
    """The changes that a short form names, in order; "" and "base" name none.

    Raises UserError on an unknown change, field or value, naming the nearest known one.
    """
    text = text.strip()
    if text in ("", "base"):
        return ()
    return tuple(_parse_one(part) for part in split_outside(text, "+"))


def _parse_one(text: str) -> Change:
    form = split_form(text)
    if form is None:
        raise UserError(f"'{text}' is not a change. Write its short name, as in 'dpn' or 'dpn(before=false)'.")
    name, inside = form[0].lower(), form[1]
    if name in REGISTRY:
        return REGISTRY[name].from_settings(inside)
    kinds: dict[str, tuple[type[Change], Mapping[str, Any]]] = {}
    for kind in REGISTRY.values():
        kinds |= {short: (kind, values) for short, values in kind.short_forms.items()}
        if name in kinds:
            return kind.from_settings(inside, **kinds[name][1])
    raise unknown("change", name, [*REGISTRY, *kinds], REGISTRY.words, REGISTRY.advice)
