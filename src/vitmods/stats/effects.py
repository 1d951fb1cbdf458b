"""Effects with verdicts from the contrasts of a fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitmods.stats.criteria import Analysis, Criteria
from vitmods.stats.fit import Array, Contrasts
from vitmods.stats.gains import Gains, less_stable
from vitmods.stats.images import ImagesPart
from vitmods.stats.verdict import FAVORABLE, FRACTION, Effect, Verdict, verdict_of
from vitmods.stats.width import HalfWidth, bounds

ENOUGH_DF = 4  # from which two seeds have an interval


class Intervals(NamedTuple):
    """Contrasts, the half-widths of their intervals, and the images' part of these."""

    contrasts: Contrasts
    half: HalfWidth
    part: ImagesPart | None


class Sides(NamedTuple):
    """The trials without and with an arm or change."""

    means: Sequence[float]  #: gains
    failures: Sequence[int]
    ended: Sequence[int]
    without: str = "base"  #: the name of the one side


def has_interval(seeds: float, df: float) -> bool:
    """Whether so many shared seeds have one; two need the degrees of freedom of other arms."""
    return seeds > 2 or (seeds == 2 and df >= ENOUGH_DF)


def effect_of(
    name: str,
    i: int | tuple[()],
    intervals: Intervals,
    sides: Sides,
    gains: Gains,
    criteria: Criteria,
    analysis: Analysis,
    *,
    with_interval: bool,
    two_seeds: bool = False,
) -> Effect:
    """Make the effect of contrast `i`; `()` of a single one. `two_seeds`: whether two may show something favorable.

    An arm that fails more often is unstable; it hurts if its interval shows that, or if all its trials fail.
    """
    contrast, half, part = intervals
    center = contrast.estimate + half.shift
    gain, variance, n, df = (float(x[i]) for x in (center, half.variance, contrast.seeds, half.df))
    base_n = n if gain != float(contrast.estimate[i]) else float(contrast.base_seeds[i])
    trials = n / 2 if base_n == n else n * base_n / (n + base_n)
    has_spread = n > 1 and math.isfinite(variance)
    # No spread at all comes from a coarse metric, not from certainty.
    has_seeds, has_total = (with_interval and 0 < x[i] < math.inf for x in (half.seeds, half.total))
    ends = [float(end[i]) if has_total else math.nan for end in bounds(center, half, part)]
    seeds_ends = [gain + side * float(half.seeds[i]) if has_seeds else math.nan for side in (-1, 1)]
    images = math.nan if part is None else float(part.variance[i])
    read, error = seeds_ends, math.sqrt(variance * (1 + n * gains.overlap))
    if criteria.generalize == "images":
        read, error = ends, math.sqrt(np.nansum([error**2, images]))
    verdict, notes = verdict_of(read[0], read[1], criteria.margin), []
    if n == 2 and with_interval and not two_seeds:
        notes.append("the interval assumes that arms vary alike")
        verdict = Verdict.OPEN if verdict in FAVORABLE else verdict
    leans = ("up" if gain > 0 else "down") if verdict == Verdict.OPEN and has_spread and abs(gain) > error else ""
    (base_failed, failed), (base_of, of) = sides.failures, sides.ended
    if less_stable(failed, of, base_failed, base_of, level := analysis.alpha / analysis.family):
        verdict = Verdict.HURTS if verdict == Verdict.HURTS or failed == of else Verdict.UNSTABLE
        notes.append(f"fails: {failed} of {of}, {sides.without} {base_failed} of {base_of}")
    if less_stable(base_failed, base_of, failed, of, level):
        notes.append(f"steadier than {sides.without}")
    sign = criteria.sign
    (low, high), (seeds_low, seeds_high) = ([sign * end for end in pair][::sign] for pair in (ends, seeds_ends))
    return Effect(
        arm=name, effect=sign * gain, low=low, high=high, seeds_low=seeds_low, seeds_high=seeds_high,
        verdict=verdict, n=int(n), base_n=int(base_n),
        base_mean=sign * sides.means[0], arm_mean=sign * sides.means[1],
        sd=math.sqrt(variance * trials) if has_spread else math.nan, df=df if has_spread else math.nan,
        spread_ratio=math.nan, correlation=math.nan, images_sd=math.sqrt(images),
        failures=failed, base_failures=base_failed, margin=criteria.margin, family=analysis.family,
        alpha=analysis.alpha, unit=criteria.unit or FRACTION, images=0 if part is None else part.m,
        grouped=gains.grouped, higher_is_better=criteria.higher_is_better, generalize=criteria.generalize,
        overlap=gains.overlap, provisional=analysis.provisional, notes=tuple(notes),
        leans=leans if verdict == Verdict.OPEN else "",
    )  # fmt: skip


def mean_of(values: Array) -> float:
    """The mean; NaN without values."""
    return float(values.mean()) if len(values) else math.nan
