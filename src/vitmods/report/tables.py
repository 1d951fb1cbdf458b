"""What a study or an evaluation found, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from vitmods.evals.base import PROTOCOLS
from vitmods.evals.protocols import metric_named
from vitmods.report.advice import what_now
from vitmods.report.designs import several_bases, sweep_rows
from vitmods.report.published import printed
from vitmods.report.text import (
    built_differently,
    doubts,
    half_on_these,
    headline,
    holds,
    number,
    numbers,
    points,
    ranked,
    ranked_effects,
    ratio,
    score,
    seeds,
    tuned_text,
    verdict_text,
)
from vitmods.stats.verdict import Effect, Verdict
from vitmods.study.answer import VIEWS, Answer, ArmCost
from vitmods.util.errors import UserError
from vitmods.util.files import rendered
from vitmods.util.text import single_line

STYLES = {Verdict.HELPS: "bold green", Verdict.HURTS: "bold red", Verdict.UNSTABLE: "red", Verdict.OPEN: "dim"}
WIDE = 110
PLAIN = str.maketrans({"▲": "^", "▼": "v", "≥": ">", "≤": "<", "±": "+", "−": "-", "×": "x", "–": "-", "─": "-"})


def print_answer(answer: Answer, console: Console | None = None) -> None:
    """Print the verdict of every arm, its effect and its costs as ratios to base.

    At 80 columns an arm has one line; from 110 on it shows more. Without a terminal there are no colors, and where the
    output is not Unicode, plain signs.
    """
    console = console or Console()
    if console.encoding.startswith("utf"):
        console.print(answer_table(answer, console.width), crop=False)
        return
    plain = render(answer, console.width).translate(PLAIN).encode(console.encoding, "backslashreplace")
    console.print(Text(plain.decode(console.encoding)), soft_wrap=True)


@VIEWS.register("text")
def render(answer: Answer, width: int = 120) -> str:
    """The same as plain text."""
    return rendered(answer_table(answer, width), width)


def answer_table(answer: Answer, width: int = 120) -> Group:
    """A headline, what makes its numbers doubtful, the table with the best arm first, and what to do now."""
    parts: list[Any] = [Text(single_line(headline(answer)), style="bold")]
    parts += [Text(single_line(f"Warning: {doubt}"), style="yellow") for doubt in doubts(answer)]
    parts += [*_tables(answer, width >= WIDE), _legend(answer)]
    if tuned := tuned_text(answer):
        parts.append(Text(single_line(tuned), style="dim"))
    parts += printed(answer)
    parts.append(Text("\nNext steps", style="bold"))
    for step in what_now(answer):
        parts.append(Text(f"- {single_line(step.text)}"))
        if step.command:
            lines = map(single_line, step.command.splitlines())  # whole, however long, for copying
            parts += [Text(f"  {line}", style="cyan", no_wrap=True, overflow="ignore") for line in lines]
    return Group(*parts)


def _tables(answer: Answer, wide: bool) -> Iterator[Table]:
    """Of arms with their costs; of changes, and of pairs of them; of arms on average, and under each setting."""
    if answer.factorial:
        yield _effects(ranked_effects(answer), wide, "change")
        if answer.factorial.pairs:
            yield _effects(answer.factorial.pairs.values(), wide, "pair, together")
        return
    yield _table(answer, wide)
    if answer.sweep:
        yield _sweep(answer, wide)


def _effects(effects: Iterable[Effect], wide: bool, heading: str) -> Table:
    table = _empty(heading, wide)
    for name in ("these images", "seeds"):
        table.add_column(name, justify="right", no_wrap=True)
    for effect in effects:
        arm = Text(single_line(effect.arm))
        table.add_row(arm, _verdict(effect), numbers(effect), half_on_these(effect), seeds(effect))
    return table


def _sweep(answer: Answer, wide: bool) -> Table:
    table = _empty("setting, arm", wide)
    bases = several_bases(answer)
    for heading in ("score", *(("train", "infer") if bases else ()), *(("steps to base",) if wide else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = None
    for row in sweep_rows(answer):
        if row.setting is not shown:
            table.add_row(Text(single_line(row.setting.name), style="bold"))
        shown = row.setting
        found = ("", "") if row.effect is None else (_verdict(row.effect), numbers(row.effect))
        costs = _costs(row.setting.costs.get(row.arm.name))[:2] if bases else []
        last = [score(answer.metric, row.mean), *costs, *([row.steps] if wide else [])]
        table.add_row(Text(f"  {single_line(row.arm.name)}"), *found, *last)
    return table


def _empty(heading: str, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0) if wide else (0, 1, 0, 0))
    table.add_column(heading, overflow="fold", min_width=12)
    table.add_column("verdict", no_wrap=True)
    table.add_column("effect, 95 % interval", no_wrap=True)
    return table


def _verdict(effect: Effect) -> Text:
    return Text(verdict_text(effect), style="dim" if effect.provisional else STYLES.get(effect.verdict, "cyan"))


def _table(answer: Answer, wide: bool) -> Table:
    table = _empty("arm", wide)
    more = ("these images", "sd ratio", "seeds") if wide else ("seeds",)
    for heading in (*more, *(("train", "infer", "memory", "params") if wide else ("train", "infer"))):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm, effect in ranked(answer):
        shown = (half_on_these(effect), number(effect.spread_ratio)) if wide else ()
        costs = _costs(arm.cost) if wide else _costs(arm.cost)[:2]
        table.add_row(Text(single_line(arm.name)), _verdict(effect), numbers(effect), *shown, seeds(effect), *costs)
    return table


def _costs(cost: ArmCost | None) -> list[str]:
    if cost is None:
        return ["–"] * 4
    return [ratio(value) for value in (cost.train_step.ratio, cost.infer_n.ratio, cost.peak_memory.ratio, cost.params)]


def _legend(answer: Answer) -> Text:
    metric, mean = answer.metric, answer.base_mean
    reached = "not finished" if mean is None else metric.shown(mean)
    lower = "" if metric.higher_is_better else "; lower is better"
    name = "" if several_bases(answer) else f" ({single_line(answer.base.model.name)})"
    text = (
        f"{answer.base.name}{name}: {reached} {metric.title} "
        f"({' and '.join(answer.splits)}{lower}). {_differences(answer)}"
        f"{f', in{points(metric)}' if metric.unit else ''}, margin {answer.margin:g}; {holds(answer)}"
        f"{'' if answer.factorial else ' Costs are ratios.'}"
    )
    if not answer.factorial:
        text = " ".join([text, *built_differently((arm.name, arm.cost) for arm in answer.arms)])
    return Text(single_line(text), style="dim")


def _differences(answer: Answer) -> str:
    if answer.factorial:
        return "Effects are means of the runs with a change minus those without"
    return f"Effects are differences to it{', on average over the settings' if answer.sweep else ''}"


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
        mine = [metric for metric in metrics if metric.protocol == protocol or protocol not in PROTOCOLS]
        for row, metric in enumerate(mine):
            ends = " to ".join(metric.number(end) for end in found["intervals"].get(metric.name, ()))
            title = metric.title if metric.higher_is_better else f"{metric.title}, low is good"
            table.add_row("" if row else protocol, title, metric.shown(found["metrics"][metric.name]), ends)
    console.print(table)
    fewshot = ", of fewshot over choices of training images" * ("fewshot" in one["protocols"])
    over = "the checkpoints, by Student's t" if several else f"the images{fewshot}"
    console.print(Text(f"Intervals are over {over}.", style="dim"), soft_wrap=True)


def shares(found: Mapping[str, Any]) -> Mapping[str, float]:
    """Of an entry of `predict`, class -> its probability, or the fraction of the pixels that it has.

    Raises:
        UserError: the task says something else of images.
    """
    if (rows := found.get("probabilities", found.get("pixels"))) is None:
        raise UserError("What this task finds in images is no table: write it as JSON (--format json).")
    return rows  # type: ignore[no-any-return]


def print_predictions(found: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print what `predict` gives: of each image the likeliest classes, those that are predicted in bold."""
    console = console or Console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("image", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("of the pixels" if "pixels" in found[0] else "probability", justify="right", no_wrap=True)
    for one in found:
        for row, (name, p) in enumerate(shares(one).items()):
            style = "bold" if name in one["predicted"] else "dim"
            image = "" if row else single_line(one["image"])
            table.add_row(Text(image), Text(single_line(name), style=style), Text(f"{100 * p:.1f} %", style=style))
    console.print(table)
