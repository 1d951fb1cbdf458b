"""`vitmods paper`: published tables, what each needs, and running one again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitmods.cli.options import parse
from vitmods.util.errors import UserError
from vitmods.util.text import plural

if TYPE_CHECKING:
    from vitmods.papers import Table


@dataclass(frozen=True)
class List:
    """List the published tables: what each compares, and what is missing to run it again.

    `paper show TABLE` prints one with the commands that run it. `paper run TABLE` takes the options of `compare`, and
    fills in the arms of the table, and its task, bases and sweep where they are not given.

    examples:
      vitmods paper
      vitmods paper show dpn-table6
      vitmods paper run dpn-table6 --data path/to/images --base Ti/4 S/4 --img-size 32 --budget 2h
    """

    json: bool = False
    """print JSON, for programs"""


@dataclass(frozen=True)
class Show:
    """Show a published table: its numbers with ±, how to read them, and the commands that run it again."""

    table: Annotated[str, tyro.conf.Positional]
    """its name, e.g. dpn-table6; `vitmods paper` lists all"""
    json: bool = False
    """print JSON, for programs"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    given = list(arguments)
    if given[:1] == ["run"]:
        return _run(given[1:])
    from vitmods.papers import TABLES

    if given[:1] == ["show"]:
        show = parse(Show, given[1:], "paper show")
        table = TABLES[show.table]
        print(json.dumps(_described(table), indent=1)) if show.json else _show(table)
        return 0
    if given and not given[0].startswith("-") and given[0] != "list":
        raise UserError(f"It is `vitmods paper list`, `paper show TABLE` or `paper run TABLE`, not 'paper {given[0]}'.")
    options = parse(List, given[1:] if given[:1] == ["list"] else given, "paper")
    if options.json:
        print(json.dumps([_described(table) for table in TABLES.values()], indent=1))
    else:
        _list(TABLES.values())
    return 0


def _run(arguments: list[str]) -> int:
    from vitmods.cli import compare

    if any(word.split("=")[0] == "--arms" for word in arguments):
        raise UserError("A table has its own arms. With others beside them: `vitmods compare --arms paper:TABLE dpn`.")
    if arguments[:1] in (["-h"], ["--help"]):
        return compare.main(["--help"])
    if not arguments or arguments[0].startswith("-"):
        raise UserError("Say which table: `vitmods paper run dpn-table6 --data ...`. `vitmods paper` lists all.")
    from vitmods.papers import TABLES

    if (table := TABLES[arguments[0]]).bench:
        return _bench(table, arguments[1:])
    return compare.main(["--arms", f"paper:{arguments[0]}", *arguments[1:]])


def _bench(table: Table, arguments: list[str]) -> int:
    """The table's comparison of speed, with what is given in place of its own options, and then the table."""
    from vitmods.cli import bench

    given = {word.partition("=")[0] for word in arguments}
    own = [option for option in re.findall(r"--\S+(?: (?!--)\S+)*", table.bench) if option.split(" ")[0] not in given]
    code = bench.main([*(word for option in own for word in option.split(" ")), *arguments])
    _show(table)
    return code


def missing(table: Table) -> tuple[list[str], list[str]]:
    """What stands in the way of running a table at all, and, where nothing does, of all of it as published."""
    from vitmods.recipes import RECIPES
    from vitmods.tasks.base import TASKS

    study = table.study
    if study is None:
        return ([], list(table.needs)) if table.bench else (list(table.needs), [])
    if study.task not in TASKS:
        return [f"The task {study.task} is not built yet."], list(table.needs)
    parts = list(table.needs)
    if study.recipe and study.recipe.partition("(")[0] not in RECIPES:
        parts.append(f"The paper's recipe {study.recipe} is not built yet.")
    return [], parts


def _described(table: Table) -> dict[str, Any]:
    from vitmods.papers.cost import full_scale
    from vitmods.papers.table import covered

    blocked, parts = missing(table)
    commands: tuple[str, ...] = (f"vitmods paper run {table.name}",) if table.bench else ()
    about: dict[str, Any] = {"runs": not blocked, "missing": blocked + parts}
    if table.study and not blocked:
        commands = table.study.commands(table.name)
        about |= {"full_scale": asdict(full_scale(table)), "covers": covered(table)}
    about |= {"commands": list(commands)}
    return {**table.describe(), **about, "claims": [asdict(claim) for claim in table.claims]}


def _list(tables: Any) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("table", "what it compares", "in the paper"):
        grid.add_column(column, no_wrap=column == "table")
    paper = None
    for table in tables:
        if table.paper is not paper:
            paper = table.paper
            grid.add_row("", Text(f"{paper.authors}: {paper.title}", style="bold"), "")
        blocked, parts = missing(table)
        what = Text(table.title)
        for word, style, reasons in (("not yet: ", "yellow", blocked), ("not all: ", "dim", parts)):
            if reasons:
                what.append(f"\n{word}{' '.join(reasons)}", style=style)
        grid.add_row(Text(table.name, style="dim" if blocked else "cyan"), what, table.where)
    console = Console()
    console.print(grid)
    console.print("vitmods paper show TABLE prints one, with the commands that run it again.", style="dim")


def _show(table: Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    from vitmods.papers.cost import full_scale
    from vitmods.papers.table import covered

    console = Console()
    console.print(Text(f"{table.name}: {table.title}", style="bold"))
    console.print(Text(f"{table.paper.authors}: {table.paper.title}, {table.where}. {table.paper.url}", style="dim"))
    console.print(Text(f"{table.data}; {table.unit}; {table.scale}."))
    if table.printed:
        grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
        grid.add_column("", min_width=max(map(len, table.rows)))
        for column in table.columns:
            unit = table.unit_of(column)
            widest = max(len(table.shown(row, column)) for row in table.rows)
            name = column if unit == table.unit else f"{column} ({unit})"
            grid.add_column(name, justify="right", min_width=widest, overflow="fold")
        for row in table.rows:
            grid.add_row(Text(row), *(table.shown(row, column) for column in table.columns))
        console.print(grid)
    unsure = any(not number.certain for number in table.numbers.values())
    for line in (
        *table.notes,
        *table.claims,
        *(["?: the reading is not sure, and nothing is shown."] if unsure else []),
    ):
        console.print(Text(f"- {line}"))
    blocked, parts = missing(table)
    study = table.study
    if study:
        console.print(Text("\narms", style="cyan"), Text(f"base: {study.base}"))
        for label, arm in study.arms.items():
            console.print(Text(f"  {arm}: {label}"))
        for arm in study.beside:
            console.print(Text(f"  {arm} (not in the table)"))
        if not study.start:
            console.print(Text("bases", style="cyan"), Text(", ".join(study.bases.values())))
        for name, values in study.sweep.items():
            console.print(Text("sweep", style="cyan"), Text(f"{name}={','.join(map(str, values.values()))}"))
        for line in study.differs:
            console.print(Text(f"- {line}"))
    for line in (*blocked, *parts):
        console.print(Text(f"missing: {line}", style="yellow"))
    if study and not blocked:
        own, full = study.commands(table.name)
        print(f"\nOn your images, with --base and --img-size as you like; --dry-run says how long it takes:\n  {own}")
        print(f"At the paper's scale, with the first of its bases:\n  {full}")
        reach, results = covered(table)
        part = f" ({reach} of the table's {results} results)" if results else ""
        print(f"With {plural(len(study.bases), 'base')}{part}: {full_scale(table)}.")
    if table.bench:
        print(f"\nOn your machine; --models, --batch and --img-size as you like:\n  vitmods paper run {table.name}")
