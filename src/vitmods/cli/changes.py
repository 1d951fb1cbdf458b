"""`vitmods changes`: what can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitmods.cli.options import parse

if TYPE_CHECKING:
    from vitmods.changes import LineUp


@dataclass(frozen=True)
class Changes:
    """List the design changes: what each does, its paper, what it preserves, its cost and its published gain.

    preserves: function - the changed model computes the same at first; weights - it keeps the old weights, its outputs
    differ; nothing - it may alter weights. Combine changes with +, set their options in parentheses.

    examples:
      vitmods changes
      vitmods diff --base S/16 --arm "dpn(before=false)+rms"
    """

    json: bool = False
    """print JSON, for programs"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Changes, arguments, "changes")
    from vitmods.changes import LINEUPS, REGISTRY

    described = [describe(kind) for kind in REGISTRY.values()]
    if options.json:
        print(json.dumps(described, indent=1))
        return 0
    _print(described)
    _print_lineups(LINEUPS.values())
    return 0


def describe(kind: Any) -> dict[str, Any]:
    """One change, for people and programs."""
    from vitmods.changes import Change

    record = Change.describe(_plain(kind))  # of the change as a whole, where one of its variants tells of itself
    return {**record, "settings": kind.settings(), "short_forms": list(kind.short_forms)}


def _plain(kind: Any) -> Any:
    """Its shortest spelling; a change that must be reported something takes its first short form."""
    try:
        return kind()
    except ValueError:
        return kind(**next(iter(kind.short_forms.values())))


def _print(described: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("change", no_wrap=True)
    table.add_column("what it does, paper, cost, published gain")
    for change in described:
        name = Text(change["name"], style="bold")
        for short in change["short_forms"]:
            name.append(f"\n{short}", style="dim")
        record = Text.assemble(
            (change["title"], "bold"), f": {change['summary']}\n",
            (f"{change['paper']} {change['url']}\n", "dim"),
            ("preserves ", "cyan"), f"{change['preserves']}\n",
            ("cost      ", "cyan"), f"{change['cost']}\n",
            ("published ", "cyan"), change["published"],
        )  # fmt: skip
        options = ", ".join(
            name if value in (None, "") else f"{name}={str(value).lower()}"
            for name, value in change["settings"].items()
        )
        if options:
            record.append("\noptions   ", style="cyan")
            record.append(options)
        table.add_row(name, record)
    console.print(table)


def _print_lineups(lineups: Iterable[LineUp]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("line-up", no_wrap=True)
    table.add_column("arms of one published comparison; base is its row without changes")
    for lineup in lineups:
        arms = ", ".join(f"{name}={changes}" for name, changes in lineup.arms.items())
        record = Text.assemble(
            (lineup.title, "bold"), f": {lineup.note}\n",
            (f"{lineup.paper} {lineup.url}\n", "dim"),
            ("base      ", "cyan"), f"{lineup.base}\n",
            ("arms      ", "cyan"), arms,
        )  # fmt: skip
        table.add_row(Text(lineup.name, style="bold"), record)
    Console().print(table)
