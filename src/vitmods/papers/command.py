"""`vitmods paper`: list published tables, show one, and run it again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from vitmods.cli.options import HELP_ALL, parse
from vitmods.papers.claims import Status, counted
from vitmods.papers.cost import full_scale
from vitmods.papers.table import PAPERS, TABLES, Paper, Table, covered
from vitmods.recipes import RECIPES
from vitmods.study.arms import BASE
from vitmods.tasks.base import TASKS
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.text import plural

STYLES = {Status.PROVEN: "bold green", Status.SEEN: "green", Status.NOT_SEEN: "red", Status.NOT_RUN: "dim"}


@dataclass(frozen=True)
class List:
    """List the published tables: what each compares, and what is missing to run it again.

    `paper show TABLE` prints one with the commands that run it. `paper run TABLE` accepts the options of `compare`, and
    fills in the arms of the table, and its task, bases and sweep where they are not given.

    `paper claims` lists the claims of the papers' texts and what our studies say about them.

    examples:
      vitmods paper
      vitmods paper claims --paper dpn
      vitmods paper show dpn-table6
      vitmods paper run dpn-table6 --data path/to/images --base Ti/4 S/4 --img-size 32 --budget 2h
    """

    json: bool = False
    """print JSON, for programs"""


@dataclass(frozen=True)
class ShowTable:
    """Show a published table: its numbers with ±, how to read them, and the commands that run it again."""

    table: Annotated[str, tyro.conf.Positional]
    """its name, e.g. dpn-table6; `vitmods paper` lists all"""
    out: Path | None = None
    """draw the gain of each arm by model into this file, .svg, .pdf or .png, instead of printing"""
    study: Path | None = None
    """with --out: draw the gains of the study in this folder"""
    json: bool = False
    """print JSON, for programs"""


@dataclass(frozen=True)
class Claims:
    """List the claims of the papers' texts: whether our studies see the claimed effect, by which study, and slips.

    proven: a test shows it without training. seen here, not seen here: the interval of the studies that keep its
    conditions shows the effect, or excludes it. too wide to test: neither. other conditions: no study keeps them. not
    run: no study tests it. docs/claims.md has the same list with links.

    examples:
      vitmods paper claims
      vitmods paper claims --paper dpn
    """

    paper: str | None = None
    """one paper: dpn, dtn, norm or tt; None: all"""
    json: bool = False
    """print JSON, for programs"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    action, *words = arguments or [""]
    if action == "run":
        return _run(words)
    if action == "show":
        show = parse(ShowTable, words, "paper show")
        table = TABLES[show.table]
        if show.study and not show.out:
            raise UserError("--study needs --out FILE.svg: the figure to draw.")
        if show.out:
            _draw(table, show.out, show.study)
            return 0
        print(json.dumps(_describe(table), indent=1)) if show.json else _print_table(table)
        return 0
    if action == "claims":
        claims = parse(Claims, words, "paper claims")
        papers = [PAPERS[claims.paper]] if claims.paper else list(PAPERS.values())
        described = [{"paper": paper.name, **claim.describe()} for paper in papers for claim in paper.claims]
        print(json.dumps(described, indent=1)) if claims.json else _print_claims(papers)
        return 0
    if action and not action.startswith("-") and action != "list":
        raise UserError(
            f"Unknown action 'paper {action}': use `paper list`, `paper show TABLE`, `paper run TABLE` or "
            "`paper claims`."
        )
    options = parse(List, words if action == "list" else arguments, "paper")
    if options.json:
        print(json.dumps([_describe(table) for table in TABLES.values()], indent=1))
    else:
        _print_list()
    return 0


def _run(arguments: list[str]) -> int:
    from vitmods.cli import bench, compare

    if any(word.split("=")[0] == "--arms" for word in arguments):
        raise UserError(
            "A table has its own arms. To compare others too, use `vitmods compare --arms paper:TABLE dpn`."
        )
    if arguments[:1] in (["-h"], ["--help"], [HELP_ALL]):
        return compare.main(arguments[:1])
    if not arguments or arguments[0].startswith("-"):
        raise UserError("Name a table: `vitmods paper run dpn-table6 --data ...`. `vitmods paper` lists all.")
    name, *options = arguments
    table = TABLES[name]
    if not table.bench:
        return compare.main(["--arms", f"paper:{name}", *options])
    replaced = {word.partition("=")[0] for word in options}
    settings = [text.split(" ") for text in re.findall(r"--\S+(?: (?!--)\S+)*", table.bench)]
    code = bench.main([*(word for words in settings if words[0] not in replaced for word in words), *options])
    _print_table(table)
    return code


def missing(table: Table) -> tuple[list[str], list[str]]:
    """The reasons why a table cannot be run at all; or, if it can, why not all of it runs as published."""
    study = table.study
    if study is None:
        return ([], list(table.needs)) if table.bench else (list(table.needs), [])
    if study.task not in TASKS:
        return [f"The task {study.task} is not built yet."], list(table.needs)
    parts = list(table.needs)
    if study.recipe and study.recipe.partition("(")[0] not in RECIPES:
        parts.append(f"The paper's recipe {study.recipe} is not built yet.")
    return [], parts


def _describe(table: Table) -> dict[str, Any]:
    blocked, parts = missing(table)
    commands = [f"vitmods paper run {table.name}"] if table.bench else []
    facts: dict[str, Any] = {"runs": not blocked, "missing": blocked + parts}
    if table.study and not blocked:
        commands = list(table.study.commands(table.name))
        facts |= {"full_scale": asdict(full_scale(table)), "covers": covered(table)}
    return {**table.describe(), **facts, "commands": commands, "claims": [claim.describe() for claim in table.claims]}


def _draw(table: Table, out: Path, folder: Path | None) -> None:
    from vitmods.papers.figure import draw_gains
    from vitmods.report.figures import save_figure
    from vitmods.study import Answer

    reference = (table.study.reference if table.study else "") or BASE
    save_figure(draw_gains(table, Answer.load(folder, reference) if folder else None), out)
    print(f"Figure: {named(out)}")


def _print_claims(papers: Sequence[Paper]) -> None:
    console = Console()
    for paper in papers:
        console.print(Text(f"{paper.authors}: {paper.title}", style="bold"))
        console.print(Text(counted(paper.claims), style="dim"))
        grid = Grid(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
        grid.add_column(no_wrap=True, min_width=max(map(len, Status)))
        grid.add_column(overflow="fold")
        for claim in paper.claims:
            text = Text.assemble(f"{claim.says} ", (f"({claim.where})", "dim"))
            for slip in claim.slips:
                text.append(f"\nbut {slip.says}", style="yellow")
            if claim.points:
                text.append(f"\npublished: {claim.effect} points")
            if claim.holds:
                text.append(f"\nfor {claim.conditions}", style="dim")
            if sum(found.counts for found in claim.evidence) > 1:
                text.append("\n" + "\n".join(map(str, claim.together)))
            for found in sorted(claim.evidence, key=lambda found: not found.counts):
                text.append(f"\n{found.study.name}: {found.outcome}", style="cyan" if found.counts else "dim")
                for effect in found.effects:
                    text.append(f"\n  {effect}", style="" if found.counts else "dim")
            if claim.why or claim.proof:
                text.append(f"\n{claim.why or claim.proof}", style="dim")
            grid.add_row(Text(claim.status, style=STYLES.get(claim.status, "")), text)
        console.print(grid)
    console.print(Text("The studies and their commands: docs/gallery.md, or --json.", style="dim"))


def _print_list() -> None:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("table", "what it compares", "in the paper"):
        grid.add_column(column, no_wrap=column == "table")
    paper = None
    for table in TABLES.values():
        if table.paper is not paper:
            paper = table.paper
            grid.add_row("", Text(paper.cited, style="bold"), "")
        blocked, parts = missing(table)
        summary = Text(table.title)
        for word, style, reasons in (("not available: ", "yellow", blocked), ("partial: ", "dim", parts)):
            if reasons:
                summary.append(f"\n{word}{' '.join(reasons)}", style=style)
        grid.add_row(Text(table.name, style="dim" if blocked else "cyan"), summary, table.where)
    console = Console()
    console.print(grid)
    console.print("vitmods paper show TABLE prints one, with the commands that run it again.", style="dim")


def _print_table(table: Table) -> None:
    console = Console()
    console.print(Text(f"{table.name}: {table.title}", style="bold"))
    console.print(Text(f"{table.paper.cited}, {table.where}. {table.paper.url}", style="dim"))
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
    uncertain = any(not number.certain for number in table.numbers.values())
    for line in (*table.notes, *table.claims, *(["?: an uncertain reading, not shown."] if uncertain else [])):
        console.print(Text(f"- {line}"))
    if study := table.study:
        console.print(Text.assemble(("\narms", "cyan"), f" base: {study.base or 'without a change'}"))
        for arm, label in [*((arm, f": {label}") for label, arm in study.arms.items()),
                           *((arm, " (not in the table)") for arm in study.beside)]:  # fmt: skip
            console.print(Text(f"  {arm}{label}"))
        if not study.start:
            console.print(Text.assemble(("bases", "cyan"), f" {', '.join(study.bases.values())}"))
        for name, values in study.sweep.items():
            console.print(Text.assemble(("sweep", "cyan"), f" {name}={','.join(map(str, values.values()))}"))
        for line in study.differs:
            console.print(Text(f"- {line}"))
    blocked, parts = missing(table)
    for reason in (*blocked, *parts):
        console.print(Text(f"missing: {reason}", style="yellow"))
    if study and not blocked:
        on_user_data, full = study.commands(table.name)
        print(f"\nOn your data (set --base and --img-size; --dry-run estimates the time):\n  {on_user_data}")
        print(f"At the paper's scale, with the first of its bases:\n  {full}")
        reach, results = covered(table)
        part = f" ({reach} of the table's {results} results)" if results else ""
        print(f"With {plural(len(study.bases), 'base')}{part}: {full_scale(table)}.")
    if table.bench:
        print(f"\nOn your machine (set --models, --batch and --img-size):\n  vitmods paper run {table.name}")
