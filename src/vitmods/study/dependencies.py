"""What a trial's numbers depend on outside of vitmods and its settings: code of users, files, and libraries."""

from __future__ import annotations

import ast
import importlib.util
import sys
import uuid
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from importlib.machinery import ModuleSpec
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
            code[field] = _checksum(path)
    return code


def _checksum(path: Path) -> str:
    """Hash a file, or the files below a folder with their names."""
    if path.is_file():
        return checksum(path)
    inside = sorted(file for file in path.rglob("*") if file.is_file())
    lines = [f"{file.relative_to(path).as_posix()} {checksum(file)}" for file in inside]
    return sha256("\n".join(lines).encode()).hexdigest()[:32]


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
            waiting += [*source.imports, *filter(None, [name.rpartition(".")[0]])]  # a package runs first
        elif name in names:
            code[name] = uuid.uuid4().hex
    return code


def _source(name: str, is_named: bool) -> _Source | None:
    """Read a module; None if it does not have a file, or if it is installed and only imported."""
    module, spec, parent = sys.modules.get(name), None, name.rpartition(".")[0]
    if parent and parent not in sys.modules:  # to find it would import its package
        return None
    with suppress(ImportError, AttributeError, ValueError):  # optional imports; modules without a spec
        spec = importlib.util.find_spec(name)
    if name in _read and _read[name].spec is spec:
        return _read[name]
    origin = spec.origin if spec is not None and spec.has_location else getattr(module, "__file__", None)
    if origin is None or not Path(origin).is_file():
        return None
    installed = is_installed(Path(origin))
    if installed and not is_named:
        return None
    package = (spec.parent if spec is not None else None) or ""
    source = _Source(spec, checksum(Path(origin)), frozenset(() if installed else _imports(Path(origin), package)))
    if module is not None:
        _read[name] = source
    return source


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
