"""Sections that other packages add to the report of a study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vitmods.report.figures import Inliner
from vitmods.study.answer import Answer
from vitmods.util.registry import Registry


@dataclass(frozen=True)
class Section:
    """A section of the report, empty if it does not apply to a study.

    after: position on the page: after the verdicts, or after the models.
    html: returns markup for the page; the Inliner inlines its figures.
    text: returns renderables of rich for a terminal.
    """

    after: Literal["verdicts", "models"]
    html: Callable[[Answer, Inliner], str]
    text: Callable[[Answer], list[Any]] = lambda answer: []


SECTIONS: Registry[Section] = Registry("report section", "vitmods.papers.comparison", "vitmods.analysis.gallery")
