"""Seeds until a verdict: when to look, when an arm stops, and which trials come next.

A sequential study may be looked at after 4, 5, 6, 8, ... seeds. The look at n of at most N seeds has the nominal level

    alpha_n = 0.028 (n / N)^2

so that at most 5 % of studies make a false claim at any look, whether or not the study stops there. So every look's
interval is valid, and looking is free. Early looks are strict, since a claim that is true is seen at a later look too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import special

from vitmods.stats.fit import KNOWN_SEEDS, Array, Contrasts, Mask
from vitmods.stats.images import ImagesPart
from vitmods.stats.verdict import Claim
from vitmods.stats.width import against_base
from vitmods.util.errors import UserError

ALPHA = 0.05  # of a study whose seeds were fixed before
EARLY_LOOK_SEEDS = (2, 3)  # where base is known
LOOK_SEEDS = (4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
MAXIMUM_SEEDS = (8, 16, 32)  # that are offered
LAST_LEVEL = 0.028  # with all seeds; calibrated by simulated studies for every maximum and 1 to 8 arms
INTERIM_LEVEL = 0.008  # instead, of one more look at trials that were shown, and of a fixed study before it is complete
FUTILE_FROM_SEEDS, FUTILE_CHANCE = 4, 0.08


def steps_of(base: int) -> tuple[int, ...]:
    """The looks of a study that starts with `base` known seeds of base."""
    return (*EARLY_LOOK_SEEDS, *LOOK_SEEDS) if base >= KNOWN_SEEDS else LOOK_SEEDS


def looks(most: int, steps: Sequence[int] = LOOK_SEEDS, kind: str = "study") -> tuple[int, ...]:
    """The seeds at which a study of at most `most` seeds is looked at. UserError for more or fewer than `steps` has."""
    if not steps[0] <= most <= steps[-1]:
        raise UserError(f"A {kind} until decided takes at most {steps[0]} to {steps[-1]} seeds, not {most}.")
    return (*(n for n in steps if n < most), most)


def last_look(planned: Sequence[int], done: int) -> tuple[int, str]:
    """The seeds of the last look that `done` seeds reach (0: of none yet), and which look it is."""
    taken = [n for n in planned if n <= done]
    if not taken:
        return 0, f"no verdict yet: the first look is at {planned[0]} seeds"
    return taken[-1], f"look at {taken[-1]} of at most {planned[-1]} seeds"


def nominal_level(most: int, n: int, last: float = LAST_LEVEL) -> float:
    """alpha of the look at `n` of at most `most` seeds; `last` with all of them."""
    return last * (n / most) ** 2


def interim_level(done: int, planned: int | None, looked: int | None = None) -> float | None:
    """alpha of a study of `planned` seeds of which all arms have `done`; None where none is missing or planned.

    looked: the most seeds that were planned or shown before, where this is one more look at their trials.
    """
    if looked is None and (planned is None or done >= planned):
        return None
    return nominal_level(max(planned or 0, looked or 0, done), max(done, 2), INTERIM_LEVEL)


def next_maximum(seeds: int) -> int:
    """The maximum that a study is taken to have which got more seeds than were planned: 8, 16, 32, ..."""
    return max(8, 1 << (seeds - 1).bit_length())


def futile(contrast: Contrasts, images: ImagesPart | None, claim: Claim, margin: float, family: int, most: int) -> Mask:
    """Arms that are unlikely (below 8 %) to be clear of zero, and to be shown equivalent, with all `most` seeds: from 4
    seeds on. It makes no claim, so it needs no part of the level."""
    n, later = contrast.seeds, extended(contrast, most)
    with np.errstate(invalid="ignore", divide="ignore"):
        at_most, now = (against_base(some, images, LAST_LEVEL, family) for some in (later, contrast))
        half = at_most.seeds if claim == "seeds" else at_most.total
        b = np.sqrt(now.variance * np.maximum(1 - _variance_per_sd(later) / _variance_per_sd(contrast), 0))
    is_hopeless = hopeless(contrast.estimate + now.shift, half, b, margin)
    return np.asarray((n >= FUTILE_FROM_SEEDS) & (n < most) & is_hopeless)


def hopeless(estimate: Array, half: Array, b: Array, margin: float) -> Mask:
    """Whether both clear ends are unlikely for estimates d that will be normal around now's with standard deviation b.

    With `half` the half-width then, that of N seeds (V scaled by n / N), and b = sqrt(V (1 - n / N)):

        clear of zero   1 - Phi((half - |d|) / b)
        equivalent      Phi((margin - half - |d|) / b) - Phi((half - margin - |d|) / b)
    """
    d = np.abs(estimate)
    with np.errstate(invalid="ignore", divide="ignore"):
        clear = special.ndtr((d - half) / b)
        same = special.ndtr((margin - half - d) / b) - special.ndtr((half - margin - d) / b)
    return np.asarray((clear < FUTILE_CHANCE) & (same < FUTILE_CHANCE))


def extended(contrast: Contrasts, n: int) -> Contrasts:
    """Extend the contrasts to `n` seeds with the same spread."""
    with np.errstate(invalid="ignore", divide="ignore"):
        df = (n - 1) / (contrast.seeds - 1)
        more = dataclasses.replace(
            contrast, seeds=np.full_like(contrast.seeds, n), base_seeds=np.maximum(contrast.base_seeds, n),
            pooled_df=contrast.pooled_df * df, own_df=np.full_like(contrast.own_df, n - 1),
            own=contrast.own * contrast.seeds / n,
        )  # fmt: skip
        return dataclasses.replace(more, pooled=contrast.pooled * _variance_per_sd(more) / _variance_per_sd(contrast))


def _variance_per_sd(contrast: Contrasts) -> Array:
    """The pooled variance of an effect in squared sd of one trial."""
    return np.asarray(1 / contrast.seeds + 1 / contrast.base_seeds)


def decided(estimate: Array, half: Array, margin: float) -> Mask:
    """Arms that stop: helps, hurts or equivalent. `no worse` does not stop an arm: that loses most findings."""
    return np.asarray((np.abs(estimate) > half) | (np.abs(estimate) + half < margin))
