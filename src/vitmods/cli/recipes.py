"""`vitmods recipes`: what a training may start from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vitmods.cli.options import parse

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


@dataclass(frozen=True)
class Recipes:
    """List the recipes: what each is for, its paper, its data, and the number to expect.

    Their settings are written in parentheses: --recipe "augreg(level=light1,epochs=30,warmup_epochs=3)".

    examples:
      vitmods recipes
      vitmods recipe show a2 --model B/16
      vitmods compare --data path/to/images --recipe "augreg(level=light1,epochs=30,warmup_epochs=3)" --arms dpn
    """

    json: bool = False
    """print JSON, for programs"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Recipes, arguments, "recipes")
    from vitmods.recipes import RECIPES, evidence
    from vitmods.recipes.registry import arguments as arguments_of
    from vitmods.recipes.registry import summary

    groups: dict[str, list[dict[str, Any]]] = {}
    for name in RECIPES:
        known = evidence(name)
        kind = "of papers" if known.paper else "for small budgets"
        group = groups.setdefault(kind + (", for trained weights" if known.trained else ""), [])
        facts = {key: value for key, value in asdict(known).items() if not callable(value)}
        group.append({"name": name, "summary": summary(name), **facts, "arguments": arguments_of(name)})
    if options.json:
        print(json.dumps([one for group in groups.values() for one in group], indent=1))
        return 0
    _print(groups)
    return 0


def _print(groups: dict[str, list[dict[str, Any]]]) -> None:
    from rich.console import Console

    console = Console()
    for title, group in groups.items():
        console.print(_table(title, group))
    console.print("vitmods recipe show NAME prints all of a recipe, resolved for a data set.", style="dim")


def _table(title: str, group: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column("recipe", no_wrap=True, min_width=17)
    table.add_column(title, ratio=1)
    for one in group:
        table.add_row(Text(one["name"], style="bold"), _record(one))
    return table


def _record(one: dict[str, Any]) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = {
        "paper": one["paper"],
        "data": one["data"],
        "expected": one["expected"],
        "settings": ", ".join(one["arguments"]),
    }
    record = Table.grid(padding=(0, 2, 0, 0))
    for label, value in rows.items():
        if value:
            record.add_row(Text(label, style="cyan"), Text(value, style="dim" if label == "settings" else ""))
    return Group(Text(one["summary"], style="bold"), record)
