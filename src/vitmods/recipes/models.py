"""What the papers say for some models alone, looked up by the model's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from vitmods.model.names import parse_name
from vitmods.util.errors import UserError, nearest

T = TypeVar("T")


def size_of(model: str) -> str:
    """`B` of `B/16`; with a depth of its own `B36`, with parallel branches `B18x2`. UserError for what is no ViT."""
    size, depth, parallel, _, _ = parse_name(model)
    branches = f"x{parallel}" if parallel > 1 else ""
    return f"{size}{depth or ''}{branches}"


def size_and_patch(model: str) -> str:
    """`S/16`, also of timm's `vit_small_patch16_224`."""
    return f"{size_of(model)}/{parse_name(model)[3]}"


def published(table: Mapping[str, T], key: str, what: str, remedy: str) -> T:
    """What `table` has for `key`. UserError, with the remedy, where the paper says nothing of that model."""
    if key not in table:
        raise UserError(f"There is no published {what} for {key}, only for {', '.join(table)}. {remedy}")
    return table[key]


def one_of(name: str, word: str, known: Mapping[str, T]) -> T:
    """The entry of that word. UserError naming the nearest."""
    if word not in known:
        raise UserError(f"There is no {name} {word!r}. {nearest(word, known)}")
    return known[word]
