"""A user's own source of data: one file, opened by its name as any other, and known in worker processes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitmods.data.sources import SOURCES, open_source
from vitmods.util.errors import UserError
from vitmods.util.registry import load_plugins, plugins

SOURCE = Path(__file__).with_name("my_source.py")


@pytest.fixture
def loaded() -> Iterator[None]:
    load_plugins([str(SOURCE)])
    yield
    SOURCES.remove("stripes")
    del sys.modules[SOURCE.stem]


def test_without_the_plugin_there_is_no_such_source() -> None:
    with pytest.raises(UserError, match=r"neither a folder .stripes:40. nor a set|no folder stripes:40"):
        open_source("stripes:40")


def test_a_source_from_outside_is_one_file(loaded: None) -> None:
    assert str(SOURCE) in plugins()
    source = open_source("stripes:40?gray=150")
    assert (source.classes, len(source.splits["train"]), source.spec) == (("down", "across"), 40, "stripes:40?gray=150")
    with pytest.raises(UserError, match=r"stripes has no option .grey.\. Did you mean .gray."):
        open_source("stripes:40?grey=1")
    with pytest.raises(UserError, match="Did you mean 'stripes'"):
        open_source("stripe:40")


@pytest.mark.slow
def test_a_study_in_worker_processes_reads_it(tmp_path: Path) -> None:
    words = "--data stripes:60 --base mu2/4 --img-size 8 --in-chans 1 --arms dpn --seeds 2 --batch-size 32 --steps 2"
    how = ["--plugin", str(SOURCE), "--workers", "2", "--out", str(tmp_path / "study")]
    command = [sys.executable, "-m", "vitmods", "compare", *words.split(), *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "study" / "results.json").read_text())["data"]["spec"] == "stripes:60"
