"""One interval from those of several studies of the same effect, and what another data set may show.

Studies of one data set may share trials, so nothing is gained by counting them twice. With half-widths h_i and weights
w_i = (1/h_i^2) / sum (1/h^2),

    one data set        sum w_i d_i  +-  sum w_i h_i        valid however far the studies depend on each other

Of B data sets with such effects d_b and half-widths h_b, two stand for themselves alone. Three or more are a sample of
data sets like these, whose true effects vary with a variance tau^2 around their mean m:

    B = 2               sum w_b d_b  +-  1 / sqrt(sum 1/h_b^2)
    B >= 3              m  +-  t(B - 1) sqrt(q / sum u_b)          u_b = 1 / (tau^2 + s_b^2),  m = sum u_b d_b / sum u_b

with standard errors s_b = h_b / 2, tau^2 such that sum u_b (d_b - m)^2 = B - 1, or 0 where that is less already (Paule
and Mandel, 1982), and q = sum u_b (d_b - m)^2 / (B - 1) (Hartung and Knapp, 2001), which is 1 unless tau is 0. The
level of t is divided by the number of arms, and the interval is never narrower than the one that the half-widths alone
give the mean: data sets that happen to agree do not make an effect more certain than measured.

A study of the same kind measures on a further data set, its own error included,

    m  +-  t(B - 1) sqrt(q (tau^2 + mean s_b^2 + 1 / sum u_b))

exactly where all h_b are equal: then q (tau^2 + s^2) is the variance of the d_b. Both are simulated in
tests/stats/test_across.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from vitmods.stats.verdict import Verdict, verdict_of

ALPHA = 0.05
ENOUGH_SETS = 3  # for an interval from how effects differ between data sets

Interval = tuple[float, float, float]  # effect, low, high


class OtherSets(NamedTuple):
    """What data sets like those of some studies show.

    effect, low, high: the mean effect over such data sets
    next_low, next_high: what a study of the same kind measures on a further one
    spread: the standard deviation of true effects between data sets
    """

    effect: float
    low: float
    high: float
    next_low: float
    next_high: float
    spread: float

    def verdict(self, higher_is_better: bool, margin: float) -> Verdict:
        """The verdict of the mean effect."""
        return verdict_of(*((self.low, self.high) if higher_is_better else (-self.high, -self.low)), margin)


def across_studies(sets: Sequence[Sequence[Interval]], arms: int = 1) -> Interval:
    """The interval of an effect from the intervals of the studies of each data set; `arms` of a claim hold together."""
    if len(sets) == 1 and len(sets[0]) == 1:
        return sets[0][0]
    if len(sets) >= ENOUGH_SETS:
        return other_sets(sets, arms)[:3]
    effects, halves = _of_sets(sets)
    weights = halves**-2.0
    effect, half = float(effects @ weights / weights.sum()), float(weights.sum() ** -0.5)
    return effect, effect - half, effect + half


def other_sets(sets: Sequence[Sequence[Interval]], arms: int = 1) -> OtherSets:
    """The mean effect on data sets like these, and what a further one shows, from the intervals of the studies of each
    of at least ENOUGH_SETS; `arms` hold together."""
    assert len(sets) >= ENOUGH_SETS
    effects, halves = _of_sets(sets)
    errors, df = halves / 2, len(sets) - 1

    def around(variance: float) -> tuple[float, float, np.ndarray]:
        weights = 1 / (variance + errors**2)
        mean = float(weights @ effects / weights.sum())
        return mean, float(weights @ (effects - mean) ** 2 / df), weights

    widest = float(effects.var(ddof=1)) * len(sets)  # there q is below 1
    variance = float(optimize.brentq(lambda one: around(one)[1] - 1, 0, widest)) if around(0)[1] > 1 else 0.0
    mean, q, weights = around(variance)
    total, t = float(weights.sum()), float(special.stdtrit(df, 1 - ALPHA / arms / 2))
    half = max(t * (q / total) ** 0.5, float(((weights * halves) ** 2).sum() ** 0.5) / total)
    further = max(t * (q * (variance + float((errors**2).mean()) + 1 / total)) ** 0.5, half)
    return OtherSets(mean, mean - half, mean + half, mean - further, mean + further, variance**0.5)


def _of_sets(sets: Sequence[Sequence[Interval]]) -> tuple[np.ndarray, np.ndarray]:
    """The effect and the half-width of each data set, however its studies depend on each other."""
    pairs = []
    for studies in sets:
        effects, lows, highs = (np.array(values) for values in zip(*studies, strict=True))
        halves = (highs - lows) / 2
        weights = halves**-2.0 / (halves**-2.0).sum()
        pairs.append((effects @ weights, halves @ weights))
    effects, halves = np.array(pairs).T
    return effects, halves
