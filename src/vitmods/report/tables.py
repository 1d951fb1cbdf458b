"""What a study or an evaluation found, as tables for the terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from vitmods.evals.base import PROTOCOLS
from vitmods.evals.protocols import metric_named
from vitmods.report.text import (
    GLYPHS,
    headline,
    interval,
    mean_effect,
    points,
    probability,
    ranked,
    ratio,
    tuned_text,
)
from vitmods.stats.effects import CANNOT_TELL, HELPS, HURTS, NO_WORSE, Effect
from vitmods.study.answer import Answer, ArmCost
from vitmods.util.text import plural, single_line

STYLES = {HELPS: "bold green", NO_WORSE: "cyan", CANNOT_TELL: "dim", HURTS: "bold red"}
WIDE = 110
PLAIN = str.maketrans({"▲": "^", "▼": "v", "≈": "~", "−": "-", "×": "x", "–": "-", "─": "-"})


def print_answer(answer: Answer, console: Console | None = None) -> None:
    """Print the verdict of every arm, its effect and its costs as ratios to base.

    Below 110 columns a row takes two lines, so that nothing is left out at 80. Without a terminal there are no colors,
    and where the output is not Unicode, plain signs.
    """
    console = console or Console()
    if console.encoding.startswith("utf"):
        console.print(answer_table(answer, console.width))
        return
    plain = render(answer, console.width).translate(PLAIN).encode(console.encoding, "backslashreplace")
    console.print(Text(plain.decode(console.encoding)))


def render(answer: Answer, width: int = 120) -> str:
    """The same as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(answer_table(answer, width))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def answer_table(answer: Answer, width: int = 120) -> Group:
    """A headline, the table with the best arm first, how to read it, and what makes its numbers doubtful."""
    parts: list[Any] = [Text(headline(answer), style="bold"), _table(answer, width >= WIDE), _legend(answer)]
    if tuned := tuned_text(answer):
        parts.append(Text(single_line(tuned), style="dim"))
    parts += [Text(single_line(f"Warning: {doubt}"), style="yellow") for doubt in answer.doubts]
    if not answer.complete:
        parts.append(Text("The study is not complete; run the same command again to finish it.", style="yellow"))
    return Group(*parts)


def _table(answer: Answer, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0) if wide else (0, 1, 0, 0))
    table.add_column("arm", overflow="fold", min_width=14)
    if wide:
        table.add_column("verdict", no_wrap=True)
    table.add_column("effect, 95 % interval" if wide else "effect", no_wrap=True)
    for heading in ("p", "seeds", "train", "infer", "memory", "params"):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm, effect in ranked(answer):
        name, verdict = Text(single_line(arm.name)), _verdict(effect)
        first = (name, verdict) if wide else (name.append("\n").append(verdict),)
        numbers = f"{mean_effect(effect)}{' ' if wide else chr(10)}{interval(effect)}".rstrip()
        table.add_row(*first, numbers, probability(effect.p_holm), str(effect.n), *_costs(arm.cost))
    return table


def _verdict(effect: Effect) -> Text:
    text = Text(f"{GLYPHS[effect.verdict]} {effect.verdict}", style=STYLES[effect.verdict])
    if effect.diverged:
        text.append(f"\n  {effect.diverged} diverged", style="yellow")
    return text


def _costs(cost: ArmCost | None) -> list[str]:
    if cost is None:
        return ["–"] * 4
    return [ratio(value) for value in (cost.train_step.ratio, cost.infer_n.ratio, cost.peak_memory.ratio, cost.params)]


def _legend(answer: Answer) -> Text:
    metric, mean = answer.metric, answer.base.mean
    reached = "not finished" if mean is None else metric.shown(mean)
    unit = f" in{points(metric.unit)}" if metric.unit else ""
    lower = "" if metric.higher_is_better else "; lower is better"
    text = (
        f"Base {single_line(answer.base.model.name)}: {reached} {metric.title} ({answer.split}{lower}). "
        f"Effects are paired differences to base{unit}; p is Holm-corrected for {plural(len(answer.arms), 'arm')}; "
        f"no worse: within {answer.margin:g}{points(metric.unit)}. Costs are ratios to base."
    )
    return Text(text, style="dim")


def print_evaluation(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Print every metric with its 95 % interval; `found` is one of what `evaluate` gives, or what `over_seeds` does."""
    console = console or Console()
    several = found.get("checkpoints", [])
    one = several[0] if several else found
    outputs = f"Mean of {len(several)} checkpoints" if several else one["checkpoint"]
    head = f"{outputs} on {one['images']:,} images of {one['data']} ({one['split']})"
    console.print(Text(single_line(head), style="bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("protocol", no_wrap=True)
    table.add_column("metric", overflow="fold")
    for heading in ("value", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    for protocol in one["protocols"]:
        metrics = [metric_named(name) for name in found["metrics"]]
        mine = [metric for metric in metrics if metric.protocol == PROTOCOLS[protocol].name]
        for row, metric in enumerate(mine):
            ends = " to ".join(metric.number(end) for end in found["intervals"].get(metric.name, ()))
            title = metric.title if metric.higher_is_better else f"{metric.title}, low is good"
            table.add_row("" if row else protocol, title, metric.shown(found["metrics"][metric.name]), ends)
    console.print(table)
    fewshot = ", of fewshot over choices of training images" * ("fewshot" in one["protocols"])
    over = "the checkpoints, by Student's t" if several else f"the images{fewshot}"
    console.print(Text(f"Intervals are over {over}.", style="dim"), soft_wrap=True)


def print_predictions(found: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print what `predict` gives: of each image the likeliest classes, those that are predicted in bold."""
    console = console or Console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("image", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("probability", justify="right", no_wrap=True)
    for one in found:
        for row, (name, p) in enumerate(one["probabilities"].items()):
            style = "bold" if name in one["predicted"] else "dim"
            image = "" if row else single_line(one["image"])
            table.add_row(Text(image), Text(single_line(name), style=style), Text(f"{100 * p:.1f} %", style=style))
    console.print(table)
