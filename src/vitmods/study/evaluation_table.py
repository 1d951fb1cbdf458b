"""What an evaluation found, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitmods.evals.protocols import PROTOCOLS, metric_named


def print_evaluation(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Print every metric with its 95 % interval; `found` is what `evaluate` gives."""
    console = console or Console()
    head = f"{found['checkpoint']} on {found['pictures']:,} pictures of {found['data']} ({found['split']})"
    console.print(Text(head, style="bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("protocol", no_wrap=True)
    table.add_column("metric", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    for protocol in found["protocols"]:
        first = protocol
        for name in _metrics_of(protocol, found["metrics"]):
            metric = metric_named(name)
            ends = found["intervals"].get(name, ())
            interval = " to ".join(metric.number(end) for end in ends)
            title = metric.title if metric.higher_is_better else f"{metric.title}, low is good"
            table.add_row(first, title, metric.shown(found["metrics"][name]), interval)
            first = ""
    console.print(table)
    over = f"the pictures{', of fewshot over choices of training pictures' * ('fewshot' in found['protocols'])}"
    console.print(Text(f"Intervals are over {over}.", style="dim"), soft_wrap=True)


def _metrics_of(protocol: str, names: Mapping[str, float]) -> list[str]:
    return [name for name in names if metric_named(name).protocol == PROTOCOLS[protocol].name]
