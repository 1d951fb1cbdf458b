"""The page of several studies: each change with its plot and its studies, and what they say together."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from markupsafe import Markup

from vitmods import __version__
from vitmods.report import text
from vitmods.report.figures import Inliner, forest, has_arrows
from vitmods.report.templates import templates
from vitmods.stats.verdict import Effect
from vitmods.study.answer import VIEWS
from vitmods.study.arms import BASE
from vitmods.study.evidence import LIKE_THESE, Evidence, OfChange
from vitmods.tasks.metrics import Metric
from vitmods.util.address import named
from vitmods.util.remote import write_output


@VIEWS.register("evidence")
def write_evidence(evidence: Evidence, out: str | Path) -> Path:
    """Write the page as one self-contained HTML file; returns its path."""
    template = templates().get_template("evidence.html")
    content = template.render(
        page=EvidencePage(evidence), e=evidence, named=lambda study: named(Path(study)), version=__version__
    )
    return write_output(out, content.encode())


class EvidencePage:
    """Values and plots that the template needs in addition to the evidence."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence, self.inline = evidence, Inliner()
        findings = [one for found in evidence.changes for one in found.findings]
        self.studies = len({one.study for one in findings})
        self.data_sets = sorted({one.data for one in findings})

    @cached_property
    def means(self) -> list[Effect]:
        """The mean effects on data sets like these, by change; best verdict first."""
        found = [(one.title, effect) for one in self.evidence.changes for effect in one.effects]
        means = [replace(effect, arm=title, n=1) for title, effect in found if effect.arm == LIKE_THESE]
        return sorted(means, key=text.rank)

    @property
    def headline(self) -> str:
        if not self.means:
            return "No change was studied on three data sets or more: nothing is known of other data sets."
        return text.verdicts(self.means, "changes", BASE, f"on {LIKE_THESE}")

    def forests(self, found: OfChange) -> list[Markup]:
        """The plot of a change for wide and for narrow screens."""
        unit = "%" if found.unit == "points" else found.unit
        effects = found.effects
        metric = Metric(found.metric, found.metric, "", effects[0].higher_is_better, cast(Any, unit))
        return [forest(effects, effects[0].margin, metric, self.inline, narrow) for narrow in (False, True)]

    def has_arrows(self, found: OfChange) -> bool:
        return has_arrows(found.effects, found.effects[0].margin)
