"""Docstrings as the house writes them, for Sphinx: plain text with `names`, and fields as `name: what it is`."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

FIELD = re.compile(r"[a-z_]\w*(, [a-z_]\w*)*:\s+\S")
NAMED = re.compile(r"<(?:class|function) '?(?:\w+\.)*(\w+)'?(?: at 0x[0-9a-f]+)?>")
UNNAMED = re.compile(r"<factory>|<function [\w.]*<lambda>(?: at 0x[0-9a-f]+)?>")
CODE = re.compile(r"(``.+?``|`[^`]+`|:\w+:`[^`]+`)")


def prepare(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Signs that mean something only to reStructuredText are escaped, paragraphs of fields become lists.

    Napoleon reads an attribute's docstring as `TYPE: text` up to its first colon, in the first line that is not empty:
    a comment takes that place.
    """
    made = [".."] if what in ("attribute", "data", "property") else []
    for paragraph in re.split(r"\n{2,}", "\n".join(lines).rstrip()):
        indented = paragraph.startswith(" ")
        if made and (made[-1].rstrip().endswith("::") or made[-1].lstrip().startswith(".. ")) and indented:
            made.append(paragraph)  # a literal block, or what a directive holds
        elif paragraph.lstrip().startswith(".. "):
            made.append(paragraph)
        else:
            made.append(_fields(_escaped(paragraph)))
    lines[:] = [*"\n\n".join(made).split("\n"), ""]


def shorten(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Sphinx reads no signature with `<class 'a.B'>` in it: a default is its name, or `...` without one."""
    if signature is not None:
        signature = UNNAMED.sub("...", signature)
        signature = NAMED.sub(r"\1", signature)
    return signature, returns


def _escaped(text: str) -> str:
    parts = CODE.split(text)
    return "".join(part if i % 2 else re.sub(r"[*|]|(?<=\w)_(?!\w)", r"\\\g<0>", part) for i, part in enumerate(parts))


def _fields(paragraph: str) -> str:
    lines = paragraph.split("\n")
    heads = [line for line in lines if not line.startswith(" ")]
    if lines[0].startswith(" ") or not all(map(FIELD.match, heads)) or lines[0].split(":")[0] in SECTIONS:
        return paragraph
    return "\n".join(f"  {line}" if line.startswith(" ") else f"- {line}" for line in lines)


SECTIONS = {"Args", "Raises", "Returns", "Yields", "Shapes", "Warns", "Processes", "Example", "Note"}


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", prepare, priority=400)
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
