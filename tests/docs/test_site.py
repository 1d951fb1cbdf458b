"""The site: what its builder refuses, what a browser shows, the cards, the gallery, answers as images."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from vitmods.changes import REGISTRY
from vitmods.report import write_report
from vitmods.study.arms import arms_from_text

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*Check CHANGES for Sphinx")  # of libraries with each other
CARDS = sorted((ROOT / "docs" / "changes").glob("*.md"))
HEADINGS = ["What it is", "Why", "Drawing", "Formula", "Use", "Published numbers", "Our numbers",
            "What it preserves and what it costs", "When not to use it"]  # fmt: skip
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
PLACES = r"(?<![\w:.])/(work|tmp|home|root|usr|mnt|data)/"  # of a machine


@pytest.fixture(scope="module")
def build(load):
    return load("docs/site/build.py")


@pytest.fixture(scope="module")
def gallery(load):
    return load("docs/gallery/add.py")


@pytest.fixture
def checked(load):
    """Lists what a browser finds in the pages of a folder."""
    browser = load("docs/site/browser.py")
    if (program := browser.find()) is None:
        pytest.skip("Chromium is not installed (Debian package: chromium)")
    return lambda folder: browser.problems(folder, program)


PAGES = {
    "README.md": "# Start\n\nSee [the index](docs/index.md).\n",
    "docs/index.md": "# Index\n\n## Start\n\n- [Start](../README.md), [more](more.md#a-part), [a file](data.csv)\n",
    "docs/more.md": "# More\n\n## A part\n\n```math\n\\frac{a}{b}\n```\n\n<!-- drawing: dpn -->\n",
    "docs/data.csv": "1,2\n",
}


def site(build, tmp_path, **edits):
    """What is wrong with a small site, some of whose pages are others."""
    for name, text in (PAGES | edits).items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    return build.build(tmp_path / "site", tmp_path / "root", packages=())


def test_a_site_has_formulas_drawings_files_and_nothing_from_elsewhere(build, tmp_path):
    assert site(build, tmp_path) == []
    page = (tmp_path / "site" / "docs" / "more.html").read_text()
    assert re.search(r"<math .*<mfrac>.*<mi>a</mi>.*<mi>b</mi>.*</mfrac>.*</math>", page)
    assert page.count('<g class="added">') == 2, "both norms of the stem are marked"
    assert list((tmp_path / "site" / "_downloads").rglob("data.csv"))
    assert 'href="more.html"' in (tmp_path / "site" / "docs" / "index.html").read_text(), "the navigation"


WIDE = """# More

## A part

| arm | effect | low | high |
| --- | --- | --- | --- |
| `dpn` | +1 | 0 | |

| few | columns |
| --- | --- |
| 1 | 2 |
"""


def test_cells_of_wide_tables_have_their_headings_for_phones(build, tmp_path):
    assert site(build, tmp_path, **{"docs/more.md": WIDE}) == []
    page = (tmp_path / "site" / "docs" / "more.html").read_text()
    assert re.findall(r'data-label="(\w+)"', page) == ["arm", "effect", "low", "high"]
    assert page.count('class="empty" data-label="high"') == 1
    assert page.count("stacked") == 1, "two columns fit"


def test_a_site_is_refused_for_every_fault(build, tmp_path):
    faults = "[gone](gone.md)\n\n```math\n\\unheard{a}\n```\n"
    lost = {"docs/lost.md": "# A page that the index does not name\n"}
    wrong = site(build, tmp_path, **{"docs/more.md": f"# More\n\n## Another part\n\n{faults}"}, **lost)
    for part in ("lost.md", "gone.md", "a-part", "unheard"):
        assert sum(part in line for line in wrong) == 1, part


def test_a_site_that_loads_from_elsewhere_is_refused(build, tmp_path):
    (wrong,) = site(build, tmp_path, **{"docs/more.md": "# More\n\n## A part\n\n![far](https://example.org/a.png)\n"})
    assert "https://example.org/a.png" in wrong


def test_what_a_built_page_may_not_have(build, tmp_path):
    (tmp_path / "a.html").write_text(
        '<script src="https://cdn.example.org/x.js"></script><link rel="stylesheet" href="//example.org/x.css">'
        '<img src="gone.png"><a href="b.html#x">b</a><a href="#here">here</a><a href="https://example.org">fine</a>'
        '<p style="background: url(http://example.org/y.png)">'
    )
    (tmp_path / "b.html").write_text('<a id="y" href="gone.html">gone</a>')
    (tmp_path / "d.html").write_text(
        '<dl><dt class="field-odd">Type<span>:</span></dt>\n<dd class="field-odd"><p>rate (arXiv</p></dd></dl>'
        '<dl><dt class="field-odd">Parameters<span>:</span></dt><dd><p><strong>one of a, b</strong> – x</p></dd></dl>'
        "<p>a :class:`Norm` and <code>``fine``</code></p>"
    )
    (tmp_path / "c.css").write_text("@import 'https://example.org/font.css'; b { background: url(own.png) }")
    assert [line.partition(": ")[2] for line in build.check.problems(tmp_path)] == [
        "loads https://cdn.example.org/x.js",
        "loads //example.org/x.css",
        "loads gone.png, which is not there",
        "loads http://example.org/y.png",
        "links to b.html#x, which has no such anchor",
        "links to #here, which has no such anchor",
        "links to gone.html, which is not there",
        "has a field Type, 'rate (arXiv': a docstring that was cut at its first colon",
        "has markup in its text, ':class:`Norm': a docstring that was not understood",
        "has a parameter 'one of a, b': a list of fields that was not understood",
        "loads https://example.org/font.css",
    ]


FAULTS = {
    '<p style="width: 1500px; background: #eee">x</p>': "wider than the window",
    '<figure style="width: 200px"><svg width="200" height="30" viewBox="0 0 200 30"><text y="20">'
    "A text that is much wider than its drawing</text></svg></figure>": "text is cut off",
    '<div style="overflow-x: auto; width: 200px"><img src="wide.svg"></div>': "an image is cut off",
    '<article><div class="table-wrapper" style="overflow-x: auto"><table style="width: 900px"><tr><td>1</table></div>'
    "</article>": "a table is cut off",
    '<img src="wide.svg" style="width: 300px">': "an image is too small to read",
    '<img src="gone.png">': "an image is not shown",
    '<p style="color: #999">pale</p>': "pale text",
    '<pre style="overflow-x: auto">' + "long " * 100 + "</pre>": "is cut off on paper",
    "<details><summary>More</summary>Folded</details>": "is folded on paper",
    "<h2>A heading</h2>": "may be the last line of a page",
    '<script>console.error("broken")</script>': "the console says broken",
}


def test_a_browser_finds_every_fault_and_none_in_a_sound_page(checked, tmp_path):
    page = '<!doctype html><link rel="icon" href="data:,"><main><h1 style="break-after: avoid">Title</h1>{}</main>'
    (tmp_path / "wide.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="900" height="90"/>')
    (tmp_path / "sound.html").write_text(page.format("<p>A page.</p>"))
    for i, fault in enumerate(FAULTS):
        (tmp_path / f"{i}.html").write_text(page.format(fault))
    wrong = checked(tmp_path)
    assert not [line for line in wrong if line.startswith("sound")]
    for i, fault in enumerate(FAULTS.values()):
        assert [line for line in wrong if line.startswith(f"{i}.html: ") and fault in line], fault


def test_answers_of_the_gallery_are_whole_on_every_screen(checked, build, tmp_path):
    shown = ["# More\n\n## A part\n"]
    for path in sorted((ROOT / "docs" / "gallery").glob("*.svg")):
        (tmp_path / "root" / "docs" / "gallery").mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / "docs" / "gallery" / path.name).write_text(path.read_text())
        shown += [] if path.stem.endswith("-narrow") else [f"![An answer](gallery/{path.name})\n"]
    assert site(build, tmp_path, **{"docs/more.md": "\n".join(shown)}) == []
    assert (tmp_path / "site" / "docs" / "more.html").read_text().count("<picture>") == len(shown) - 1
    assert checked(tmp_path / "site") == []


@pytest.mark.parametrize("archive", sorted((ROOT / "docs" / "gallery").glob("*.tar.xz")), ids=lambda path: path.name)
def test_a_stored_study_still_opens_and_names_no_place_of_a_machine(build, archive):
    """`make docs` keeps the reports, so that they are made once."""
    name = archive.name.partition(".")[0]
    page = build.report_of(archive).read_text()
    facts = json.loads(archive.with_name(f"{name}.json").read_text())
    assert facts["headline"] in page
    for arm, effect in facts["effects"].items():
        assert f"{arm}: {effect.rpartition(']')[0]}]" in page, "the numbers of the image"
    assert not re.search(PLACES, page)


def test_stored_studies_are_small():
    sizes = [path.stat().st_size for path in (ROOT / "docs" / "gallery").glob("*.tar.xz")]
    assert len(sizes) >= 6
    assert sum(sizes) < 3_000_000


def test_a_study_is_stored_without_weights_places_and_images(gallery, tmp_path):
    import tarfile

    run = tmp_path / "elsewhere" / "run"
    trial = run / "trials" / "dpn" / "seed0"
    (trial / "examples").mkdir(parents=True)
    (run / "study.json").write_text(
        '{"command": "vitmods compare --data /home/me/pets --out /x/y", "data": "/home/me/pets"}'
    )
    (trial / "reused.json").write_text('{"study": "/home/me/runs/first"}')
    for path in (trial / "model.safetensors", trial / "examples" / "0-image.png", run / ".lease", run / "split.csv"):
        path.write_text("x")
    np.savez_compressed(run / "samples.npz", names=np.array(["a"]))
    np.savez_compressed(trial / "test.npz", ids=np.array(["a"]), top1=np.array([1.0]))
    for images, extra in ((True, ["samples.npz", "trials/dpn/seed0/examples/0-image.png"]), (False, [])):
        gallery.stored.store(run, tmp_path / "x.tar.xz", images)
        with tarfile.open(tmp_path / "x.tar.xz") as packed:
            names = sorted(packed.getnames())
        scores = ["trials/dpn/seed0/reused.json", "trials/dpn/seed0/test.npz"]
        assert names == sorted(["study.json", *scores, *extra])
    unpacked = gallery.stored.unpack(tmp_path / "x.tar.xz", tmp_path)
    facts = json.loads((tmp_path / unpacked / "study.json").read_text())
    assert facts == {"command": "vitmods compare --data path/to/pets", "data": "path/to/pets"}
    assert "../first" in (tmp_path / unpacked / "trials" / "dpn" / "seed0" / "reused.json").read_text()
    assert np.load(tmp_path / unpacked / "trials" / "dpn" / "seed0" / "test.npz")["top1"].tolist() == [1.0]


def test_public_names_are_in_the_reference(build):
    import vitmods as vm

    text = dict(build.reference.pages(("vitmods", "changes", "tasks")))
    assert ".. autofunction:: vitmods.apply" in text["vitmods"]
    assert ".. autoclass:: vitmods.Study\n   :members:" in text["vitmods"]
    for name, kind in REGISTRY.items():
        assert f".. autoclass:: vitmods.{kind.__name__}\n" in text["changes"], name
    assert "``segmentation``" in text["tasks"], "what a registry has"
    named = {line.rpartition(".")[2] for page in text.values() for line in page.splitlines() if ":: vitmods." in line}
    assert all(map(build.reference.public, build.reference.PACKAGES)), "a page without names"
    modules = {name for name in vm.__all__ if hasattr(getattr(vm, name), "__path__")}
    assert set(vm.__all__) - modules - {"__version__"} <= named


@pytest.mark.parametrize("page", CARDS, ids=lambda page: page.stem)
def test_a_card_has_every_part_in_order(page):
    text = page.read_text()
    parts = dict(part.split("\n", 1) for part in re.split(r"^## ", text, flags=re.M)[1:])
    assert list(parts)[: len(HEADINGS)] == HEADINGS
    assert all(FENCE.sub("", parts[name]).strip() or "```" in parts[name] for name in HEADINGS)
    assert len(re.findall(r"^<!-- drawing: .+ -->$", parts["Drawing"], re.M)) == 1
    assert "```math" in parts["Formula"] or page.stem == "norm"  # a table of formulas
    assert "| setting | default | meaning |" in parts["Use"]
    assert re.search(r"\]\(\.\./(\.\./RESULTS|log/\w+)\.md", parts["Our numbers"]), "where its numbers are from"
    assert parts["When not to use it"].count("\n- ") >= 2


def test_readme_names_every_change_and_every_drawing_marks_something(build):
    readme = (ROOT / "README.md").read_text()
    assert not [name for name in REGISTRY if f"](docs/changes/{name}.md)" not in readme]
    for page in CARDS:
        drawing = build.drawing(build.DRAWING.search(page.read_text())[1])
        assert re.search('<g class="(added|changed|removed)">', drawing), page.stem
        ET.fromstring(re.search(r"<svg.*</svg>", drawing, re.S)[0])


def test_the_gallery_is_made_from_its_entries(gallery):
    entries = sorted((ROOT / "docs" / "gallery").glob("*.json"))
    assert entries
    assert (ROOT / "docs" / "gallery.md").read_text() == gallery.page(), "run: python docs/gallery/add.py"
    for entry in entries:
        facts = json.loads(entry.read_text())
        image = entry.with_suffix(".svg").read_text()
        narrow = entry.with_name(f"{entry.stem}-narrow.svg").read_text()
        for drawn in (image, narrow):
            assert len(drawn) < 40_000
            assert not re.search(PLACES, drawn)
            assert ET.fromstring(drawn).get("aria-label") == facts["headline"]
        assert facts["command"].startswith("vitmods ")
        for effect in facts["effects"].values():
            assert re.search(rf"[▲▼≥=?≤!] {effect.rpartition('] ')[2]}\b", narrow), "the verdict in words"
        if table := re.search(r"paper:([\w-]+)", facts["command"]):
            assert facts["effects"].keys() <= {arm.name for arm in arms_from_text(table[0])}, "the table's arms"


def test_defaults_in_a_signature_are_names(load):
    shorten = load("docs/site/docstrings.py").shorten
    signature = "(a=<class 'x.y.Norm'>, b=<function K.<lambda>>, c=<factory>, d=<function f at 0x7f>, e=1 < 2)"
    assert shorten(None, "class", "x", None, {}, signature, "int") == ("(a=Norm, b=..., c=..., d=f, e=1 < 2)", "int")
    assert shorten(None, "data", "x", None, {}, None, None) == (None, None)


def test_an_answer_as_an_image(load, tmp_path):
    answer = load("tests/report/synthetic.py").make_answer(tmp_path, arms=4, rename={0: "<b>&"})
    path = write_report(answer, tmp_path / "answer.svg")
    image = path.read_text()
    root = ET.fromstring(image)
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<b>&" in texts, "names are escaped"
    for effect in answer.effects.values():
        assert any(text.startswith(f"{effect.effect:+.2f}".replace("-", "−")) for text in texts)
    assert sum(text.startswith(("▲", "▼", "≥", "=", "?", "≤", "!")) for text in texts) == len(answer.effects)
    variables = set(re.findall(r"var\((--[\w-]+)\)", image))
    assert variables <= set(re.findall(r"(--[\w-]+):", image)), "every color is set in the file itself"
    assert "prefers-color-scheme: dark" in image
    assert write_report(answer, tmp_path / "again.svg").read_text() == image
