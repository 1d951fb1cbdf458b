"""A study's trials as gains: more is better, fractions in points, failures sorted out.

A trial diverged when it has no score (a loss that is not finite). A trial collapsed when it has a score that is
(i) less than half as far above chance as base's median, and (ii) more than 5 sd below the median of its arm's other
trials. The sd is pooled over all trials that do not meet (i), and so is the median where the arm has such trials, so
that several collapses of one arm do not hide one another. An arm that is bad on every seed has not collapsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vitmods.stats.fit import Array, Fit, Mask, fit
from vitmods.stats.images import ImagesPart, clusters, images_part
from vitmods.stats.read import Table
from vitmods.util.errors import UserError
from vitmods.util.text import listing, plural

HALF_AN_IMAGE = 0.5


@dataclass(frozen=True)
class Gains:
    """g arms, base first, and n seeds."""

    trials: Array  #: (g, n); NaN where there is none, and for all arms where base failed
    images: Array | None  #: (g, n, m)
    floor: float  #: the least sd of a trial: half an image where scores are right or wrong
    failures: Mask  #: (g, n) diverged or collapsed
    ended: Mask  #: (g, n)
    pooled: Mask  #: (g,) arms whose trials enter the common variance: none collapsed, no more failures than base

    def fit(self) -> Fit:
        """Every arm against base."""
        return fit(self.trials, 0, self.floor, np.broadcast_to(self.pooled[:, None], self.trials.shape))

    def shared(self, arm: int, other: int = 0) -> Mask:
        """(n,) seeds that both have."""
        return np.asarray(np.isfinite(self.trials[arm]) & np.isfinite(self.trials[other]))

    def images_part(self, arm: int, other: int = 0) -> ImagesPart | None:
        """Of arm minus another over the seeds that both have; None without per-image scores."""
        seeds = self.shared(arm, other)
        if self.images is None or not seeds.any():
            return None
        return images_part(self.images[arm, seeds] - self.images[other, seeds])

    def failure_notes(self, arms: Sequence[str], what: str, then: str) -> list[str]:
        """What failed, base first; `then` is what follows for the others."""
        failed, of = self.failures.sum(-1), self.ended.sum(-1)
        notes = []
        if failed[0]:
            trials = plural(int(failed[0]), "trial")
            notes.append(f"{trials} of base failed, so these seeds are left out for all {what}")
        counts = [f"{arm} {count} of {total}" for arm, count, total in zip(arms[1:], failed[1:], of[1:]) if count]
        if counts:
            notes.append(f"trials diverged or collapsed: {listing(counts)}; {then}")
        return notes


def gains_of(table: Table, scale: float, chance: float | None, groups: ArrayLike | None) -> Gains:
    """Scores times `scale` (negative where less is better). `chance` None: collapsed trials are not looked for."""
    trials, images, floor = table.trials * scale, table.images, 0.0
    if images is not None:
        if np.isin(images[np.isfinite(images)], (0, 1)).all():
            floor = HALF_AN_IMAGE * abs(scale) / images.shape[-1]
        images = images * scale
    if groups is not None:
        images = clusters(*_grouped(images, groups))
    collapses = np.zeros(trials.shape, bool) if chance is None else collapsed(trials, chance * scale)
    failures = table.diverged | collapses
    count = failures.sum(-1)
    pooled = ~collapses.any(-1) & (count <= count[0])
    pooled[0] = True
    return Gains(np.where(failures[0], np.nan, trials), images, floor, failures, table.ended, pooled)


def _grouped(images: Array | None, groups: ArrayLike) -> tuple[Array, ArrayLike]:
    if images is None:
        raise UserError("groups need per-image scores: give an array of scores for every trial.")
    if np.shape(groups) != images.shape[-1:]:
        raise UserError(f"groups must have one label for each of {images.shape[-1]} images, not {np.shape(groups)}.")
    return images, groups


FAR = 5.0  # sd below the arm's other trials
FRACTION_OF_BASE = 0.5  # of base's gain over chance
ENOUGH = 4  # trials that all diverged, against none of base's


def collapsed(scores: Array, chance: float, base: int = 0) -> Mask:
    """Which trials of one study (g, n) collapsed; more is better, NaN is a missing cell."""
    found = np.zeros(scores.shape, dtype=bool)
    if not np.isfinite(scores[base]).any():
        return found
    limit = chance + FRACTION_OF_BASE * (np.nanmedian(scores[base]) - chance)
    low = np.isfinite(scores) & (scores < limit)
    sd = _pooled_sd(np.where(low, np.nan, scores))
    for arm, seed in zip(*np.nonzero(low)):
        others = np.isfinite(scores[arm]) & ~low[arm]
        if others.any():
            found[arm, seed] = np.median(scores[arm, others]) - scores[arm, seed] > FAR * sd
    return found


def less_stable(failed: int, of: int, base_failed: int, base_of: int, level: float) -> bool:
    """Whether an arm fails more often than base: Fisher's exact test, one-sided; or all of at least 4, base never.

    All of 2 or 3 is not enough: at some rates of divergence up to 28 % of studies would be false.
    """
    if not (failed and of and base_of):
        return False
    if min(of, base_of) >= ENOUGH and failed == of and base_failed == 0:
        return True
    from scipy import stats  # half a second, which studies without a failed trial do without

    table = [[failed, of - failed], [base_failed, base_of - base_failed]]
    return bool(stats.fisher_exact(table, alternative="greater").pvalue <= level)


def rate_bound(trials: int) -> float:
    """The largest rate of failure that `trials` without one leave possible, at 95 %."""
    return float(1 - 0.05 ** (1 / trials))


def _pooled_sd(scores: Array) -> float:
    """Within arms; infinite where no arm has two scores."""
    counts = np.isfinite(scores).sum(-1)
    df = np.maximum(counts - 1, 0).sum()
    if not df:
        return np.inf
    rows = scores[counts > 1]
    return float(np.sqrt(np.nansum((rows - np.nanmean(rows, -1, keepdims=True)) ** 2) / df))
