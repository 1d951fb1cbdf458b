"""Formulas as MathML, made when the site is built: pages need no script and no font for them."""

from __future__ import annotations

import re
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def mathml(formula: str, display: str, place: Any) -> str:
    """A formula as MathML. What is unknown in it is a warning, which fails the build."""
    try:
        plain = " ".join(formula.split()).replace("{aligned}", "{align*}")  # the same where there is no text beside it
        made = convert(plain, display=display)
    except Exception as error:  # a parser's errors have no common base
        logger.warning("the formula %r cannot be read: %r", formula, error, location=place)
        return ""
    if unknown := re.findall(r"\\\w+|<mi>&</mi>", made):
        logger.warning("the formula %r has unknown commands: %s", formula, ", ".join(unknown), location=place)
    return made


def inline(writer: Any, node: Any) -> None:
    writer.body.append(mathml(node.astext(), "inline", node))
    raise SkipNode


def block(writer: Any, node: Any) -> None:
    writer.body.append(f'<div class="math">{mathml(node.astext(), "block", node)}</div>')
    raise SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
