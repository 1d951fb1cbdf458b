"""What papers print: numbers with all their decimals, tables of them, and what the text says of these.

Tables are written as the papers have them, one line a row, so that they can be compared by eye:

    arch | base         | DPN
    S/16 | 78.6 ± 0.32  | 79.7 ± 0.2

`-` is a cell that the paper leaves empty or that cannot be read; `?` after a number marks one that is not sure,
`(MEM)` one that was not read in the paper. These are kept, and are never shown as published.

What makes a published table again: its arms, bases and settings, as the shell writes them.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from vitmods.study.line_ups import LINE_UPS, LineUp
from vitmods.util.errors import UserError, nearest
from vitmods.util.registry import Registry

_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?( \?| \(MEM\))?")
_COLUMN = re.compile(r"(.*?)(?: \((.*)\))?")


@dataclass(frozen=True)
class Number:
    """A published number.

    value, plus_minus: as numbers; what ± is, the table says.
    text: as printed, with all decimals.
    certain: whether it was read for sure; if not, it is shown as "?".
    """

    value: float
    plus_minus: float | None = None
    text: str = ""
    certain: bool = True

    @classmethod
    def read(cls, cell: str) -> Number:
        """`78.6 ± 0.32`, `35.1 ?` or `71.0 (MEM)`. ValueError for anything else."""
        found = _NUMBER.fullmatch(cell)
        if found is None:
            raise ValueError(f"'{cell}' is no number")
        value, plus_minus, mark = found.groups()
        text = value if plus_minus is None else f"{value} ± {plus_minus}"
        return cls(float(value), None if plus_minus is None else float(plus_minus), text, mark is None)

    def __str__(self) -> str:
        return self.text if self.certain else "?"


@dataclass(frozen=True)
class Claim:
    """What a paper's text says of its tables, in our words.

    tables: names of those that it is about, without the paper's; `vitmods paper show` prints it with each.
    slip: where it disagrees with the paper's own tables, and what these say.
    """

    where: str
    says: str
    tables: tuple[str, ...]
    slip: str = ""

    def __str__(self) -> str:
        return f"The text ({self.where}): {self.says}.{f' But {self.slip}.' if self.slip else ''}"


@dataclass(frozen=True)
class Paper:
    """A paper, and what its text claims."""

    name: str
    """begins the names of its tables"""
    title: str
    authors: str
    url: str
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class Table:
    """A published table, or a figure whose arms are known and whose numbers are not printed.

    name: e.g. `dpn-table6`.
    where: in the paper.
    unit: of columns that have none of their own behind their name.
    data, scale: what was trained on and how long, and what ± is.
    printed: the rows, the first line the columns; empty for a figure.
    keys: how many of the first columns name a row.
    notes: how to read it, and what is not sure of it.
    study: what makes it again; None: nothing does yet.
    needs: what is missing for all of it, or for what the study leaves out.
    also: a short name of its arms beside `paper:NAME`.
    bench: options of `vitmods bench`, where it is a comparison of speed.
    """

    name: str
    paper: Paper
    title: str
    where: str
    data: str
    scale: str
    unit: str = "top-1, %"
    printed: str = ""
    keys: int = 1
    notes: tuple[str, ...] = ()
    study: TableStudy | None = None
    needs: tuple[str, ...] = ()
    also: str = ""
    bench: str = ""

    def __getitem__(self, cell: tuple[str, str]) -> Number | None:
        """The number in (row, column), sure or not; None where there is none. UserError for an unknown row or column,
        naming the nearest."""
        row, column = cell
        for what, name, known in (("row", row, self.rows), ("column", column, self.columns)):
            if name not in known:
                raise UserError(f"{self.name} has no {what} '{name}'. {nearest(name, known)}")
        return self.numbers.get((row, column))

    def shown(self, row: str, column: str) -> str:
        """A cell as it may be shown: with all decimals and ±, "?" where the reading is not sure, "" where there is
        none. UserError as above."""
        number = self[row, column]
        return "" if number is None else str(number)

    @cached_property
    def numbers(self) -> Mapping[tuple[str, str], Number]:
        """(row, column) -> number. A row is named by its first cells, joined by a comma."""
        found: dict[tuple[str, str], Number] = {}
        for line in self._lines[1:]:
            if len(line) != len(self._lines[0]):
                raise ValueError(f"{self.name}: {line} has {len(line)} cells, the heading {len(self._lines[0])}")
            for column, cell in zip(self.columns, line[self.keys :], strict=True):
                if cell != "-":
                    found[self._row(line), column] = Number.read(cell)
        return found

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(map(self._row, self._lines[1:]))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._columns)

    @property
    def claims(self) -> list[Claim]:
        """What the paper's text says of this table."""
        return [claim for claim in self.paper.claims if self.name.partition("-")[2] in claim.tables]

    def unit_of(self, column: str) -> str:
        return dict(self._columns)[column] or self.unit

    @property
    def line_up(self) -> LineUp:
        """What its study compares. The table has a study."""
        study = self.study
        assert study is not None
        return LineUp(
            self.name,
            f"{self.paper.title}, {self.where}: {self.title}",
            tuple(study.every_arm),
            tuple(study.bases.values()),
            study.task,
            study.metric,
            {name: tuple(values.values()) for name, values in study.sweep.items()},
            study.start,
        )

    def describe(self) -> dict[str, Any]:
        """For programs; cells as they may be shown."""
        return {
            "name": self.name,
            "paper": f"{self.paper.authors}: {self.paper.title}",
            "url": self.paper.url,
            **{name: getattr(self, name) for name in ("title", "where", "data", "scale", "notes", "needs")},
            "units": {column: self.unit_of(column) for column in self.columns},
            "numbers": {row: {column: self.shown(row, column) for column in self.columns} for row in self.rows},
            "arms": self.study.every_arm if self.study else [],
            "bases": dict(self.study.bases) if self.study else {},
        }

    @cached_property
    def _lines(self) -> list[list[str]]:
        lines = self.printed.strip().splitlines() or [" "]
        return [[cell.strip() for cell in line.split("|")] for line in lines]

    @property
    def _columns(self) -> list[tuple[str, str]]:
        matches = (_COLUMN.fullmatch(column) for column in self._lines[0][self.keys :])
        return [(found[1], found[2] or "") for found in matches if found]

    def _row(self, line: list[str]) -> str:
        return ", ".join(line[: self.keys])


PAPERS: Registry[Paper] = Registry("paper", "vitmods.papers.tables")
TABLES: Registry[Table] = Registry("table", "vitmods.papers.tables", advice="`vitmods paper` lists all.")


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


def read_paper(path: Path) -> None:
    """Register a paper and its tables, in the paper's order.

    The file has the fields of Paper, `claims` and `tables` with theirs, `defaults` of all tables, and `studies`: fields
    of TableStudy that the study of a table takes over with `like`.
    """

    def tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

    values = tomllib.loads(path.read_text(encoding="utf-8"))
    defaults, studies, tables = (values.pop(name, {}) for name in ("defaults", "studies", "tables"))
    paper = Paper(**values | {"claims": tuple(Claim(**tuples(claim)) for claim in values["claims"])})
    PAPERS.add(paper.name, paper)
    for table in tables:
        name, study = f"{paper.name}-{table['name']}", table.get("study")
        if study is not None:
            study = TableStudy(**tuples(studies.get(study.pop("like", ""), {}) | study))
        TABLES.add(name, Table(**tuples(defaults | table) | {"name": name, "paper": paper, "study": study}))


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


PREFIX = "paper:"


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


@LINE_UPS.register("paper")
def _line_up(text: str) -> LineUp | None:
    return table.line_up if (table := line_up(text)) else None
