"""A user's own source: one file, opened by its name as any other, and known in worker processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from vitmods.data.sources import SOURCES, open_source
from vitmods.util.errors import UserError
from vitmods.util.registry import load_plugins, plugins

PLUGIN = """
import numpy as np
from vitmods.data.records import Records, Source
from vitmods.data.sources import Spec, data_source

@data_source("stripes", "stripes:NUMBER", "black and white stripes", options=("gray",))
def stripes(spec: Spec) -> Source:
    n, gray = int(spec.rest), int(spec.options.get("gray", 255))
    def fetch(key):
        rows = np.arange(8)[:, None] if key % 2 else np.arange(8)
        return ((rows + np.zeros((8, 8), int) + key) % 2 * (gray - key)).astype(np.uint8)
    ids = tuple(f"{i:03d}" for i in range(n))
    return Source("stripes", ("down", "across"), {"train": Records(ids, np.arange(n) % 2, ids, fetch, np.arange(n))})
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "stripes_source.py"
    path.write_text(PLUGIN)
    yield str(path)
    SOURCES._things.pop("stripes", None)
    sys.modules.pop("stripes_source", None)


def test_a_source_from_outside_is_one_file(plugin: str) -> None:
    with pytest.raises(UserError, match=r"neither a folder .stripes:40. nor a set"):
        open_source("stripes:40")
    load_plugins([plugin])
    assert plugin in plugins()
    source = open_source("stripes:40?gray=200")
    assert (source.classes, len(source.splits["train"]), source.spec) == (("down", "across"), 40, "stripes:40?gray=200")
    with pytest.raises(UserError, match=r"stripes has no option .grey.\. Did you mean .gray."):
        open_source("stripes:40?grey=1")
    with pytest.raises(UserError, match="Did you mean 'stripes'"):
        open_source("stripe:40")


def test_it_is_known_in_other_processes(plugin: str) -> None:
    script = (
        "import sys; from vitmods.util.registry import load_plugins; load_plugins(sys.argv[1:]);"
        "from vitmods.data import check; print(check('stripes:40').fit)"
    )
    done = subprocess.run([sys.executable, "-c", script, plugin], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
