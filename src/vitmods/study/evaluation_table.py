"""What an evaluation found, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitmods.evals.protocols import PROTOCOLS, metric_named


def print_evaluation(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Print every metric with its 95 % interval; `found` is one of what `evaluate` gives, or what `over_seeds` does."""
    console = console or Console()
    several = found.get("checkpoints", [])
    one = several[0] if several else found
    outputs = f"Mean of {len(several)} checkpoints" if several else one["checkpoint"]
    head = f"{outputs} on {one['images']:,} images of {one['data']} ({one['split']})"
    console.print(Text(head, style="bold"), soft_wrap=True)
    console.print(_table(one["protocols"], found["metrics"], found["intervals"]))
    fewshot = ", of fewshot over choices of training images" * ("fewshot" in one["protocols"])
    over = "the checkpoints, by Student's t" if several else f"the images{fewshot}"
    console.print(Text(f"Intervals are over {over}.", style="dim"), soft_wrap=True)


def _table(protocols: Iterable[str], metrics: Mapping[str, float], intervals: Mapping[str, Sequence[float]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("protocol", no_wrap=True)
    table.add_column("metric", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    for protocol in protocols:
        first = protocol
        for name in _metrics_of(protocol, metrics):
            metric = metric_named(name)
            interval = " to ".join(metric.number(end) for end in intervals.get(name, ()))
            title = metric.title if metric.higher_is_better else f"{metric.title}, low is good"
            table.add_row(first, title, metric.shown(metrics[name]), interval)
            first = ""
    return table


def _metrics_of(protocol: str, names: Mapping[str, float]) -> list[str]:
    return [name for name in names if metric_named(name).protocol == PROTOCOLS[protocol].name]
