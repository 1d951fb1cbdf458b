"""`vitmods report`: results and report from a study's folder; `vitmods decide`: verdicts on scores of any training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitmods.cli.options import parse
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.text import listing

KINDS = (".html", ".svg", ".pdf", ".png")
"""what `--out` of a report may end with"""
MOST_FORECASTS = 10  # of open arms; each is simulated
TEXTS = ("markdown", "latex", "bibtex", "methods")
"""what a report prints: `Answer.to_...`"""


@dataclass(frozen=True)
class Report:
    """Rebuild results.json, results.csv and report.html of a study, finished or not, and print the table.

    examples:
      vitmods report runs/digits-mu3-2
      vitmods report runs/digits-mu3-2 --out answer.html
      vitmods report runs/digits-mu3-2 --out answer.pdf     (a figure: the sentence and the intervals; also svg, png)
      vitmods report runs/digits-mu3-2 --latex     (also --markdown, --methods)
      vitmods report runs/digits-mu3-2 --bibtex > citations.bib
      vitmods report runs/digits-mu3-2 --paper paper     (table, methods and references for LaTeX)
      vitmods report runs/digits-mu3-2 --reference dpn --out against-dpn.html     (all others against dpn)
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """the study's folder or address"""
    out: Path | None = None
    """where the report goes: .html, or .svg, .pdf or .png for a figure of the verdicts; None: report.html in the
    folder"""
    reference: str = "base"
    """the arm that all others are compared with"""
    paper: Path | None = None
    """write the table, the methods and the references for LaTeX into this folder, and no report"""
    markdown: bool = False
    """print a Markdown table, and write nothing"""
    latex: bool = False
    """print a LaTeX table, and write nothing"""
    bibtex: bool = False
    """print the citations of the changes, and write nothing"""
    methods: bool = False
    """print a paragraph that describes the methods, and write nothing"""

    def __post_init__(self) -> None:
        """Raise UserError for options that exclude each other, and for a report of another kind."""
        if len(self.printed) + (self.out is not None) + (self.paper is not None) > 1:
            printing = ", ".join(f"--{name}" for name in TEXTS)
            raise UserError(f"{printing} print a text, --out and --paper write files: give one of them.")
        if self.out is not None and self.out.suffix.lower() not in KINDS:
            raise UserError(f"The report {self.out} must end with {listing(KINDS, 'or')}.")

    @property
    def printed(self) -> list[str]:
        """The texts that are asked for."""
        return [name for name in TEXTS if getattr(self, name)]


@dataclass(frozen=True)
class Decide:
    """Say which arms are better or worse than base, from a CSV file of scores. Nothing is trained.

    The columns are arm,seed,score: a score for each trial; or arm,seed,image,score: for each test image, and then the
    intervals hold for other test images too. A score of `diverged` is a trial without one. Train base and every arm
    with the same seeds.

    examples:
      vitmods decide scores.csv
      vitmods decide scores.csv --base plain --margin 0.2 --markdown
      vitmods decide losses.csv --unit nats --lower-is-better --margin 0.01
    """

    scores: Annotated[Path, tyro.conf.Positional]
    """the CSV file"""
    base: str = "base"
    """the arm that the others are compared with"""
    margin: float = 0.5
    """the difference that does not matter, in points, or in the unit of the scores"""
    unit: str | None = None
    """fraction (0.93, shown as 93 points), points (93), or what the scores count; None: fractions up to 1"""
    lower_is_better: bool = False
    """losses and errors"""
    generalize: Literal["images", "seeds"] = "images"
    """the verdict holds for other test images too, or for these alone"""
    most_seeds: int | None = None
    """the maximum, where seeds are added until it is decided; None: their number was fixed before"""
    chance: float | None = None
    """the score of the best constant prediction, e.g. the share of the most frequent class: where base is not clearly
    above it, no verdict is given; None: 0 for fractions of which more is better"""
    markdown: bool = False
    """print a Markdown table"""
    latex: bool = False
    """print a LaTeX table"""
    json: bool = False
    """print JSON, for programs"""


def main(arguments: Sequence[str]) -> int:
    """Run `vitmods report`; returns the exit code."""
    options = parse(Report, arguments, "report")
    from vitmods.report import print_answer
    from vitmods.study import Answer

    answer = Answer.load(options.folder, options.reference)
    if options.printed:
        print(getattr(answer, f"to_{options.printed[0]}")())
        return 0
    if options.paper is not None:
        folder = answer.paper(options.paper)
        print(f"Paper: {named(folder)} (pdflatex main, bibtex main, and pdflatex main twice)")
        return 0
    report = answer.report(options.out)
    print_answer(answer)
    print(f"Report: {named(report)}")
    return 0


def decide_scores(arguments: Sequence[str]) -> int:
    """Run `vitmods decide`; returns the exit code."""
    options = parse(Decide, arguments, "decide")
    if options.markdown + options.latex + options.json > 1:
        raise UserError("Give one of --markdown, --latex and --json.")
    from vitmods.stats.decide import decide
    from vitmods.stats.sample_size import forecast
    from vitmods.stats.verdict import Verdict

    decision = decide(
        options.scores, options.base, options.margin, unit=options.unit, generalize=options.generalize,
        higher_is_better=not options.lower_is_better, most_seeds=options.most_seeds, chance=options.chance,
    )  # fmt: skip
    if all(effect.n < 2 and effect.verdict == Verdict.OPEN for effect in decision.effects.values()):
        raise UserError(
            f"No arm shares two seeds with {options.base}, so their spread is unknown. Train {options.base} and "
            "the arms with the same seeds, 3 or more."
        )
    if options.json:
        print(json.dumps(decision.to_dict(), indent=1))
    elif options.latex:
        print(decision.to_latex())
    elif options.markdown:
        print(decision.to_markdown())
    else:
        print(decision)
        open_ones = [effect for effect in decision.effects.values() if effect.verdict == Verdict.OPEN]
        for effect in sorted(open_ones, key=lambda effect: -abs(effect.effect))[:MOST_FORECASTS]:
            if expected := forecast(effect):
                print(f"{effect.arm}: {expected}")
        if len(open_ones) > MOST_FORECASTS:
            shown = f"the {MOST_FORECASTS} largest of {len(open_ones)} open effects"
            print(f"What more seeds would decide is shown of {shown}.")
    return 0
