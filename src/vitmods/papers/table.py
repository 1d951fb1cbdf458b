"""Published tables: their numbers with all decimals, the claims of the papers, and the studies that reproduce them.

Tables are written as in the paper, one line per row, so that they can be compared by eye:

    arch | base         | DPN
    S/16 | 78.6 ± 0.32  | 79.7 ± 0.2

`-` is a cell that the paper leaves empty or that is illegible. A number with `?` is uncertain, one with `(MEM)` comes
from another source: both are kept, but never shown as published.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from vitmods.papers.claims import Claim, Slip, too_wide
from vitmods.recipes.registry import evidence
from vitmods.stats.tables import interval, signed
from vitmods.stats.verdict import Effect, Verdict
from vitmods.study.arms import LINE_UPS, LineUp
from vitmods.util.errors import UserError, nearest
from vitmods.util.registry import Registry

_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?( \?| \(MEM\))?")
_COLUMN = re.compile(r"(.*?)(?: \((.*)\))?")


@dataclass(frozen=True)
class Number:
    """A published number; text: as printed, with all decimals. Uncertain readings are shown as "?"."""

    value: float
    plus_minus: float | None = None
    text: str = ""
    certain: bool = True

    @classmethod
    def read(cls, cell: str) -> Number:
        """Read `78.6 ± 0.32`, `35.1 ?` or `71.0 (MEM)`. ValueError for anything else."""
        match = _NUMBER.fullmatch(cell)
        if match is None:
            raise ValueError(f"'{cell}' is not a number")
        value, plus_minus, mark = match.groups()
        text = value if plus_minus is None else f"{value} ± {plus_minus}"
        return cls(float(value), None if plus_minus is None else float(plus_minus), text, mark is None)

    def __str__(self) -> str:
        return self.text if self.certain else "?"


@dataclass(frozen=True)
class Paper:
    """A paper and the claims of its text. The names of its tables start with its name.

    venue: with the year, `TMLR 2023`; empty for a source that cannot be cited.
    """

    name: str
    title: str
    authors: str
    url: str
    venue: str = ""
    claims: tuple[Claim, ...] = ()

    @property
    def cited(self) -> str:
        """The paper as changes name theirs: `Kumar, Dehghani & Houlsby: Dual PatchNorm. TMLR 2023`."""
        return f"{self.authors}: {self.title}{f'. {self.venue}' if self.venue else ''}"


@dataclass(frozen=True)
class Table:
    """A published table, or a figure with known arms whose numbers are not printed.

    name: e.g. `dpn-table6`.
    where: in the paper.
    data, scale: what was trained on and how long, and what ± is.
    unit: of columns whose name does not end in a unit.
    printed: the rows, with the columns in the first line; empty for a figure.
    keys: how many of the first columns name a row.
    notes: how to read it, and what is uncertain.
    study: what reproduces it; None: nothing yet.
    needs: what is missing to reproduce it, or the part that the study leaves out.
    also: a short name of its arms, besides `paper:NAME`.
    bench: options of `vitmods bench`, for a comparison of speed.
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
        """The number in (row, column), certain or not; None for an empty cell. UserError for an unknown row or column,
        with the nearest one."""
        for kind, name, names in zip(("row", "column"), cell, (self.rows, self.columns), strict=True):
            if name not in names:
                raise UserError(f"{self.name} does not have a {kind} '{name}'. {nearest(name, names)}")
        return self.numbers.get(cell)

    def shown(self, row: str, column: str) -> str:
        """A cell for people: with all decimals and ±, "?" for an uncertain number, "" for an empty cell."""
        number = self[row, column]
        return "" if number is None else str(number)

    @property
    def numbers(self) -> Mapping[tuple[str, str], Number]:
        """(row, column) -> number. A row is named by its first cells, joined by a comma."""
        return self._parsed[2]

    @property
    def rows(self) -> tuple[str, ...]:
        return self._parsed[0]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._parsed[1])

    def unit_of(self, column: str) -> str:
        return self._parsed[1][column] or self.unit

    @cached_property
    def _parsed(self) -> tuple[tuple[str, ...], dict[str, str], dict[tuple[str, str], Number]]:
        """The rows, column -> the unit in parentheses behind its name or "", and the numbers."""
        lines = self.printed.strip().splitlines() or [" "]
        heading, *body = [[cell.strip() for cell in line.split("|")] for line in lines]
        names = [_COLUMN.fullmatch(name) for name in heading[self.keys :]]
        units = {match[1]: match[2] or "" for match in names if match}
        numbers: dict[tuple[str, str], Number] = {}
        for line in body:
            if len(line) != len(heading):
                raise ValueError(f"{self.name}: {line} has {len(line)} cells, the heading {len(heading)}")
            for column, cell in zip(units, line[self.keys :], strict=True):
                if cell != "-":
                    numbers[", ".join(line[: self.keys]), column] = Number.read(cell)
        return tuple(", ".join(line[: self.keys]) for line in body), units, numbers

    @property
    def claims(self) -> list[Claim]:
        """The statements of the paper's text about this table."""
        return [claim for claim in self.paper.claims if self.name.partition("-")[2] in claim.tables]

    @property
    def line_up(self) -> LineUp:
        """The arms and settings of its study, which it must have."""
        study = self.study
        assert study is not None
        return LineUp(
            self.name,
            f"{self.paper.title}, {self.where}: {self.title}",
            tuple(study.every_arm),
            tuple(study.bases.values()),
            study.task,
            study.metric,
            {name: tuple(values.values()) for name, values in study.sweep.items() if name != "data"},
            study.start,
            evidence(study.pretrain.partition("(")[0]).task if study.pretrain else "",
            study.recipe,
            study.network or study.pretrain.partition("(")[0] or study.recipe,
        )

    def describe(self) -> dict[str, Any]:
        """The table for programs, with its cells as `shown`."""
        return {
            "name": self.name,
            "paper": self.paper.cited,
            "url": self.paper.url,
            **{name: getattr(self, name) for name in ("title", "where", "data", "scale", "notes", "needs")},
            "units": {column: self.unit_of(column) for column in self.columns},
            "numbers": {row: {column: self.shown(row, column) for column in self.columns} for row in self.rows},
            "arms": self.study.every_arm if self.study else [],
            "bases": dict(self.study.bases) if self.study else {},
        }


PAPERS: Registry[Paper] = Registry("paper", "vitmods.papers.tables")
TABLES: Registry[Table] = Registry("table", "vitmods.papers.tables", advice="`vitmods paper` lists all.")


@dataclass(frozen=True)
class TableStudy:
    """The study that reproduces a table. Labels are the table's own words.

    arms: label -> the arm, `NAME=CHANGES`.
    base: the label of the arm base.
    bases: label -> model, at `img_size`.
    row, column: where the number of an arm is, with {base}, {arm}, or a field of the sweep in braces.
    beside: further arms, which the table lacks.
    sweep: field -> label -> value, besides the bases. Its data sets are not swept unless `--sweep data=` asks for it.
    reference: the arm that the table's numbers are differences to; empty: they are not differences.
    start: the trained weights that it needs, with `--from`; empty: new weights.
    user_data: data of a user, as written in the shell.
    pretrain: the recipe without labels of a first stage, as written in the shell; empty: there is one stage.
    data, recipe, img_size, seeds, options: the same at the paper's scale; an img_size of 0 follows from the data.
    network: the recipe with whose ViTs it is trained; empty: `pretrain` or `recipe`.
    images: training images there, if the recipe does not say it.
    differs: what differs from the paper even then.
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
    user_data: str = "path/to/images"
    pretrain: str = ""
    data: str = "imagenet:path/to/imagenet"
    recipe: str = ""
    network: str = ""
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
        """The settings of the sweep, by labels; one empty setting without a sweep."""
        return [dict(zip(self.sweep, labels, strict=True)) for labels in itertools.product(*self.sweep.values())]

    def cell(self, base: str, arm: str | None = None, **setting: str) -> tuple[str, str]:
        """(row, column) of an arm by labels; None: of base."""
        labels = {"base": base, "arm": self.base if arm is None else arm, **setting}
        return self.row.format_map(labels).strip(), self.column.format_map(labels).strip()

    def commands(self, name: str) -> tuple[str, str]:
        """The commands that run it on a user's images, and at the paper's scale with the first of its bases."""
        start = f" --from path/to/{'study' if 'study' in self.start else 'checkpoint'}" if self.start else ""
        options = [] if self.start else [f"--base {shlex.quote(next(iter(self.bases.values())))}"]
        options += [f"--img-size {self.img_size}"] if self.img_size else []
        options += [f"--pretrain {shlex.quote(self.pretrain)}"] if self.pretrain else []
        options += [f"--recipe {shlex.quote(self.recipe)}"] if self.recipe else []
        options += [f"--seeds {self.seeds}", self.options]
        run = f"vitmods paper run {name}"
        data = (
            f"--sweep {shlex.quote(f'data={self.data}')}"
            if "data" in self.sweep
            else f"--data {shlex.quote(self.data)}"
        )
        full = f"{run} {data}{start} {' '.join(options)}".rstrip()
        length = "" if self.pretrain else " --budget 2h"  # a budget does not cover two stages
        return f"{run} --data {self.user_data}{start}{length}", full


def read_paper(path: Path) -> None:
    """Register a paper and its tables, in the paper's order.

    The file has the fields of Paper, `claims` and `tables` with theirs, `defaults` of all tables, and `studies`: fields
    of TableStudy that the study of a table takes over with `like`.
    """

    def tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

    values = tomllib.loads(path.read_text(encoding="utf-8"))
    defaults, studies, tables = (values.pop(name, {}) for name in ("defaults", "studies", "tables"))
    claims = [
        Claim(**tuples(claim) | {"slips": tuple(Slip(**tuples(slip)) for slip in claim.get("slips", ()))})
        for claim in values["claims"]
    ]
    paper = Paper(**values | {"claims": tuple(claims)})
    PAPERS.add(paper.name, paper)
    for table in tables:
        name, study = f"{paper.name}-{table['name']}", table.get("study")
        if study is not None:
            study = TableStudy(**tuples(studies.get(study.pop("like", ""), {}) | study))
        TABLES.add(name, Table(**tuples(defaults | table) | {"name": name, "paper": paper, "study": study}))


@dataclass(frozen=True)
class Published:
    """The numbers that a table prints for an arm on a base; text: the difference, with the printed decimals."""

    where: str
    base: Number | None
    arm: Number
    difference: float
    text: str

    @property
    def plus_minus(self) -> float:
        """The ± of the difference, from those of its two numbers; 0 if none is printed."""
        return math.hypot(*(number.plus_minus or 0.0 for number in (self.base, self.arm) if number))


def published(table: Table, arm: str) -> list[Published]:
    """The numbers that a table prints for an arm of its study, by name: one entry for each base and setting whose
    numbers are certain."""
    study = table.study
    assert study is not None
    label = next((label for label, text in study.arms.items() if text.partition("=")[0] == arm), None)
    if label is None or not table.printed:
        return []
    entries = []
    for base, setting in itertools.product(study.bases, study.points):
        number = table.numbers.get(study.cell(base, label, **setting))
        reference = Number(0.0) if study.reference else table.numbers.get(study.cell(base, **setting))
        if number is None or reference is None or not (number.certain and reference.certain):
            continue
        decimals = max(len(text.split(" ")[0].partition(".")[2]) for text in (number.text, reference.text))
        difference = round(number.value - reference.value, decimals)
        text = f"{difference:{'+' if difference else ''}.{decimals}f}"
        printed = None if study.reference else reference
        entries.append(Published(", ".join((base, *setting.values())), printed, number, difference, text))
    return entries


class Agreement(StrEnum):
    """Whether our difference can be the published one."""

    CONSISTENT = "consistent"
    INCONSISTENT = "inconsistent"
    TOO_WIDE = "too wide to test"

    @classmethod
    def of(cls, published: Published, low: float, high: float) -> Agreement:
        """Compare a published difference, with its ±, with our interval: their half-widths add in quadrature."""
        half = math.hypot((high - low) / 2, published.plus_minus)
        if abs((low + high) / 2 - published.difference) > half:
            return cls.INCONSISTENT
        return cls.TOO_WIDE if too_wide(half, published.difference) else cls.CONSISTENT


@dataclass(frozen=True)
class ComparedArm:
    """An arm, on average or under one setting, and the numbers that the paper prints for it."""

    arm: str
    setting: str
    effect: Effect
    published: tuple[Published, ...]

    @property
    def name(self) -> str:
        return f"{self.arm}, {self.setting}" if self.setting else self.arm

    @property
    def ours(self) -> str:
        return f"{signed(self.effect.effect, self.effect.digits)} {interval(self.effect)}"

    @property
    def value(self) -> float:
        """In percent, as papers print it."""
        return self._scale * self.effect.effect

    @property
    def interval(self) -> tuple[float, float]:
        """In percent; NaN with too few seeds."""
        low, high = self.effect.interval
        return self._scale * low, self._scale * high

    @property
    def _scale(self) -> float:
        return 100.0 if not self.effect.unit else 1.0

    @property
    def outcomes(self) -> tuple[Agreement, ...]:
        """One for each published difference; none without an interval, or if base has not learned."""
        low, high = self.interval
        if math.isnan(low) or self.effect.verdict == Verdict.WITHHELD:
            return ()
        return tuple(Agreement.of(number, low, high) for number in self.published)

    @property
    def agreement(self) -> str:
        """The outcome, or how many published differences have which; and the sign where ours is clear."""
        counts, (low, high) = Counter(self.outcomes), self.interval
        if not counts:
            return "base has not learned" if self.effect.verdict == Verdict.WITHHELD else "too few seeds to compare"
        many = len(self.published)
        words = [f"{kind}: {counts[kind]} of {many}" if len(counts) > 1 else kind for kind in Agreement if counts[kind]]
        if low > 0 or high < 0:
            same = sum(number.difference * self.effect.effect > 0 for number in self.published)
            words.append(f"same sign: {same} of {many}" if many > 1 else f"{'same' if same else 'other'} sign")
        return ", ".join(words)


@dataclass(frozen=True)
class Comparison:
    """A table, the arms of the study for which it prints numbers, and a note on how to read them."""

    table: Table
    rows: tuple[ComparedArm, ...]
    note: str

    @property
    def headline(self) -> str:
        """How many published differences have which outcome."""
        counts = Counter(outcome for row in self.rows if not row.setting for outcome in row.outcomes)
        return ", ".join(f"{counts[outcome]} {outcome}" for outcome in Agreement) if counts else ""


def covered(table: Table) -> tuple[int, int]:
    """Count the results of a table that its study reproduces, and all that it has in its unit."""
    study = table.study
    assert study is not None
    labels = itertools.product(study.bases, (None, *study.arms), study.points)
    cells = {study.cell(base, arm, **point) for base, arm, point in labels} & table.numbers.keys()
    return len(cells), sum(table.unit_of(column) == table.unit for _, column in table.numbers)


PREFIX = "paper:"


def line_up(text: str) -> Table | None:
    """Return the table of `paper:NAME`, or of the short name of its arms; None for other texts.

    Raises UserError for an unknown table, with the nearest one, or one that cannot be reproduced yet.
    """
    text = text.strip()
    if not text.startswith(PREFIX):
        return next((table for table in TABLES.values() if table.also and table.also == text), None)
    table = TABLES[text.removeprefix(PREFIX)]
    if table.study is None:
        raise UserError(
            f"{table.name} cannot be run: {' '.join(table.needs)} `vitmods paper show {table.name}` has its numbers."
        )
    return table


@LINE_UPS.register("paper")
def _line_up(text: str) -> LineUp | None:
    return table.line_up if (table := line_up(text)) else None
