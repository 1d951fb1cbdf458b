"""Criteria that all designs share, and effects with verdicts from the contrasts of a fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vitmods.stats.fit import Array, Contrasts
from vitmods.stats.gains import Gains, gains_of, less_stable
from vitmods.stats.images import ImagesPart
from vitmods.stats.read import ScoreTable, check_fractions
from vitmods.stats.verdict import FAVORABLE, FRACTION, POINTS, Claim, Effect, Verdict, verdict_of
from vitmods.stats.width import HalfWidth, bounds
from vitmods.util.errors import UserError

ALPHA = 0.05
ENOUGH_DF = 4  # from which two seeds have an interval


@dataclass(frozen=True)
class Criteria:
    """How scores are read, as in `vitmods.decide`: margin, unit and sign, and the claim of verdicts."""

    margin: float
    unit: str | None  #: None: a fraction, and no score is above 1
    higher_is_better: bool
    generalize: Claim
    chance: float | None
    groups: ArrayLike | None
    alpha: float = ALPHA
    overlap: float = 0.0  #: n_test / n_train, of seeds that are tested on other parts of the images
    provisional: bool = False  #: trials of a fixed number of seeds are missing
    level: float | None = None  #: what base reaches without training

    def __post_init__(self) -> None:
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise UserError(f"margin must be 0 or more, not {self.margin}: it is the difference that does not matter.")
        if self.generalize not in ("images", "seeds"):
            raise UserError(f"generalize must be 'images' or 'seeds', not {self.generalize!r}.")

    @property
    def is_fraction(self) -> bool:
        return self.unit in (None, FRACTION)

    @property
    def sign(self) -> int:
        return 1 if self.higher_is_better else -1

    def gains(self, table: ScoreTable) -> Gains:
        """The scores of a table, so that more is better."""
        chance, scale = self.chance, float(self.sign)
        if self.is_fraction:
            check_fractions(table, self.unit is not None)
            if chance is not None and not 0 <= chance <= 1:
                raise UserError(f"The chance of scores that are fractions is a fraction too (0.1), not {chance:g}.")
            if chance is None and self.higher_is_better and not (table.trials < 0).any():
                chance = 0.0
            scale *= POINTS
        groups = self.groups if self.generalize == "images" else None  # of which nothing is said otherwise
        # A best constant prediction that is only assumed asks no more of base than to be above it.
        margin = None if self.chance is None else self.margin
        return gains_of(table, scale, chance, groups, margin, self.level)


def has_interval(seeds: float, df: float) -> bool:
    """Whether so many shared seeds have one; two need the degrees of freedom of other arms."""
    return seeds > 2 or (seeds == 2 and df >= ENOUGH_DF)


def effect_of(
    name: str,
    i: int | tuple[int, ...],
    contrast: Contrasts,
    half: HalfWidth,
    part: ImagesPart | None,
    family: int,
    means: Sequence[float],
    failures: Sequence[int],
    criteria: Criteria,
    two_seeds: bool = False,
    with_interval: bool | None = None,
    limit: float = math.inf,
) -> Effect:
    """Make the effect of contrast `i`.

    Args:
        means, failures: without and with the arm or change, means in gains.
        two_seeds: whether two seeds may show something favorable.
        with_interval: whether there is an interval; None: by the seeds and degrees of freedom.
        limit: the largest possible effect.
    """
    center = contrast.estimate + half.shift
    gain, variance, n, df = (float(x[i]) for x in (center, half.variance, contrast.seeds, half.df))
    base_n = n if gain != float(contrast.estimate[i]) else float(contrast.base_seeds[i])
    trials = n / 2 if base_n == n else n * base_n / (n + base_n)
    has_spread = n > 1 and math.isfinite(variance)
    if with_interval is None:
        with_interval = has_interval(n, df)
    # No spread at all comes from a coarse metric, not from certainty.
    has_seeds, has_total = (with_interval and 0 < x[i] < math.inf for x in (half.seeds, half.total))
    ends = [float(end[i]) if has_total else math.nan for end in bounds(center, half, part)]
    seeds_ends = [gain + side * float(half.seeds[i]) if has_seeds else math.nan for side in (-1, 1)]
    images = math.nan if part is None else float(part.variance[i])
    read, error = seeds_ends, math.sqrt(variance * (1 + n * criteria.overlap))
    if criteria.generalize == "images":
        read, error = ends, math.sqrt(np.nansum([error**2, images]))
    verdict = verdict_of(read[0], read[1], criteria.margin)
    doubtful = n == 2 and with_interval and not two_seeds
    if doubtful and verdict in FAVORABLE:
        verdict = Verdict.OPEN
    sign, limits = criteria.sign, (-limit, limit)
    ends, seeds_ends = ([sign * end for end in pair][::sign] for pair in (ends, seeds_ends))
    low, high, seeds_low, seeds_high = np.clip([*ends, *seeds_ends], *limits).tolist()
    return Effect(
        arm=name, effect=sign * gain, low=low, high=high, seeds_low=seeds_low, seeds_high=seeds_high,
        verdict=verdict, n=int(n), base_n=int(base_n),
        base_mean=sign * means[0], arm_mean=sign * means[1],
        sd=math.sqrt(variance * trials) if has_spread else math.nan, df=df if has_spread else math.nan,
        spread_ratio=math.nan, correlation=math.nan, images_sd=math.sqrt(images),
        failures=int(failures[1]), base_failures=int(failures[0]), margin=criteria.margin, family=family,
        alpha=criteria.alpha, unit=criteria.unit or FRACTION, images=0 if part is None else part.m,
        grouped=criteria.groups is not None,
        higher_is_better=criteria.higher_is_better, generalize=criteria.generalize, overlap=criteria.overlap,
        provisional=criteria.provisional,
        notes=("the interval assumes that arms vary alike",) if doubtful else (),
        leans=("up" if gain > 0 else "down") if verdict == Verdict.OPEN and has_spread and abs(gain) > error else "",
    )  # fmt: skip


def with_failures(effect: Effect, of: int, base_of: int, level: float, base: str = "base") -> Effect:
    """Add a test of how often trials fail, `of` trials against `base_of`, to the verdict of the interval.

    An arm that fails more often is unstable; it hurts if its interval shows that, or if all its trials fail.
    """
    failed, base_failed = effect.failures, effect.base_failures
    verdict, notes = effect.verdict, [*effect.notes]
    if less_stable(failed, of, base_failed, base_of, level):
        verdict = Verdict.HURTS if verdict == Verdict.HURTS or failed == of else Verdict.UNSTABLE
        notes.append(f"fails: {failed} of {of}, {base} {base_failed} of {base_of}")
    if less_stable(base_failed, base_of, failed, of, level):
        notes.append(f"steadier than {base}")
    leans = effect.leans if verdict == Verdict.OPEN else ""
    return dataclasses.replace(effect, verdict=verdict, notes=tuple(notes), leans=leans)


def mean_of(values: Array) -> float:
    """The mean; NaN without values."""
    return float(values.mean()) if len(values) else math.nan
