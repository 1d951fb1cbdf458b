"""Libraries whose models may be the base of a study, each by the word before the colon of its name. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitmods.util.registry import Registry

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Library:
    """How base models `LIBRARY:NAME?option=value` are made.

    build:        (base, name, whether weights are trained, options) -> model; base has `spec`, `num_classes`,
                  `img_size` (rows, columns) and `in_chans`
    size_option:  the option that sets the image size (rows, columns), for models that have one
    reads_tokens: whether its models read tokens, not images
    """

    build: Callable[[Any, str, bool, dict[str, Any]], nn.Module]
    size_option: str | None = None
    reads_tokens: bool = False


LIBRARIES: Registry[Library] = Registry("library of base models", "vitmods.study.bases", "vitmods.tasks.*.models")
