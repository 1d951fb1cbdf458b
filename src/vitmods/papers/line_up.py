"""What makes a published table again: its arms, bases and settings, as the shell writes them."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitmods.papers.table import TABLES, Number, Table
from vitmods.util.errors import UserError

PREFIX = "paper:"


@dataclass(frozen=True)
class TableStudy:
    """The study behind a table. Labels are the table's own words; `row` and `column` say by them where a number is:
    {base}, {arm}, or a field of the sweep in braces.

    arms: label -> the arm, `NAME=CHANGES`.
    beside: arms that are not in the table.
    base: the label of the arm base.
    bases: label -> model, at `img_size`.
    sweep: field -> label -> value, beside the bases.
    reference: label of the arm that the table's numbers are differences to; empty: they are no differences.
    start: what trained weights it begins with, with `--from`; empty: new ones.
    own: data of the user's, as the shell writes them.
    data, recipe, img_size, seeds, options: the same at the paper's scale; an img_size of 0 follows from the data.
    images: that are trained on there, where the recipe does not say it.
    differs: what is otherwise than in the paper there too.
    """

    arms: Mapping[str, str]
    base: str
    bases: Mapping[str, str]
    row: str = "{base}"
    column: str = "{arm}"
    beside: tuple[str, ...] = ()
    task: str = "classification"
    sweep: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metric: str | None = None
    reference: str = ""
    start: str = ""
    own: str = "path/to/images"
    data: str = "imagenet:path/to/imagenet"
    recipe: str = ""
    img_size: int = 224
    seeds: int = 3
    images: int | None = None
    options: str = ""
    differs: tuple[str, ...] = ()

    @property
    def every_arm(self) -> list[str]:
        return [*self.arms.values(), *self.beside]

    def scaled(self, patch: int = 16) -> list[str]:
        """The bases for smaller images, where the side of a patch is `patch` and not 16: S/32 becomes S/4 for 2. Models
        of other libraries stay as they are."""

        def smaller(found: re.Match[str]) -> str:
            return f"/{max(1, int(found[1]) * patch // 16)}"

        return [base if ":" in base else re.sub(r"/(\d+)$", smaller, base) for base in self.bases.values()]

    def settings(self, patch: int = 16) -> dict[str, Any]:
        """Arguments of `vitmods.Study` beside data, recipe and seeds."""
        bases = self.scaled(patch)
        swept = {"base": bases} if len(bases) > 1 else {}
        swept |= {name: list(values.values()) for name, values in self.sweep.items()}
        found = {"arms": self.every_arm, "task": self.task, "sweep": swept, "metric": self.metric}
        return found | ({} if self.start else {"base": bases[0]})

    @property
    def points(self) -> list[dict[str, str]]:
        """The settings of the sweep, by labels; an empty one where there is none."""
        return [dict(zip(self.sweep, labels, strict=True)) for labels in itertools.product(*self.sweep.values())]

    def cell(self, base: str, arm: str | None = None, **setting: str) -> tuple[str, str]:
        """(row, column) of an arm by labels; None: of base."""
        labels = {"base": base, "arm": self.base if arm is None else arm, **setting}
        return self.row.format_map(labels), self.column.format_map(labels)

    def commands(self, name: str) -> tuple[str, str]:
        """What runs it with images of the user's own, and at the paper's scale with the first of its bases."""
        begins = f" --from path/to/{'study' if 'study' in self.start else 'checkpoint'}" if self.start else ""
        base = "" if self.start else f" --base {shlex.quote(next(iter(self.bases.values())))}"
        size = f" --img-size {self.img_size}" if self.img_size else ""
        recipe = f" --recipe {shlex.quote(self.recipe)}" if self.recipe else ""
        rest = f"{size}{recipe} --seeds {self.seeds} {self.options}".rstrip()
        run = f"vitmods paper run {name} --data"
        return f"{run} {self.own}{begins} --budget 2h", f"{run} {shlex.quote(self.data)}{begins}{base}{rest}"


@dataclass(frozen=True)
class Published:
    """What a table says of an arm on one of its bases: the arm's number, base's, and the difference."""

    where: str
    base: Number | None
    arm: Number
    difference: float
    text: str
    """the difference, with the decimals that are printed"""

    @property
    def plus_minus(self) -> float:
        """The ± of the difference, from those of its two numbers; 0 where none is printed."""
        return math.hypot(*(number.plus_minus or 0.0 for number in (self.base, self.arm) if number))


def published(table: Table, arm: str) -> list[Published]:
    """What a table prints of an arm of its study, by the arm's name: one entry for each base (and setting) of which it
    has the numbers, and is sure of them."""
    study = table.study
    assert study is not None
    label = next((label for label, text in study.arms.items() if text.partition("=")[0] == arm), None)
    if label is None or not table.printed:
        return []
    found = []
    for base in study.bases:
        for setting in study.points:
            number = table[study.cell(base, label, **setting)]
            against = None if study.reference else table[study.cell(base, **setting)]
            if number is None or not number.certain or (not study.reference and not (against and against.certain)):
                continue
            decimals = max(len(one.text.split(" ")[0].partition(".")[2]) for one in (number, against) if one)
            difference = round(number.value - (against.value if against else 0.0), decimals)
            text = f"{difference:{'+' if difference else ''}.{decimals}f}"
            found.append(Published(", ".join((base, *setting.values())), against, number, difference, text))
    return found


def covered(table: Table) -> tuple[int, int]:
    """How many of a table's results its study reproduces, and how many there are, in the table's unit."""
    study = table.study
    assert study is not None
    labels = itertools.product(study.bases, (None, *study.arms), study.points)
    cells = {study.cell(base, arm, **point) for base, arm, point in labels} & table.numbers.keys()
    return len(cells), sum(table.unit_of(column) == table.unit for _, column in table.numbers)


def line_up(text: str) -> Table | None:
    """The table that `paper:NAME`, or the short name of its arms, stands for; None for anything else.

    Raises UserError where there is no such table, naming the nearest, or nothing makes it again yet.
    """
    text = text.strip()
    if not text.startswith(PREFIX):
        return next((table for table in TABLES.values() if table.also and table.also == text), None)
    table = TABLES[text.removeprefix(PREFIX)]
    if table.study is None:
        raise UserError(
            f"{table.name} cannot be run: {' '.join(table.needs)} `vitmods paper show {table.name}` has it."
        )
    return table


def refuse_line_ups(text: str) -> None:
    """Raises UserError where a line-up stands among the changes of one arm, joined by +."""
    for part in text.split("+"):
        if (table := line_up(part)) and table.study:
            name = part.strip()
            raise UserError(
                f"'{name}' is a line-up, several arms of a study: it stands for itself, as in `vitmods compare --arms "
                f"{name}`. Here one of its arms can stand: {', '.join(table.study.every_arm)}."
            )
