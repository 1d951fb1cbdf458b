"""Every row of the table of faults names a test that exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs" / "reliability.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| fault", "| ---"))
]


@cache
def names_in(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_every_fault_names_what_shows_it(row):
    cells = re.split(r"(?<!\\)\|", row.strip("|"))
    assert len(cells) == 3
    tests = re.findall(r"`([^`]+)`", cells[2])
    assert tests
    for name in tests:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), path
        assert not (test and path.startswith("tests/")) or test in names_in(ROOT / path), name


def test_the_makefile_names_tests_that_exist():
    words = re.findall(r"tests/[\w/.]+", (ROOT / "Makefile").read_text())
    assert words
    assert [word for word in words if not (ROOT / word).exists()] == []
