"""The table of known sets: every set has a reader, and the page lists them as they are."""

import re
from pathlib import Path

import pytest

from vitmods.data.sources import SOURCES, open_source
from vitmods.papers.sources.transfer import TASKS
from vitmods.util.errors import UserError

PUBLISHED = [name for name, kind in SOURCES.items() if kind.layout]
PAGE = (Path(__file__).parents[3] / "docs" / "data-sets.md").read_text()
ROWS = {
    cells[0].strip("` "): cells for cells in (line.strip("|").split("|") for line in PAGE.splitlines() if "|" in line)
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_page_has_the_facts(name):
    source = SOURCES[name]
    row = "|".join(ROWS[source.usage.replace("?corruption=fog&severity=3", "")])
    assert source.title in row
    assert source.used_in in row
    assert source.terms in row
    numbers = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", row)}
    assert {source.classes or 19, *source.counts.values()} <= numbers
    section = PAGE[PAGE.index("## Files") :]
    for line in source.layout:
        assert line in section, f"the page lacks how {name}'s files lie: {line}"


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in PUBLISHED])
def test_the_page_has_the_other_sources(name):
    rows = (Path(__file__).parents[3] / "docs" / "data.md").read_text().splitlines()
    row = next(row for row in rows if row.startswith(f"| `{SOURCES[name].usage}` |"))
    assert SOURCES[name].title in row
    assert SOURCES[name].needs in "".join(rows)


@pytest.mark.parametrize("name", TASKS)
def test_the_page_has_the_tasks_of_vtab(name):
    task = TASKS[name]
    cells = [cell.strip(" `") for cell in ROWS[name]]
    assert cells[1:6] == [task.title, task.group, f"{task.classes:,}", f"{task.test:,}", task.lists]
    assert cells[6] == (f"{task.torchvision}" if task.torchvision else "no")


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_set_says_what_it_lacks(name, tmp_path):
    where = str(tmp_path / "none")
    spec = SOURCES[name].usage.replace("FOLDER", where).replace("TASK", "dtd")
    with pytest.raises(UserError, match="the folder does not exist") as caught:
        open_source(spec)
    assert SOURCES[name].layout[-1] in str(caught.value)


def test_a_name_that_is_nearly_known():
    with pytest.raises(UserError, match=r'nor a set called "imagnet" exists\. Did you mean \'imagenet\''):
        open_source("imagnet:/data")
    with pytest.raises(UserError, match="The folder zzz:name does not exist"):
        open_source("zzz:name")
