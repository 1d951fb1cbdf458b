"""The figures of the papers; figures.toml has their facts, `vitmods.analysis.figure` defines what a figure is."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitmods.analysis.figure import figure_kind

_FACTS = tomllib.loads((Path(__file__).parent / "figures.toml").read_text(encoding="utf-8"))


def paper_figure(name: str, **arrays: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function that draws a paper's figure; `each` or `arrays` as in `figure_kind`."""
    return figure_kind(name, **_FACTS[name] | {"columns": tuple(_FACTS[name]["columns"])}, **arrays)
