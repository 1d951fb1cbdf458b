"""What papers print: numbers with all their decimals, tables of them, and what the text says of these.

Tables are written as the papers have them, one line a row, so that they can be compared by eye:

    arch | base         | DPN
    S/16 | 78.6 ± 0.32  | 79.7 ± 0.2

`-` is a cell that the paper leaves empty or that cannot be read; `?` after a number marks one that is not sure,
`(MEM)` one that was not read in the paper. These are kept, and are never shown as published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vitmods.util.errors import UserError, nearest
from vitmods.util.registry import Registry

if TYPE_CHECKING:
    from vitmods.papers.line_up import TableStudy

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


PAPERS: Registry[Paper] = Registry("paper", "vitmods.papers")
TABLES: Registry[Table] = Registry("table", "vitmods.papers", advice="`vitmods paper` lists all.")
"""name -> Table. A file adds its paper's, in the paper's order."""


@dataclass(frozen=True)
class Tables:
    """Adds the tables of one paper, and the paper, to the registries."""

    paper: Paper
    about: Mapping[str, Any] = field(default_factory=dict)
    """what is said of each, unless it says otherwise"""

    def __post_init__(self) -> None:
        PAPERS.add(self.paper.name, self.paper)

    def add(self, name: str, title: str, **facts: Any) -> Table:
        table = Table(f"{self.paper.name}-{name}", self.paper, title, **{**self.about, **facts})
        return TABLES.add(table.name, table)
