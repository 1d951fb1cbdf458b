"""The table of models that nobody wrote for vitmods: what is committed meets the goals, and is what the code does."""

import importlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TABLE = json.loads((FOLDER / "results" / "strangers.json").read_text())


@pytest.mark.parametrize(("change", "least"), [("layerscale(init=0.3)", 36), ("qknorm", 30)])
def test_the_table_meets_its_goals(change, least):
    assert len(TABLE) == 44
    assert sum(row[change] in ("in place", "has it") for row in TABLE.values()) >= least


@pytest.mark.parametrize("name", ["vit", "xcit", "pit", "simple_uvit", "x: vision", "x: text decoder"])
def test_the_table_is_what_the_code_does(monkeypatch, name):
    pytest.importorskip("vit_pytorch" if ":" not in name else "x_transformers")
    monkeypatch.syspath_prepend(str(FOLDER))
    assert importlib.import_module("strangers").row(name) == TABLE[name]
