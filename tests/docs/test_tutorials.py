"""Each tutorial runs as it is written, in one folder with a few drawn photos; only training is made small."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.fixture
def tutorials(load):
    return load("docs/site/tutorials.py")


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_and_ends_with_an_answer(tutorials, page):
    """`make docs` keeps what the blocks print, so that they run once."""
    text, printed = page.read_text(), tutorials.outputs(page)  # RuntimeError if a command fails
    kinds = [kind for kind, _ in tutorials.FENCE.findall(text)]
    assert len(kinds) == len(printed)
    assert all(output.strip() for kind, output in zip(kinds, printed) if kind == "console")
    assert re.search(r"\b(helps|hurts|open|no worse|no gain|equivalent)\b", "".join(printed))
    links = text.partition("## Next steps\n")[2]
    assert links.count("](../") >= 3


PAGE = """# Counting

First:

```python
import os
count = 2
```

```python
print(count, os.path.abspath("x.txt"))
print("line\\n" * 100)
```
"""


def test_a_page_shows_what_its_blocks_print_and_keeps_it(tutorials, tmp_path, monkeypatch):
    monkeypatch.setattr(tutorials, "KEPT", tmp_path / "kept")
    page = tmp_path / "counting.md"
    page.write_text(PAGE)
    shown = tutorials.with_output(page, PAGE)
    assert shown.startswith("# Counting\n\n```{note}")
    assert shown.count(":class: output") == 1, "a block that prints nothing has no output"
    assert "2 path/to/x.txt" in shown
    assert "... 61 lines ..." in shown
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_text('["", "from the first run"]')
    assert "from the first run" in tutorials.with_output(page, PAGE)
    page.write_text(PAGE.replace("count = 2", "count = 3"))
    assert "3 path/to/x.txt" in tutorials.with_output(page, page.read_text())
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_command_that_fails_fails_the_build(tutorials, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="vitmods data nowhere"):
        list(tutorials.run("```console\n$ vitmods data nowhere\n```\n"))
