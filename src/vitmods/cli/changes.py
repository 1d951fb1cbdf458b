"""`vitmods changes`: what can be compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from vitmods.cli.options import parse
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class Changes:
    """List the design changes: what each does, its paper, what it preserves, its cost and its published gain.

    preserves: function - the changed model computes the same at first; weights - it keeps the old weights, its outputs
    differ; nothing - it may alter weights. Combine changes with +, set their options in parentheses.

    examples:
      vitmods changes
      vitmods changes dtn
      vitmods diff --base S/16 --arm "dpn(before=false)+rms"
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    """one change or short form; None: all"""
    json: bool = False
    """print JSON, for programs"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Changes, arguments, "changes")
    from vitmods.changes import REGISTRY

    wanted = [change_named(options.name)] if options.name else list(REGISTRY.values())
    described = [describe(kind) for kind in wanted]
    if options.json:
        print(json.dumps(described[0] if options.name else described, indent=1))
        return 0
    _print(described)
    return 0


def change_named(name: str) -> Any:
    """The class of a change by its name or a short form. UserError, naming the nearest, where there is none."""
    from vitmods.changes import REGISTRY
    from vitmods.study.line_ups import find_line_up

    if line_up := find_line_up(name):
        raise UserError(f"{name} is a line-up of several changes: `vitmods paper show {line_up.name}`.")
    return next((kind for kind in REGISTRY.values() if name in kind.short_forms), None) or REGISTRY[name]


def describe(kind: Any) -> dict[str, Any]:
    """One change, for people and programs."""
    from vitmods.changes import Change

    record = Change.describe(_plain(kind))  # of the change as a whole, where one of its variants tells of itself
    slots = sorted(map(str, _plain(kind).claims))
    return {**record, "slots": slots, "settings": kind.settings(), "short_forms": list(kind.short_forms)}


def _plain(kind: Any) -> Any:
    """Its shortest spelling; a change that is none without settings takes its example, or its first short form."""
    try:
        return kind()
    except ValueError:
        return kind(**(kind.example or next(iter(kind.short_forms.values()))))


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
            ("slots     ", "cyan"), f"{', '.join(change['slots'])}\n",
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
    console.print("`vitmods paper` lists the papers' tables, line-ups of several arms.", style="dim")
