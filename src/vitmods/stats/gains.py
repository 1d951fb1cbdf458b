"""A study's trials as gains: more is better, fractions in points, failures sorted out.

A trial fails in one of four ways, each counted and reported by itself:

- It diverged: it is without a score (a loss that is not finite).
- Its prediction is constant, and its score is not above the best constant prediction by more than the margin. (A log
  loss can be informative although the most likely class never changes.)
- It learned nothing: its score is not above the best constant prediction by more than its own test error, the standard
  error over its images. Without scores of images, this takes an arm whose median is not above it either.
- It collapsed: its score is (i) less than half as far above the best constant prediction as base's median, and (ii)
  more than 5 sd below the median of its arm's other trials. Trials that meet (i) count neither in the sd, which is
  pooled over all arms, nor in the median, so that several collapses of one arm do not hide one another.

An arm has learned if the median of its trials is above the best constant prediction by more than the margin (at most
`LEARNED_POINTS`), the sd of one of its trials, and the test error of one. Where base has not, no verdict is given but
`helps` of an arm that has: arms that are all at the constant prediction are equivalent, which says nothing about them.
Where base starts from trained weights and its median is below a linear probe of these by more than that margin, there
is no verdict at all: training lost what they hold, and arms that keep more of it seem better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import ArrayLike

from vitmods.stats.criteria import Criteria
from vitmods.stats.fit import Array, Fit, Mask, fit
from vitmods.stats.images import NEAR_FRACTION, ImagesPart, clusters, images_part
from vitmods.stats.read import Table
from vitmods.stats.verdict import POINTS_PER_FRACTION
from vitmods.util.errors import UserError
from vitmods.util.text import listing, plural

HALF_AN_IMAGE = 0.5
ROUNDING = 1e-6
LEARNED_POINTS = 0.5  # in points, or in the unit of the metric: a larger margin asks no more of base
LARGEST_FRACTION = 10.0  # of a unit that is given: an error relative to a reference may be above 1
FEWEST_GROUPS = 3


@dataclass(frozen=True)
class Gains:
    """Trials of g arms, base first, with n seeds."""

    arms: tuple[str, ...]
    trials: Array  #: (g, n); NaN where there is none, and for all arms where base failed
    images: Array | None  #: (g, n, m)
    floor: float  #: the least sd of a trial: half an image where scores are right or wrong
    step: float  #: between an image that is right and one that is wrong; 0 for other scores, and for groups
    kinds: dict[str, Mask]  #: what went wrong, in the order of `FAILURES` -> (g, n) the trials that failed so
    ended: Mask  #: (g, n)
    pooled: Mask  #: (g,) arms whose trials enter the common variance: no score of a failed trial, failures as in base
    constant: float  #: the score of the best constant prediction; NaN where it is not known
    base: float  #: the median of base's trials; NaN for a sum over settings
    left_out: int  #: images without a score in some trial
    learned: Mask  #: (g,) which arms are clearly above the best constant prediction; none where base is below the level
    near: Mask  #: (g,) arms that are right on nearly all images, or on hardly any
    level: float = math.nan  #: of a linear probe of the weights that base starts from, if base is below it
    sets: tuple[tuple[int, float], ...] = ()  #: of data sets whose images are side by side, images and step of each
    grouped: bool = False  #: whether images have groups
    overlap: float = 0.0  #: of the table
    limit: float = math.inf  #: the largest possible effect: 100 points where all scores are fractions from 0 to 1

    @property
    def has_learned(self) -> bool:
        """Whether base has."""
        return bool(self.learned[0])

    @property
    def failures(self) -> Mask:
        """(g, n) all trials that failed."""
        return np.asarray(np.any(list(self.kinds.values()), axis=0))

    def fit(self) -> Fit:
        """Every arm against base."""
        return fit(self.trials, 0, self.floor, np.broadcast_to(self.pooled[:, None], self.trials.shape))

    def shared(self, arm: int, other: int = 0) -> Mask:
        """(n,) seeds that both have."""
        return np.asarray(np.isfinite(self.trials[arm]) & np.isfinite(self.trials[other]))

    def images_part(self, arm: int, other: int = 0) -> ImagesPart | None:
        """The images' part of arm minus another over their shared seeds; None without per-image scores."""
        seeds = self.shared(arm, other)
        if self.images is None or not seeds.any():
            return None
        return self.part_of(self.images[arm, seeds] - self.images[other, seeds], [arm, other])

    def part_of(self, differences: Array, arms: Sequence[int] | Mask) -> ImagesPart:
        """The images' part of `differences` (..., n, m) between these arms."""
        return images_part(differences, self.step, self.sets, bool(self.near[arms].all()))

    def notes(self, what: str = "arms", then: str = "") -> list[str]:
        """Whether base has learned, and what failed. `what` shares base's seeds; `then` follows for what failed."""
        sentences, of_base, base = [], int(self.failures[0].sum()), self.arms[0]
        others = (self.failures & np.isfinite(self.trials[0])).sum(-1).tolist()[1:]  # their seeds count
        if math.isfinite(self.level):
            sentences.append(
                f"{base} {BELOW}: the median of its trials is {self.base:.4g}, and a linear probe of the frozen "
                f"weights reaches {self.level:.4g}, so verdicts are withheld"
            )
        elif not self.has_learned and math.isfinite(self.base):  # NaN in a sum over settings, which report themselves
            sentences.append(
                f"{base} has not learned: the median of its trials ({abs(self.base):.4g}) is not clearly better "
                f"than the best constant prediction ({abs(self.constant):.4g}), so verdicts are withheld, but for arms "
                "that have learned and help; it may need another learning rate"
            )
        elif of_base and self.has_learned:
            seeds = "so its seed is" if of_base == 1 else "so their seeds are"
            sentences.append(f"{plural(of_base, 'trial')} of {base} failed, {seeds} left out for all {what}")
        for kind, (singular, many) in FAILURES.items():
            counts = zip(self.arms, self.kinds[kind].sum(-1).tolist(), self.ended.sum(-1).tolist(), strict=True)
            if trials := [f"{count} of {of} {name} trials" for name, count, of in counts if count]:
                sentences.append(f"{listing(trials)} {singular if self.kinds[kind].sum() == 1 else many}")
        if any(others):
            diverged = not np.isfinite(self.trials[1:][self.failures[1:]]).any()
            sentences.append(then or ("effects are of the trials that have a score" if diverged else COUNTED))
        if self.left_out:
            images = f"{plural(self.left_out, 'test image')} without a score in some trial"
            sentences.append(f"{images} {'is' if self.left_out == 1 else 'are'} left out for all")
        return sentences


BELOW = "ends below the weights that it starts from"
FAILURES = {
    "constant": ("predicts a single class", "predict a single class"),
    "unlearned": ("is not above the best constant prediction", "are not above the best constant prediction"),
    "collapsed": ("collapsed", "collapsed"),
    "diverged": ("diverged", "diverged"),
}
COUNTED = "failed trials that have a score count in the effect of their arm, not in the spread that other arms share"


def gains_of(table: Table, criteria: Criteria) -> Gains:
    """Scale the scores, so that more is better, and sort out failures.

    Without a known `chance`, 0 is assumed for fractions of which more is better; then base only has to be above it. For
    other scores, only trials that diverged or are known to predict a constant have failed. Raises `UserError` for
    scores above 1 without a unit, or that look like percentages, and for groups that do not fit.
    """
    scale, chance, images, floor, step = float(criteria.sign), table.chance, table.images, 0.0, 0.0
    limit, groups = math.inf, table.groups if criteria.generalize == "images" else None
    if criteria.is_fraction:
        if np.nanmax(np.abs(table.trials), initial=0.0) > (1.0 if criteria.unit is None else LARGEST_FRACTION):
            most, others = 1.0, "; for fractions that may be above 1, the unit fraction"
            if criteria.unit is not None:
                most, others = LARGEST_FRACTION, ""
            raise UserError(
                f"Scores are taken as fractions (0.93, not 93), and some are above {most:g}. For percent give the unit "
                f"points (unit='points' or --unit points){others}."
            )
        for name, value in (("chance", chance), ("level", table.level)):
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"The {name} of scores that are fractions is a fraction too (0.1), not {value:g}.")
        if chance is None and criteria.higher_is_better and not (table.trials < 0).any():
            chance = 0.0
        if ((table.trials >= 0) & (table.trials <= 1) | np.isnan(table.trials)).all():
            limit = POINTS_PER_FRACTION
        scale *= POINTS_PER_FRACTION
    trials, level = table.trials * scale, table.level
    if images is not None:
        if np.isin(images[np.isfinite(images)], (0, 1)).all():
            floor, step = HALF_AN_IMAGE * abs(scale) / images.shape[-1], abs(scale) if groups is None else 0.0
        images = images * scale
    if groups is not None:
        images = clusters(*_grouped(images, groups, table.kept))
    constant = math.nan if chance is None else chance * scale
    finite, median = np.isfinite(trials), medians(trials)
    is_known = table.chance is not None
    least, error = min(criteria.margin if is_known else 0.0, LEARNED_POINTS), np.zeros(trials.shape)
    if has_error := images is not None and is_known:
        error = images.std(-1) / math.sqrt(max(images.shape[-1] - 1, 1))
    with np.errstate(invalid="ignore"):
        same = table.constant & ~(trials > constant + least + ROUNDING)
        low = (trials <= constant + error + ROUNDING) & ~same
        low &= has_error | (median <= constant + ROUNDING)[:, None]
    lost = same | low
    least_of = np.fmax(medians(error), least)
    # Where half of the trials are at chance, so may be the others: they count in the sd.
    rare = same | (low & (2 * low.sum(-1) < finite.sum(-1))[:, None])
    learned = np.array([chance is None or has_learned(*arm) for arm in zip(trials, rare, repeat(constant), least_of)])
    learned &= finite.any(-1) | ~table.diverged.any(-1)  # all that ended diverged
    is_below = level is not None and bool(median[0] < level * scale - least - ROUNDING)
    far = collapsed(trials, constant) & ~lost if chance is not None and learned[0] else np.zeros(trials.shape, bool)
    kinds = {"constant": same, "unlearned": low, "collapsed": far, "diverged": table.diverged}
    failures = table.diverged | lost | far
    count = failures.sum(-1)
    pooled = ~(lost | far).any(-1) & (count <= count[0])
    pooled[0] = True
    missing = failures[0] & (learned[0] | ~finite[0])
    trials = np.where(missing, np.nan, trials)
    return Gains(
        table.arms, trials, images, floor, step, kinds, table.ended, pooled, constant, float(median[0]),
        int((~table.kept).sum()),
        learned & (not is_below), (step > 0) & (abs(median / scale - 0.5) > 0.5 - NEAR_FRACTION),
        level * scale if level is not None and is_below and learned[0] else math.nan,
        grouped=table.groups is not None, overlap=table.overlap, limit=limit,
    )  # fmt: skip


def has_learned(scores: Array, lost: Mask, constant: float, margin: float) -> bool:
    """Whether the median of an arm's scores (n,) is above the best constant prediction by more than `margin` and by
    more than the sd of the trials that are not `lost`. True before the first score."""
    ended = np.isfinite(scores)
    if not ended.any():
        return True
    kept = scores[ended & ~lost]
    sd = float(kept.std(ddof=1)) if len(kept) > 1 else 0.0
    return len(kept) > 0 and float(np.median(scores[ended])) - constant > max(margin, sd)


def medians(scores: Array) -> Array:
    """The median of each row's finite scores; NaN without any."""
    return np.array([np.median(row[np.isfinite(row)]) if np.isfinite(row).any() else np.nan for row in scores])


def _grouped(images: Array | None, groups: ArrayLike, kept: Mask) -> tuple[Array, ArrayLike]:
    if images is None:
        raise UserError("groups need per-image scores: give an array of scores for every trial.")
    if len({isinstance(label, str) for label in np.asarray(groups, dtype=object).ravel()}) > 1:
        raise UserError("Some groups are texts and others are not: name all in one way.")
    if np.shape(groups) != kept.shape:
        raise UserError(f"groups must have one label for each of {kept.size} images, not {np.shape(groups)}.")
    if (count := len(np.unique(np.asarray(groups)[kept]))) < FEWEST_GROUPS:
        raise UserError(
            f"Images of {count} groups do not generalize to other groups: it takes {FEWEST_GROUPS} or more. Name "
            "smaller groups, or take verdicts on these images alone (--generalize seeds)."
        )
    return images, np.asarray(groups)[kept]


COLLAPSED_SDS = 5.0  # sd below the arm's other trials
FRACTION_OF_BASE = 0.5  # of base's gain over chance
ENOUGH_TRIALS = 4  # trials that all diverged, against none of base's


def collapsed(scores: Array, chance: float, base: int = 0) -> Mask:
    """Which trials of one study (g, n) collapsed; more is better, NaN is a missing cell."""
    far = np.zeros(scores.shape, dtype=bool)
    if not np.isfinite(scores[base]).any():
        return far
    limit = chance + FRACTION_OF_BASE * (np.nanmedian(scores[base]) - chance)
    low = np.isfinite(scores) & (scores < limit)
    kept = [row[np.isfinite(row)] for row in np.where(low, np.nan, scores)]
    df = sum(max(len(row) - 1, 0) for row in kept)
    sd = math.sqrt(sum(((row - row.mean()) ** 2).sum() for row in kept if len(row)) / df) if df else math.inf
    for arm, seed in zip(*np.nonzero(low)):
        others = np.isfinite(scores[arm]) & ~low[arm]
        if others.any():
            far[arm, seed] = np.median(scores[arm, others]) - scores[arm, seed] > COLLAPSED_SDS * sd
    return far


def less_stable(failed: int, of: int, base_failed: int, base_of: int, level: float) -> bool:
    """Whether an arm fails more often than base: Fisher's exact test, one-sided; or all of at least 4, base never.

    All of 2 or 3 is not enough: at some rates of divergence up to 28 % of studies would be false.
    """
    if not (failed and of and base_of):
        return False
    if min(of, base_of) >= ENOUGH_TRIALS and failed == of and base_failed == 0:
        return True
    both = failed + base_failed
    as_many = sum(math.comb(of, x) * math.comb(base_of, both - x) for x in range(failed, min(of, both) + 1))
    return as_many / math.comb(of + base_of, both) <= level


def rate_bound(trials: int) -> float:
    """The largest rate of failure that `trials` without one leave possible, at 95 %."""
    return float(1 - 0.05 ** (1 / trials))
