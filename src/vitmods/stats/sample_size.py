"""Power: what seeds and images can find before a study, and what it takes to decide an arm after one.

No power formula: 4,000 simulated studies without an effect go through the very code that makes the intervals, with a
fixed seed. With d the estimate of an arm and half its half-width, both in sd of one trial, an effect is detectable
when 80 % of studies would find it, which is the 80 % quantile of half - d. No difference that matters is shown by 80 %
of studies when the margin is the 80 % quantile of half + |d|.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy import special

from vitmods.stats.fit import Array, Contrasts, fit
from vitmods.stats.images import ImagesPart
from vitmods.stats.sequential import (
    FUTILE_FROM_SEEDS,
    LAST_LEVEL,
    LOOK_SEEDS,
    decided,
    hopeless,
    looks,
    nominal_level,
    steps_of,
)
from vitmods.stats.verdict import POINTS_PER_FRACTION, Effect, Verdict, images_text
from vitmods.stats.width import against_base, critical_value
from vitmods.util.errors import UserError
from vitmods.util.text import about, duration, plural

POWER = 0.8
SIMULATED_STUDIES = 4000
SIMULATED_PATHS = 500  # of an estimate, at each of several sds
SIMULATED_SEEDS = 48  # seeds; beyond, widths shrink as in a study with endless degrees of freedom
SEARCHED_SEEDS = 10_000
MANY_IMAGES = 10**6
DISAGREEMENT = (0.1, 0.3)  # fractions of the images on which two trainings disagreed in studies of small ViTs
USUAL_DISAGREEMENT = math.sqrt(math.prod(DISAGREEMENT))
SHARED_DISAGREEMENT = 1 / 6  # of these: an arm and base, whatever the seed
FORECAST_SEEDS = (8, 16, 32)  # maximum seeds of an extended study
FEASIBLE_CHANCE, EVEN_CHANCE = 0.1, 0.5  # chances of a verdict
MORE_IMAGES = tuple(2**half for half in np.arange(0.5, 10.5, 0.5))  # times as many


@dataclass(frozen=True)
class Findable:
    """In sd of one trial, or in the unit that they were multiplied into."""

    half: float  #: median half-width of an interval
    effect: float  #: the true effect that 80 % of studies find
    equivalent: float  #: the margin within which 80 % of studies show an arm without effect

    @classmethod
    def of(cls, half: Array, d: Array) -> Findable:
        """From the half-widths and estimates of studies without an effect."""
        effect, same = (float(np.quantile(values, POWER)) for values in (half - d, half + np.abs(d)))
        return cls(float(np.median(half)), effect, same)

    def __mul__(self, sd: float) -> Findable:
        return Findable(self.half * sd, self.effect * sd, self.equivalent * sd)


@lru_cache(maxsize=1024)
def detectable(k: int, n: int, alpha: float = 0.05, images: float = 0.0, known: int = 0) -> Findable:
    """The effects that `k` arms against one base can find with `n` seeds each; `images`: sqrt(I), in sd of a trial;
    `known`: seeds of base, if it has more."""
    if n < 2:
        return Findable(math.inf, math.inf, math.inf)
    if n > SIMULATED_SEEDS:  # times the ratio of the standard errors
        ratio = math.sqrt((2 / n + images**2) / (2 / SIMULATED_SEEDS + images**2))
        return detectable(k, SIMULATED_SEEDS, alpha, images) * ratio
    simulated, image_errors = _without_effect(k, n, known)
    part = None
    if images:
        variance = np.full(simulated.estimate.shape, images**2 * MANY_IMAGES)
        part = ImagesPart(variance, np.zeros_like(variance), n, MANY_IMAGES)
    width = against_base(simulated, part, alpha, k)
    return Findable.of(width.total, simulated.estimate + width.shift + images * image_errors)


@lru_cache(maxsize=32)
def _without_effect(k: int, n: int, known: int) -> tuple[Contrasts, Array]:
    """Simulated studies without an effect, and errors of their images, in sd."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((SIMULATED_STUDIES, k + 1, max(n, known)))
    scores[:, 1:, n:] = np.nan
    against = fit(scores).against
    return against, rng.standard_normal(against.estimate.shape)


def seeds_for(margin: float, k: int, alpha: float = 0.05) -> int | None:
    """The fewest seeds that show an arm without effect to be within a margin, in sd of one trial; None beyond
    `SEARCHED_SEEDS`."""
    few, many = 1, SEARCHED_SEEDS
    if detectable(k, many, alpha).equivalent > margin:
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if detectable(k, middle, alpha).equivalent <= margin else (middle, many)
    return many


def finest(images_sd: float, k: int, alpha: float = 0.05) -> float:
    """The smallest difference, and margin, that these test images can resolve with unlimited seeds."""
    return float(critical_value(k, np.inf, alpha)) * images_sd


def images_for(margin: float, sd: float, images_sd: float, m: int, k: int) -> int | None:
    """The test images with which the most seeds show an arm without effect to be within the margin, given that `m`
    images add `images_sd`; None if no number of images is enough."""

    def enough(times: float) -> bool:
        part = round(images_sd / sd / math.sqrt(times), 2)
        return detectable(k, LOOK_SEEDS[-1], LAST_LEVEL, part).equivalent * sd <= margin

    if not enough(MORE_IMAGES[-1]):
        return None
    return about(m * MORE_IMAGES[bisect.bisect_left(MORE_IMAGES, True, key=enough)])


def usual_sd(images: int) -> float:
    """The spread of top-1 in points, if trainings with other seeds disagree on as many of the images as usual, each on
    its own: as coins."""
    return POINTS_PER_FRACTION * math.sqrt(USUAL_DISAGREEMENT / 2 / images)


def resolution(
    images: int, grouped: bool = False, margin: float = 0.5, k: int = 4, n: int = 5, half: float | None = None
) -> str:
    """Describe the half-width of intervals of accuracy that a test set gives: `half`, or by what studies have seen.
    `grouped`: `images` counts groups."""
    of_range = ""
    if half is None:
        half = detectable(k, n, images=round(math.sqrt(2 * SHARED_DISAGREEMENT), 2)).half * usual_sd(images)
        low, high = (half * math.sqrt(disagree / USUAL_DISAGREEMENT) for disagree in DISAGREEMENT)
        percent = " to ".join(f"{100 * disagree:.0f}" for disagree in DISAGREEMENT)
        of_range = (
            f": ±{low:.2g} to ±{high:.2g} in studies of small ViTs so far, in which two trainings disagree on "
            f"{percent} % of the images"
        )
    text = f"{images_text(images, grouped)} resolve about ±{half:.2g} points with {plural(k, 'arm')} and {n} seeds"
    if not 0 < margin < half:
        return f"{text}{of_range}."
    enough = images_text(about(images * (half / margin) ** 2), grouped)
    return f"{text}{of_range}. The margin of {margin:g} points needs about {enough}, or more seeds."


def sd_range(sd: float, df: float) -> tuple[float, float]:
    """80 % range of a standard deviation that was estimated with `df` degrees of freedom."""
    low, high = (sd * math.sqrt(df / float(2 * special.gammaincinv(df / 2, q))) for q in (0.9, 0.1))
    return low, high


def images_at_worst(disagree: float, m: int) -> float:
    """Upper end of sqrt(I) in points, from the fraction of images on which two trials of base disagree."""
    return POINTS_PER_FRACTION * math.sqrt(disagree / m)


def seeds_within(
    budget: float,
    base_cost: float,
    arm_cost: float,
    k: int,
    least: int = 3,
    show_cost: Callable[[float], str] = duration,
) -> int:
    """The most seeds of base and `k` arms that fit into `budget`, by the cost of a trial of base and of an arm.

    Costs are seconds, or whatever `show_cost` formats. Raises `UserError` with the arithmetic where fewer than `least`
    fit.
    """
    n = int(budget // (base_cost + k * arm_cost))
    if n >= least:
        return n
    needed = show_cost(least * (base_cost + k * arm_cost))
    arms = int((budget / least - base_cost) // arm_cost)
    fits = f"{plural(arms, 'arm')} x {least} seeds fit" if arms >= 1 else f"not even one arm x {least} seeds fits"
    available = show_cost(budget) if budget > 0 else "the budget leaves for trials"
    raise UserError(
        f"{plural(k, 'arm')} and base x {least} seeds take {needed}, more than {available}; {fits}. "
        "Raise --budget, compare fewer arms, or train on smaller images (--img-size) or for fewer epochs (--epochs)."
    )


@dataclass(frozen=True)
class Forecast:
    """How likely more trials are to decide an open arm: to show that it helps, hurts or makes no difference.

    chances: most seeds of the study -> chance of a verdict until then
    images: test images that would make a verdict as likely as not, where these images keep it from being feasible; else
        0
    """

    effect: Effect
    chances: dict[int, float]
    images: int = 0

    @property
    def feasible(self) -> bool:
        """Whether enough seeds may decide the arm with the test images at hand."""
        return max(self.chances.values(), default=0.0) >= FEASIBLE_CHANCE

    @property
    def seeds(self) -> int:
        """The fewest that make a verdict as likely as not, else the most; 0 where no number of seeds is feasible."""
        if not self.feasible:
            return 0
        return next((n for n, chance in self.chances.items() if chance >= EVEN_CHANCE), max(self.chances))

    def __str__(self) -> str:
        if self.feasible:
            # To 5 %, as exact as a chance is.
            percent = {n: min(max(5 * round(20 * chance), 5), 95) for n, chance in self.chances.items()}
            first, *more = (f"{value} % with {n}" for n, value in percent.items())
            return ", ".join([f"chance of a verdict {first} seeds", *more])
        most = max(self.chances, default=LOOK_SEEDS[-1])
        text = f"a verdict is not feasible with up to {most} seeds (chance below {100 * FEASIBLE_CHANCE:.0f} %)"
        if not self.images:
            return text
        here, enough = self.effect.test_images(self.effect.images), self.effect.test_images(self.images)
        return f"{text} and {here}; about {enough} would make it feasible"


Halves = Mapping[int, Mapping[int, float]]
"""most seeds of a study -> seeds of a look -> half-width in sd of one trial, without the part of the images"""


def forecast(effect: Effect, halves: Halves | None = None) -> Forecast | None:
    """The forecast for an open arm; None if it is decided, if its spread is unknown, or if it was tested on folds.

    halves: None: those of one arm of `effect.family` against base, which is given up where it is futile.
    """
    if effect.verdict != Verdict.OPEN or effect.overlap or not (effect.sd > 0 and math.isfinite(effect.df)):
        return None
    gives_up = halves is None
    later = {most: dict(looked) for most, looked in (halves or halves_at_looks(effect)).items() if most > effect.n}
    expected = Forecast(effect, {most: chance(effect, looked, gives_up) for most, looked in later.items()})
    if expected.feasible or not later:
        return expected
    looked = later[max(later)]
    enough = (times for times in MORE_IMAGES if chance(effect, looked, gives_up, times) >= EVEN_CHANCE)
    return replace(expected, images=about(effect.images * next(enough, 0)))


def halves_at_looks(effect: Effect) -> Halves:
    """Half-widths at the looks that remain for an arm. Early looks are wider than the last one by the ratio of t
    quantiles of one arm."""
    k, known = effect.family, effect.base_n

    def half(most: int, n: int) -> float:
        df = effect.df * (n - 1) / (effect.n - 1)
        early, last = special.stdtrit(df, 1 - np.array([nominal_level(most, n), LAST_LEVEL]) / (2 * k))
        return float(detectable(k, n, LAST_LEVEL, known=known).half * early / last)

    steps = steps_of(known if known > effect.n else 0)
    return {most: {n: half(most, n) for n in looks(most, steps) if n > effect.n} for most in FORECAST_SEEDS}


def chance(effect: Effect, halves: Mapping[int, float], gives_up: bool = False, times: float = 1.0) -> float:
    """The chance that an effect is decided at one of the later looks, with `times` as many test images.

    What `n` seeds will show, given what `effect.n` have shown, is normal around it:

        d_n ~ N(d, 2 sd^2 (1 / effect.n - 1 / n) + I (1 - 1 / times))

    since the true effect is as uncertain as d itself, and from look to look it moves by independent steps. It is
    decided beyond a half-width of zero, or so near to it that the interval is within the margin. `halves` are these
    half-widths in sd of one trial by the seeds of the look; the images' part I widens them. The chance is that of
    simulated paths, averaged over the sds that fit the one that was seen.

    gives_up: whether the arm ends at a look where it is futile.
    """
    seeds = np.array([effect.n, *halves])
    per_sd = np.array([effect.variance_per_sd(int(n)) for n in seeds])
    images = effect.images_sd**2 if effect.generalize == "images" and effect.images > 1 else 0.0
    sds = effect.sd * np.sqrt(effect.df / (2 * special.gammaincinv(effect.df / 2, (np.arange(9) + 0.5) / 9)))
    sds = sds[:, None]
    half = np.array([*halves.values()]) * np.sqrt(sds**2 + images / times / per_sd[1:])
    draws = np.random.default_rng(0).standard_normal((SIMULATED_PATHS, 1, len(seeds)))
    start = effect.effect + math.sqrt(images * (1 - 1 / times)) * draws[..., :1]
    d = start + np.cumsum(sds * np.sqrt(-np.diff(per_sd)) * draws[..., 1:], -1)
    ends = is_decided = decided(d, half, effect.margin)
    if gives_up:
        moves = sds * np.sqrt(per_sd[1:] - per_sd[-1])
        is_futile = hopeless(d, half[:, -1:], moves, effect.margin) & (seeds[1:] >= FUTILE_FROM_SEEDS)
        ends = is_decided | (is_futile & (seeds[1:] < seeds[-1]))
    return float(np.take_along_axis(is_decided, ends.argmax(-1)[..., None], -1).mean())
