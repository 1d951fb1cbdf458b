"""`vitmods report`: results and report from a study's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vitmods.cli.options import parse
from vitmods.util.address import named


@dataclass(frozen=True)
class Report:
    """Rebuild results.json, results.csv and report.html of a study, finished or not, and print the table.

    examples:
      vitmods report runs/digits-mu3-2
      vitmods report runs/digits-mu3-2 --out answer.html
      vitmods report runs/digits-mu3-2 --out answer.svg     (an image: the sentence and the intervals)
      vitmods report runs/digits-mu3-2 --reference dpn --out against-dpn.html     (all others against dpn)
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """the study's folder or address"""
    out: Path | None = None
    """where the report goes, .html, or .svg for an image of the verdicts; None: report.html in the folder"""
    reference: str = "base"
    """the arm that all others are compared with"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Report, arguments, "report")
    from vitmods.report import print_answer
    from vitmods.study import Answer

    answer = Answer.load(options.folder, options.reference)
    report = answer.report(options.out)
    print_answer(answer)
    print(f"\nReport: {named(report)}")
    return 0
