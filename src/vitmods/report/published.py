"""A study that makes a published table again, beside that table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitmods.papers import TABLES, Table
from vitmods.papers.line_up import Published, published
from vitmods.stats.tables import signed
from vitmods.study.arms import arms_from_text
from vitmods.study.tuning import show_value

if TYPE_CHECKING:
    from vitmods.stats.verdict import Effect
    from vitmods.study.answer import Answer

PATCHES = (16, 8, 4, 2, 1)
FEW = 3  # arms from which on a study is known to be a table's by its arms alone


@dataclass(frozen=True)
class Beside:
    """An arm, on average or under one setting, and what the paper prints of it."""

    arm: str
    setting: str
    effect: Effect
    published: tuple[Published, ...]

    @property
    def ours(self) -> str:
        return signed(self.effect.effect, self.effect.digits)

    @property
    def points(self) -> float:
        """What our numbers are multiplied by to be compared: the papers print percent."""
        return 100.0 if not self.effect.unit else 1.0

    @property
    def agreement(self) -> str:
        """Whether the published differences have the sign of ours, where that is known, and lie in our interval; of
        several, how many."""
        low, high = (self.points * end for end in self.effect.interval)
        if math.isnan(low):
            return "too few seeds to compare"
        within = sum(low <= one.difference <= high for one in self.published)
        signs = sum(one.difference * self.effect.effect > 0 for one in self.published)
        sign = "our sign is open" if low <= 0 <= high else f"same sign: {self._count(signs)}"
        return f"{sign}; in our interval: {self._count(within)}"

    def _count(self, found: int) -> str:
        many = len(self.published)
        return ("yes" if found else "no") if many == 1 else f"{found} of {many}"


@dataclass(frozen=True)
class Comparison:
    """A table, and the arms of the study that it has numbers of; `note` says how to read them, or why none are."""

    table: Table
    rows: tuple[Beside, ...]
    note: str


def table_of(answer: Answer) -> Table | None:
    """The table that a study makes again: as its command says, or the one whose arms, three or more, are all there."""
    named = re.search(r"paper:([\w-]+)|paper run ([\w-]+)", answer.command)
    if named and (table := TABLES.get(named[1] or named[2])) and table.study:
        return table  # type: ignore[no-any-return]
    here = {(arm.name, arm.changes) for arm in (answer.base, *answer.arms)}
    for table in TABLES.values():
        study = table.study
        if study and len(study.arms) >= FEW and study.task == answer.settings.get("task"):
            arms = (arm for text in study.arms.values() for arm in arms_from_text(text))
            if {(arm.name, arm.short) for arm in arms} <= here:
                return table
    return None


def comparison(answer: Answer) -> Comparison | None:
    """The study beside the table that it makes again; None where it makes none."""
    table = table_of(answer)
    if table is None or table.study is None or answer.factorial:
        return None
    reference = table.study.reference
    if answer.base.name != (reference or "base"):
        return Comparison(table, (), _other_reference(answer, reference)) if reference else None
    rows = tuple(row for arm in answer.arms for row in _rows(answer, table, arm.name))
    note = (
        "No number of its arms is printed."
        if not rows
        else "Its models, images and training are other ones: signs may be expected to agree, sizes not."
    )
    return Comparison(table, rows, note)


def _other_reference(answer: Answer, reference: str) -> str:
    return (
        f"The table's numbers are differences to {reference}: `vitmods report {answer.path} --reference {reference}` "
        "puts ours beside them."
    )


def _rows(answer: Answer, table: Table, arm: str) -> list[Beside]:
    known = published(table, arm)
    if not known:
        return []
    effect = answer.decision.effects.get(arm)
    rows = [Beside(arm, "", effect, tuple(known))] if effect and effect.n else []
    if not answer.over_settings:
        return rows
    for setting in answer.sweep:
        labels = _labels(table, answer, setting.values)
        alike = tuple(one for one in known if labels <= set(one.where.split(", ")))
        under = answer.over_settings.each[arm].get(setting.name)
        if labels and alike and under and under.n:
            rows.append(Beside(arm, setting.name, under, alike))
    return rows


def _labels(table: Table, answer: Answer, values: Mapping[str, Any]) -> set[str]:
    """The table's words for a setting; empty where it has not this setting."""
    study = table.study
    assert study is not None
    found = set()
    for name, value in values.items():
        known = {show_value(theirs): label for label, theirs in study.sweep.get(name, {}).items()}
        if name == "base":
            bases = {str(setting.values["base"]) for setting in answer.sweep}
            fitting = (dict(zip(study.scaled(patch), study.bases, strict=True)) for patch in PATCHES)
            known = next((names for names in fitting if bases <= names.keys()), {})
        found.add(known.get(show_value(value), ""))
    return set() if "" in found else found
