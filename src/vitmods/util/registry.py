"""Named things of one kind: what the package has in a folder, and what a user's own modules add."""

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
from typing import Any, TypeVar

from vitmods.util.errors import UserError, nearest

T = TypeVar("T")
D = TypeVar("D")
_HOUSE = __name__.partition(".")[0]
_READING = threading.RLock()
_registries: list[Registry[Any]] = []
_entered: set[str] = set()
"""modules that entry points have brought"""
_asked = False
"""whether entry points were asked for"""


class Registry(Mapping[str, T]):
    """name -> thing, for one kind of things.

    The package's own are found when the registry is first read: every file of the folders is imported, and adds what it
    has. A folder may be a pattern: ``vitmods.tasks.*.recipes`` is the module ``recipes`` of each package of
    ``vitmods.tasks`` that has one. A user's add theirs when their module is imported: by themselves, by
    ``load_plugins``, or by an entry point of the group ``vitmods``, which the first reading imports too.

        NORMS = Registry("norm", "vitmods.layers.norms")

        @NORMS.register("layer", words=("ln",))
        class LayerNorm: ...

        NORMS["layr"]  # UserError: There is no norm 'layr'. Did you mean 'layer'?

    Args:
        kind: of things, in one or two words, for errors.
        folders: packages whose files add to it, modules, or patterns of modules; none where the module of the registry
            imports them itself.
        advice: ends the error of an unknown name (how to list all, for instance).
    """

    def __init__(self, kind: str, *folders: str, advice: str = "") -> None:
        self.kind, self.advice = kind, advice
        self._folders = folders
        self._unread = True
        self._things: dict[str, T] = {}
        self._modules: dict[str, str] = {}
        self._origins: dict[str, str] = {}
        self.words: dict[str, str] = {}
        """what else things may be looked for by -> their names"""
        _registries.append(self)

    def add(self, name: str, thing: T, *, words: Iterable[str] = (), origin: Any = None) -> T:
        """Add a thing.

        Args:
            name, thing: it and its name.
            words: what else one may look for it by: an error suggests it, nothing is called so.
            origin: the class or function that the thing represents, if it is not one itself.

        Raises UserError where another thing has the name. The same class or module may add it again (a reload).
        """
        named = origin if origin is not None else thing
        module = named.__module__ if hasattr(named, "__qualname__") else _calling_module()
        origin = f"{module}.{named.__qualname__}" if hasattr(named, "__qualname__") else module
        if not _ours(module):
            self._read()  # so that it is the newcomer who is refused
        if self._origins.get(name, origin) != origin:
            raise UserError(
                f"There are two {self.kind}s '{name}': {self._origins[name]} and {origin}. Give one of them another "
                "name."
            )
        self._things[name], self._modules[name], self._origins[name] = thing, module, origin
        self.words.update(dict.fromkeys(words, name))
        return thing

    def remove(self, name: str) -> None:
        """Forget a thing, after a test for instance."""
        del self._things[name], self._modules[name], self._origins[name]
        self.words = {word: thing_name for word, thing_name in self.words.items() if thing_name != name}

    def register(self, name: str, *, words: Iterable[str] = ()) -> Callable[[D], D]:
        """``add`` as a decorator."""

        def decorate(thing: D) -> D:
            self.add(name, thing, words=words)  # type: ignore[arg-type]
            return thing

        return decorate

    def is_from_outside(self, name: str) -> bool:
        """Whether a plugin or the user's own code added it."""
        return not _ours(self._modules[name])

    def hint(self, name: str) -> str:
        """The end of the error of an unknown name: the nearest one, or all where none is near."""
        return f"{nearest(name, self, self.words)} {self.advice}".strip()

    def _read(self) -> dict[str, T]:
        with _READING:
            if self._unread:
                self._unread = False  # a file that is imported here may read what is there already
                try:
                    for folder in self._folders:
                        folder, _, module = folder.partition(".*")
                        for file in pkgutil.iter_modules(getattr(importlib.import_module(folder), "__path__", ())):
                            name = f"{folder}.{file.name}{module}"
                            if not module or (file.ispkg and importlib.util.find_spec(name)):
                                importlib.import_module(name)
                except BaseException:
                    self._unread = True
                    raise
                _load_entry_points()
        return self._things

    def __getitem__(self, name: str) -> T:
        if name not in self:
            raise UserError(f"There is no {self.kind} '{name}'. {self.hint(name)}")
        return self._things[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._read().get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._read()

    def __iter__(self) -> Iterator[str]:
        """The package's own, file by file, then what was added from outside; whoever was imported first."""
        names = self._read()
        return iter(sorted(names, key=lambda name: (not _ours(self._modules[name]), self._modules[name])))

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self)})"


asked_for: list[str] = []
"""The names that `load_plugins` was given, for processes that do the same command; workers need `plugins()` alone."""
named_by_user: set[str] = set()
"""Names that files may refer to: modules given to `load_plugins`, and functions given as `module:name`."""


def load_plugins(names: Iterable[str]) -> None:
    """Import a user's modules, so that they add what they have.

    Args:
        names: modules as Python finds them, or paths of .py files; a name that Python does not find is looked for as a
            file of the working directory.

    Raises:
        UserError: there is no such module, or it cannot be imported.
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


def plugins() -> list[str]:
    """List what another process must pass to ``load_plugins``: the modules outside the package that have added things,
    by name, or by path if Python cannot find them. Entry points are found without it."""
    return sorted(spelled(sys.modules[name]) for name in _added() - _entered - {"__main__"} if name in sys.modules)


def plugin_options() -> list[str]:
    """The shell's options that load the same plugins."""
    return [word for plugin in plugins() for word in ("--plugin", plugin)]


def check_plugins(needed: Iterable[str], what: str) -> None:
    """Raises UserError where ``what``, a file or folder, was made with plugins that are not loaded here. They are not
    loaded for it: who opens a folder that others wrote must not run what it names."""
    loaded = {_name(plugin) for plugin in plugins()}
    missing = [plugin for plugin in needed if _name(plugin) not in loaded]
    if missing:
        options = " ".join(f"--plugin {plugin}" for plugin in missing)
        raise UserError(f"{what} was made with plugins: add {options} (in Python, import them first).")


def check_reachable() -> None:
    """Raises UserError where the script itself has added something: no other process can import that."""
    names = [f"'{n}'" for registry in _registries for n, module in registry._modules.items() if module == "__main__"]
    if names:
        raise UserError(
            f"What is defined in the script itself cannot reach worker processes: {', '.join(names)}. Move it to a "
            "module that the script imports, or run with workers=1."
        )


def _added() -> set[str]:
    """Modules outside the package that have added something."""
    return {name for registry in _registries for name in registry._modules.values() if not _ours(name)}


def _name(plugin: str) -> str:
    return Path(plugin).stem if plugin.endswith(".py") else plugin


def spelled(module: ModuleType) -> str:
    """A module for ``load_plugins`` of another process: its name, or its path where Python would not find it."""
    parent = module.__name__.rpartition(".")[0]
    spec = PathFinder.find_spec(module.__name__, getattr(sys.modules.get(parent), "__path__", None))
    path = getattr(module, "__file__", None)
    return module.__name__ if path is None or (spec is not None and spec.origin == path) else path


def _ours(module: str) -> bool:
    return module.partition(".")[0] == _HOUSE


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
            f"There is no plugin '{name}': give the name of a module that Python finds (see PYTHONPATH), or the path "
            "of its .py file."
        )
    path = path.resolve()
    loaded = sys.modules.get(path.stem)
    if loaded is not None:
        if Path(getattr(loaded, "__file__", None) or "").resolve() == path:
            return
        raise UserError(f"The plugin {path} is called as the module {path.stem} is: rename the file.")
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
    global _asked
    if _asked:
        return
    _asked = True
    for point in importlib.metadata.entry_points(group=_HOUSE):
        try:
            point.load()
        except Exception as error:  # an installed package must not stop all others
            warnings.warn(f"The plugin {point.name} ({point.value}) is left out: {error}", stacklevel=2)
        _entered.add(point.module)


def _calling_module() -> str:
    """The module that calls ``add`` or ``register``."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))
