"""The answer of a study as one small image for a README, a wiki or slides: the sentence, and the interval plot."""

from __future__ import annotations

import html
import re
import textwrap
from pathlib import Path

from vitmods.report import text
from vitmods.report.figures import clipped, forest
from vitmods.report.svg import Inliner
from vitmods.study.answer import Answer
from vitmods.util.text import plural

WIDTH, MARGIN, LETTERS = 900, 20, 66  # SVG units; letters of the headline that a line holds
_COLORS = re.compile(r":root \{(.*?)\}", re.S)
_RULES = (
    'text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif; '
    "font-variant-numeric: tabular-nums } .headline { font-size: 21px; font-weight: 700; fill: var(--ink) } "
    ".meta { font-size: 13.5px; fill: var(--muted) }"
)


def picture(answer: Answer) -> str:
    """A stand-alone SVG file, which follows the reader's light or dark setting. The same answer gives the same text."""
    effects = [effect for effect in text.ranked_effects(answer) if effect.n]
    lines = textwrap.wrap(text.headline(answer), LETTERS)
    parts = [_text("meta", 30, [clipped(_title(answer), 110)]), _text("headline", 60, lines)]
    top = 60 + 27 * (len(lines) - 1) + 26
    parts.append(_text("meta", top, [clipped(_numbers(answer), 120)]))
    top += 18
    if effects:
        plot = str(forest(effects, answer.margin, answer.metric, Inliner(), narrow=False))
        found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', plot)
        assert found is not None, "figures have a viewBox"
        width, height = map(float, found.groups())
        place = f'<svg x="{MARGIN}" y="{top}" width="{width:g}" height="{height:g}"'
        parts.append(plot.replace("<svg", place, 1))
        top += round(height)
    css = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    light, dark = (" ".join(colors.split()) for colors in _COLORS.findall(css)[:2])
    style = f"svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }} {_RULES}"
    size, label = f'width="{WIDTH}" height="{top + 12}"', html.escape(text.headline(answer), quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {top + 12}" role="img" '
        f'aria-label="{label}"><style>{style}</style><rect {size} rx="8" fill="var(--paper)"/>{"".join(parts)}</svg>\n'
    )


def _text(css_class: str, y: float, lines: list[str]) -> str:
    rows = (html.escape(line, quote=False) for line in lines)
    return "".join(
        f'<text class="{css_class}" x="{MARGIN}" y="{y + 27 * i:g}">{row}</text>' for i, row in enumerate(rows)
    )


def _title(answer: Answer) -> str:
    models = {str(one.values.get("base", answer.base.model.name)): None for one in answer.sweep}
    return f"vitmods study of {answer.data['name']}, {', '.join(models) or answer.base.model.name}"


def _numbers(answer: Answer) -> str:
    seeds = max((effect.n for effect in answer.headline.values()), default=0)
    metric, mean = answer.metric, answer.base_mean
    reached = f"{answer.base.name} reaches {metric.shown(mean)} {metric.title}" if mean is not None else ""
    trials = plural(sum(trial.ended for trial in answer.trials), "trial")
    claim = "95 % intervals, for other images too" if text.on_new_images(answer) else "95 % intervals for these images"
    return " · ".join(filter(None, [reached, plural(seeds, "seed"), trials, claim, answer.created[:10]]))
