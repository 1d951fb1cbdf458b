"""Sections that other packages add to the report of a study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vitmods.report.figures import Inliner
from vitmods.study.answer import Answer
from vitmods.util.registry import Registry


def _nothing(answer: Answer) -> list[Any]:
    return []


@dataclass(frozen=True)
class Section:
    """A section of the report; empty where it has nothing to say of a study.

    after: the part of the page that it follows: the verdicts, or the models.
    html: markup for the page, whose figures the Inliner makes inline.
    text: renderables of rich, for a terminal.
    """

    after: Literal["verdicts", "models"]
    html: Callable[[Answer, Inliner], str]
    text: Callable[[Answer], list[Any]] = _nothing


SECTIONS: Registry[Section] = Registry("report section", "vitmods.papers.comparison", "vitmods.analysis.gallery")
