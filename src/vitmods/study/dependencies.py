"""What a trial's numbers depend on outside of vitmods and its settings: code of users, files, and libraries."""

from __future__ import annotations

import ast
import importlib.util
import sys
import uuid
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from vitmods.recipes import Recipe
from vitmods.study.arms import Arm, base_function, functions_of, is_foreign, is_installed
from vitmods.tasks.base import Task
from vitmods.util.files import checksum
from vitmods.util.limits import read_bytes
from vitmods.util.registry import modules_from_outside


class _Source(NamedTuple):
    spec: ModuleSpec | None
    checksum: str
    imports: frozenset[str]


_is_installed = cache(is_installed)  # every trial asks for the same files
_read: dict[str, _Source] = {}
"""source of each loaded module, as it was when a trial first depended on it: an edit counts after a reload"""


def code_of(arm: Arm, base: Any, task: type[Task], recipe: Recipe) -> dict[str, str]:
    """Return the checksums of plugins, of functions' modules, of the modules that these import (except installed ones),
    and of files that the recipe or base names; and the versions of libraries that base and task use.

    What a function without a file does is unknown: its checksum is never the same again.
    """
    functions = [*functions_of(arm.changes), *filter(None, [base_function(base)])]
    code = _checksums({*modules_from_outside(), *(function.module or "" for function in functions)})
    libraries, files = list(task.libraries), {}
    if is_foreign(base):
        library, _, name = base.partition(":")
        libraries.append({"hf": "transformers"}.get(library, library))
        files["base"] = name.partition("?")[0] if library == "hf" else None
    if task.recipe_part is not None:
        part = recipe.part(task.recipe_part)
        files |= {field: getattr(part, field) for field in part.files}
    for library in libraries:
        with suppress(PackageNotFoundError):
            code[library] = version(library)
    for field, name in files.items():
        if name and (path := Path(name).expanduser()).exists():
            code[f"file:{field}"] = _checksum(path)
    return code


def _checksum(path: Path) -> str:
    """Hash a file, or the files below a folder with their names, except hidden ones."""
    if path.is_file():
        return _content(path, path.stat().st_size, path.stat().st_mtime_ns)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    names = {file: file.relative_to(path) for file in files}
    lines = [f"{name} {_checksum(file)}" for file, name in names.items() if not any(p[0] == "." for p in name.parts)]
    return sha256("\n".join(lines).encode()).hexdigest()[:32]


@cache
def _content(path: Path, size: int, changed: int) -> str:
    """Hash a file once, as every trial asks for it; size and time of its last change show another content."""
    return checksum(path)


def _checksums(names: Iterable[str]) -> dict[str, str]:
    """Return module -> checksum of its source, for these modules and those that they import."""
    code, waiting = {}, [*names]
    while waiting:
        name = waiting.pop()
        if name in code:
            continue
        source = _source(name, is_named=name in names)
        if source is not None:
            code[name] = source.checksum
            waiting += source.imports
        elif name in names:
            code[name] = uuid.uuid4().hex
    return code


def _source(name: str, is_named: bool) -> _Source | None:
    """Read a module; None if it does not have a file, or if it is installed and only imported."""
    module, spec = sys.modules.get(name), None
    if module is None:
        spec = _find(name)
    elif name in _read and _read[name].spec is module.__spec__:
        return _read[name]
    file = Path(getattr(module, "__file__", None) or getattr(spec, "origin", None) or "")
    is_own = file.is_file() and not _is_installed(file)
    if not is_own and not (is_named and file.is_file()):
        return None
    package = name if file.stem == "__init__" else name.rpartition(".")[0]
    imports = {*_imports(file, package), name.rpartition(".")[0]} - {""} if is_own else set()  # packages run first
    source = _Source(getattr(module, "__spec__", None), checksum(file), frozenset(imports))
    if module is not None and is_own:
        _read[name] = source
    return source


def _find(name: str) -> ModuleSpec | None:
    """Find a module without importing the packages around it; None if it does not exist or is installed."""
    spec, places = None, None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, places)  # with its whole name, its package would have to be imported
        if spec is None or (spec.origin and _is_installed(Path(spec.origin))):
            return None
        places = [*(spec.submodule_search_locations or ())]
    return spec


def _imports(file: Path, package: str) -> set[str]:
    """Return the names that a file of Python imports anywhere; of `from a import b` both `a` and `a.b`."""
    try:
        tree = ast.parse(read_bytes(file, "text"))
    except (SyntaxError, ValueError):  # an extension module, or too large
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):
                origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                names |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return names
