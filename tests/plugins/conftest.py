"""Plugins of this folder, forgotten when a module's tests are done: later studies of this process do without."""

import sys
from pathlib import Path

import pytest

from vitmods.util import registry

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def load():
    """Loads files of this folder by their names."""
    loaded = []

    def load(*names):
        loaded.extend(names)
        registry.load_plugins([str(HERE / f"{name}.py") for name in names])

    yield load
    for known in registry._registries:
        for name in [name for name, module in known._modules.items() if module in loaded]:
            known.remove(name)
    for name in loaded:
        sys.modules.pop(name, None)
