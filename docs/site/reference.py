"""The pages of the public names, as reStructuredText for Sphinx's autodoc: what each package names as its own."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("vitmods", "changes", "study", "adapters", "finetune", "fast", "recipes", "data", "tasks", "train", "evals",
            "analysis", "report", "papers", "layers")  # fmt: skip
FROM_THE_TOP = {"changes"}
"""packages whose classes are public as names of vitmods itself"""


def pages(packages: Sequence[str] = PACKAGES) -> Iterator[tuple[str, str]]:
    """(name, text) of each page. A name that two packages have is documented where it comes first."""
    seen: dict[int, str] = {}
    for package in packages:
        yield package, _page(package, seen)


def public(package: str) -> dict[str, Any]:
    """The public names of a package, and what they are; of vitmods without its packages and the changes."""
    module = importlib.import_module("vitmods" if package == "vitmods" else f"vitmods.{package}")
    names = [name for name in dir(module) if package in FROM_THE_TOP] or list(getattr(module, "__all__", ()))
    if package == "recipes":  # those of papers and tasks register from elsewhere
        names = list(dict.fromkeys((*names, *module.RECIPES)))
    found = {name: getattr(module, name) for name in names if not name.startswith("_")}
    found = {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}
    return {name: value for name, value in found.items() if package != "vitmods" or not _is_change(value)}


def _is_change(value: Any) -> bool:
    from vitmods.changes import Change

    return isinstance(value, type) and issubclass(value, Change)


def _page(package: str, seen: dict[int, str]) -> str:
    title = "vitmods" if package == "vitmods" else f"vitmods.{package}"
    lines = [
        title,
        "=" * len(title),
        "",
        *inspect.cleandoc(importlib.import_module(title).__doc__ or "").splitlines(),
        "",
    ]
    for name, value in public(package).items():
        top = package in FROM_THE_TOP and _is_change(value) and hasattr(importlib.import_module("vitmods"), name)
        full = f"vitmods.{name}" if top else f"{title}.{name}"
        if id(value) in seen:
            lines += [f"``{name}`` is :py:obj:`{seen[id(value)]}`.", ""]
            continue
        seen[id(value)] = full
        lines += [*_entry(full, value), ""]
    return "\n".join(lines)


def _entry(full: str, value: Any) -> list[str]:
    if isinstance(value, type):
        if _is_change(value) and hasattr(value, "name"):
            return [f".. autoclass:: {full}", "", f"   :doc:`Its card </docs/changes/{value.name}>`"]
        return [f".. autoclass:: {full}", "   :members:"]
    if inspect.isroutine(value):
        return [f".. autofunction:: {full}"]
    name = full.rpartition(".")[2]
    said = [f"   {line}" for line in (_said(name, value) or "").splitlines()]
    known = [f"   It has {', '.join(f'``{one}``' for one in value)}."] if isinstance(value, Mapping) else []
    return [f".. py:data:: {full}", "", *said, "", *known]


def _said(name: str, value: Any) -> str | None:
    """The docstring under the assignment of a value, in the module of ours that makes it."""
    for module in [module for path, module in sorted(sys.modules.items()) if path.startswith("vitmods.")]:
        if vars(module).get(name) is not value or not getattr(module, "__file__", None):
            continue
        body = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body
        for line, after in itertools.pairwise(body):
            targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
            ours = any(isinstance(target, ast.Name) and target.id == name for target in targets)
            if ours and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return inspect.cleandoc(str(after.value.value))
    return None
