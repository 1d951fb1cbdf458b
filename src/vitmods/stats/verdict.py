"""The effect of an arm on the metric, its interval, and the verdict that follows from the interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

POINTS_PER_FRACTION = 100.0
FRACTION = "fraction"

Claim = Literal["images", "seeds"]


class Verdict(StrEnum):
    """The verdict of an interval [low, high] of the gain: the first that holds, in this order."""

    HELPS = "helps"  #: low > 0
    HURTS = "hurts"  #: high < 0
    EQUIVALENT = "equivalent"  #: both ends are within the margin
    NO_WORSE = "no worse"  #: low > -margin
    NO_GAIN = "no gain"  #: high < margin: a gain of the margin or more is ruled out
    UNSTABLE = "unstable"  #: shown to fail more often than base, so no favorable verdict
    OPEN = "open"
    WITHHELD = "no verdict"  #: base has not learned, so there is nothing to compare with


FAVORABLE = (Verdict.HELPS, Verdict.EQUIVALENT, Verdict.NO_WORSE)
STOPS = (Verdict.HELPS, Verdict.HURTS, Verdict.EQUIVALENT, Verdict.UNSTABLE, Verdict.WITHHELD)
"""not `no worse`: that would lose most findings"""


def verdict_of(low: float, high: float, margin: float) -> Verdict:
    """Derive the verdict from the ends of a gain's interval; NaN, without an interval, is open."""
    if low > 0:
        return Verdict.HELPS
    if high < 0:
        return Verdict.HURTS
    if -margin < low and high < margin:
        return Verdict.EQUIVALENT
    if low > -margin:
        return Verdict.NO_WORSE
    return Verdict.NO_GAIN if high < margin else Verdict.OPEN


def images_text(count: int, grouped: bool) -> str:
    """`1,532 test images`, or `1,532 groups of test images`."""
    return f"{count:,} {'groups of test images' if grouped else 'test images'}"


@dataclasses.dataclass(frozen=True, repr=False)
class Effect:
    """An arm compared with base on the seeds that both have; fractions are in points (0 to 100).

    Differences are arm minus base, also where lower is better: then a negative one is a gain. `low` to `high` is for
    new trainings and new test images, `seeds_low` to `seeds_high` for new trainings on these images. Intervals hold
    together over the arms of the study. What cannot be computed is NaN.
    """

    arm: str
    effect: float
    low: float
    high: float
    seeds_low: float
    seeds_high: float
    verdict: Verdict
    n: int  #: seeds that the arm and base share
    base_mean: float  #: over these seeds
    arm_mean: float
    sd: float  #: of one trial, as it enters the interval
    df: float  #: degrees of freedom of `sd`
    spread_ratio: float  #: sd of the arm's trials over that of base's; NaN below 3 shared seeds, and of a single arm
    correlation: float  #: of arm and base over seeds: what pairing is worth; NaN below 3
    images_sd: float  #: standard error that the choice of test images adds; NaN without per-image scores
    failures: int  #: trials that diverged, collapsed or learned nothing
    base_failures: int
    margin: float
    family: int  #: arms whose intervals hold together
    alpha: float
    unit: str
    images: int = 0  #: test images or groups of them; 0 without per-image scores
    grouped: bool = False  #: whether these are groups
    higher_is_better: bool = True
    generalize: Claim = "images"  #: which of the two intervals the verdict is read from
    leans: str = ""  #: `up` or `down` (of the gain) for an open arm more than one standard error from zero
    overlap: float = 0.0  #: n_test / n_train, of seeds that are tested on other parts of the images; else 0
    base_n: int = 0  #: seeds of base that count: more than `n` where base was known; 0: `n`
    futile: bool = False  #: the seeds that remain are unlikely to decide
    provisional: bool = False  #: trials of a fixed study are missing, and the interval is one of many looks
    notes: tuple[str, ...] = ()
    expected: float = math.nan  #: the effect that may be expected, where `effect` is large in part by luck
    base_learned: bool = True  #: if base has not, the effect is part of no average over studies

    def __repr__(self) -> str:
        low, high = self.interval
        interval = "" if math.isnan(low) else f" [{low:+.{self.digits}f}, {high:+.{self.digits}f}]"
        return f"Effect({self.effect:+.{self.digits}f}{interval}, n={self.n}, {self.verdict})"

    @property
    def interval(self) -> tuple[float, float]:
        """The one that the verdict is read from."""
        return (self.low, self.high) if self.generalize == "images" else (self.seeds_low, self.seeds_high)

    @property
    def gain(self) -> float:
        """The effect, positive where the arm is better."""
        return self.effect if self.higher_is_better else -self.effect

    @property
    def fails_more(self) -> bool:
        """Whether more trials of the arm failed than of base."""
        return self.failures > self.base_failures

    @property
    def expects(self) -> str:
        """`about +1.1`, the effect to expect of an arm that helps; else empty."""
        is_shown = self.verdict == Verdict.HELPS and not self.provisional and math.isfinite(self.expected)
        return f"about {self.expected:+.2g}".replace("-", "−") if is_shown else ""

    @property
    def half(self) -> float:
        """Half the width of the interval that the verdict is read from."""
        return (self.interval[1] - self.interval[0]) / 2

    @property
    def stops(self) -> bool:
        """Whether a study until decided trains this arm no further: it `helps`, `hurts`, is `equivalent` or `unstable`,
        or base has not learned."""
        return self.verdict in STOPS

    def withheld(self, numbers: bool = True) -> Effect:
        """Drop the verdict and its notes, and keep the numbers, unless there is nothing that they are of."""
        names = ("effect", "low", "high", "seeds_low", "seeds_high", "base_mean", "arm_mean", "expected")
        unknown: dict[str, Any] = {} if numbers else dict.fromkeys(names, math.nan)
        return dataclasses.replace(
            self, verdict=Verdict.WITHHELD, leans="", futile=False, notes=(), base_learned=False, **unknown
        )

    def variance_per_sd(self, n: int | None = None) -> float:
        """The variance over seeds of this effect, or with `n` seeds in all, in squared sd of one trial."""
        n = n or self.n
        return 1 / n + 1 / max(self.base_n, n)

    @property
    def images_share(self) -> float:
        """The part of the effect's variance that comes from the choice of test images."""
        images = self.images_sd**2
        total = images + self.sd**2 * self.variance_per_sd() if self.n else math.nan
        return images / total if total else math.nan

    def test_images(self, count: int) -> str:
        """So many test images, or groups of them."""
        return images_text(count, self.grouped)

    @property
    def digits(self) -> int:
        """Decimals that it is shown with."""
        return 2 if self.unit == FRACTION else 4

    @property
    def shown_unit(self) -> str:
        """The unit of its numbers: a fraction is shown in points."""
        return "points" if self.unit == FRACTION else self.unit

    def to_dict(self) -> dict[str, Any]:
        """For JSON, in which NaN is None."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        if self.base_learned:  # the usual case, which older files do not name
            del values["base_learned"]
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Effect:
        """Invert `to_dict`; unknown keys are an error."""
        fields: dict[str, Any] = {key: math.nan if value is None else value for key, value in values.items()}
        fields |= {"verdict": Verdict(fields["verdict"]), "notes": tuple(fields.get("notes", ()))}
        return cls(**fields)
