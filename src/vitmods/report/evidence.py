"""The page of several studies: each change with its plot and its studies, and what they say together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from markupsafe import Markup

from vitmods import __version__
from vitmods.report import text
from vitmods.report.figures import Inliner, forest, has_arrows
from vitmods.report.templates import templates
from vitmods.study.answer import VIEWS
from vitmods.study.arms import BASE
from vitmods.study.evidence import FURTHER, LIKE_THESE, Evidence, OfChange
from vitmods.tasks.metrics import Metric
from vitmods.util.address import named
from vitmods.util.remote import write_output
from vitmods.util.text import listing


@VIEWS.register("evidence")
def write_evidence(evidence: Evidence, out: str | Path) -> Path:
    """Write the page as one self-contained HTML file; returns its path."""
    inline, claimed = Inliner(), [one for one in evidence.changes if one.other]
    name = "title" if len({one.metric for one in claimed}) > 1 else "change"
    means = [replace(one.on_others[0], arm=getattr(one, name), n=one.studies) for one in claimed]
    headline = "No change was studied on three data sets or more: nothing is known of other data sets."
    if means:
        headline = text.verdicts(sorted(means, key=text.rank), "changes", BASE, f"on {LIKE_THESE}")

    def forests(found: OfChange) -> list[Markup]:
        effects, unit = found.effects, cast(Any, "%" if found.unit == "points" else found.unit)
        metric = Metric(found.metric, found.metric, "", effects[0].higher_is_better, unit)
        return [forest(effects, effects[0].margin, metric, inline, narrow) for narrow in (False, True)]

    findings = [one for found in evidence.changes for one in found.findings]
    content = templates().get_template("evidence.html").render(
        e=evidence, headline=headline, forests=forests, has_arrows=has_arrows, listing=listing, version=__version__,
        like_these=LIKE_THESE, further=FURTHER, has_claims=bool(claimed),
        studies=len({one.study for one in findings}), data_sets=sorted({one.data for one in findings}),
        named=lambda study: named(Path(study)),
    )  # fmt: skip
    return write_output(out, content.encode())
