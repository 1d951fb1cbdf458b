"""Seeds until a verdict: when to look, when an arm stops, and which trials come next.

A sequential study may be looked at after 4, 5, 6, 8, ... seeds. Each look uses the same nominal level, so low that at
most 5 % of studies make a false claim at any look, whether or not the study stops there. So every look's interval is
valid, and looking is free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import special

from vitmods.stats.fit import Array, Contrasts, Mask
from vitmods.stats.images import ImagesPart
from vitmods.stats.verdict import Claim
from vitmods.stats.width import against_base
from vitmods.util.errors import UserError

LOOKS = (4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
NOMINAL = {8: 0.017, 16: 0.010, 32: 0.0075}  # most seeds: level of a look, calibrated by simulated studies
PROVISIONAL_LEVEL = 0.0025  # of a fixed study that is read, perhaps after each trial, before it is complete
FUTILE_FROM, FUTILE_CHANCE = 6, 0.10


def looks(most: int, steps: Sequence[int] = LOOKS, kind: str = "study") -> tuple[int, ...]:
    """The seeds at which a study of at most `most` seeds is looked at. UserError for more or fewer than `steps` has."""
    if not steps[0] <= most <= steps[-1]:
        raise UserError(f"A {kind} until decided takes at most {steps[0]} to {steps[-1]} seeds, not {most}.")
    return (*(n for n in steps if n < most), most)


def last_look(planned: Sequence[int], done: int) -> tuple[int, str]:
    """The seeds of the last look that `done` seeds reach (0: of none yet), and which look it is."""
    taken = [n for n in planned if n <= done]
    if not taken:
        return 0, f"no verdict yet: the first of {len(planned)} looks is at {planned[0]} seeds"
    return taken[-1], f"look {len(taken)} of {len(planned)}, at {taken[-1]} seeds"


def nominal_level(most: int) -> float:
    """alpha at each look, of the next larger calibrated maximum. Raises UserError outside 4 to 32 seeds."""
    looks(most)
    return next(level for maximum, level in NOMINAL.items() if most <= maximum)


def next_maximum(seeds: int) -> int:
    """The calibrated maximum of a study that was fixed, and has got more seeds: at least so many; 32 is the last."""
    return next((maximum for maximum in NOMINAL if seeds <= maximum), LOOKS[-1])


def futile(
    contrast: Contrasts, images: ImagesPart | None, claim: Claim, margin: float, alpha: float, family: int, most: int
) -> Mask:
    """Arms that are unlikely (below 10 %) to be clear of zero, and to be shown equivalent, with all `most` seeds.

    With half_N the half-width at N = `most` seeds (V scaled by n / N) and b = sqrt(V (1 - n / N)):

        clear of zero   1 - Phi((half_N - |d|) / b)
        equivalent      Phi((margin - half_N - |d|) / b) - Phi((half_N - margin - |d|) / b)

    From 6 seeds on. It makes no claim, so it needs no part of the level.
    """
    n, d = contrast.seeds, np.abs(contrast.estimate)
    with np.errstate(invalid="ignore", divide="ignore"):
        at_most = against_base(extended(contrast, most), images, alpha, family)
        half = at_most.seeds if claim == "seeds" else at_most.total
        b = np.sqrt(against_base(contrast, images, alpha, family).variance * np.maximum(1 - n / most, 0))
        clear = special.ndtr((d - half) / b)
        same = special.ndtr((margin - half - d) / b) - special.ndtr((half - margin - d) / b)
    return np.asarray((n >= FUTILE_FROM) & (n < most) & (clear < FUTILE_CHANCE) & (same < FUTILE_CHANCE))


def extended(contrast: Contrasts, n: int) -> Contrasts:
    """Extend the contrasts to `n` seeds with the same spread."""
    with np.errstate(invalid="ignore", divide="ignore"):
        scale, df = contrast.seeds / n, (n - 1) / (contrast.seeds - 1)
    return dataclasses.replace(
        contrast, seeds=np.full_like(contrast.seeds, n),
        pooled=contrast.pooled * scale, pooled_df=contrast.pooled_df * df,
        own=contrast.own * scale, own_df=np.full_like(contrast.own_df, n - 1),
    )  # fmt: skip


def decided(estimate: Array, half: Array, margin: float) -> Mask:
    """Arms that stop: helps, hurts or equivalent. `no worse` does not stop an arm: that loses most findings."""
    return np.asarray((np.abs(estimate) > half) | (np.abs(estimate) + half < margin))
