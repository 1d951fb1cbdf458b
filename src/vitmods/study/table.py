"""The verdicts of a study as a table for the terminal."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from vitmods.stats.effects import CANNOT_TELL, HELPS, HURTS, NO_WORSE, Effect
from vitmods.study.words import (
    GLYPHS,
    difference,
    effect_of,
    headline,
    interval,
    metric_of,
    plural,
    points,
    probability,
    rank,
    ratio,
    tuned_text,
)

STYLES = {HELPS: "bold green", NO_WORSE: "cyan", CANNOT_TELL: "dim", HURTS: "bold red"}
WIDE = 110
PLAIN = str.maketrans({"▲": "^", "▼": "v", "≈": "~", "−": "-", "×": "x", "–": "-", "─": "-"})


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the verdict of every arm, its effect and its costs as ratios to base.

    Below 110 columns a row takes two lines, so that nothing is left out at 80. Without a terminal there are no colors,
    and where the output is not Unicode, plain signs. `results` is what results.json holds.
    """
    console = console or Console()
    if console.encoding.startswith("utf"):
        console.print(verdict_table(results, console.width))
        return
    plain = render(results, console.width).translate(PLAIN).encode(console.encoding, "backslashreplace")
    console.print(Text(plain.decode(console.encoding)))


def render(results: Mapping[str, Any], width: int = 120) -> str:
    """The same as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(verdict_table(results, width))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def verdict_table(results: Mapping[str, Any], width: int = 120) -> Group:
    """A headline, the table with the best arm first, and a line on how to read it."""
    rows = sorted(((arm, effect_of(arm)) for arm in results["arms"]), key=lambda row: rank(row[1]))
    head = Text(headline(effect.verdict if effect else None for _, effect in rows), style="bold")
    parts: list[Any] = [head, _table(rows, width >= WIDE), _legend(results, rows)]
    if tuned := tuned_text(results):
        parts.append(Text(_printable(tuned), style="dim"))
    if not results["complete"]:
        parts.append(Text("The study is not complete; run the same command again to finish it.", style="yellow"))
    return Group(*parts)


def _table(rows: list[tuple[Mapping[str, Any], Effect | None]], wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0) if wide else (0, 1, 0, 0))
    table.add_column("arm", overflow="fold", min_width=14)
    if wide:
        table.add_column("verdict", no_wrap=True)
    table.add_column("effect, 95 % interval" if wide else "effect", no_wrap=True)
    for heading in ("p", "seeds", "train", "infer", "memory", "params"):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm, effect in rows:
        name, verdict, numbers = Text(_printable(str(arm["name"]))), _verdict(effect), _numbers(effect, wide)
        first = (name, verdict) if wide else (name.append("\n").append(verdict),)
        table.add_row(*first, *numbers, *_costs(arm.get("cost")))
    return table


def _verdict(effect: Effect | None) -> Text:
    verdict = effect.verdict if effect else CANNOT_TELL
    text = Text(f"{GLYPHS[verdict]} {verdict}", style=STYLES[verdict])
    if effect and effect.diverged:
        text.append(f"\n  {effect.diverged} diverged", style="yellow")
    return text


def _numbers(effect: Effect | None, wide: bool) -> tuple[str, str, str]:
    if effect is None:
        return "–", "–", "0"
    numbers = f"{difference(effect, effect.mean)}{' ' if wide else chr(10)}{interval(effect)}".rstrip()
    return numbers, probability(effect.p_holm), str(effect.n)


def _costs(cost: Mapping[str, Any] | None) -> list[str]:
    if not cost:
        return ["–"] * 4
    timed = [ratio((cost.get(key) or {}).get("ratio")) for key in ("train_step", "infer_n", "peak_memory")]
    return [*timed, ratio(cost.get("params"))]


def _legend(results: Mapping[str, Any], rows: list[tuple[Mapping[str, Any], Effect | None]]) -> Text:
    base = results["base"]
    metric = metric_of(results)
    mean = "not finished" if base.get("mean") is None else metric.shown(base["mean"])
    unit = f" in{points(metric.unit)}" if metric.unit else ""
    lower = "" if metric.higher_is_better else "; lower is better"
    text = (
        f"Base {_printable(str(base['name']))}: {mean} {metric.title} ({results['metric']['split']}{lower}). "
        f"Effects are paired differences to base{unit}; p is Holm-corrected for {plural(len(rows), 'arm')}; "
        f"no worse: within {results['margin']:g}{points(metric.unit)}. Costs are ratios to base."
    )
    return Text(text, style="dim")


def _printable(text: str) -> str:
    """Control characters could move the cursor of the terminal; they become spaces."""
    return "".join(" " if unicodedata.category(char) in ("Cc", "Cf") else char for char in text)
