"""Effects as tables: text, Markdown, LaTeX."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from vitmods.stats.verdict import Effect, Verdict
from vitmods.util.latex import tabular

HEADER = ("arm", "effect", "95 % interval", "verdict", "on these images", "seeds", "sd ratio")


def rows(effects: Sequence[Effect]) -> list[tuple[str, ...]]:
    """One for each arm, in the order of `HEADER`."""
    return [
        (
            effect.arm,
            signed(effect.effect, effect.digits),
            interval(effect),
            verdict_cell(effect),
            f"± {(effect.seeds_high - effect.seeds_low) / 2:.{effect.digits}f}" if shown(effect) else "–",
            seeds(effect),
            "–" if math.isnan(effect.spread_ratio) else f"{effect.spread_ratio:.1f}",
        )
        for effect in effects
    ]


def text(effects: Sequence[Effect], notes: Sequence[str] = ()) -> str:
    """For a terminal."""
    table = [_header(effects), *rows(effects)]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *(["", *notes] if notes else [])])


def markdown(effects: Sequence[Effect], notes: Sequence[str] = ()) -> str:
    """A pipe table, and the notes as a list."""
    table = [_header(effects), ("---",) * len(HEADER), *rows(effects)]
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in table]
    return "\n".join([*lines, *(["", *(f"- {note}" for note in notes)] if notes else [])])


def as_html(effects: Sequence[Effect], notes: Sequence[str] = ()) -> str:
    """A table for a notebook, and the notes as a list."""
    lines = ["<table>"]
    for tag, row in [("th", _header(effects)), *(("td", row) for row in rows(effects))]:
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return "\n".join([*lines, "</table>", "<ul>", *(f"<li>{html.escape(note)}</li>" for note in notes), "</ul>"])


def latex(effects: Sequence[Effect]) -> str:
    """A `tabular` that fits a column."""
    return tabular(_header(effects), rows(effects))


def verdict_cell(effect: Effect) -> str:
    """Format a verdict: an open arm with where it leans, another with whether it is provisional."""
    leans = f", leans {effect.leans}" if effect.verdict == Verdict.OPEN and effect.leans else ""
    expects = f", expect {effect.expects}" if effect.expects else ""
    return f"{effect.verdict}{leans}{expects}{so_far(effect)}"


def so_far(effect: Effect) -> str:
    """Mark a provisional verdict; an open one is open in any case."""
    return ", so far" if effect.provisional and effect.verdict != Verdict.OPEN else ""


def seeds(effect: Effect) -> str:
    """Format the seeds of an arm, its failed trials, and the seeds of base where more are known: `4 (−1, base 16)`."""
    more = [f"−{effect.failures}"] * (effect.failures > 0) + [f"base {effect.base_n}"] * (effect.base_n > effect.n)
    return f"{effect.n} ({', '.join(more)})" if more else str(effect.n)


def interval(effect: Effect) -> str:
    """`[+0.60, +3.20]`, of the claim that the verdict makes; a dash where there is none."""
    low, high = effect.interval
    return "–" if math.isnan(low) else f"[{signed(low, effect.digits)}, {signed(high, effect.digits)}]"


def with_unit(effect: Effect) -> str:
    """`+1.90 [+0.60, +3.20] points`."""
    return f"{signed(effect.effect, effect.digits)} {interval(effect)} {effect.shown_unit}"


def shown(effect: Effect) -> bool:
    """Whether there is an interval."""
    return not math.isnan(effect.seeds_low)


def signed(value: float, digits: int = 2) -> str:
    """`+0.42`, with a real minus sign and no sign on zero; a dash for NaN."""
    if math.isnan(value):
        return "–"
    number = f"{value:+.{digits}f}"
    return number[1:] if float(number) == 0 else number.replace("-", "−")


def _header(effects: Sequence[Effect]) -> tuple[str, ...]:
    unit = effects[0].shown_unit if effects else ""
    return tuple(f"{cell} ({unit})" if cell == "effect" and unit else cell for cell in HEADER)
