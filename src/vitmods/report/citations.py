"""The papers that a study cites: those of its changes, of the table it reproduces, of its statistics and software."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from vitmods.report.page import SECTIONS
from vitmods.study.answer import Answer
from vitmods.util.latex import tex

PAPERS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("papers.toml").read_text(encoding="utf-8"))
"""names of venues and journals; other works that methods cite; title -> its authors with given names, as in BibTeX"""
_PAPER = re.compile(
    r"(?P<authors>[^:]+?): (?P<title>.+)(?:\.|(?<=[?!])) (?:(?P<venue>[^.,]+?) )?(?P<year>\d{4})(?:, .*)?"
)
_NEXT = re.compile(r"; (?=[^;:]+: )")
"""what separates two papers of one change"""
_SMALL = {"a", "an", "the", "on", "of"}


class Citation(NamedTuple):
    """A paper as a change names it: `Kumar, Dehghani & Houlsby: Dual PatchNorm. TMLR 2023`, and its address.

    A text of another form is the title of an entry without authors.
    """

    title: str
    url: str = ""
    authors: tuple[str, ...] = ()
    venue: str = ""
    year: str = ""

    @classmethod
    def read(cls, paper: str, url: str) -> list[Citation]:
        """Read the papers of a change; the address is that of the first."""
        papers = []
        for number, part in enumerate(_NEXT.split(paper) if paper else ()):
            place = "" if number else url
            if match := _PAPER.fullmatch(part):
                names = re.split(r", | & ", match["authors"].replace(" et al.", ", others"))
                papers.append(cls(match["title"], place, tuple(names), match["venue"] or "", match["year"]))
            else:
                papers.append(cls(part, place))
        return papers

    @property
    def key(self) -> str:
        """`kumar2023dual`: the first author, the year and the first word of the title."""
        words = (word for word in re.findall(r"\w+", self.title.lower()) if word not in _SMALL)
        first = re.sub(r"\W", "", self.authors[0].lower()) if self.authors else ""
        key = f"{first}{self.year}{next(words, '')}"
        return unicodedata.normalize("NFD", key).encode("ascii", "ignore").decode() or "untitled"

    @property
    def short(self) -> str:
        """`Kumar et al., 2023`; empty without authors."""
        if not self.authors:
            return ""
        first, *others = self.authors
        several = len(others) > 1 or "others" in others
        names = f"{first} et al." if several else " & ".join(self.authors)
        return f"{names}, {self.year}"

    @property
    def mark(self) -> str:
        """`[@Dual PatchNorm]`: stands for the citation in a text, until that is rendered."""
        return f"[@{self.title}]"

    def bibtex(self, key: str) -> str:
        """Format the entry with all authors; of a paper that vitmods does not know, those that its change names."""
        arxiv = re.search(r"arxiv\.org/abs/([\w.]+)", self.url)
        authors = PAPERS["authors"].get(self.title, " and ".join(self.authors))
        kind, fields = "misc", {"title": f"{{{tex(self.title)}}}", "author": tex(authors)}
        if self.venue in PAPERS["journals"]:
            kind, fields["journal"] = "article", PAPERS["journals"][self.venue]
        elif self.venue:
            kind, fields["booktitle"] = "inproceedings", tex(PAPERS["venues"].get(self.venue, self.venue))
        fields["year"] = self.year
        if arxiv:
            fields |= {"eprint": arxiv[1], "archiveprefix": "arXiv"}
        fields["url"] = self.url.replace("{", "%7B").replace("}", "%7D")
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
        return "\n".join([f"@{kind}{{{key},", *lines, "}"])


def cite(paper: str, url: str = "") -> str:
    """Cite the papers of a change in a text: `; [@Dual PatchNorm]` for each that names authors."""
    return "".join(f"; {citation.mark}" for citation in Citation.read(paper, url) if citation.authors)


WORKS = {name: Citation.read(*work)[0] for name, work in PAPERS["works"].items()}
"""papers that the methods of some studies cite, besides those of changes and tables"""


class References:
    """The papers of a study by their keys, each once: of the changes, by arm, then of the tables that the study
    reproduces, then those that a text cites."""

    def __init__(self, answer: Answer, text: str = "") -> None:
        papers = [(change.paper, change.url) for arm in answer.every_arm for change in arm.model.changes]
        papers += [paper for section in SECTIONS.values() for paper in section.papers(answer)]
        read = [citation for paper, url in papers for citation in Citation.read(paper, url)]
        read += [work for work in WORKS.values() if work.mark in text]
        self.by_key: dict[str, Citation] = {}
        self.keys: dict[str, str] = {}
        """title in small letters -> key"""
        for citation in read:
            if citation.title.lower() not in self.keys:
                taken = [key for key in self.by_key if re.fullmatch(rf"{re.escape(citation.key)}[a-z]?", key)]
                key = citation.key + (chr(ord("a") + len(taken)) if taken else "")
                self.by_key[key], self.keys[citation.title.lower()] = citation, key

    def render(self, text: str, escape: Callable[[str], str], form: Callable[[str, Citation], str]) -> str:
        """Render a text: `form` writes a citation that is marked in it, `escape` what is between."""
        first, *pieces = re.split(r"\[@([^\]]*)\]", text)
        rendered = escape(first)
        for title, between in zip(pieces[::2], pieces[1::2], strict=True):
            key = self.keys.get(title.lower())
            rendered += (form(key, self.by_key[key]) if key else escape(f"[@{title}]")) + escape(between)
        return rendered

    def bibtex(self, version: str, year: str) -> str:
        """Format all entries, and vitmods itself, as BibTeX."""
        software = {
            "title": "{vitmods: published design changes for Vision Transformers, compared with paired seeds}",
            "author": "{The vitmods authors}",
            "year": year,
            "note": f"Version {version}",
        }
        lines = [f"  {name} = {{{value}}}," for name, value in software.items()]
        entries = [citation.bibtex(key) for key, citation in self.by_key.items()]
        return "\n\n".join([*entries, "\n".join(["@misc{vitmods,", *lines, "}"])])
