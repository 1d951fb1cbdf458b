"""Each tutorial runs as it is written, in one folder with a few drawn photos; only training is made small."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
ENDS_WITH = {"photos": "verdict.svg", "table": "table.svg", "texts": "texts.svg"}


def load_runner():
    spec = importlib.util.spec_from_file_location("site_tutorials", ROOT / "docs" / "site" / "tutorials.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tutorials():
    return load_runner()


@pytest.fixture(scope="module")
def photos(tutorials, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorials") / "photos"
    tutorials.draw_photos(folder)
    return folder


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_and_ends_with_an_answer(tutorials, page, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(photos)
    text = page.read_text()
    printed = list(tutorials.run(text, page.name))
    assert [kind for kind, _ in printed] == [kind for kind, _ in tutorials.FENCE.findall(text)]
    assert all(output.strip() for kind, output in printed if kind == "console")
    assert re.search(r"\b(helps|hurts|open|no worse|no gain|equivalent)\b", "".join(output for _, output in printed))
    if made := ENDS_WITH.get(page.stem):
        assert (tmp_path / made).read_text().startswith("<svg"), f"{made} is what the reader looks at"
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


def test_a_page_shows_what_its_blocks_print_and_keeps_it(tmp_path, monkeypatch):
    runner = load_runner()
    monkeypatch.setattr(runner, "KEPT", tmp_path / "kept")
    page = tmp_path / "counting.md"
    page.write_text(PAGE)
    shown = runner.with_output(page, PAGE)
    assert shown.startswith("# Counting\n\n```{note}")
    assert shown.count(":class: output") == 1, "a block that prints nothing has no output"
    assert "2 path/to/x.txt" in shown
    assert "... 61 lines ..." in shown
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_text('["", "from the first run"]')
    assert "from the first run" in runner.with_output(page, PAGE)
    page.write_text(PAGE.replace("count = 2", "count = 3"))
    assert "3 path/to/x.txt" in runner.with_output(page, page.read_text())
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_command_that_fails_fails_the_build(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="vitmods data nowhere"):
        list(load_runner().run("```console\n$ vitmods data nowhere\n```\n"))
