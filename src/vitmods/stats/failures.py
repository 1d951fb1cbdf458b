"""Trials that diverged or collapsed, and what they say about an arm.

A trial diverged when it has no score (a loss that is not finite). A trial collapsed when it has a score that is
(i) less than half as far above chance as base's median, and (ii) more than 5 sd below the median of its arm's other
trials. The sd is pooled over all trials that do not meet (i), and so is the median where the arm has such trials, so
that several collapses of one arm do not hide one another. An arm that is bad on every seed has not collapsed.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from vitmods.stats.fit import Array, Mask

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
    if not (of and base_of):
        return False
    if min(of, base_of) >= ENOUGH and failed == of and base_failed == 0:
        return True
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
