"""How far trials of a study will lie apart, as far as that is known before it is run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitmods.stats.verdict import POINTS
from vitmods.study.answer import evaluated_of
from vitmods.study.arms import BASE
from vitmods.study.facts import Facts
from vitmods.study.plan import Settings
from vitmods.study.scores import decision_at
from vitmods.study.state import StudyState, TrialRecord
from vitmods.study.store import StudyFolder
from vitmods.util.errors import UserError
from vitmods.util.text import plural

if TYPE_CHECKING:
    from vitmods.recipes.length import Resolved


@dataclass(frozen=True)
class Spread:
    """sd:       of one trial, in points where the metric is a fraction, with `df` degrees of freedom
    source:   where it comes from
    disagree: fraction of the test images on which two trials of base disagree; NaN: not known
    images:   how many test images there are; 0: not known
    """

    sd: float
    df: float
    source: str
    disagree: float = math.nan
    images: int = 0


def known_spread(path: Path | None, state: StudyState, length: Resolved) -> Spread | None:
    """From earlier studies beside the study's folder with the same images, metric, base and recipe, else from its own
    finished trials; None where neither has two trials of one arm."""
    found = list(_earlier(path, state.settings, length)) if path else []
    if found:
        df = sum(one.df for one in found)
        sd = math.sqrt(sum(one.df * one.sd**2 for one in found) / df)
        same = next((one for one in found if one.images), found[0])
        names = ", ".join(one.source for one in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return Spread(sd, df, f"from {names}{more}", same.disagree, same.images)
    return _spread(state)


def _earlier(path: Path, settings: Settings, length: Resolved) -> Iterator[Spread]:
    wanted = settings.to_dict()
    for file in sorted(path.absolute().parent.glob("*/study.json")):
        folder = StudyFolder(file.parent)
        try:
            facts = folder.facts()
            if facts is None or folder.path == path.absolute() or not _alike(facts, wanted, length):
                continue
            spread = _spread(StudyState(folder, Settings.from_dict(facts.settings), evaluated_of(folder, facts)))
        except UserError:  # a damaged study, or one of another version
            continue
        if spread is not None:
            yield Spread(spread.sd, spread.df, str(path.parent / folder.path.name), spread.disagree, spread.images)


def _alike(facts: Facts, wanted: dict[str, object], length: Resolved) -> bool:
    names = ("images", "metric", "base", "start", "task", "folds", "recipe")
    same = all(facts.settings.get(name) == wanted.get(name) for name in names)
    views = facts.resolved.get("steps"), facts.resolved.get("images_seen")
    return same and views == (length.steps, length.images_seen) and "sweep" not in facts.settings


def _spread(state: StudyState) -> Spread | None:
    """Of the residuals of arms and seeds, or where base alone has finished, of base."""
    settings, metric = state.settings, state.settings.measure.metric
    if settings.sweep:
        return None
    base = [one for trial, one in state.answered.items() if trial.arm.name == BASE and one.status == "finished"]
    if len(base) < 2:
        return None
    decision = decision_at(state, settings.seeds)
    sd, df, source = decision.sd, decision.df, "from this study's trials"
    if not df > 0:
        scores = [score for one in base if (score := one.score(metric.name)) is not None]
        sd = statistics.stdev(scores) * (POINTS if metric.unit == "%" else 1)
        df, source = len(scores) - 1, f"from {plural(len(scores), 'trial')} of base"
    found = (math.nan, 0) if settings.folds else _disagreement(base)  # folds have other images
    return Spread(sd, float(df), source, *found) if sd > 0 else None


def _disagreement(base: list[TrialRecord]) -> tuple[float, int]:
    """Of 0/1 scores, averaged over pairs of trials; and the number of images."""
    values = [one.images.values for one in base if one.images is not None]
    if len(values) < 2 or not all(np.isin(one, (0, 1)).all() for one in values):
        return math.nan, 0
    apart = [float(np.mean(one != other)) for one, other in combinations(values, 2)]
    return statistics.fmean(apart), len(values[0])
