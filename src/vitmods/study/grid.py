"""Grids of recipe settings that a study tunes, and their points."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from itertools import product
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from vitmods.recipes.recipe import fields_by_name, tupled
from vitmods.util.errors import UserError, nearest
from vitmods.util.shorthand import split_outside

_PART = re.compile(r".+:(train|val|test)(&.*)?")  # of an option of images, FOLDER?splits=a:train,b:test
_BRIEF = 20  # characters of a model's options that are shown wherever its name is


@dataclass(frozen=True)
class Point:
    """Values of recipe fields, in the order of the grid; without any, the recipe as it is."""

    values: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """Write it as on the command line; long options of a model become a short hash."""
        texts = []
        for name, value in self.values:
            model, mark, options = (text := show_value(value)).partition("?")
            if mark and len(options) > _BRIEF:
                text = f"{model}?…{sha256(options.encode()).hexdigest()[:4]}"
            texts.append(f"{name}={text}")
        return ",".join(texts)

    @property
    def spelled(self) -> str:
        """The same with all options of models."""
        return ",".join(f"{name}={show_value(value)}" for name, value in self.values)

    def __bool__(self) -> bool:
        return bool(self.values)

    def to_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self.values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Point:
        return cls(tuple((name, tupled(value)) for name, value in values.items()))


AS_IS = Point()


@dataclass(frozen=True)
class Grid:
    """Recipe fields and the values that each may take; its points are their product, the last field fastest.

    Without fields it has one point, the recipe as it is: a study that tunes nothing.
    """

    fields: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.fields)

    @property
    def points(self) -> tuple[Point, ...]:
        names = [name for name, _ in self.fields]
        return tuple(Point(tuple(zip(names, chosen))) for chosen in product(*(values for _, values in self.fields)))

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the JSON form."""
        return {name: [Point(((name, value),)).to_dict()[name] for value in values] for name, values in self.fields}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Sequence[Any]]) -> Grid:
        return cls(tuple((name, tuple(map(tupled, values))) for name, values in fields.items()))


UNTUNED = Grid()


def make_grid(values: Grid | Mapping[str, Any] | Iterable[str], option: str = "--tune") -> Grid:
    """Read fields and the values of each: a mapping field -> value or values, or the shell's `FIELD=VALUE,VALUE`.

    A value has the type of its field, or is the text of one. With the option `--sweep`, `base` and `limit_train` (a
    number of images, or a fraction of them) are fields too.

    Raises:
        UserError: a field that recipes do not have, or a value that is not of the field's type or is listed twice.
    """
    if isinstance(values, Grid):
        return values
    if isinstance(values, Mapping):
        return Grid(tuple((name, _read_values(name, listed, option)) for name, listed in values.items()))
    texts: dict[str, list[str]] = {}
    for text in values:
        name, sign, listed = text.partition("=")
        name = name.strip().replace("-", "_")
        if not (sign and name and listed.strip()):
            raise UserError(f"{option} takes FIELD=VALUE,VALUE,... as lr=1e-4,3e-4,1e-3, not '{text}'.")
        if name in texts:
            raise UserError(f"{option} names {name} twice: list all of its values once, {name}=VALUE,VALUE,...")
        texts[name] = []
        for value in split_outside(listed, ","):
            if texts[name] and "splits=" in texts[name][-1] and _PART.fullmatch(value):
                texts[name][-1] += f",{value}"
            else:
                texts[name].append(value)
    return make_grid(texts, option)


def _read_values(name: str, listed: Any, option: str) -> tuple[Any, ...]:
    listed = tuple(listed) if isinstance(listed, Iterable) and not isinstance(listed, str) else (listed,)
    if not listed:
        raise UserError(f"{option} {name} needs at least one value.")
    types = {field: kind for field, (_, _, kind) in fields_by_name().items()}
    if option == "--sweep" and name == "data":
        from vitmods.data.sources import each_set

        values: tuple[Any, ...] = tuple(part for spec in listed for part in each_set(str(spec)))
    elif option == "--sweep" and name == "base":
        values = tuple(map(str, listed))
    elif option == "--sweep" and name == "limit_train":
        try:
            numbers = tuple(float(Fraction(value)) for value in listed)  # also the text 1/16
        except (TypeError, ValueError, ZeroDivisionError):
            numbers = (0.0,)
        if not all(0 < value <= 1 or value == int(value) > 1 for value in numbers):
            raise UserError(
                f"limit_train is a number of images, or a fraction of them up to 1, not {show_value(listed)}."
            )
        values = tuple(value if value <= 1 else int(value) for value in numbers)
    elif name not in types:
        raise UserError(f"Recipes do not have the field {name!r}. {nearest(name, types)}")
    else:
        try:
            values = tuple(_read(types[name], value) for value in listed)
        except (TypeError, ValueError):
            text = ", ".join(map(repr, listed))
            raise UserError(f"{name} is {_called(types[name])}, not {text}.") from None
    for value in values:
        if values.count(value) > 1:
            raise UserError(f"{name}={show_value(value)} is listed twice: list every value once.")
    return values


def read_value(name: str, text: str) -> Any:
    """Read the text of a recipe field's value. Raises UserError as `make_grid`."""
    return _read_values(name, [text], "")[0]


def choose(scores: Mapping[Point, Mapping[int, float | None]], higher_is_better: bool = True) -> Point:
    """The point with the best mean over the seeds; the first of equal ones.

    Args:
        scores: point -> seed -> the metric on validation, None where the trial diverged. A point with fewer diverged
            trials is better than one with more, whatever its mean.
        higher_is_better: of the metric.
    """
    sign = -1 if higher_is_better else 1

    def worth(point: Point) -> tuple[int, float]:
        values = list(scores[point].values())
        mean = mean_of(values)
        return values.count(None), 0.0 if mean is None else sign * mean

    return min(scores, key=worth)


def mean_of(scores: Iterable[float | None]) -> float | None:
    """Average the scores that are not None; None without any."""
    finite = [score for score in scores if score is not None]
    return math.fsum(finite) / len(finite) if finite else None


def _read(kind: Any, value: Any) -> Any:
    """Convert a value, or its text, to a type. Raises ValueError or TypeError."""
    options = get_args(kind)
    if NoneType in options:
        (kind,) = (option for option in options if option is not NoneType)
        return None if value in (None, "none") else _read(kind, value)
    if get_origin(kind) is Literal:
        return options[options.index(value)]
    if get_origin(kind) is tuple:
        parts = value.split(":") if isinstance(value, str) else tuple(value)
        kinds = options[:1] * len(parts) if options[-1] is Ellipsis else options
        return tuple(_read(*pair) for pair in zip(kinds, parts, strict=True))
    if kind is bool:
        return bool(("false", "true").index(str(value).lower()))
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise TypeError
    return kind(value)


def _called(kind: Any) -> str:
    """A type in words: `a number`, `adamw or sgd or lamb`."""
    options = get_args(kind)
    if kind is bool:
        return "true or false"
    if get_origin(kind) is Literal:
        return " or ".join(map(str, options))
    if get_origin(kind) is tuple:
        return "numbers with : between them"
    if options:
        return " or ".join("none" if option is NoneType else _called(option) for option in options)
    return {int: "a whole number", float: "a number"}.get(kind, "a word")


def show_value(value: Any) -> str:
    """Write a value as on the command line."""
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return ":".join(map(show_value, value))
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
