"""Matplotlib figures as inline SVG that takes its colors and fonts from the page."""

from __future__ import annotations

import html
import io
import itertools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from markupsafe import Markup

from vitmods.analysis.figure import INK, LINE, MUTED, PALETTE

# Matplotlib knows no CSS variables, so it draws with stand-ins that no other color of a figure equals.
_NAMES = ("ink", "muted", "line", "band", "base", "arm", "helps", "hurts", "same", "open", "paper")
COLOUR = {name: f"#0102{i:02x}" for i, name in enumerate(_NAMES, 16)}
_VARIABLE = {value: f"var(--{name})" for name, value in COLOUR.items()}
# Those of figures of models, which are files of their own too.
_VARIABLE |= {INK: "var(--ink)", MUTED: "var(--muted)", LINE: "var(--line)", "#ffffff": "var(--paper)"}
_VARIABLE |= {value: f"var(--s{i})" for i, value in enumerate(PALETTE)}


@contextmanager
def figure(width: float, height: float) -> Iterator[Any]:
    """An empty figure; sizes are in SVG units, of which a page shows about one per CSS pixel."""
    from matplotlib.figure import Figure

    with fixed_settings():
        yield Figure(figsize=(width / 72, height / 72), dpi=72)


@contextmanager
def fixed_settings() -> Iterator[None]:
    """Matplotlib's settings for a while, whatever the reader's own say."""
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        # Matplotlib's own font lacks many scripts; the browser's do not.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        mpl.rcdefaults()
        mpl.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": "vitmods", "path.simplify": True, "axes.unicode_minus": True}
        )
        yield


def standalone(drawn: Any) -> str:
    """A figure as a file of its own, on white paper."""
    buffer = io.StringIO()
    with fixed_settings():
        drawn.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


class Inliner:
    """Turns the figures of one page into SVG elements; ids differ between them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self, drawn: Any, label: str, css_class: str = "") -> Markup:
        """The SVG element of a matplotlib figure. `label` is what a screen reader says."""
        buffer = io.StringIO()
        with fixed_settings():
            drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        return Markup(compact(buffer.getvalue(), f"f{next(self._numbers)}-", label, css_class))


def compact(text: str, prefix: str, label: str, css_class: str = "") -> str:
    """Matplotlib's SVG file as an element for HTML: page colors and fonts, own ids, two decimals."""
    start, end = text.index("<svg"), text.rindex("</svg>")
    opening, body = text[start:end].split(">", 1)
    view = re.search(r'viewBox="([^"]+)"', opening)
    assert view is not None, "matplotlib writes a viewBox"
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r"<[^>]+>", lambda tag: _clean_tag(tag[0], prefix), body)
    body = re.sub(r">\s+<", "><", body).strip()
    name = html.escape(label, quote=True)
    return f'<svg class="{css_class}" viewBox="{_rounded(view[1])}" role="img" aria-label="{name}">{body}</svg>'


def _clean_tag(tag: str, prefix: str) -> str:
    tag = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', tag)
    tag = re.sub(r"url\(#", f"url(#{prefix}", tag)
    tag = re.sub(r'xlink:href="#', f'href="#{prefix}', tag)
    tag = re.sub(r"font: ((?:[a-z]+ |\d+ )*)([\d.]+)px [^;\"]*", r"font-size: \2px", tag)  # matplotlib before 3.10
    tag = re.sub(r"font-family: [^;\"]*; ?| transform=\"rotate\(-?0 [^\"]*\"", "", tag)
    tag = re.sub(r"#[0-9a-f]{6}\b", lambda color: _VARIABLE.get(color[0], color[0]), tag)
    if re.fullmatch(r'<g id="[^"]*"(/?)>', tag):
        tag = "" if tag.endswith("/>") else "<g>"  # ids of groups serve nobody here
    return re.sub(r"\s+", " ", _rounded(tag))


def _rounded(text: str) -> str:
    return re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", text)
