"""The report of a study: everything the template shows, as text and images.

`summary` writes the answer as one small image for a README, a wiki or slides: the headline and the interval plot.

Sections that other packages add to the report of a study.
"""

from __future__ import annotations

import html
import re
import textwrap
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from markupsafe import Markup

from vitmods.report import text
from vitmods.report.advice import next_steps
from vitmods.report.drawing import draw
from vitmods.report.evaluation import light
from vitmods.report.figures import (
    COLOUR,
    Inliner,
    axes_of,
    clipped,
    curve_panel,
    figure,
    file_of,
    forest,
    has_arrows,
    recolor,
    sweep_panel,
    tuning_panel,
)
from vitmods.report.templates import ExampleTable, differences, example_table, templates
from vitmods.stats.tables import signed
from vitmods.stats.verdict import Effect
from vitmods.study.answer import VIEWS, Answer
from vitmods.study.arms import BASE
from vitmods.study.grid import Point
from vitmods.study.questions import Question
from vitmods.study.results import ArmAnswer, ArmCost, BaseCost, Tuning
from vitmods.study.state import TrialRecord
from vitmods.study.store import slug
from vitmods.tasks.metrics import Metric
from vitmods.util.address import place
from vitmods.util.limits import read_bytes
from vitmods.util.registry import Registry
from vitmods.util.remote import write_output
from vitmods.util.text import plural


@dataclass(frozen=True)
class Section:
    """A section of the report, empty if it does not apply to a study.

    after: position on the page: after the verdicts, or after the models.
    html: returns markup for the page; the Inliner inlines its figures.
    text: returns renderables of rich for a terminal.
    papers: returns (paper, url) of the papers to cite, in the form of `Change.paper`.
    published: returns what they print, for a column of the table of LaTeX: (heading, arm) -> text; and a note on it.
    """

    after: Literal["verdicts", "models"]
    html: Callable[[Answer, Inliner], str]
    text: Callable[[Answer], list[Any]] = lambda answer: []
    papers: Callable[[Answer], list[tuple[str, str]]] = lambda answer: []
    published: Callable[[Answer], tuple[Mapping[tuple[str, str], str], str]] = lambda answer: ({}, "")


SECTIONS: Registry[Section] = Registry("report section", "vitmods.papers.comparison", "vitmods.analysis.gallery")


RELOAD_S = 20  # between two readings of the page of a running study
WIDTH, MARGIN = 900, 20  # in SVG units, of the image of an answer


def summary_lines(answer: Answer, narrow: bool) -> tuple[list[tuple[str, int, str]], int]:
    """Lay out the title, the headline, and base, seeds, trials and date of an answer: each line's kind (`headline` or
    `meta`), height and text. Returns also the plot's place."""
    metric, mean = answer.metric, answer.base_mean
    facts = [
        f"{answer.base.name} reaches {metric.shown(mean)} {metric.title}" if mean is not None else "",
        plural(max((effect.n for effect in answer.headline.effects.values()), default=0), "seed"),
        plural(sum(trial.ended for trial in answer.trials), "trial"),
        "95 % intervals, generalizing to new images" if text.on_new_images(answer) else "95 % intervals, these images",
        answer.created[:10],
    ]
    title = f"vitmods study of {answer.data['name']}, {', '.join(answer.bases)}"
    width, head_width, facts_width = (48, 34, 50) if narrow else (110, 66, 120)  # in letters
    above = [textwrap.wrap(clipped(title, 2 * width), width), textwrap.wrap(text.headline(answer), head_width)]
    above += [textwrap.wrap(clipped(" · ".join(filter(None, facts)), 4 * facts_width), facts_width)]
    lines, y = list[tuple[str, int, str]](), 12
    for kind, step, texts in zip(("meta", "headline", "meta"), (18, 24 if narrow else 27, 18), above, strict=True):
        lines += [(kind, y + step * (i + 1), line) for i, line in enumerate(texts)]
        y += step * len(texts) + (4 if kind == "meta" else 7)
    return lines, y + 10


def summary(answer: Answer, narrow: bool = False) -> str:
    """Return a stand-alone SVG file, which follows the reader's light or dark setting; deterministic.

    narrow: for a phone's screen, with every verdict above its interval
    """
    plot = forest(text.plotted_effects(answer), answer.margin, answer.metric, Inliner(), narrow)
    (lines, plot_at), plot_height = summary_lines(answer, narrow), 0
    if plot:
        view = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', plot)
        assert view is not None, "figures have a viewBox"
        plot_width, plot_height = (round(float(side)) for side in view.groups())
        place = f'x="{MARGIN}" y="{plot_at}" width="{plot_width}" height="{plot_height}"'
        plot = Markup(str(plot).replace("<svg", f"<svg {place}", 1))
    css = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    light, dark = (" ".join(colors.split()) for colors in re.findall(r":root \{(.*?)\}", css, re.S)[:2])
    return templates().get_template("summary.svg").render(
        width=390 if narrow else WIDTH, height=plot_at + plot_height + 12, margin=MARGIN, light=Markup(light),
        dark=Markup(dark), size=18 if narrow else 21, lines=lines, label=text.headline(answer), plot=plot,
    ) + "\n"  # fmt: skip


def summary_figure(answer: Answer) -> Any:
    """Draw the same as a matplotlib figure in the light colors, for a paper."""
    lines, plot_at = summary_lines(answer, narrow=False)
    plots: list[Any] = []

    def keep(drawn: Any, label: str, css_class: str) -> Markup:
        plots.append(drawn)
        return Markup()

    forest(text.plotted_effects(answer), answer.margin, answer.metric, keep, narrow=False)
    if not plots:
        with figure(860, 1) as empty:
            plots.append(empty)
    (drawn,) = plots
    plot_width, plot_height = 72 * drawn.get_size_inches()
    height = plot_at + plot_height + 12
    wide, high = plot_width / WIDTH, plot_height / height
    for axes in drawn.axes:
        place = axes.get_position()
        x, y = MARGIN / WIDTH + place.x0 * wide, 12 / height + place.y0 * high
        axes.set_position((x, y, place.width * wide, place.height * high))
    drawn.set_size_inches(WIDTH / 72, height / 72)
    for kind, line_at, line in lines:  # matplotlib's letters are wider than those of browsers
        size, weight, color = (17, "bold", "ink") if kind == "headline" else (11, "normal", "muted")
        drawn.text(MARGIN / WIDTH, 1 - line_at / height, line, fontsize=size, fontweight=weight, color=COLOUR[color],
                   parse_math=False)  # fmt: skip
    recolor(drawn, light())
    return drawn


class ReportFile(type(Path())):  # type: ignore[misc]
    """The path of a report, whose content a notebook shows."""

    def _repr_html_(self) -> str | None:
        if self.suffix.lower() not in (".html", ".svg", ".png", ".pdf") or not self.is_file():
            return None  # a path that was made from it
        kind, content = self.suffix.lower(), read_bytes(Path(self), "text")
        if kind == ".svg":
            return content.decode()
        if kind in (".png", ".pdf"):
            place = f"data:{'image/png' if kind == '.png' else 'application/pdf'};base64,{b64encode(content).decode()}"
            return f'<embed src="{place}" width="100%">'
        return (
            f'<iframe srcdoc="{html.escape(content.decode())}" style="width: 100%; height: 40em; border: 0"></iframe>'
        )


@VIEWS.register("notebook")
def notebook(answer: Answer) -> str:
    """Return the headline, the intervals as a plot, and the table of effects."""
    if not answer.arms:
        return f"<pre>{html.escape(repr(answer))}</pre>"
    return summary(answer) + answer.headline.decision(answer.decision)._repr_html_()


@VIEWS.register("html")
def write_report(answer: Answer, out: str | Path | None = None) -> Path:
    """Write the report of a study, finished or not, as one self-contained HTML file; returns its path.

    `out` None: report.html in the study's folder, or report-dpn.html if the reference is dpn. A name that ends with
    .svg, .pdf or .png gets a figure of the headline and the interval plot.

    Raises:
        UserError: the file cannot be written.
    """
    name = "report" if answer.base.name == BASE else f"report-{slug(answer.base.name)}"
    path = place(out) if out is not None else answer.path / f"{name}.html"
    kind = path.suffix.lower()
    if kind in (".pdf", ".png"):
        content = file_of(summary_figure(answer), kind[1:])
    else:
        content = (summary(answer) if kind == ".svg" else render(answer)).encode()
    return ReportFile(write_output(path, content))


def render(answer: Answer) -> str:
    """Return the page as text; deterministic. The page of a running study reloads itself."""
    template = templates().get_template("template.html")
    return template.render(page=Page(answer), a=answer, next_steps=next_steps, reload_s=RELOAD_S)


@dataclass(frozen=True)
class ArmView:
    """An arm as the page shows it; `alone`: its model does not have other changes."""

    anchor: str
    arm: ArmAnswer
    effect: Effect
    base: ArmAnswer
    alone: bool = True

    @property
    def name(self) -> str:
        return self.arm.name

    @property
    def config_differences(self) -> list[tuple[str, str, str]]:
        """(setting, base's value, the arm's value), recipe overrides included."""
        overrides = [(f"recipe: {key}", "", str(value)) for key, value in self.arm.recipe.items()]
        return differences(self.base.model.config, self.arm.model.config) + overrides

    def status(self, seed: int) -> str:
        """Status of the trial with a seed; `a single class` if it predicts only one, a dash if none is planned."""
        trial = next((trial for trial in self.arm.counted if trial.seed == seed), None)
        if trial is None:
            return "not run" if seed in self.arm.scores else "\N{EN DASH}"
        return "a single class" if trial.constant else trial.status

    def difference(self, seed: int, metric: Metric) -> str:
        """Difference to base with the same seed; empty if a score is missing."""
        arm, base = self.arm.scores.get(seed), self.base.scores.get(seed)
        return "" if arm is None or base is None else signed(text.scale_of(metric) * (arm - base), self.effect.digits)

    @property
    def published(self) -> str:
        return "; ".join(change.published for change in self.arm.model.changes if change.published)


class Tuned(NamedTuple):
    """An arm of a tuned study, under one setting of a sweep, and the trials that its points were compared by."""

    name: str
    tuning: Tuning
    trials: Sequence[TrialRecord]

    def diverged(self, point: Mapping[str, Any]) -> int:
        return sum(trial.status == "diverged" and trial.point == point for trial in self.trials)


class Page:
    """Values and plots that the template needs in addition to the answer, each computed once."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.metric = answer, answer.metric
        self.inline = Inliner()
        self.digits = 2 if self.metric.unit == "%" else 4
        self.percent = f" in {self.metric.unit}" if self.metric.unit else ""
        self.split = " and ".join(answer.splits)
        self.test_images = sum(answer.data["splits"][name]["count"] for name in answer.splits)

    @cached_property
    def arms(self) -> list[ArmView]:
        """Best verdict first."""
        return [
            ArmView(f"arm{self.answer.arms.index(arm)}", arm, effect, self.answer.base)
            for arm, effect in text.ranked(self.answer)
        ]

    @property
    def every_arm(self) -> tuple[ArmAnswer, ...]:
        """Base, then the arms in the same order."""
        return (self.answer.base, *(view.arm for view in self.arms))

    @cached_property
    def cards(self) -> list[ArmView]:
        """What the headline compares, best verdict first."""
        effects, arms = text.ranked_effects(self.answer), text.subjects(self.answer)
        views = {arm.name: (f"subject{i}", arm, alone) for i, (arm, alone) in enumerate(arms)}
        placed = [(effect, *views[effect.arm]) for effect in effects]
        return [ArmView(anchor, arm, effect, self.answer.base, alone) for effect, anchor, arm, alone in placed]

    @property
    def title(self) -> str:
        base = "" if len(self.answer.bases) > 1 else self.answer.bases[0]
        return (
            f"{self.answer.data['name']}: {f'which change helps {base}'.rstrip() + '?' if self.answer.arms else base}"
        )

    @property
    def costs(self) -> list[tuple[str, BaseCost | None, list[tuple[str, ArmCost | None]]]]:
        """(name of base, its cost, the costs of its arms); the name is empty if base is not swept over."""
        settings = {setting.values.get("base", ""): setting for setting in reversed(self.answer.under)}
        return [
            (base, setting.base_cost, [(view.name, setting.costs.get(view.name)) for view in self.arms])
            for base, setting in reversed(settings.items())
        ]

    @property
    def base_costs(self) -> dict[str, BaseCost]:
        """Setting -> the cost of its base, where bases differ."""
        settings = self.answer.under if len(self.answer.bases) > 1 else ()
        return {setting.name: setting.base_cost for setting in settings if setting.base_cost}

    @cached_property
    def anchors(self) -> dict[str, str]:
        """Label of the headline -> its card on the page."""
        return {view.name: view.anchor for view in self.cards}

    @cached_property
    def tables(self) -> list[tuple[Question, dict[str, list[text.Row]], list[str]]]:
        """Each question, its rows by heading, and the titles of the questions that are columns of it; the headline
        is first."""
        return [
            (question, text.rows_of(self.answer, name), [part.title for part in text.columns_of(self.answer, name)])
            for name, question in self.answer.questions.items()
            if question.is_shown
        ]

    def panels(self, rows: Mapping[str, Sequence[text.Row]]) -> list[tuple[str, Markup]]:
        """(arm, its plot of the metric under each heading); empty without headings."""
        if "" in rows:
            return []
        settings = {setting.name: setting.values for setting in self.answer.under}
        names = [name.partition("=")[2] if len(settings[name]) == 1 else name for name in rows]
        base, *arms = zip(*rows.values(), strict=True)
        drawn = [(of_arm[0].label, [(row.mean, row.effect) for row in of_arm]) for of_arm in arms]
        means = [row.mean for row in base]
        return [(name, sweep_panel(name, names, means, arm, self.metric, self.inline)) for name, arm in drawn]

    @property
    def steps_to_base(self) -> dict[str, str]:
        """Arm -> the steps until base's final score; empty for sweeps, and if no trial was evaluated on val."""
        steps = {arm.name: text.steps_to_base(arm.counted) for arm in self.answer.every_arm}
        return {} if len(self.answer.under) > 1 or set(steps.values()) == {"–"} else steps

    @cached_property
    def seeds(self) -> list[int]:
        """Seeds with which a trial has ended."""
        arms = self.answer.every_arm
        ended = {trial.seed for arm in arms for trial in arm.counted if trial.ended or trial.status == "failed"}
        return [seed for seed in self.answer.base.scores if seed in ended]

    @cached_property
    def forests(self) -> list[Markup]:
        """The interval plot for wide and for narrow screens; empty while no arm shares a seed with base."""
        effects, margin = text.plotted_effects(self.answer), self.answer.margin
        return [forest(effects, margin, self.metric, self.inline, narrow) for narrow in (False, True) if effects]

    @cached_property
    def has_arrows(self) -> bool:
        return has_arrows(text.plotted_effects(self.answer), self.answer.margin)

    def sections(self, after: str) -> list[Markup]:
        """Markup that other packages add after a part of the page."""
        added = (section.html(self.answer, self.inline) for section in SECTIONS.values() if section.after == after)
        return [Markup(html) for html in added if html]

    def score(self, value: float | None) -> str:
        """Format a value of the metric for a table."""
        return text.score(self.metric, value)

    def range(self, scores: Mapping[int, float | None]) -> str:
        """The lowest and the highest of several scores; empty with fewer than two."""
        values = [score for score in scores.values() if score is not None]
        return f"{self.score(min(values))} to {self.score(max(values))}" if len(values) > 1 else ""

    @cached_property
    def tuned(self) -> dict[str, list[Tuned]]:
        """Setting of a sweep, or "" -> its tuned arms, base first; empty if nothing was tuned."""
        return {
            setting: [
                Tuned(
                    ", ".join(filter(None, (arm.name, setting))),
                    arms[arm.name],
                    [t for t in arm.trials if t.for_tuning and str(Point.from_dict(t.setting)) == setting],
                )
                for arm in self.every_arm
            ]
            for setting, arms in self.answer.tunings.items()
        }

    @cached_property
    def tuning_panels(self) -> list[tuple[str, Markup]]:
        return [
            (arm.name, tuning_panel(arm.name, base.tuning, arm.tuning, self.metric, self.inline))
            for base, *arms in self.tuned.values()
            for arm in arms
        ]

    @property
    def edges(self) -> list[str]:
        """Arms whose chosen value is the first or last of the grid, as `dpn: lr 0.001`."""
        edges = [(arm.name, arm.tuning) for arms in self.tuned.values() for arm in arms if arm.tuning.at_the_edge]
        return [
            f"{name}: {text.point_text({field: (tuning.chosen or {})[field] for field in tuning.at_the_edge})}"
            for name, tuning in edges
        ]

    @cached_property
    def curves(self) -> dict[str, list[tuple[str, Markup]]]:
        """Label of an axis -> (arm, its panel)."""
        panels: dict[str, list[tuple[str, Markup]]] = {}
        if (metric := self.answer.curves) is None:
            return panels
        for setting in [setting.values for setting in self.answer.under]:
            suffix = f", {text.point_text(setting)}" if setting else ""
            base, *arms = (
                [trial for trial in arm.counted if trial.setting == setting and trial.curve.step]
                for arm in self.every_arm
            )
            if not any((base, *arms)):
                continue
            evaluated = [(view.name, trials) for view, trials in zip(self.arms, arms, strict=True) if trials]
            for axis in axes_of([base, *arms]):
                panels.setdefault(axis.label, []).extend(
                    (name + suffix, curve_panel(name + suffix, base, trials, axis, metric, self.inline))
                    for name, trials in evaluated or [("base", [])]
                )
        return panels

    @property
    def curve_marks(self) -> str:
        """What the learning curves have: lines, bands, and marks of trials that did not finish."""
        settings = [setting.values for setting in self.answer.under]
        groups = [
            [trial.status for trial in arm.counted if trial.setting == setting and trial.curve.step]
            for arm in self.every_arm
            for setting in settings
        ]
        finished = [statuses.count("finished") for statuses in groups]
        others = {status for statuses in groups for status in statuses} - {"finished"}
        marks = {
            "Line: mean over finished seeds.": any(finished),
            "Band: their range.": max(finished, default=0) > 1,
            "Dashed: a trial that did not finish.": bool(others),
            "Cross: diverged or failed.": bool(others - {"unfinished"}),
        }
        return " ".join(mark for mark, is_there in marks.items() if is_there)

    def drawing(self, view: ArmView | None = None) -> Markup:
        """Draw an arm, or base."""
        base = self.answer.base.model.config
        return draw(view.arm.model.config, base, view.name) if view else draw(base, None, "Base")

    @cached_property
    def examples(self) -> ExampleTable | None:
        """Evaluated images with the predictions of each arm's first trial that saved any."""
        return example_table(
            {
                arm.name: [self.answer.path / trial.folder for trial in arm.counted if trial.status == "finished"]
                for arm in self.every_arm
            }
        )
