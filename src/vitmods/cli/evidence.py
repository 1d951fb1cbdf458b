"""`vitmods evidence`: several studies together, change by change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vitmods.cli.options import note, parse
from vitmods.util.address import named
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class Evidence:
    """Say what finished studies show together: each change on each data set, on average, and on a further one.

    Studies of one data set count as one. A claim on other data sets needs three or more. Nothing is trained.

    examples:
      vitmods evidence runs
      vitmods evidence runs --out evidence.html
      vitmods evidence runs/pets runs/leaves runs/clothes --markdown
    """

    folders: Annotated[tuple[str, ...], tyro.conf.Positional]
    """folders of studies, or with studies in them"""
    out: Path | None = None
    """also write a page (.html): a plot and the studies of each change, and what was left out"""
    markdown: bool = False
    """print a Markdown table"""
    latex: bool = False
    """print a LaTeX table"""
    json: bool = False
    """print JSON, for programs"""

    def __post_init__(self) -> None:
        """Raise UserError without a folder, and for two forms."""
        if not self.folders:
            raise UserError("Give folders of studies: vitmods evidence runs")
        if self.markdown + self.latex + self.json > 1:
            raise UserError("Give one of --markdown, --latex and --json.")


def main(arguments: Sequence[str]) -> int:
    """Run `vitmods evidence`; returns the exit code."""
    options = parse(Evidence, arguments, "evidence")
    from vitmods.study.evidence import evidence

    found = evidence(options.folders)
    table = found.to_latex() if options.latex else found.to_markdown() if options.markdown else found
    page = options.out and found.report(options.out)
    print(json.dumps(found.to_dict(), indent=1) if options.json else table)
    if table is not found and found.left_out:
        note(f"Left out: {'; '.join(found.left_out)}.")
    if page:
        note(f"Page: {named(page)}")
    return 0
