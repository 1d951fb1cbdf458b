"""From scores to verdicts: paired differences, intervals and corrected p values.

Pure functions on numbers. Shares go in as fractions (0 to 1), and the fields of their `Effect` are in points (0 to
100); metrics with another unit stay as they are. `docs/verdicts.md` explains the choices in words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

from vitmods.stats.power import POWER, ROUNDING, detectable_effect, seeds_needed
from vitmods.util.errors import UserError

HELPS, HURTS, NO_WORSE, CANNOT_TELL = "helps", "hurts", "no worse", "cannot tell"
VERDICTS = (HELPS, NO_WORSE, CANNOT_TELL, HURTS)
POINTS = 100.0
FRACTION = "%"
LARGEST_FRACTION = 10.0  # an error relative to a reference may be above 1, a change of one below 0

Scores = Mapping[int, float | None]


@dataclasses.dataclass(frozen=True, repr=False)
class Effect:
    """What an arm did to the metric, compared with base on the same seeds; shares are in points.

    Differences are arm minus base, also where lower is better: then a negative one is a gain.

    `low` to `high` is the t interval of this arm alone (95 % at alpha=.05); `p_holm`, `p_no_worse` and the verdict
    are corrected for the number of arms, so a verdict may say less than the interval, but never more.
    A number that cannot be computed (fewer than two pairs, no spread) is NaN.
    """

    arm: str
    mean: float  #: mean paired difference to base
    low: float
    high: float
    p: float  #: paired t test, two-sided, this arm alone
    p_holm: float  #: the same, Holm-corrected over the arms of the study
    n: int  #: pairs: seeds that both the arm and base finished
    verdict: str
    margin: float  #: a loss of less than this does not matter
    base_mean: float  #: mean of base over the paired seeds
    arm_mean: float
    sd: float  #: standard deviation of the paired differences
    detectable: float  #: smallest true effect that `n` pairs find with 80 % power, after the correction for arms
    diverged: int = 0  #: trials of this arm that diverged; they are in no mean, and forbid a favorable verdict
    p_no_worse: float = math.nan  #: one-sided p against "worse by the margin", Holm-corrected over the arms
    family: int = 1  #: number of arms that were tested together
    alpha: float = 0.05
    unit: str = FRACTION  #: of the metric
    higher_is_better: bool = True

    def __repr__(self) -> str:
        if self.n == 0:
            return f"Effect(n=0 paired, {self.verdict}{self._divergence()})"
        mean, low, high = (f"{value:+.{self.digits}f}" for value in (self.mean, self.low, self.high))
        interval = f" [{low}, {high}]" if self.has_interval else ""
        return f"Effect({mean}{interval}, n={self.n} paired, {self.verdict}{self._divergence()})"

    def _divergence(self) -> str:
        return f", {self.diverged} diverged" if self.diverged else ""

    @property
    def has_interval(self) -> bool:
        """Whether there are enough different pairs for an interval."""
        return not math.isnan(self.low)

    @property
    def digits(self) -> int:
        """Decimals that a difference is shown with."""
        return digits_of(self.unit)

    @property
    def gain(self) -> float:
        """The mean difference, positive where the arm is better."""
        return self.mean if self.higher_is_better else -self.mean

    @property
    def least_gain(self) -> float:
        """The worse end of the interval, positive where the arm is better."""
        return self.low if self.higher_is_better else -self.high

    def seeds_needed(self, effect: float, power: float = POWER) -> int:
        """Seeds for which a true effect of this size is found with this power, in a study of as many arms.

        Raises `UserError` where the spread of the differences is unknown (fewer than two pairs, or all equal).
        """
        if math.isnan(self.sd) or self.sd <= ROUNDING:
            raise UserError(
                f"{self.arm}: the spread over seeds is unknown with {self.n} finished pair(s) that do not differ; "
                "run more seeds, or test on more images."
            )
        return seeds_needed(effect, self.sd, power, self.alpha / self.family)

    def to_dict(self) -> dict[str, Any]:
        """A dict for JSON, in which NaN is None."""
        return {key: _none_if_nan(value) for key, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Effect:
        """The inverse of `to_dict`; keys that are no fields are an error."""
        known: dict[str, Any] = {key: math.nan if value is None else value for key, value in values.items()}
        return cls(**known)


@dataclasses.dataclass(frozen=True)
class NoiseFloor:
    """How far base differs from itself when only the seed changes; shares are in points."""

    n: int  #: scores of base, first and other seeds together
    sd: float  #: standard deviation of one score
    single_run: float  #: two single runs of base differ by less than this in 95 % of cases
    mean: float  #: mean difference, other seeds minus first seeds: what an arm that does nothing looks like
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """A dict for JSON, in which NaN is None."""
        return {key: _none_if_nan(value) for key, value in dataclasses.asdict(self).items()}


def effects(
    base: Scores,
    arms: Mapping[str, Scores],
    margin: float,
    alpha: float = 0.05,
    diverged: Mapping[str, int] | None = None,
    *,
    unit: str = FRACTION,
    higher_is_better: bool = True,
) -> dict[str, Effect]:
    """The effect of every arm, tested together.

    `base` and each arm map a seed to a score (None or NaN where the trial has none); seeds that
    both have are pairs. `margin` is in points, or in the unit of what is no fraction. `diverged` counts the diverged
    trials of an arm. Arms without a p value still count for the correction, so that a verdict cannot change because an
    unrelated arm is not finished.

    Raises `UserError` for a negative margin, a level outside (0, 1), or a fraction that is no fraction.
    """
    if not (math.isfinite(margin) and margin >= 0):
        raise UserError(f"margin must be 0 or more, not {margin}.")
    if not 0 < alpha < 1:
        raise UserError(f"alpha must lie between 0 and 1, not {alpha}.")
    samples = {arm: _paired(base, scores, unit) for arm, scores in arms.items()}
    sign = 1 if higher_is_better else -1
    tests = [_t_test(sign * (points[1] - points[0]), margin, alpha) for points in samples.values()]
    p_holm = holm([test.p for test in tests])
    p_no_worse = holm([test.p_no_worse for test in tests])
    family = max(len(arms), 1)
    result = {}
    for i, (arm, (base_points, arm_points)) in enumerate(samples.items()):
        test, lost = tests[i], (diverged or {}).get(arm, 0)
        low, high = (test.low, test.high) if higher_is_better else (-test.high, -test.low)
        result[arm] = Effect(
            arm=arm, mean=sign * test.mean, low=low, high=high, p=test.p, p_holm=p_holm[i], n=len(base_points),
            verdict=_verdict(test, p_holm[i], p_no_worse[i], alpha, lost), margin=margin,
            base_mean=_mean(base_points), arm_mean=_mean(arm_points), sd=test.sd,
            detectable=detectable_effect(test.sd, len(base_points), POWER, alpha / family),
            diverged=lost, p_no_worse=p_no_worse[i], family=family, alpha=alpha, unit=unit,
            higher_is_better=higher_is_better,
        )  # fmt: skip
    return result


def noise_floor(first: Scores, other: Scores, alpha: float = 0.05, unit: str = FRACTION) -> NoiseFloor:
    """Compares base with base: scores (shares as fractions) of its study seeds and of as many other seeds.

    The seeds differ, so nothing is paired: the interval is Welch's.
    """
    a, b = _points(first.values(), unit), _points(other.values(), unit)
    n = len(a) + len(b)
    mean = _mean(b) - _mean(a)
    if len(a) < 2 or len(b) < 2:
        return NoiseFloor(n, math.nan, math.nan, mean, math.nan, math.nan)
    # Deviations from each group's own mean: a difference of the groups is noise too, but the interval shows that.
    sd = math.sqrt((np.sum((a - a.mean()) ** 2) + np.sum((b - b.mean()) ** 2)) / (n - 2))
    single_run = float(special.stdtrit(n - 2, 1 - alpha / 2)) * sd * math.sqrt(2)
    va, vb = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    if va + vb <= ROUNDING**2:
        return NoiseFloor(n, sd, single_run, mean, math.nan, math.nan)
    df = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    half = float(special.stdtrit(df, 1 - alpha / 2)) * math.sqrt(va + vb)
    return NoiseFloor(n, sd, single_run, mean, mean - half, mean + half)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction. NaN stays NaN, and counts as a test."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)  # NaN sorts last
    steps = np.arange(len(p), 0, -1)
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * steps), 1.0)
    return [float(value) for value in corrected]


@dataclasses.dataclass(frozen=True)
class _Test:
    """One arm's t test, before the correction over arms; of gains, which are positive where the arm is better."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    sd: float = math.nan
    p: float = math.nan
    p_no_worse: float = math.nan


def _t_test(gains: np.ndarray, margin: float, alpha: float) -> _Test:
    n = len(gains)
    mean = _mean(gains)
    if n < 2:
        return _Test(mean)
    sd = float(gains.std(ddof=1))
    if sd <= ROUNDING:
        # Equal differences come from a coarse metric (few test images), not from certainty: t is undefined.
        return _Test(mean, sd=0.0)
    error = sd / math.sqrt(n)
    half = float(special.stdtrit(n - 1, 1 - alpha / 2)) * error
    p = 2 * float(special.stdtr(n - 1, -abs(mean) / error))
    p_no_worse = float(special.stdtr(n - 1, -(mean + margin) / error))
    return _Test(mean, mean - half, mean + half, sd, p, p_no_worse)


def _verdict(test: _Test, p_holm: float, p_no_worse: float, alpha: float, diverged: int) -> str:
    """NaN compares as false throughout, so an unknown p value ends in 'cannot tell'."""
    if p_holm < alpha and test.high < 0:
        return HURTS
    if diverged:
        return CANNOT_TELL
    if p_holm < alpha and test.low > 0:
        return HELPS
    if p_no_worse < alpha / 2:
        return NO_WORSE
    return CANNOT_TELL


def _paired(base: Scores, arm: Scores, unit: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores in points, or in their unit, of the seeds that both have."""
    seeds = [seed for seed in base if _is_score(base[seed]) and _is_score(arm.get(seed))]
    return _points((base[seed] for seed in seeds), unit), _points((arm[seed] for seed in seeds), unit)


def _points(scores: Any, unit: str) -> np.ndarray:
    known = np.array([score for score in scores if _is_score(score)], dtype=float)
    if unit != FRACTION:
        return known
    if np.any(np.abs(known) > LARGEST_FRACTION):
        raise UserError("Scores must be fractions, as a rule between 0 and 1 (0.93, not 93).")
    return POINTS * known


def scale_of(unit: str) -> float:
    """What a score is multiplied by to be shown: a fraction is shown in percent."""
    return POINTS if unit == FRACTION else 1.0


def digits_of(unit: str) -> int:
    """Decimals that a score or a difference is shown with."""
    return 2 if unit == FRACTION else 4


def _is_score(score: float | None) -> bool:
    return score is not None and math.isfinite(score)


def _mean(points: np.ndarray) -> float:
    return float(points.mean()) if len(points) else math.nan


def _none_if_nan(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
