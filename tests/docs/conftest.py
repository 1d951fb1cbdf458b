"""Files of docs/ that make its pages, which are not a package."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def load():
    """Loads a file by its place in the project; what it puts on the path, and the files it imports, are forgotten."""

    def load_file(place):
        spec = importlib.util.spec_from_file_location(f"site_{Path(place).stem}", ROOT / place)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    kept, modules = list(sys.path), set(sys.modules)
    yield load_file
    sys.path[:] = kept
    for name in (set(sys.modules) - modules) & {"check", "recompute", "reference", "scores", "stored", "tutorials"}:
        del sys.modules[name]
