"""Registries of named things: those of the package's folders, and those that a user's modules add."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from vitmods.util.errors import UserError, unknown

T = TypeVar("T")
D = TypeVar("D")
_PACKAGE = __name__.partition(".")[0]
_READING = threading.RLock()
_registries: list[Registry[Any]] = []
_entry_point_modules: set[str] = set()
_has_entry_points = False
"""whether entry points were loaded"""


class _Entry(NamedTuple, Generic[T]):
    """thing: registered. module: that registered it. origin: its full name, equal when a module is reloaded."""

    thing: T
    module: str
    origin: str

    @property
    def is_from_outside(self) -> bool:
        return self.module.partition(".")[0] != _PACKAGE


class Registry(Mapping[str, T]):
    """name -> thing, for one kind of things.

    The package's own are added when the registry is first read: every file of the folders is imported. A folder may be
    a pattern: ``vitmods.tasks.*.recipes`` is the module ``recipes`` of each package of ``vitmods.tasks`` that has one.
    A user's are added when their module is imported: by the user, by ``load_plugins``, or by an entry point of the
    group ``vitmods``, which the first reading imports too.

        NORMS = Registry("norm", "vitmods.layers.norms")

        @NORMS.register("layer", words=("ln",))
        class LayerNorm: ...

        NORMS["layr"]  # UserError: Unknown norm 'layr'. Did you mean 'layer'?

    Args:
        kind: of things, in one or two words, for errors.
        folders: packages whose files add to it, modules, or patterns of modules; none if the module of the registry
            imports them itself.
        advice: ends the error of an unknown name (how to list all, for instance).
        check: "module:function" that is called after a user adds a thing, and raises UserError to refuse it.
    """

    def __init__(self, kind: str, *folders: str, advice: str = "", check: str = "") -> None:
        self.kind, self.advice, self._check = kind, advice, check
        self._folders = folders
        self._is_read = False
        self._entries: dict[str, _Entry[T]] = {}
        self.words: dict[str, str] = {}
        """search words -> names"""
        _registries.append(self)

    def add(self, name: str, thing: T, *, words: Iterable[str] = (), origin: Any = None) -> T:
        """Add a thing.

        Args:
            name, thing: it and its name.
            words: search words, which an error translates to the name.
            origin: the class or function that the thing represents, if it is not one itself.

        Raises UserError if another thing has the name. The same class or module may add it again (a reload).
        """
        definition = origin if origin is not None else thing
        if hasattr(definition, "__qualname__"):
            entry = _Entry(thing, definition.__module__, f"{definition.__module__}.{definition.__qualname__}")
        else:  # the module that calls this
            frame = sys._getframe(1)
            while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
                frame = frame.f_back
            module = str(frame.f_globals.get("__name__", ""))
            entry = _Entry(thing, module, module)
        if entry.is_from_outside:
            self._read()  # so that the later one is refused
        earlier = self._entries.get(name, entry)
        if earlier.origin != entry.origin:
            raise UserError(
                f"Two {self.kind}s are called '{name}': {earlier.origin} and {entry.origin}. Rename one of them."
            )
        self._entries[name] = entry
        self.words.update(dict.fromkeys(words, name))
        if self._check and entry.is_from_outside:
            module, _, function = self._check.partition(":")
            try:
                getattr(importlib.import_module(module), function)()
            except UserError:
                self.remove(name)
                raise
        return thing

    def remove(self, name: str) -> None:
        """Remove a thing, after a test for instance."""
        del self._entries[name]
        self.words = {word: thing_name for word, thing_name in self.words.items() if thing_name != name}

    def register(self, name: str, *, words: Iterable[str] = ()) -> Callable[[D], D]:
        """``add`` as a decorator."""

        def decorate(thing: D) -> D:
            self.add(name, thing, words=words)  # type: ignore[arg-type]
            return thing

        return decorate

    def is_from_outside(self, name: str) -> bool:
        """Whether a plugin or the user's own code added it."""
        return self._entries[name].is_from_outside

    def _read(self) -> dict[str, _Entry[T]]:
        with _READING:
            if not self._is_read:
                self._is_read = True  # a file that is imported here may read what has been added so far
                try:
                    for pattern in self._folders:
                        folder, _, module = pattern.partition(".*")
                        for file in pkgutil.iter_modules(getattr(importlib.import_module(folder), "__path__", ())):
                            name = f"{folder}.{file.name}{module}"
                            if not module or (file.ispkg and importlib.util.find_spec(name)):
                                importlib.import_module(name)
                except BaseException:
                    self._is_read = False
                    raise
                _load_entry_points()
        return self._entries

    def __getitem__(self, name: str) -> T:
        entry = self._read().get(name)
        if entry is None:
            raise unknown(self.kind, name, self, self.words, self.advice)
        return entry.thing

    def get(self, name: str, default: Any = None) -> Any:
        entry = self._read().get(name)
        return default if entry is None else entry.thing

    def __contains__(self, name: object) -> bool:
        return name in self._read()

    def __iter__(self) -> Iterator[str]:
        """The package's own, file by file, then those from outside; independent of the order of imports."""
        entries = self._read()
        return iter(sorted(entries, key=lambda name: (entries[name].is_from_outside, entries[name].module)))

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self)})"


asked_for: list[str] = []
"""arguments of `load_plugins`, for processes that run the same command; workers need only `plugins()`"""
named_by_user: set[str] = set()
"""names that files may refer to: modules given to `load_plugins`, and functions given as `module:name`"""


def load_plugins(names: Iterable[str]) -> None:
    """Import a user's modules, which add to registries.

    Args:
        names: modules as Python finds them, or paths of .py files; a name that Python does not find may be a file of
            the working directory.

    Raises:
        UserError: a module does not exist, or cannot be imported.
    """
    for name in names:
        try:
            _import(name)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"The plugin '{name}' cannot be imported: {type(error).__name__}: {error}") from error
        asked_for.append(name)
        named_by_user.add(_name(name))


def modules_from_outside() -> set[str]:
    """Return the modules outside the package that have added things."""
    entries = (entry for registry in _registries for entry in registry._entries.values())
    return {entry.module for entry in entries if entry.is_from_outside}


def plugins() -> list[str]:
    """List what another process must pass to ``load_plugins``: the modules outside the package that have added things
    or were asked for, in the order of their imports, by name, or by path if Python cannot find them. Entry points are
    found without it."""
    modules = (modules_from_outside() | set(map(_name, asked_for))) - _entry_point_modules - {"__main__"}
    return [spelled(module) for name, module in list(sys.modules.items()) if name in modules]


def plugin_options() -> list[str]:
    """Return the shell's options that load the same plugins."""
    return [word for plugin in plugins() for word in ("--plugin", plugin)]


def check_plugins(needed: Iterable[str], what: str) -> None:
    """Raise UserError if ``what``, a file or folder, was made with plugins that are not loaded. They are not loaded
    here: opening a folder of somebody else must not run the code that it names."""
    loaded = {_name(plugin) for plugin in plugins()}
    missing = [plugin for plugin in needed if _name(plugin) not in loaded]
    if missing:
        options = " ".join(f"--plugin {plugin}" for plugin in missing)
        raise UserError(f"{what} was made with plugins: add {options} (in Python, import them first).")


def check_reachable() -> None:
    """Raise UserError if the script itself has added something: other processes cannot import that."""
    items = (item for registry in _registries for item in registry._entries.items())
    names = [f"'{name}'" for name, entry in items if entry.module == "__main__"]
    if names:
        raise UserError(
            f"Definitions in the script are not available in worker processes: {', '.join(names)}. Move it to a "
            "module that the script imports, or run with workers=1."
        )


def _name(plugin: str) -> str:
    return Path(plugin).stem if plugin.endswith(".py") else plugin


def spelled(module: ModuleType) -> str:
    """Return a module for ``load_plugins`` of another process: its name, or its path if Python would not find it."""
    parent = module.__name__.rpartition(".")[0]
    spec = PathFinder.find_spec(module.__name__, getattr(sys.modules.get(parent), "__path__", None))
    path = getattr(module, "__file__", None)
    return module.__name__ if path is None or (spec is not None and spec.origin == path) else path


def _import(name: str) -> None:
    path = Path(name if name.endswith(".py") else f"{name}.py").expanduser()
    if not name.endswith(".py"):
        if name in sys.modules:
            return
        try:
            is_module = importlib.util.find_spec(name) is not None
        except (ModuleNotFoundError, ValueError):
            is_module = False
        if is_module:
            importlib.import_module(name)
            return
    if not path.is_file():
        raise UserError(
            f"The plugin '{name}' does not exist: give the name of a module that Python finds (see PYTHONPATH), or the "
            "path of its .py file."
        )
    path = path.resolve()
    loaded = sys.modules.get(path.stem)
    if loaded is not None:
        if Path(getattr(loaded, "__file__", None) or "").resolve() == path:
            return
        raise UserError(f"The plugin {path} has the name of the module {path.stem}: rename the file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise


def _load_entry_points() -> None:
    global _has_entry_points
    if _has_entry_points:
        return
    _has_entry_points = True
    for point in importlib.metadata.entry_points(group=_PACKAGE):
        try:
            point.load()
        except Exception as error:  # an installed package must not stop all others
            warnings.warn(f"The plugin {point.name} ({point.value}) is left out: {error}", stacklevel=2)
        _entry_point_modules.add(point.module)
