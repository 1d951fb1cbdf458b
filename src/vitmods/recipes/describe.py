"""What the docstrings of recipes say, for `vitmods recipes`: the functions' own words are the only source."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from vitmods.recipes.recipe import Recipe

_LABELS = ("Paper", "Data", "Model", "Command", "Expected number", "Not stated")
_LABELLED = re.compile(rf"^({'|'.join(_LABELS)}): ", re.MULTILINE)


@dataclass(frozen=True)
class Description:
    """One recipe. Fields that its docstring lacks are empty; `arguments` are as Python writes them."""

    name: str
    summary: str
    paper: str = ""
    data: str = ""
    model: str = ""
    command: str = ""
    expected_number: str = ""
    not_stated: str = ""
    arguments: tuple[str, ...] = ()


def describe(name: str, function: Callable[..., Recipe]) -> Description:
    """What the docstring of a recipe's function says under its labels, each on one line."""
    text = inspect.getdoc(function) or ""
    summary, _, rest = text.partition("\n")
    record: dict[str, str] = {}
    for part in re.split(r"\n\s*\n", rest):
        pieces = _LABELLED.split(part)
        for label, value in zip(pieces[1::2], pieces[2::2], strict=True):
            record[label.lower().replace(" ", "_")] = " ".join(value.replace("`", "").split()).rstrip(".")
    arguments = [
        f"{argument.name}={argument.default}" if argument.default not in (None, "") else argument.name
        for argument in inspect.signature(function).parameters.values()
        if argument.name != "like"
    ]
    return Description(name, summary.replace("`", "").rstrip("."), **record, arguments=tuple(arguments))
