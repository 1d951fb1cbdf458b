"""A study that reproduces a published table, compared with that table: a section of its report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table as Grid
from rich.text import Text

from vitmods.papers.figure import draw_comparison
from vitmods.papers.table import TABLES, ComparedArm, Comparison, Published, Table, published
from vitmods.report.citations import cite
from vitmods.report.figures import Inliner
from vitmods.report.page import SECTIONS, Section
from vitmods.report.templates import templates
from vitmods.study.answer import Answer
from vitmods.study.arms import BASE, arms_from_text
from vitmods.study.grid import show_value
from vitmods.util.text import single_line

PATCHES = (16, 8, 4, 2, 1)
FEW = 3  # arms from which on a study is recognized as a table's only by its arms


def table_of(answer: Answer) -> Table | None:
    """The table that a study reproduces: the one in its command, or one whose arms, three or more, it all has."""
    named = re.search(r"paper:([\w-]+)|paper run ([\w-]+)", answer.command)
    is_first_stage = "start" not in answer.settings  # of a table that has two, which compares the second
    tables = {
        name: table for name, table in TABLES.items() if table.study and not (is_first_stage and table.study.pretrain)
    }
    if named and (table := tables.get(named[1] or named[2])):
        return table
    compared = {(arm.name, arm.changes) for arm in (answer.base, *answer.arms)}
    for table in tables.values():
        study = table.study
        if study and FEW <= len(study.arms) <= len(compared) and study.task == answer.settings.get("task"):
            arms = (arm for text in study.arms.values() for arm in arms_from_text(text))
            if {(arm.name, arm.short) for arm in arms} <= compared:
                return table
    return None


def comparison(answer: Answer) -> Comparison | None:
    """Compare a study with the table that it reproduces; None for other studies.

    Differences are to the table's own reference, for which the study is read again if the answer's is another.
    """
    table = table_of(answer)
    if table is None or table.study is None or not answer.headline.against:
        return None
    reference = table.study.reference or BASE
    if reference not in {arm.name for arm in answer.every_arm}:
        return Comparison(
            table, (), f"The table's numbers are differences to {reference}, an arm that this study does not have."
        )
    if answer.base.name != reference:
        answer = Answer.load(answer.path, reference)
    rows: list[ComparedArm] = []
    for arm in (arm.name for arm in answer.arms):
        numbers = [number for number in published(table, arm) if _is_of(table, answer, number)]
        effect = answer.decision.effects.get(arm)
        if numbers and effect and effect.n:
            rows.append(ComparedArm(arm, "", effect, tuple(numbers)))
        for setting in answer.under if numbers else ():
            labels = _labels(table, answer, setting.values)
            matching = tuple(number for number in numbers if labels <= set(number.where.split(", ")))
            effect = answer.each[setting.name].get(arm)
            if labels and matching and effect and effect.n:
                rows.append(ComparedArm(arm, setting.name, effect, matching))
    if not rows:
        return Comparison(table, (), "The paper prints no number for its arms.")
    against = "" if reference == BASE else f"Differences are to {reference}. "
    return Comparison(
        table, tuple(rows), f"{against}Models, data and training differ: expect the sign to match, not the size."
    )


def _is_of(table: Table, answer: Answer, number: Published) -> bool:
    """Return whether a number is of the answer's data set; true for tables of one data set."""
    assert table.study is not None
    sets = table.study.sweep.get("data", {})
    name = str(answer.settings["data"]).partition("?")[0]
    return not sets or any(sets[label] == name for label in sets if number.where.endswith(label))


def _labels(table: Table, answer: Answer, values: Mapping[str, Any]) -> set[str]:
    """Return the table's words for a setting; empty if the table does not have it."""
    study = table.study
    assert study is not None
    labels = set()
    for name, value in values.items():
        words = {show_value(swept): label for label, swept in study.sweep.get(name, {}).items()}
        if name == "base":
            fitting = (dict(zip(table.line_up.scaled(patch), study.bases, strict=True)) for patch in PATCHES)
            words = next((names for names in fitting if {*map(_size, answer.bases)} <= names.keys()), {})
            value = _size(value)
        labels.add(words.get(show_value(value), ""))
    return set() if "" in labels else labels


def _size(base: str) -> str:
    """The size that a base's name says; models of other libraries stay as they are."""
    return base if ":" in base else base.partition("?")[0]


def _to_html(answer: Answer, inline: Inliner) -> str:
    paper = comparison(answer)
    if paper is None:
        return ""
    page = templates("vitmods.papers").get_template("comparison.html")
    drawings = [draw_comparison(paper, inline, narrow) for narrow in (False, True)]
    return page.render(paper=paper, table=paper.table, a=answer, base_names=", ".join(answer.bases), drawings=drawings)


def _to_text(answer: Answer) -> list[Any]:
    paper = comparison(answer)
    if paper is None:
        return []
    table = paper.table
    title = f"Comparison with {table.paper.title}, {table.where}{': ' * bool(paper.rows)}{paper.headline}"
    note = Text(paper.note, style="dim")
    if not paper.rows:
        return [Text(f"\n{title}", style="bold"), note]
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("arm", "ours, 95 % interval", f"published ({table.unit})", "comparison"):
        grid.add_column(column, no_wrap=column.startswith("ours"), overflow="fold")
    for row in paper.rows:
        numbers = ", ".join(f"{number.text} ({number.where})" for number in row.published)
        grid.add_row(*(Text(single_line(cell)) for cell in (row.name, row.ours, numbers, row.agreement)))
    return [Text(f"\n{title}", style="bold"), grid, note]


def _papers(answer: Answer) -> list[tuple[str, str]]:
    table = table_of(answer)
    return [(table.paper.cited, table.paper.url)] if table and table.paper.venue else []


def _published(answer: Answer) -> tuple[dict[tuple[str, str], str], str]:
    paper = comparison(answer)
    if paper is None or (study := paper.table.study) is None or not paper.rows:
        return {}, ""
    places = {tuple(number.where for number in row.published) for row in paper.rows}
    labeled = len(places) > 1
    cells = {}
    for row in paper.rows:
        numbers = [number.text.replace("-", "−") + f" ({number.where})" * labeled for number in row.published]
        cells[row.setting, row.arm] = ", ".join(numbers)
    table, note = paper.table, paper.note.replace("Differences", "Published differences", 1)
    unit = f"differences in {table.unit}" * (not study.reference) or table.unit
    cited = "".join(cite(*reference) for reference in _papers(answer))
    order = "" if labeled else f", of {'; '.join(*places)}"
    return cells, f"Paper: {table.paper.title}, {table.where}{cited}: {unit}{order}. {note}"


SECTIONS.add("comparison", Section("verdicts", _to_html, _to_text, _papers, _published))
