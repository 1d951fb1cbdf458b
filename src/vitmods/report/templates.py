"""The pages' templates: what all of them may use, and how text becomes HTML."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vitmods.report import facts, text
from vitmods.stats.tables import signed
from vitmods.util.text import plural


@cache
def templates() -> Environment:
    """All text is escaped; what is not given to a template is an error."""
    found = Environment(
        loader=PackageLoader("vitmods.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    found.filters.update(breakable=breakable, code=code)
    css = Markup((Path(__file__).parent / "style.css").read_text(encoding="utf-8"))
    found.globals.update(css=css, text=text, facts=facts, plural=plural, signed=signed, link=link)
    return found


def breakable(name: str) -> Markup:
    """A name that a narrow column breaks after its punctuation, not within a word."""
    return Markup("<wbr>").join(re.split(r"(?<=[(,+._])", name))


def code(words: str) -> Markup:
    """Text in which `x` is code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(words))))


def link(url: str) -> str | None:
    """The address of a citation, if it is one that a browser may follow."""
    return url if url.startswith(("https://", "http://")) else None
