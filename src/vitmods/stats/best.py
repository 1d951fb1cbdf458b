"""Which arms may be the best, and all arms head to head.

With d_ij the mean of arm j minus that of arm i over the seeds that both have, and V_ij + I_ij its variance, arm j may
be the best unless some arm i beats it:

    d_ij <= -c1 sqrt(V_ij + I_ij),   c1 the one-sided critical value of g - 1 arms against one

(Gupta's subset, 1965; the constrained intervals of Hsu, 1981). The true best is in the set in 95 % of studies.
"""

from __future__ import annotations

import itertools

import numpy as np

from vitmods.stats.critical import critical_value
from vitmods.stats.fit import Array, Contrasts, Errors, Mask, contrasts


def pairs_of(g: int) -> list[tuple[int, int]]:
    """(i, j) with i < j, in the order of `head_to_head`."""
    return list(itertools.combinations(range(g), 2))


def head_to_head(scores: Array, errors: Errors, floor: float = 0.0) -> Contrasts:
    """Arm j minus arm i for every pair of studies (..., g, n)."""
    g = scores.shape[-2]
    weights = np.array([np.eye(g)[j] - np.eye(g)[i] for i, j in pairs_of(g)])
    return contrasts(scores, weights, errors, floor)


def may_be_best(differences: Array, variance: Array, df: Array, g: int, alpha: float) -> Mask:
    """(..., g) from what `head_to_head` found (..., pairs), V + I; a pair that cannot be compared rules out no arm."""
    c = critical_value(g - 1, df, alpha, one_sided=True)
    limit = c * np.sqrt(variance)
    best = np.ones((*differences.shape[:-1], g), dtype=bool)
    for row, (i, j) in enumerate(pairs_of(g)):
        known = limit[..., row] > 0  # no spread at all, or no interval: nothing is shown
        best[..., i] &= ~(known & (differences[..., row] >= limit[..., row]))
        best[..., j] &= ~(known & (differences[..., row] <= -limit[..., row]))
    return best
