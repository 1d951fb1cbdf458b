"""What a number of seeds can find: the power of a paired t test, from the noncentral t distribution."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import special

from vitmods.util.errors import UserError

POWER = 0.8
# Scores that differ by less than this many points differ by rounding of floats only, not by an image.
ROUNDING = 1e-9


def power_of(effect: float, sd: float, n: int, alpha: float = 0.05) -> float:
    """Probability that a two-sided paired t test of `n` pairs finds a true effect (same unit as `sd`)."""
    if n < 2:
        return 0.0
    df, shift = n - 1, abs(effect) / sd * math.sqrt(n)
    critical = special.stdtrit(df, 1 - alpha / 2)
    # Far out in the wrong tail the series gives NaN for a probability below 1e-5.
    wrong_side = np.nan_to_num(special.nctdtr(df, shift, -critical))
    return float(1 - special.nctdtr(df, shift, critical) + wrong_side)


def detectable_effect(sd: float, n: int, power: float = POWER, alpha: float = 0.05) -> float:
    """Smallest true effect that `n` pairs find with this power; NaN where the spread is unknown."""
    if n < 2 or math.isnan(sd) or sd <= ROUNDING:
        return math.nan
    return sd * _standard_effect(n, power, alpha)


def seeds_needed(effect: float, sd: float, power: float = POWER, alpha: float = 0.05) -> int:
    """Smallest number of pairs that finds a true effect (same unit as `sd`) with this power; at least 2."""
    if not (math.isfinite(effect) and effect != 0):
        raise UserError(f"No number of seeds finds an effect of {effect}; ask for one other than zero.")
    if not alpha < power < 1:
        raise UserError(f"power must lie between alpha ({alpha}) and 1, not {power}.")
    # The normal approximation needs fewer pairs than t does, and only a few fewer: count up from there.
    z = special.ndtri(1 - alpha / 2) + special.ndtri(power)
    n = max(2, math.floor(float(z * sd / effect) ** 2))
    while power_of(effect, sd, n, alpha) < power:
        n += 1
    return n


@lru_cache(maxsize=256)
def _standard_effect(n: int, power: float, alpha: float) -> float:
    """The detectable effect in units of the standard deviation."""
    critical = special.stdtrit(n - 1, 1 - alpha / 2)
    # The wrong tail holds less than 1e-4 of the power here, so the noncentrality has a closed inverse.
    return float(special.nctdtrinc(n - 1, 1 - power, critical)) / math.sqrt(n)
