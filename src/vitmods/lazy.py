"""Names of a package that are imported when they are first used (PEP 562)."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``, for ``home``: name -> the file in which it lives.

    ``__getattr__`` raises AttributeError for other names, as Python does.
    """

    def find(name: str) -> Any:
        if name in home:
            return getattr(import_module(f".{home[name]}", package), name)
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    return find, lambda: sorted(home)
