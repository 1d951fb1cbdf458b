"""Tuning: every arm is trained with every point of one grid, and evaluated by the point that is best on validation.

The grid is part of the comparison: an arm that were tuned more than base would win by that alone. The test split is
seen once an arm, by the chosen point (as VTAB does, arXiv:1910.04867).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from itertools import product
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from vitmods.recipes.recipe import tupled
from vitmods.util.errors import UserError, nearest

VAL = "val"
_BRIEF = 20  # characters of a model's options that are shown wherever its name is


@dataclass(frozen=True)
class Point:
    """Values of recipe fields, in the order of the grid; without any, the recipe as it is."""

    values: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return ",".join(f"{name}={_brief(show_value(value))}" for name, value in self.values)

    @property
    def spelled(self) -> str:
        """The same with all options of models, which `str` leaves out."""
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
        """As JSON gives it back."""
        return {name: [Point(((name, value),)).to_dict()[name] for value in values] for name, values in self.fields}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Sequence[Any]]) -> Grid:
        return cls(tuple((name, tuple(map(tupled, values))) for name, values in fields.items()))


UNTUNED = Grid()


def make_grid(tune: Mapping[str, Any], tune_on: str | None) -> Grid:
    """The grid that users name: field -> value or values, each of the field's type or its text.

    Raises:
        UserError: a field that a recipe does not have, a value that is none of it or is given twice, or a split that
            nothing may be chosen on.
    """
    _check_split(tune_on, bool(tune))
    return Grid(tuple((name, _values(name, given)) for name, given in tune.items()))


def make_sweep(sweep: Mapping[str, Any], fixed: Mapping[str, Any]) -> Grid:
    """What a study is repeated under: field of the recipe, `base` or `limit_train` -> values. `limit_train` may be a
    fraction of the training images, below 1. UserError as `make_grid`, or where a checkpoint says what base is."""
    return Grid(tuple((name, _settings(name, given, fixed)) for name, given in sweep.items()))


def _settings(name: str, given: Any, fixed: Mapping[str, Any]) -> tuple[Any, ...]:
    if name not in ("base", "limit_train"):
        return _values(name, given)
    listed = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if name == "base":
        if "start" in fixed:
            raise UserError("The checkpoint that training starts from says what base is: it cannot be swept over.")
        return _once(name, tuple(map(str, listed)))
    if fixed.get("limit_train") is not None:
        raise UserError(f"limit_train={fixed['limit_train']} is swept over too: leave one of the two out.")
    try:
        numbers = tuple(float(Fraction(value)) for value in listed)  # of text, 1/16 too
    except (TypeError, ValueError, ZeroDivisionError):
        numbers = (0.0,)
    if not all(0 < value <= 1 or value == int(value) > 1 for value in numbers):
        raise UserError(f"limit_train is a number of images, or a fraction of them up to 1, not {show_value(listed)}.")
    return _once(name, tuple(value if value <= 1 else int(value) for value in numbers))


def grid_from_text(texts: Iterable[str], option: str = "--tune") -> dict[str, tuple[str, ...]]:
    """Read `FIELD=VALUE,VALUE`, e.g. `lr=1e-4,3e-4`. UserError for anything else, naming the option."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not (sign and name and values.strip()):
            raise UserError(f"{option} takes FIELD=VALUE,VALUE,... as lr=1e-4,3e-4,1e-3, not '{text}'.")
        if name in found:
            raise UserError(f"{option} names {name} twice: list all of its values once, {name}=VALUE,VALUE,...")
        found[name] = tuple(value.strip() for value in values.split(","))
    return found


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
    """Of those that there are; None without any."""
    known = [score for score in scores if score is not None]
    return math.fsum(known) / len(known) if known else None


def _check_split(tune_on: str | None, tuned: bool) -> None:
    if not tuned and tune_on is not None:
        raise UserError(f"tune_on={tune_on} without anything to tune: name values too, as --tune lr=1e-4,3e-4,1e-3.")
    if not tuned or tune_on == VAL:
        return
    if tune_on is None:
        raise UserError('Say what the tuned values are chosen on: --tune-on val (tune_on="val").')
    if tune_on == "test":
        raise UserError(
            "Nothing can be chosen on test: the best of several numbers is too good, and the study would report it. "
            "Choose on val: --tune-on val."
        )
    raise UserError(f"Nothing can be chosen on {tune_on!r}, only on the validation split: --tune-on val.")


def _values(name: str, given: Any) -> tuple[Any, ...]:
    from vitmods.recipes.recipe import fields_by_name

    types = {each: kind for each, (_, _, kind) in fields_by_name().items()}
    if name not in types:
        raise UserError(f"A recipe has no field {name!r} to tune. {nearest(name, types)}")
    listed = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    values = tuple(_value(name, types[name], value) for value in listed)
    if not values:
        raise UserError(f"There is no value of {name} to try: give at least one.")
    return _once(name, values)


def _once(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    for value in values:
        if values.count(value) > 1:
            raise UserError(f"{name}={show_value(value)} is to be tried twice: list every value once.")
    return values


def _value(name: str, kind: Any, given: Any) -> Any:
    try:
        return _read(kind, given)
    except (TypeError, ValueError):
        raise UserError(f"{given!r} is no value of {name}, which is {_called(kind)}.") from None


def _read(kind: Any, given: Any) -> Any:
    """`given`, or what its text says, as a `kind`. ValueError or TypeError where it is none."""
    options = get_args(kind)
    if NoneType in options:
        (kind,) = (option for option in options if option is not NoneType)
        return None if given in (None, "none") else _read(kind, given)
    if get_origin(kind) is Literal:
        return options[options.index(given)]
    if get_origin(kind) is tuple:
        parts = given.split(":") if isinstance(given, str) else tuple(given)
        kinds = options[:1] * len(parts) if options[-1] is Ellipsis else options
        return tuple(_read(*pair) for pair in zip(kinds, parts, strict=True))
    if isinstance(given, bool) or (kind is int and isinstance(given, float)):
        raise TypeError
    return kind(given)


def _called(kind: Any) -> str:
    """A type in words: `a number`, `adamw or sgd or lamb`."""
    options = get_args(kind)
    if get_origin(kind) is Literal:
        return " or ".join(map(str, options))
    if get_origin(kind) is tuple:
        return "numbers with : between them"
    if options:
        return " or ".join("none" if option is NoneType else _called(option) for option in options)
    return {int: "a whole number", float: "a number"}.get(kind, "a word")


def _brief(value: str) -> str:
    """A model's name without its options, but for a mark that sets it apart from others of that name."""
    name, asked, options = value.partition("?")
    return f"{name}?…{sha256(options.encode()).hexdigest()[:4]}" if asked and len(options) > _BRIEF else value


def show_value(value: Any) -> str:
    """As it is written on the command line."""
    if value is None:
        return "none"
    return ":".join(map(show_value, value)) if isinstance(value, tuple | list) else str(value).removesuffix(".0")
