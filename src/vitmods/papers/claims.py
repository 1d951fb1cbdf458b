"""The claims of the papers' texts, and what the studies of our gallery say about each.

The status of a claim is never written down. It follows from a test that proves the claim without training, or from the
published effect and the intervals of the studies that test it. These and the studies' conditions are in
`tables/studies.json`: the numbers of the gallery's entries, part of the package. A study counts only if it keeps the
conditions of the claim, and those that count are one interval, which anyone can recompute from their scores.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from vitmods.stats.across import across_studies
from vitmods.stats.tables import signed
from vitmods.util.limits import parse_json

STUDIES = Path(__file__).parent / "tables" / "studies.json"
MARGIN = 0.5
"""Points that a claim without a number may be off, where it says that something does not help or does not hurt: the
default margin of a study"""
WIDE = 2
"""Half-widths above this multiple of the published effect test nothing"""


class Direction(StrEnum):
    """The claimed difference between an arm and base."""

    GAIN = "gain"
    LOSS = "loss"
    NO_GAIN = "no gain"
    NO_LOSS = "no loss"
    NO_DIFFERENCE = "no difference"


class Status(StrEnum):
    """What our tests and studies say about a claim."""

    PROVEN = "proven"
    SEEN = "seen here"
    NOT_SEEN = "not seen here"
    TOO_WIDE = "too wide to test"
    ONE_PROCESSOR = "decided on one processor"
    OTHER = "other conditions"
    NOT_RUN = "not run"


CONDITIONS = {
    "data": "{}",
    "images": "{} images",
    "patch": "patches of {} px",
    "patch_values": "patches of {} values",
    "depth": "{} blocks",
    "width": "width {}",
    "heads": "{} heads",
    "recipe": "recipe {}",
    "epochs": "{} epochs",
    "warm_up": "{} warm-up",
    "start": "{} weights",
}
"""What a claim may hold for and what is known of a study, and how it is said. Patches are in pixels of a side, or in
values (pixels times channels); images are those of the training; weights are new or trained."""


def condition_text(name: str, wanted: Any) -> str:
    """`12 to 24 blocks`, `ImageNet-1k or JFT-4B`, `100 blocks or more`."""
    if isinstance(wanted, list):
        if isinstance(wanted[0], str):
            return CONDITIONS[name].format(" or ".join(wanted))
        low, high = wanted
        wanted = low if high == low else f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} or more"
    return CONDITIONS[name].format(wanted)


def is_met(wanted: Any, found: Any) -> bool:
    """Whether a fact of a study, or each of several, is what a claim holds for: a value, one of several words, or a
    number in a range."""
    values = found if isinstance(found, list) else [found]
    if not isinstance(wanted, list):
        return all(value == wanted for value in values)
    if isinstance(wanted[0], str):
        return all(value in wanted for value in values)
    return all(wanted[0] <= value <= wanted[1] for value in values)


def too_wide(half_width: float, effect: float) -> bool:
    """Return whether an interval is too wide to test a published effect."""
    return half_width > WIDE * abs(effect)


def status_of(direction: Direction, points: tuple[float, ...], low: float, high: float) -> Status:
    """Compare a claim with the interval of a study, or of several.

    A gain is seen if the interval is above zero, and not seen if it is below the smallest published gain; a loss the
    other way around. "No gain" is seen if the interval is below the published size, or without one below MARGIN, and
    not seen if it is above it. An interval whose half-width is more than twice the largest published effect, or that
    leaves both answers open, is too wide to test the claim.
    """
    if points and too_wide((high - low) / 2, points[-1]):
        return Status.TOO_WIDE
    if direction in (Direction.LOSS, Direction.NO_LOSS):
        low, high = -high, -low
    if direction in (Direction.GAIN, Direction.LOSS):
        smallest = points[0] if points else 0.0
        return Status.SEEN if low > 0 else Status.NOT_SEEN if high < smallest else Status.TOO_WIDE
    size = points[-1] if points else MARGIN
    if direction == Direction.NO_DIFFERENCE:
        low, high = (low, high) if high >= -low else (-high, -low)  # the end that is farther from zero is the high one
    return Status.SEEN if high < size else Status.NOT_SEEN if low > size else Status.TOO_WIDE


@dataclass(frozen=True)
class StudyEffect:
    """An effect in a study of the gallery: `post`, `post against dpn` or `post at mu8/2, warmup_epochs=0`."""

    arm: str
    effect: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.arm} {signed(self.effect, 2)} [{signed(self.low, 2)}, {signed(self.high, 2)}]"


@dataclass(frozen=True)
class GalleryStudy:
    """An entry of the gallery.

    facts: what is known of it, by the names of CONDITIONS; several values where it has several models or settings. And
    `numerics`, the version of the numbers of its trials (NUMERICS in vitmods.train.trial).
    seeds: the most that an arm has.
    effects: arm -> its effect and interval, in points.
    again: the same of a second run with other instructions of a processor, whose sums round differently; of no arm
        without one.
    design: empty where its arms are compared with base; the effects of a factorial study are of changes.
    """

    name: str
    title: str
    command: str
    date: str
    machine: str
    metric: str
    seeds: int
    facts: Mapping[str, Any]
    effects: Mapping[str, tuple[float, float, float]]
    again: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    design: str = ""

    @property
    def anchor(self) -> str:
        """The heading of its entry in docs/gallery.md, as a link has it."""
        return re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")

    def broken(self, conditions: Mapping[str, Any]) -> tuple[str, ...]:
        """The conditions that it does not keep, as `6 blocks, not 36`."""
        broken = []
        for name, wanted in conditions.items():
            found = self.facts[name]
            if not is_met(wanted, found):
                several = found if isinstance(found, list) else [found]
                text = CONDITIONS[name].format(" and ".join(map(str, several)))
                alone = CONDITIONS[name].split("{}")
                claimed = condition_text(name, wanted).removeprefix(alone[0]).removesuffix(alone[1])
                broken.append(f"{text}, not {claimed}")
        return tuple(broken)


@cache
def studies() -> Mapping[str, GalleryStudy]:
    """Return the studies of the gallery by name."""
    entries = parse_json(STUDIES.read_text(encoding="utf-8"))
    return {
        name: GalleryStudy(
            name,
            **facts | {of: {arm: tuple(numbers) for arm, numbers in facts[of].items()} for of in ("effects", "again")},
        )
        for name, facts in entries.items()
    }


@dataclass(frozen=True)
class ClaimTest:
    """A study of the arms that a claim is about; again: their effects in its second run, empty without one; broken: the
    conditions of the claim that it does not keep."""

    study: GalleryStudy
    effects: tuple[StudyEffect, ...]
    again: tuple[StudyEffect, ...]
    broken: tuple[str, ...]

    @property
    def counts(self) -> bool:
        """Whether it makes the status of the claim."""
        return not self.broken

    @property
    def outcome(self) -> str:
        """Whether it counts, and why not."""
        return "counts" if self.counts else f"{Status.OTHER} ({'; '.join(self.broken)})"


@dataclass(frozen=True)
class Slip:
    """A contradiction of a paper with itself, and the tables (named without the paper) that show it."""

    says: str
    tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, in our words.

    where: the section, or what else of the paper states it.
    tables: the tables and figures that it is about, named without the paper.
    direction, points: the effect that it states, and the smallest and the largest published size in points; no
        direction: it states no effect of an arm.
    holds: its conditions, by the names of CONDITIONS, that it states or its tables have: a value, several words, or the
        ends of a range.
    changes: the changes that it is about, by the names of their pages.
    tests: studies of the gallery that test it, as `STUDY: ARM; ARM`. If it names several arms, the claim is that each
        has the effect.
    proof: the test that shows it without training, as `FILE::FUNCTION`.
    why: why there is neither.
    """

    where: str
    says: str
    tables: tuple[str, ...]
    direction: Direction | None = None
    points: tuple[float, ...] = ()
    holds: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    proof: str = ""
    why: str = ""
    slips: tuple[Slip, ...] = ()

    def __post_init__(self) -> None:
        if self.direction is not None:
            object.__setattr__(self, "direction", Direction(self.direction))
        if self.tests and not self.direction:
            raise ValueError(f"'{self.says}' states no effect that {self.tests[0]} could test: give its direction.")
        if list(self.points) != sorted(self.points) or any(point <= 0 for point in self.points):
            raise ValueError(f"'{self.says}': points are sizes, the smallest first, without a sign.")
        if unknown := self.holds.keys() - CONDITIONS.keys():
            raise ValueError(
                f"'{self.says}': no condition is named {sorted(unknown)[0]}; take {', '.join(CONDITIONS)}."
            )
        if sum(map(bool, (self.tests, self.proof, self.why))) > 1:
            raise ValueError(f"'{self.says}' takes one of tests, proof and why.")

    @property
    def slip(self) -> str:
        """All slips in one sentence."""
        return "; ".join(slip.says for slip in self.slips)

    @property
    def effect(self) -> str:
        """The published effect, as `gain of 0.7 to 1.9`; empty without a direction."""
        if self.direction is None:
            return ""
        sizes = " to ".join(f"{point:g}" for point in dict.fromkeys(self.points))
        return f"{self.direction} of {sizes}" if sizes else str(self.direction)

    @property
    def conditions(self) -> str:
        """What it holds for, as `patches of 16 px, 12 blocks, ImageNet-1k`."""
        return ", ".join(condition_text(name, wanted) for name, wanted in self.holds.items())

    @property
    def evidence(self) -> tuple[ClaimTest, ...]:
        """The studies that test it. Raises ValueError for a study or an arm that the gallery does not have."""
        return tuple(self._evidence(text) for text in self.tests)

    def _evidence(self, text: str) -> ClaimTest:
        name, _, text_of_arms = text.partition(": ")
        study, arms = studies().get(name), text_of_arms.split("; ")
        for arm in arms:
            if study is None or arm not in study.effects:
                raise ValueError(f"'{text}': the gallery has {f'no arm {arm!r} there' if study else 'no such study'}.")
        assert study is not None
        effects, again = (
            tuple(StudyEffect(arm, *run[arm]) for arm in arms if arm in run) for run in (study.effects, study.again)
        )
        return ClaimTest(study, effects, again if len(again) == len(arms) else (), study.broken(self.holds))

    @property
    def together(self) -> tuple[StudyEffect, ...]:
        """The effect of each arm over the studies that count; a study more or less does not decide."""
        return self._together([(test, test.effects) for test in self.evidence if test.counts])

    def _together(self, tests: Iterable[tuple[ClaimTest, tuple[StudyEffect, ...]]]) -> tuple[StudyEffect, ...]:
        by_arm: dict[str, dict[str, list[StudyEffect]]] = {}
        for test, effects in tests:
            for effect in effects:
                by_arm.setdefault(effect.arm, {}).setdefault(str(test.study.facts["data"]), []).append(effect)
        sets = {
            arm: [[(e.effect, e.low, e.high) for e in of_set] for of_set in x.values()] for arm, x in by_arm.items()
        }
        return tuple(StudyEffect(arm, *across_studies(intervals, len(sets))) for arm, intervals in sets.items())

    @property
    def status(self) -> Status:
        """What the proof, or the studies that count say; each arm needs the effect. What their second runs do not say
        too is not decided."""
        if not self.tests:
            return Status.PROVEN if self.proof else Status.NOT_RUN
        if not self.together:
            return Status.OTHER
        status = self._status(self.together)
        if status == Status.TOO_WIDE:
            return status
        tests = [test for test in self.evidence if test.counts]
        confirmed = all(test.again for test in tests)
        confirmed = confirmed and self._status(self._together([(test, test.again) for test in tests])) == status
        return status if confirmed else Status.ONE_PROCESSOR

    def _status(self, together: Iterable[StudyEffect]) -> Status:
        assert self.direction is not None
        found = {status_of(self.direction, self.points, effect.low, effect.high) for effect in together}
        return next(status for status in (Status.NOT_SEEN, Status.TOO_WIDE, Status.SEEN) if status in found)

    def describe(self) -> dict[str, Any]:
        """Describe the claim for programs."""
        return {
            "where": self.where,
            "says": self.says,
            "tables": list(self.tables),
            "effect": self.effect,
            "points": list(self.points),
            "holds": {name: _finite(wanted) for name, wanted in self.holds.items()},
            "changes": list(self.changes),
            "slips": [{"says": slip.says, "tables": list(slip.tables)} for slip in self.slips],
            "status": str(self.status),
            "proof": self.proof,
            "why": self.why,
            "together": {effect.arm: [effect.effect, effect.low, effect.high] for effect in self.together},
            "tests": [
                {
                    "study": test.study.name,
                    "command": test.study.command,
                    "facts": dict(test.study.facts),
                    "broken": list(test.broken),
                    "effects": {effect.arm: [effect.effect, effect.low, effect.high] for effect in test.effects},
                    "again": {effect.arm: [effect.effect, effect.low, effect.high] for effect in test.again},
                }
                for test in self.evidence
            ],
        }

    def __str__(self) -> str:
        slip = f" But {self.slip}." if self.slip else ""
        return f"The text ({self.where}): {self.says}.{slip} [{self.status}]"


def counted(claims: Iterable[Claim]) -> str:
    """Count claims by status, as `3 proven, 2 under other conditions`."""
    counts = Counter(claim.status for claim in claims)
    words = {Status.OTHER: f"under {Status.OTHER}"}
    return ", ".join(f"{counts[status]} {words.get(status, status)}" for status in Status if counts[status])


def _finite(wanted: Any) -> Any:
    """A condition for JSON, which has no infinity: a range without an end has none."""
    return [None if value == math.inf else value for value in wanted] if isinstance(wanted, list) else wanted
