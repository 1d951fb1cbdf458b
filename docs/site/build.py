"""Builds the documentation as a site that needs no network: `make docs`, or `python docs/site/build.py build/site`.

The pages are the repository's Markdown files as they are. A copy of them is made first, to which the drawings of the
changes, the output of the tutorials, the reports of stored studies, the navigation and the reference of the public
names are added; Sphinx turns the copy into the site. Every warning is an error, and so are a link that leads nowhere
and a page that loads anything from elsewhere.
"""

from __future__ import annotations

import functools
import html
import io
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gallery"))
sys.path.insert(0, str(Path(__file__).parent))

import check
import reference
import stored
import tutorials

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INDEX = Path("docs/index.md")

LINK = re.compile(r"(?<!!)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)|!\[[^\]]*\]\((?!\w+:)([^)\s]+)\)")
FENCE = re.compile(r"^(```+).*?^\1$", re.M | re.S)
DRAWING = re.compile(r"^<!-- drawing: (.+?) -->$", re.M)
REPORT = re.compile(r"^<!-- report: ([\w-]+) -->$", re.M)
ANSWER = re.compile(r"^!\[(.*)\]\((?!\w+:)(\S+)\.svg\)$", re.M)
EXTRA = Path("_extra")
"""in the copy: files that the site has as they are"""


def pages(root: Path = ROOT) -> list[Path]:
    """The Markdown files of the repository that are part of the site, relative to its root."""
    found = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("examples/**/*.md")]
    return sorted(page.relative_to(root) for page in found)


def stage(root: Path, to: Path, packages: Sequence[str]) -> None:
    """A copy of the pages and of the files that they link to, with what is generated."""
    for page in pages(root):
        to_a_page = functools.partial(_to_a_page, root, page)
        text = (root / page).read_text(encoding="utf-8")
        for target in _targets(text):
            _copy_linked(root, page, target, to)
        text = outside_fences(text, functools.partial(LINK.sub, to_a_page))
        text = DRAWING.sub(lambda found: drawing(found[1]), text)
        text = ANSWER.sub(functools.partial(_answer, root, page, to), text)
        up = "../" * (len(page.parts) - 1)
        text = REPORT.sub(functools.partial(_report_link, up), text)
        if page.parent.name == "tutorials":
            text = tutorials.with_output(root / page, text)
        if page == INDEX:
            text += "\n" + "\n".join(toctrees(text, root, packages))
        _write(to / page, text)


def _report_link(up: str, found: re.Match[str]) -> str:
    return _html(f'<p class="report"><a href="{up}reports/{found[1]}.html">Open the full report of this study</a></p>')


def _html(text: str) -> str:
    return f"```{{raw}} html\n{text}\n```"


def _answer(root: Path, page: Path, to: Path, image: re.Match[str]) -> str:
    """The image of an answer, where there is one for phones too, as the one that fits the reader's screen."""
    wide, narrow = f"{image[2]}.svg", f"{image[2]}-narrow.svg"
    if not (root / page.parent / narrow).is_file():
        return image[0]
    for name in (wide, narrow):
        path = Path(os.path.normpath(page.parent / name))
        (to / EXTRA / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, to / EXTRA / path)
    return _html(
        f'<picture><source media="screen and (max-width: 44rem)" srcset="{narrow}">'
        f'<img src="{wide}" alt="{html.escape(image[1])}"></picture>'
    )


def write_reports(root: Path, to: Path) -> None:
    """The reports of all stored studies, as they are in the site."""
    (to / EXTRA / "reports").mkdir(parents=True, exist_ok=True)
    for archive in sorted(root.glob("docs/gallery/*.tar.xz")):
        name = archive.name.partition(".")[0]
        shutil.copyfile(report_of(archive), to / EXTRA / "reports" / f"{name}.html")


def report_of(archive: Path) -> Path:
    """The report of a stored study, kept in build/reports for as long as neither the study nor the package changes."""
    name, code = archive.name.partition(".")[0], Path(stored.__file__)
    kept = tutorials.KEPT.with_name("reports") / f"{name}={tutorials.fingerprint(archive, code)}.html"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        for old in kept.parent.glob(f"{name}=*.html"):
            old.unlink()
        with tempfile.TemporaryDirectory() as folder:
            stored.write_page(archive, Path(folder), kept)
    return kept


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """The text with a change of all that is no block of code."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def _targets(text: str) -> list[str]:
    return [link[1] or link[3] for link in LINK.finditer(FENCE.sub("", text))]


def _copy_linked(root: Path, page: Path, target: str, to: Path) -> None:
    linked = (root / page.parent / target).resolve()
    if linked.is_file() and linked.suffix != ".md" and linked.is_relative_to(root):
        copy = to / linked.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(linked, copy)


def _to_a_page(root: Path, page: Path, link: re.Match[str]) -> str:
    """A link to a folder as one to its page."""
    if link[1] and (root / page.parent / link[1] / "README.md").is_file():
        return f"]({link[1].rstrip('/')}/README.md{link[2] or ''})"
    return link[0]


def toctrees(index: str, root: Path, packages: Sequence[str]) -> Iterator[str]:
    """The navigation: a group for each heading of the index, with the pages that are linked under it, then those of the
    changes and the reference. A page that the index does not name is an orphan, which fails the build."""
    for section in re.split(r"^## ", index, flags=re.M)[1:]:
        title, _, text = section.partition("\n")
        linked = dict.fromkeys(os.path.normpath(Path("docs") / target) for target in _targets(text))
        entries = [name.removesuffix(".md") for name in linked if name.endswith(".md") and (root / name).is_file()]
        yield _toctree(title, [_entry(name) for name in entries if name != "docs/changes"])
        if "docs/changes" in entries:
            cards = sorted(page.stem for page in (root / "docs" / "changes").glob("*.md"))
            yield _toctree("The changes", ["/docs/changes", *(f"/docs/changes/{name}" for name in cards)])
    if packages:
        yield _toctree("Reference", [f"/docs/api/{name}" for name in packages])


def _entry(name: str) -> str:
    """A page in the navigation, by its own title; README and examples by what they are."""
    if name == "README":
        return "README </README>"
    folder = re.fullmatch(r"examples/(\w+)/README", name)
    return f"Example: {folder[1].replace('_', ' ')} </{name}>" if folder else f"/{name}"


def _toctree(title: str, entries: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *entries, "```", ""])


def drawing(arm: str) -> str:
    """The block of a small ViT with the changes of an arm, what is new in it marked, as HTML within Markdown."""
    from vitmods.changes import parse_changes
    from vitmods.model.config import ViTConfig
    from vitmods.report.drawing import draw

    base_name, _, text = arm.rpartition(": ")
    changed = base = ViTConfig.from_name(base_name or "S/16")
    for change in parse_changes(text):
        changed = change.edit(changed)
    svg = draw(json.loads(changed.to_json()), json.loads(base.to_json()), text)
    caption = f"<code>{text}</code> on {base_name or 'S/16'}: what it adds or alters is marked."
    return _html(f'<figure class="block-drawing">{svg}<figcaption>{caption}</figcaption></figure>')


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def style() -> str:
    """The site's style sheet: the report's colors and rules for drawings, for the theme's light and dark."""
    from vitmods import report

    text = Path(report.__file__).with_name("style.css").read_text(encoding="utf-8")
    light, dark = (colors.strip() for colors in re.findall(r":root \{(.*?)\}", text, re.S)[:2])
    rules = [line for line in text.splitlines() if line.startswith(".drawing")]
    return "\n".join(
        [
            f"body {{ {light} }}",
            f'body[data-theme="dark"] {{ {dark} }}',
            f'@media (prefers-color-scheme: dark) {{ body:not([data-theme="light"]) {{ {dark} }} }}',
            *rules,
            (HERE / "site.css").read_text(encoding="utf-8"),
        ]
    )


def build(out: Path, root: Path = ROOT, packages: Sequence[str] = reference.PACKAGES) -> list[str]:
    """Builds the site into a folder that is made anew; returns what is wrong with it, nothing if it is right."""
    from sphinx.application import Sphinx
    from sphinx.errors import SphinxError
    from sphinx.util.console import strip_escape_sequences
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    said = io.StringIO()
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        stage(root, source, packages)
        write_reports(root, source)
        for name, text in reference.pages(packages):
            _write(source / "docs" / "api" / f"{name}.rst", text)
        for name in ("conf.py", "docstrings.py", "mathml.py"):
            shutil.copyfile(HERE / name, source / name)
        _write(source / "_static" / "site.css", style())
        shutil.copyfile(HERE / "copy.js", source / "_static" / "copy.js")
        _write(source / EXTRA / "index.html", REDIRECT)
        shutil.rmtree(out, ignore_errors=True)
        os.environ["TZ"] = "UTC"
        try:
            with patch_docutils(source), docutils_namespace():
                app = Sphinx(source, source, out, source / ".doctrees", "html", status=None, warning=said)
                app.build()
        except SphinxError as error:
            return [str(error)]
        if said.getvalue():
            return strip_escape_sequences(said.getvalue()).replace(f"{source}/", "").splitlines()
    shutil.rmtree(out / ".doctrees", ignore_errors=True)
    simplify_sources(out)
    label_cells(out)
    return check.problems(out)


def simplify_sources(out: Path) -> None:
    """Leave out of the source pages their list and their links back, which miss names that several packages have."""
    (out / "_modules" / "index.html").unlink(missing_ok=True)
    for page in (out / "_modules").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r'<a class="viewcode-back"[^>]*>.*?</a>', "", text), encoding="utf-8")


TABLE = re.compile(r"<table class=\"docutils.*?</table>", re.S)
HEAD = re.compile(r'<th class="head[^>]*>(.*?)</th>', re.S)
CELL = re.compile(r"<td(?: class=\"[^\"]*\")?>(?P<text>.*?)</td>", re.S)
MOST_COLUMNS = 3
"""of a table that fits a phone"""


def label_cells(out: Path) -> None:
    """Give the cells of tables with more columns than fit a phone their headings, which site.css shows there."""

    def labeled(table: re.Match[str]) -> str:
        heads = [re.sub(r"<[^>]+>", "", head) for head in HEAD.findall(table[0])]
        if len(heads) <= MOST_COLUMNS:
            return table[0]
        columns = itertools.cycle(heads)

        def cell(found: re.Match[str]) -> str:
            is_empty = not re.sub(r"<[^>]+>", "", found["text"]).strip()
            kind = ' class="empty"' if is_empty else ""
            return f'<td{kind} data-label="{next(columns)}">{found["text"]}</td>'

        return CELL.sub(cell, table[0]).replace('class="docutils', 'class="stacked docutils', 1)

    for page in sorted(out.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        if (new := TABLE.sub(labeled, text)) != text:
            page.write_text(new, encoding="utf-8")


REDIRECT = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>vitmods</title>
<meta http-equiv="refresh" content="0; url=docs/index.html"></head>
<body><a href="docs/index.html">The documentation of vitmods</a></body></html>
"""


def main(arguments: list[str]) -> int:
    """Exit code 1 with a line for each thing that is wrong."""
    out = Path(arguments[0] if arguments else "build/site").resolve()
    wrong = build(out)
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        print(f"{out}/index.html")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
