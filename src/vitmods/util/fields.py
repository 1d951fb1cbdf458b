"""Check the values of a frozen dataclass against the types of its fields."""

from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from vitmods.util.errors import UserError, nearest

_KINDS = {bool: (bool, "True or False"), int: (Integral, "a whole number"), float: (Real, "a finite number")}
_LARGEST = 2**31  # of sizes and counts, so that products of some fit


def check_types(config: Any) -> None:
    """Raise UserError for a field of a description whose value is of another type than its own, or outside its choices.
    Types other than numbers, booleans, strings, choices and parts are not checked."""
    for name, (kinds, words, choices, usual) in _types(config.__class__).items():
        value = getattr(config, name)
        if type(value) in usual and not (isinstance(value, int | float) and not abs(value) < _LARGEST):
            continue  # at once: to ask for a Real takes ten times longer
        if choices:
            if value not in choices:
                raise UserError(f"{name} cannot be '{value}'. {nearest(str(value), map(str, choices))}")
            continue
        number = isinstance(value, Real) and not isinstance(value, bool)
        fits = isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
        if not fits or (number and not abs(value) < _LARGEST):
            below = f" below {_LARGEST:,}" if number and isinstance(value, Integral) else ""
            raise UserError(f"{name} of a {type(config).__name__} is {words}{below}, not {str(value)[:60]!r}.")


_Types = dict[str, tuple[tuple[type, ...], str, tuple[str, ...], frozenset[type]]]


@cache
def _types(config: Any) -> _Types:
    """Classes, words and choices of each field, and the built-in classes of usual values."""
    types: _Types = {}
    for field in fields(config):
        if get_origin(field.type) is Literal:
            types[field.name] = ((), "", get_args(field.type), frozenset())
            continue
        options = [kind for kind in get_args(field.type) or (field.type,) if isinstance(kind, type)]
        if options and field.name not in ("img_size", "patch_size", "options", "reference"):
            kinds, words = zip(*(_KINDS.get(kind, (kind, kind.__name__)) for kind in options if kind is not NoneType))
            none = (NoneType,) if NoneType in options else ()
            usual = {*options, int} if float in options else {*options}
            types[field.name] = (
                (*kinds, *none), " or ".join([*words, *("None" for _ in none)]), (), frozenset(usual)
            )  # fmt: skip
    return types
