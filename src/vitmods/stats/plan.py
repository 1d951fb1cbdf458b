"""What a number of seeds and images can find, before a study, and what it would take to decide an arm after one.

No power formula: 4,000 simulated studies without an effect go through the very code that makes the intervals, with a
fixed seed. With d the estimate of an arm and half its half-width, both in sd of one trial, an effect is detectable
when 80 % of studies would find it, which is the 80 % quantile of half - d. No difference that matters is shown by 80 %
of studies when the margin is the 80 % quantile of half + |d|.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

from vitmods.stats.fit import Array, fit
from vitmods.stats.images import ImagesPart
from vitmods.stats.sequential import LOOKS, nominal_level
from vitmods.stats.verdict import Effect, Verdict
from vitmods.stats.width import against_base, critical_value
from vitmods.util.errors import UserError
from vitmods.util.text import about, duration, plural

POWER = 0.8
STUDIES = 4000
SIMULATED = 48  # seeds; beyond, widths shrink as in a study with endless degrees of freedom
MOST = 10_000
MANY_IMAGES = 10**6


@dataclass(frozen=True)
class Findable:
    """In sd of one trial, or in the unit that they were multiplied into."""

    half: float  #: median half-width of an interval
    effect: float  #: the true effect that 80 % of studies find
    equivalent: float  #: the margin within which 80 % of studies show an arm without effect

    @classmethod
    def of(cls, half: Array, d: Array) -> Findable:
        """From the half-widths and estimates of studies without an effect."""
        found, same = (float(np.quantile(values, POWER)) for values in (half - d, half + np.abs(d)))
        return cls(float(np.median(half)), found, same)

    def __mul__(self, sd: float) -> Findable:
        return Findable(self.half * sd, self.effect * sd, self.equivalent * sd)


@lru_cache(maxsize=1024)
def detectable(k: int, n: int, alpha: float = 0.05, images: float = 0.0) -> Findable:
    """What `k` arms against one base find with `n` seeds each; `images` is sqrt(I), in sd of one trial too."""
    if n < 2:
        return Findable(math.inf, math.inf, math.inf)
    if n > SIMULATED:
        return _shrunk(k, n, alpha, images)
    rng = np.random.default_rng(0)
    found = fit(rng.standard_normal((STUDIES, k + 1, n))).against
    part = None
    if images:
        variance = np.full(found.estimate.shape, images**2 * MANY_IMAGES)
        part = ImagesPart(variance, np.zeros_like(variance), n, MANY_IMAGES)
    half = against_base(found, part, alpha, k).total
    return Findable.of(half, found.estimate + images * rng.standard_normal(found.estimate.shape))


def _shrunk(k: int, n: int, alpha: float, images: float) -> Findable:
    """For many seeds: `SIMULATED` seeds, times the ratio of the standard errors."""
    known = detectable(k, SIMULATED, alpha, images)
    return known * math.sqrt((2 / n + images**2) / (2 / SIMULATED + images**2))


def seeds_for(effect: float, k: int, alpha: float = 0.05, images: float = 0.0, equivalent: bool = False) -> int | None:
    """The fewest seeds that find a true effect of this many sd of one trial; None where no number of seeds does.

    `equivalent`: that show an arm without effect to lie within a margin of this many sd instead.
    """

    def enough(n: int) -> bool:
        found = detectable(k, n, alpha, round(images, 2))
        return (found.equivalent if equivalent else found.effect) <= abs(effect)

    return _fewest(enough, 1, MOST) if effect else None


def _fewest(enough: Callable[[int], bool], few: int, many: int) -> int | None:
    """The fewest above `few`, at most `many`, that are enough; None where `many` are not."""
    if few >= many or not enough(many):
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many


def images_for(effect: float, images_sd: float, m: int, k: int, alpha: float = 0.05) -> int:
    """Test images that find an effect with endless seeds: M = m I ((c + 0.84) / |d|)^2, with `images_sd` = sqrt(I)."""
    c = float(critical_value(k, np.inf, alpha))
    return math.ceil(m * (images_sd * (c + float(special.ndtri(POWER))) / effect) ** 2)


def seeds_can_decide(effect: float, images_sd: float, k: int, alpha: float = 0.05) -> bool:
    """Whether more seeds on the same test images could tell an effect of this size from zero."""
    return float(critical_value(k, np.inf, alpha)) * images_sd < abs(effect)


def sd_range(sd: float, df: float) -> tuple[float, float]:
    """80 % range of a standard deviation that was estimated with `df` degrees of freedom."""
    low, high = (sd * math.sqrt(df / float(2 * special.gammaincinv(df / 2, q))) for q in (0.9, 0.1))
    return low, high


def images_at_worst(disagree: float, m: int) -> float:
    """Upper end of sqrt(I) in points, from the fraction of images on which two trials of base disagree."""
    return 100 * math.sqrt(disagree / m)


def seeds_within(
    budget: float,
    base_cost: float,
    arm_cost: float,
    k: int,
    least: int = 3,
    shown: Callable[[float], str] = duration,
) -> int:
    """The most seeds of base and `k` arms that fit into `budget`, by the cost of a trial of base and of an arm.

    Costs are seconds, or what else `shown` shows. Raises `UserError` with the arithmetic where fewer than `least` fit.
    """
    n = int(budget // (base_cost + k * arm_cost))
    if n >= least:
        return n
    needed = shown(least * (base_cost + k * arm_cost))
    arms = int((budget / least - base_cost) // arm_cost)
    fits = f"{plural(arms, 'arm')} x {least} seeds fit" if arms >= 1 else f"not even one arm x {least} seeds fits"
    raise UserError(
        f"{plural(k, 'arm')} and base x {least} seeds take {needed}, more than {shown(max(budget, 0))}; {fits}. Raise "
        "--budget, compare fewer arms, or train on smaller images (--img-size) or for fewer epochs (--epochs)."
    )


@dataclass(frozen=True)
class Need:
    """What finds an effect of the size seen; where that is within the margin, what shows that nothing matters.

    seeds, low, high: for the spread seen, and over its 80 % range; None: more than the most of a study, 32
    images: test images, where no number of seeds would do; else 0
    """

    effect: Effect
    seeds: int | None = None
    low: int | None = None
    high: int | None = None
    images: int = 0

    def __str__(self) -> str:
        effect = self.effect
        size, unit = f"{abs(effect.effect):.{effect.digits}f}", f" {effect.shown_unit}".rstrip()
        what = f"to find an effect of the size seen ({size}{unit})"
        if _is_small(effect):
            what = f"to rule out a difference of {effect.margin:g}{unit}"
        if self.images:
            images = f"{about(self.images)} test images instead of {effect.images:,}"
            return f"{what} takes about {images}: more seeds cannot do it"
        if self.seeds is None:
            return f"{what} takes more than {LOOKS[-1]} seeds: out of reach"
        return f"{what} takes about {self.seeds} seeds ({self.low} to {self.high or f'more than {LOOKS[-1]}'})"


def needed(effect: Effect) -> Need | None:
    """None for an arm that is decided, or of which too little is known yet, or where seeds are parts of the images.

    More seeds than were planned make a study one that is looked at twice, and its level is that of each look.
    """
    if effect.verdict != Verdict.OPEN or effect.overlap or not (effect.sd > 0 and math.isfinite(effect.df)):
        return None
    k, small = effect.family, _is_small(effect)
    sought = effect.margin if small else abs(effect.effect)
    images_sd = effect.images_sd if effect.generalize == "images" and effect.images > 1 else 0.0
    if not seeds_can_decide(sought, images_sd, k, effect.alpha):
        return Need(effect, images=images_for(sought, images_sd, effect.images, k, effect.alpha))
    low, high = sd_range(effect.sd, effect.df)
    seeds, few, many = (_seeds(sought / sd, k, images_sd / sd, small, effect.n) for sd in (effect.sd, low, high))
    return Need(effect, seeds, few, many)


def _is_small(effect: Effect) -> bool:
    return abs(effect.effect) < effect.margin


@lru_cache(maxsize=1024)
def _seeds(sought: float, k: int, images_sd: float, equivalent: bool, done: int) -> int | None:
    """The fewest seeds, more than `done`, that find `sought`, in sd of one trial; None: more than 32."""

    def enough(n: int) -> bool:
        found = detectable(k, n, nominal_level(max(n, LOOKS[0])), round(images_sd, 1))
        return (found.equivalent if equivalent else found.effect) <= sought

    return _fewest(enough, done, LOOKS[-1])
