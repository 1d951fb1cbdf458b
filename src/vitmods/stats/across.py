"""One interval from those of several studies of the same effect.

Studies of one data set may share trials, so nothing is gained by counting them twice. With half-widths h_i and weights
w_i = (1/h_i^2) / sum (1/h^2),

    one data set        sum w_i d_i  +-  sum w_i h_i        valid however far the studies depend on each other

Of B data sets with such effects d_b and half-widths h_b,

    B = 2               sum w_b d_b  +-  1 / sqrt(sum 1/h_b^2)        for these two sets
    B >= 3              mean d_b  +-  t(B - 1) sd(d) / sqrt(B)        for data sets like these

where the level of t is divided by the number of arms, and the interval is never narrower than the one that the
half-widths alone give the mean: data sets that happen to agree do not make an effect more certain than measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

ALPHA = 0.05
ENOUGH_SETS = 3  # for an interval from how effects differ between data sets

Interval = tuple[float, float, float]  # effect, low, high


def across_studies(sets: Sequence[Sequence[Interval]], arms: int = 1) -> Interval:
    """The interval of an effect from the intervals of the studies of each data set; `arms` of a claim hold together."""
    if len(sets) == 1 and len(sets[0]) == 1:
        return sets[0][0]
    pairs = [_within(studies) for studies in sets]
    effects, halves = (np.array(values) for values in zip(*pairs, strict=True))
    n = len(pairs)
    if n < ENOUGH_SETS:
        weights = halves**-2.0
        effect, half = float(effects @ weights / weights.sum()), float(weights.sum() ** -0.5)
    else:
        t = float(special.stdtrit(n - 1, 1 - ALPHA / arms / 2))
        effect = float(effects.mean())
        half = max(t * float(effects.std(ddof=1)) / math.sqrt(n), float(np.sqrt((halves**2).sum())) / n)
    return effect, effect - half, effect + half


def _within(studies: Sequence[Interval]) -> tuple[float, float]:
    """The effect and half-width of studies of one data set."""
    effects, lows, highs = (np.array(values) for values in zip(*studies, strict=True))
    halves = (highs - lows) / 2
    weights = halves**-2.0 / (halves**-2.0).sum()
    return float(effects @ weights), float(halves @ weights)
