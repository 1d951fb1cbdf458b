"""Data sets that the papers use, in the layouts that people have; sets.toml has their facts."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitmods.data.records import Source
from vitmods.data.sources import Spec, data_source

SETS: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "sets.toml").read_text(encoding="utf-8"))


def published_set(name: str, **facts: Any) -> Callable[[Callable[[Spec], Source]], Callable[[Spec], Source]]:
    """Register the function that opens a set, with its facts."""
    facts |= {key: tuple(value) if isinstance(value, list) else value for key, value in SETS[name].items()}
    facts = {key: value for key, value in facts.items() if key not in ("torchvision", "tasks")}
    return data_source(name, facts.pop("usage", f"{name}:FOLDER"), **facts)
