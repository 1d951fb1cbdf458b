"""The decision of a study, which prints as a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vitmods.stats import tables
from vitmods.stats.gains import rate_bound
from vitmods.stats.verdict import Claim, Effect, Verdict, verdict_of
from vitmods.util.errors import UserError, nearest
from vitmods.util.text import grouped, listing, plural


@dataclass(frozen=True)
class Pair:
    """One arm minus another, in the family of all pairs."""

    effect: float
    low: float
    high: float

    @property
    def differ(self) -> bool:
        """Whether zero is ruled out."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, repr=False)
class Decision:
    """An effect for every arm, and what holds for all of them."""

    effects: dict[str, Effect]
    base: str
    best: tuple[str, ...]  #: arms that may be the best: the true best is among them in 95 % of studies
    ruled_out: tuple[str, ...]  #: arms that another one beats
    pairs: dict[tuple[str, str], Pair]  #: (arm, other): head to head, a family of its own
    sd: float  #: of one trial, pooled: the square root of the MSE
    df: float
    seed_share: float  #: of the variance within arms that seeds explain; nan without any
    family: int  #: arms whose intervals hold together
    alpha: float  #: of the intervals: 0.05, or the nominal level of this look
    look: str  #: which look of a study until decided this is
    without_images: bool  #: no per-image scores, so the intervals are for these test images alone
    generalize: Claim
    notes: tuple[str, ...]  #: failures first
    overlap: float = 0.0  #: n_test / n_train, where each seed is tested on another part of the images; else 0
    provisional: bool = False  #: trials of a fixed number of seeds are missing: intervals are those of many looks
    of_pairs: bool = False  #: base was chosen after scores were seen: intervals hold together over all pairs of arms

    def __getitem__(self, arm: str) -> Effect:
        if arm not in self.effects:
            raise UserError(f"Unknown arm {arm}. {nearest(arm, self.effects)}")
        return self.effects[arm]

    def __repr__(self) -> str:
        return tables.text(list(self.effects.values()), self.summary())

    @property
    def claim(self) -> str:
        """The trainings and images that verdicts hold for."""
        if self.overlap:
            return "new trainings, other training sets and other images too"
        these = self.without_images or self.generalize == "seeds"
        return "new trainings and these images alone" if these else "new trainings and new images"

    def summary(self) -> list[str]:
        """The lines under the table."""
        facts = [f"{level_of(self.effects.values())}{PAIRS * self.of_pairs}; {self.claim}", self.look]
        if self.provisional:
            facts.append(PROVISIONAL)
        if not math.isnan(self.sd):
            facts.append(f"pooled sd {self.sd:.3g}, {self.df:.0f} df")
        if not math.isnan(self.seed_share):
            facts.append(f"seeds explain {self.seed_share:.0%} of the spread")
        if self.without_images and not self.overlap and self.generalize == "images":
            facts.append("without per-image scores, other test images may say otherwise")
        lines = [*self.notes, "; ".join(filter(None, facts))]
        trials = min((effect.n for effect in self.effects.values() if not effect.failures), default=0)
        if trials and not any(effect.base_failures for effect in self.effects.values()):
            lines.append(
                f"no failure in {plural(trials, 'trial')} of an arm: its rate may still be up to "
                f"{100 * rate_bound(trials):.0f} %"
            )
        arms_by_note = grouped((effect.arm, note) for effect in self.effects.values() for note in effect.notes)
        lines += [f"{listing(arms)}: {note}" for note, arms in arms_by_note.items()]
        if len(self.best) + len(self.ruled_out) > 2:
            line = f"best: {' or '.join(self.best)}" + (" (no difference shown)" if len(self.best) > 1 else "")
            lines.append("; ruled out: ".join(filter(None, (line, ", ".join(self.ruled_out)))))
        return lines

    def _repr_html_(self) -> str:
        return tables.as_html(list(self.effects.values()), self.summary())

    def to_markdown(self) -> str:
        """A table for a README."""
        return tables.markdown(list(self.effects.values()), self.summary())

    def to_latex(self) -> str:
        """A `tabular` for a paper, no wider than a column."""
        return tables.latex(list(self.effects.values()))

    def to_pandas(self) -> Any:
        """A data frame with a row for each arm. Raises `UserError` without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas needs pandas: python -m pip install pandas") from error
        return pandas.DataFrame([effect.to_dict() for effect in self.effects.values()]).set_index("arm")

    def to_dict(self) -> dict[str, Any]:
        """For JSON, in which NaN is None."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["effects"] = {arm: effect.to_dict() for arm, effect in self.effects.items()}
        plain["pairs"] = [{"arm": arm, "other": other, **vars(pair)} for (arm, other), pair in self.pairs.items()]
        return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in plain.items()}


def beats_both(decision: Decision, other: Decision, arms: Iterable[str], point: str) -> Decision:
    """Of a tuned study: `other` compares `arms` with base at their own point, which base did not choose. The points
    were chosen by noise too, so an arm helps only if it beats both."""
    effects = {arm: of_both(decision[arm], other[arm], point) for arm in arms}
    best, beaten = decision.best, decision.ruled_out
    if any(effect.verdict != Verdict.HELPS == decision[arm].verdict for arm, effect in effects.items()):
        best = tuple(dict.fromkeys((decision.base, *best)))
        beaten = tuple(arm for arm in beaten if arm != decision.base)
    return dataclasses.replace(decision, effects={**decision.effects, **effects}, best=best, ruled_out=beaten)


def of_both(effect: Effect, other: Effect, point: str) -> Effect:
    """An effect, which helps only if the `other`, against base at the arm's own point, does so: else the interval
    reaches as low as the other's."""
    found = f"{tables.signed(other.effect, other.digits)} {tables.interval(other)}"
    notes = (*effect.notes, f"base at {point}: {found if other.n else 'not trained yet'}")
    side, worse = ("low", min) if effect.higher_is_better else ("high", max)
    if effect.verdict != Verdict.HELPS or other.verdict == Verdict.HELPS:
        return dataclasses.replace(effect, notes=notes, expected=worse(effect.expected, other.expected))
    ends = {name: worse(getattr(effect, name), getattr(other, name)) for name in (side, f"seeds_{side}")}
    wider = dataclasses.replace(effect, notes=notes, **ends)
    low, high = wider.interval if effect.higher_is_better else (-wider.interval[1], -wider.interval[0])
    verdict = verdict_of(low, high, effect.margin)
    verdict = Verdict.OPEN if verdict == Verdict.HELPS or math.isnan(other.half) else verdict
    return dataclasses.replace(wider, verdict=verdict, leans="up" if verdict == Verdict.OPEN else "")


PAIRS = " over all pairs of arms, since the reference was chosen after the scores were seen"
PROVISIONAL = "provisional: trials are missing, so intervals are wider, as of a study that is read after each trial"


def level_of(effects: Iterable[Effect]) -> str:
    """Describe the joint level of the intervals, or why there are none."""
    effects = list(effects)
    if any(effect.half >= 0 for effect in effects):
        return "simultaneous 95 % intervals"
    same = any(effect.n > 2 and math.isnan(effect.sd) for effect in effects)
    return "no intervals: scores do not vary from seed to seed" if same else "too few seeds for intervals"
