"""The page of data sets lists the known sets as they are."""

import re
from pathlib import Path

import pytest

from vitmods.data.sources import SOURCES
from vitmods.papers.sources.transfer import TASKS

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "data-sets.md").read_text()
ROWS = {
    cells[0].strip("` "): cells for cells in (line.strip("|").split("|") for line in PAGE.splitlines() if "|" in line)
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_page_has_the_facts(name):
    source = SOURCES[name]
    if not source.layout:  # no published set
        page = (DOCS / "data.md").read_text()
        row = next(row for row in page.splitlines() if row.startswith(f"| `{source.usage}` |"))
        assert source.title in row
        assert source.needs in page
        return
    row = "|".join(ROWS[source.usage.replace("?corruption=fog&severity=3", "")])
    for fact in (source.title, source.used_in, source.terms):
        assert fact in row
    numbers = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", row)}
    assert {source.classes or 19, *source.counts.values()} <= numbers
    for line in source.layout:
        assert line in PAGE.partition("## Files")[2], f"the page lacks how {name}'s files lie: {line}"


@pytest.mark.parametrize("name", TASKS)
def test_the_page_has_the_tasks_of_vtab(name):
    task = TASKS[name]
    cells = [cell.strip(" `") for cell in ROWS[name]]
    assert cells[1:6] == [task.title, task.group, f"{task.classes:,}", f"{task.test:,}", task.lists]
    assert cells[6] == (f"{task.torchvision}" if task.torchvision else "no")
