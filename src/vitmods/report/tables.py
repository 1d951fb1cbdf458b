"""Results of a study or an evaluation as tables for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from vitmods.evals.base import PROTOCOLS
from vitmods.evals.protocols import metric_named
from vitmods.report import text as words
from vitmods.report.advice import Step, next_steps
from vitmods.report.page import SECTIONS
from vitmods.stats.verdict import Effect, Verdict
from vitmods.study.answer import VIEWS, Answer
from vitmods.study.questions import Question
from vitmods.study.results import ArmCost
from vitmods.util.errors import UserError
from vitmods.util.files import rendered
from vitmods.util.text import plural, single_line

STYLES = {Verdict.HELPS: "bold green", Verdict.HURTS: "bold red", Verdict.UNSTABLE: "red", Verdict.OPEN: "dim"}
WIDE, NAME = 110, 12  # columns: from when on there are more, and for names at least
MOST_NUMBERS = 9  # columns beside the effect
WARNING_LINES = 4  # of all warnings together, unless the first one has more
PLAIN = str.maketrans({"▲": "^", "▼": "v", "≥": ">", "≤": "<", "±": "+", "−": "-", "×": "x", "–": "-", "─": "-"})


def print_answer(answer: Answer, console: Console | None = None) -> None:
    """Print the verdict of every arm, its effect and its costs as ratios to base.

    With a few arms it fits a screen of 80 columns and 25 lines, the rest is in the report. The table has more columns
    from 110 on. Colors need a terminal; output that is not Unicode gets plain signs.
    """
    console = console or Console()
    if console.encoding.startswith("utf"):
        console.print(answer_table(answer, console.width), crop=False)
        return
    plain = render(answer, console.width).translate(PLAIN).encode(console.encoding, "backslashreplace")
    console.print(Text(plain.decode(console.encoding)), soft_wrap=True)


@VIEWS.register("text")
def render(answer: Answer, width: int = 120) -> str:
    """Return what `print_answer` prints as plain text."""
    return rendered(answer_table(answer, width), width)


def answer_table(answer: Answer, width: int = 120) -> Group:
    """Return headline, the first warnings, the table with the best arm first, and the next step."""
    wide = width >= WIDE
    parts: list[Any] = [Text(single_line(words.headline(answer)), style="bold")]
    parts += [Text(line, style="yellow") for line in _warnings(words.caveats(answer), width)]
    for name, question in answer.questions.items():
        if question.is_shown and not question.is_folded:
            counts = range(MOST_NUMBERS, -1, -1)
            parts += [Text(), _fitting((_table(answer, name, wide, count) for count in counts), width)]
    parts += [Text(), Text(single_line(" ".join(_legend(answer))), style="dim")]
    for text in filter(None, (words.tuned_text(answer), words.shared_text(answer))):
        parts.append(Text(single_line(text), style="dim"))
    parts += [part for section in SECTIONS.values() for part in section.text(answer)]
    if steps := next_steps(answer):
        parts += [Text(), *_next(steps)]
    return Group(*parts)


def _warnings(caveats: Sequence[str], width: int) -> list[str]:
    """Return the first warnings, of a few lines together, and how many more the report has."""
    texts: list[str] = []
    lines = 0
    for caveat in caveats:
        text = single_line(f"Warning: {caveat}")
        lines += len(textwrap.wrap(text, width))
        if texts and lines > WARNING_LINES:
            break
        texts.append(text)
    if more := len(caveats) - len(texts):
        texts[-1] += f" The report has {plural(more, 'more warning')}."
    return texts


def _next(steps: Sequence[Step]) -> list[Text]:
    """Return the first step, and the first one that has a command."""
    printed = [steps[0], *[step for step in steps if step.command][:1]]
    first, *others = dict.fromkeys(single_line(step.text.replace("`", "")) for step in printed)
    more = ["The report has more next steps."] if len(steps) > len(printed) else []
    parts = [Text.assemble(("Next: ", "bold"), " ".join([first, *more, *others]))]
    lines = map(single_line, printed[-1].command.splitlines())  # not wrapped, for copying
    return [*parts, *(Text(f"  {line}", style="cyan", no_wrap=True, overflow="ignore") for line in lines)]


def _fitting(tables: Iterable[Table], width: int) -> Table:
    """The first of tables with fewer and fewer columns that fits; of the last one, cells have several lines. Otherwise
    rich would take the width from the column that may fold: the names."""
    unlimited = Console(width=10_000)
    for table in tables:
        names = next(column for column in table.columns if column.overflow == "fold")
        longest = max(cell_len(str(cell)) for cell in (names.header, *names.cells))
        if Measurement.get(unlimited, unlimited.options, table).maximum - max(0, longest - NAME) <= width:
            return table
    for column in table.columns:
        column.no_wrap = False
    return table


def _table(answer: Answer, name: str, wide: bool, most: int) -> Table:
    """Return the effects of a question, under its headings if it has some, then with the scores of base; with at most
    so many numbers beside the effect."""
    question = answer.questions[name]
    cells = {
        heading: [
            (row, dict(islice(_numbers(answer, question, row, wide).items(), most)))
            for row in rows
            if heading or row.effect
        ]
        for heading, rows in words.rows_of(answer, name).items()
    }
    numbers = next((list(of_row) for rows in cells.values() for _, of_row in rows), [])
    heading = f"{'setting, ' * question.has_headings}{question.label}"
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0))
    table.add_column(heading, overflow="fold", min_width=NAME)
    table.add_column("verdict", no_wrap=True)
    table.add_column("effect, 95 % interval", no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    for heading, rows in cells.items():
        if heading:
            table.add_row(Text(single_line(heading), style="bold"))
        for row, of_row in rows:
            found = (_verdict(row.effect), words.numbers(row.effect)) if row.effect else ("", "")
            table.add_row(Text(f"{'  ' * bool(heading)}{single_line(row.label)}"), *found, *of_row.values())
    return table


def _verdict(effect: Effect) -> Text:
    style = "dim" if effect.provisional else STYLES.get(effect.verdict, "cyan")
    return Text(words.verdict_text(effect), style=style)


def _numbers(answer: Answer, question: Question, row: words.Row, wide: bool) -> dict[str, str]:
    """Return column -> cell of a row, beside verdict and effect."""
    cells: dict[str, str] = {}
    if question.has_headings:
        cells["score"] = words.score(answer.metric, row.mean)
    elif row.effect:
        cells |= {"these images": words.half_on_these(row.effect)} if wide or not question.against else {}
        cells |= {"sd ratio": words.number(row.effect.spread_ratio)} if wide and question.against else {}
        cells["seeds"] = words.seeds(row.effect)
    if question.against and (not question.has_headings or len(answer.bases) > 1):
        names = ("train", "infer", "memory", "params")[: 4 if wide and not question.has_headings else 2]
        cells |= {"trained": words.trained(row.cost)} if words.trains_parts(answer) else {}
        cells |= dict(zip(names, _costs(row.cost)))
    return cells | ({"steps to base": row.steps} if wide and question.has_headings else {})


def _costs(cost: ArmCost | None) -> list[str]:
    if cost is None:
        return ["–"] * 4
    timed = (cost.train_step.ratio, cost.infer_n.ratio, cost.peak_memory.ratio)
    return [words.ratio(value) for value in (*timed, cost.params)]


def _legend(answer: Answer) -> Iterator[str]:
    """Yield the sentences below the table."""
    metric, mean = answer.metric, answer.base_mean
    reached = "no score of" if mean is None else metric.shown(mean)
    lower = "" if metric.higher_is_better else "; lower is better"
    name = f" ({single_line(answer.base.model.name)})" if len(answer.bases) == 1 else ""
    spread = f", {spread}" if (spread := words.base_spread(answer)) else ""
    yield f"{answer.base.name}{name}: {reached} {metric.title} ({' and '.join(answer.splits)}{lower}){spread}."
    if not answer.headline.effects:
        yield words.brief_claim(answer).capitalize()
        return
    unit = f", in{words.points(metric)}" if metric.unit else ""
    yield f"Effects are {answer.headline.meaning}{unit}, margin {answer.margin:g}; {words.brief_claim(answer)}"
    if answer.headline.against:
        yield "Costs are ratios."
        yield from words.remarks_on_costs((arm.name, arm.cost) for arm in answer.arms)


def print_evaluation(evaluation: Mapping[str, Any], console: Console | None = None) -> None:
    """Print every metric with its 95 % interval; `evaluation` is what `evaluate` or `over_seeds` returns."""
    console = console or Console()
    several = evaluation.get("checkpoints", [])
    first = several[0] if several else evaluation
    outputs = f"Mean of {len(several)} checkpoints" if several else first["checkpoint"]
    head = f"{outputs} on {first['images']:,} images of {first['data']} ({first['split']})"
    console.print(Text(single_line(head), style="bold"), soft_wrap=True)
    tables = []
    for has_protocol in (True, False):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2 if has_protocol else 1, 0, 0))
        if has_protocol:
            table.add_column("protocol", no_wrap=True)
        table.add_column("metric", overflow="fold", min_width=NAME)
        for heading in ("value", "95 % interval"):
            table.add_column(heading, justify="right", no_wrap=True)
        metrics = [metric_named(name) for name in evaluation["metrics"]]
        for protocol in first["protocols"]:
            rows = [metric for metric in metrics if metric.protocol == protocol or protocol not in PROTOCOLS]
            for row, metric in enumerate(rows):
                ends = " to ".join(metric.number(end) for end in evaluation["intervals"].get(metric.name, ()))
                title = metric.title if metric.higher_is_better else f"{metric.title}, lower is better"
                name = ["" if row else protocol] * has_protocol
                table.add_row(*name, title, metric.shown(evaluation["metrics"][metric.name]), ends)
        tables.append(table)
    console.print(_fitting(tables, console.width))
    fewshot = "; few-shot: over choices of training images" * ("fewshot" in first["protocols"])
    over = "the checkpoints, by Student's t" if several else f"the images{fewshot}"
    console.print(Text(f"Intervals are over {over}.", style="dim"), soft_wrap=True)


def shares(prediction: Mapping[str, Any]) -> Mapping[str, float]:
    """Return class -> probability, or fraction of the pixels, of one image that `predict` returned.

    Raises:
        UserError: the task predicts something else.
    """
    if (rows := prediction.get("probabilities", prediction.get("pixels"))) is None:
        raise UserError("Predictions of this task do not fit a table: write JSON (--format json).")
    return rows


def print_predictions(predictions: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print the likeliest classes of each image, predicted ones in bold; `predictions` is what `predict` returns."""
    console = console or Console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("image", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("of the pixels" if "pixels" in predictions[0] else "probability", justify="right", no_wrap=True)
    for prediction in predictions:
        for row, (name, p) in enumerate(shares(prediction).items()):
            style = "bold" if name in prediction["predicted"] else "dim"
            image = "" if row else single_line(prediction["image"])
            table.add_row(Text(image), Text(single_line(name), style=style), Text(f"{100 * p:.1f} %", style=style))
    console.print(table)
