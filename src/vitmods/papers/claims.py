"""The claims of the papers' texts, and what the studies of our gallery say about each.

The status of a claim is never written down. It follows from the published effect and the intervals of the studies that
test it, which are in `tables/studies.json`: the numbers of the gallery's entries, part of the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

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
    """The answer of our studies to a claim."""

    SEEN = "seen here"
    NOT_SEEN = "not seen here"
    TOO_WIDE = "too wide to test"
    NOT_RUN = "not run"


def too_wide(half_width: float, effect: float) -> bool:
    """Return whether an interval is too wide to test a published effect."""
    return half_width > WIDE * abs(effect)


def status_of(direction: Direction, points: tuple[float, ...], low: float, high: float) -> Status:
    """Compare a claim with the interval of a study.

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
    """An entry of the gallery; effects: arm -> its effect and interval, in points."""

    name: str
    title: str
    command: str
    date: str
    machine: str
    metric: str
    effects: Mapping[str, tuple[float, float, float]]

    @property
    def anchor(self) -> str:
        """The heading of its entry in docs/gallery.md, as a link has it."""
        return re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")


@cache
def studies() -> Mapping[str, GalleryStudy]:
    """Return the studies of the gallery by name."""
    entries = parse_json(STUDIES.read_text(encoding="utf-8"))
    return {
        name: GalleryStudy(
            name, **facts | {"effects": {arm: tuple(effect) for arm, effect in facts["effects"].items()}}
        )
        for name, facts in entries.items()
    }


@dataclass(frozen=True)
class ClaimTest:
    """A study that tests a claim, and its outcome."""

    study: GalleryStudy
    effects: tuple[StudyEffect, ...]
    status: Status
    direction: Direction

    @property
    def outcome(self) -> str:
        """The status, and whether effects that are clear of zero have the sign of a claimed gain or loss."""
        signs = {effect.low > 0 for effect in self.effects if effect.low > 0 or effect.high < 0}
        if self.status != Status.TOO_WIDE or len(signs) != 1 or self.direction not in (Direction.GAIN, Direction.LOSS):
            return self.status
        return f"{self.status}, {'same' if signs == {self.direction == Direction.GAIN} else 'other'} sign"


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
    changes: the changes that it is about, by the names of their pages.
    tests: studies of the gallery that test it, as `STUDY: ARM; ARM`. If it names several arms, the claim is that each
        has the effect.
    why: why none does.
    """

    where: str
    says: str
    tables: tuple[str, ...]
    direction: Direction | None = None
    points: tuple[float, ...] = ()
    changes: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    why: str = ""
    slips: tuple[Slip, ...] = ()

    def __post_init__(self) -> None:
        if self.direction is not None:
            object.__setattr__(self, "direction", Direction(self.direction))
        if self.tests and not self.direction:
            raise ValueError(f"'{self.says}' states no effect that {self.tests[0]} could test: give its direction.")
        if list(self.points) != sorted(self.points) or any(point <= 0 for point in self.points):
            raise ValueError(f"'{self.says}': points are sizes, the smallest first, without a sign.")

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
    def evidence(self) -> tuple[ClaimTest, ...]:
        """The studies that test it. Raises ValueError for a study or an arm that the gallery does not have."""
        return tuple(self._evidence(text) for text in self.tests)

    def _evidence(self, text: str) -> ClaimTest:
        name, _, arms = text.partition(": ")
        study, effects = studies().get(name), []
        for arm in arms.split("; "):
            if study is None or arm not in study.effects:
                raise ValueError(f"'{text}': the gallery has {f'no arm {arm!r} there' if study else 'no such study'}.")
            effects.append(StudyEffect(arm, *study.effects[arm]))
        assert study is not None
        assert self.direction is not None
        statuses = {status_of(self.direction, self.points, effect.low, effect.high) for effect in effects}
        return ClaimTest(study, tuple(effects), _joint(statuses, every=True), self.direction)

    @property
    def status(self) -> Status:
        """The status over all tests: one study that contradicts the claim is enough for "not seen here"."""
        return _joint({test.status for test in self.evidence}, every=False) if self.tests else Status.NOT_RUN

    def describe(self) -> dict[str, Any]:
        """Describe the claim for programs."""
        return {
            "where": self.where,
            "says": self.says,
            "tables": list(self.tables),
            "effect": self.effect,
            "points": list(self.points),
            "changes": list(self.changes),
            "slips": [{"says": slip.says, "tables": list(slip.tables)} for slip in self.slips],
            "status": str(self.status),
            "why": self.why,
            "tests": [
                {
                    "study": test.study.name,
                    "command": test.study.command,
                    "status": str(test.status),
                    "effects": {effect.arm: [effect.effect, effect.low, effect.high] for effect in test.effects},
                }
                for test in self.evidence
            ],
        }

    def __str__(self) -> str:
        slip = f" But {self.slip}." if self.slip else ""
        return f"The text ({self.where}): {self.says}.{slip} [{self.status}]"


def _joint(statuses: Iterable[Status], every: bool) -> Status:
    """Join the statuses of the arms of a study, which must all be seen, or of the studies of a claim."""
    present = set(statuses)
    if Status.NOT_SEEN in present:
        return Status.NOT_SEEN
    if every and Status.TOO_WIDE in present:
        return Status.TOO_WIDE
    return Status.SEEN if Status.SEEN in present else Status.TOO_WIDE
