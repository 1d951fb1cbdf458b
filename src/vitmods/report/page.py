"""The report of a study: everything the template shows, put into words and images here.

The answer of a study as one small image for a README, a wiki or slides: the sentence, and the interval plot.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vitmods.report import facts, text
from vitmods.report.advice import what_now
from vitmods.report.designs import Row, Step, all_steps_to_base, factor_arms, several_bases, short_name, sweep_rows
from vitmods.report.drawing import draw
from vitmods.report.figures import axes_of, clipped, curve_panel, forest, lines, sweep_panel, tuning_panel
from vitmods.report.gallery import Shown, inside_the_models
from vitmods.report.published import Comparison, comparison
from vitmods.report.svg import Inliner
from vitmods.report.templates import templates
from vitmods.stats.decision import Pair
from vitmods.stats.tables import signed
from vitmods.stats.verdict import Effect
from vitmods.study.answer import VIEWS, Answer, ArmAnswer, ArmCost, BaseCost, Tuning
from vitmods.study.arms import BASE
from vitmods.study.plan import mean_of
from vitmods.study.state import NLL
from vitmods.study.store import slug
from vitmods.tasks.metrics import Metric
from vitmods.util.address import place
from vitmods.util.files import disk_errors, write_atomically
from vitmods.util.remote import upload
from vitmods.util.text import plural

WIDTH, MARGIN, LETTERS = 900, 20, 66  # SVG units; letters of the headline that a line holds
_COLORS = re.compile(r":root \{(.*?)\}", re.S)
_RULES = (
    'text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif; '
    "font-variant-numeric: tabular-nums } .headline { font-size: 21px; font-weight: 700; fill: var(--ink) } "
    ".meta { font-size: 13.5px; fill: var(--muted) }"
)


def summary(answer: Answer) -> str:
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


@VIEWS.register("html")
def write_report(answer: Answer, out: str | Path | None = None) -> Path:
    """Write the report of a study, finished or not, as one HTML file without outside parts; returns its path.

    `out` None: report.html in the study's folder, or report-dpn.html of one with the reference dpn. A name that ends
    with .svg gets the sentence and the interval plot alone, as an image.

    Raises:
        UserError: the file cannot be written.
    """
    name = "report" if answer.base.name == BASE else f"report-{slug(answer.base.name)}"
    path = place(out) if out is not None else answer.path / f"{name}.html"
    page = summary(answer) if path.suffix.lower() == ".svg" else render(answer)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(page.encode()))
    upload(path)
    return path


def render(answer: Answer) -> str:
    """The page as text. The same answer gives the same text."""
    return templates().get_template("template.html").render(page=Page(answer), a=answer)


@dataclass(frozen=True)
class ArmView:
    """One arm as the page shows it."""

    anchor: str
    arm: ArmAnswer
    effect: Effect
    base: ArmAnswer
    alone: bool = True  #: whether its model has no other changes

    @property
    def name(self) -> str:
        return self.arm.name

    @property
    def config_differences(self) -> list[tuple[str, str, str]]:
        """(setting, base's value, the arm's value), recipe overrides included."""
        overrides = [(f"recipe: {key}", "", str(value)) for key, value in self.arm.recipe.items()]
        return facts.differences(self.base.model.config, self.arm.model.config) + overrides

    def status(self, seed: int) -> str:
        """How the trial of one seed stands; of one that predicts a single class, this."""
        trial = next((trial for trial in self.arm.counted if trial.seed == seed), None)
        return "not run" if trial is None else "a single class" if trial.constant else trial.status

    def difference(self, seed: int, metric: Metric) -> str:
        """To base with the same seed; empty where one of the two has no score."""
        mine, bases = self.arm.scores.get(seed), self.base.scores.get(seed)
        if mine is None or bases is None:
            return ""
        return signed(text.scale_of(metric) * (mine - bases), self.effect.digits)

    @property
    def published(self) -> str:
        return "; ".join(change.published for change in self.arm.model.changes if change.published)


class Page:
    """What the template asks for beside the answer itself, computed once."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.metric = answer, answer.metric
        self.inline = Inliner()

    @cached_property
    def arms(self) -> list[ArmView]:
        """Best verdict first."""
        return [
            ArmView(f"arm{self.answer.arms.index(arm)}", arm, effect, self.answer.base)
            for arm, effect in text.ranked(self.answer)
        ]

    @cached_property
    def cards(self) -> list[ArmView]:
        """What is explained: the changes of a factorial study, else the arms."""
        if not self.answer.factorial:
            return self.arms
        arms = enumerate(factor_arms(self.answer))
        effects = self.answer.factorial.effects
        return [ArmView(f"change{i}", arm, effects[arm.name], self.answer.base, alone) for i, (arm, alone) in arms]

    @property
    def title(self) -> str:
        base = "" if several_bases(self.answer) else f" {self.answer.base.model.name}"
        return f"{self.answer.data['name']}: which change helps{base}?"

    @property
    def costs(self) -> list[tuple[str, BaseCost | None, list[tuple[str, ArmCost | None]]]]:
        """Of base and of the arms; with several bases, for each."""
        names = [view.name for view in self.arms]
        if not several_bases(self.answer):
            return [("", self.answer.base_cost, [(view.name, view.arm.cost) for view in self.arms])]
        first = {setting.values["base"]: setting for setting in reversed(self.answer.sweep)}
        return [(base, one.base_cost, [(name, one.costs.get(name)) for name in names]) for base, one in
                reversed(first.items())]  # fmt: skip

    @property
    def swept(self) -> str:
        return " and ".join(self.answer.sweep[0].values)

    @cached_property
    def sweep_rows(self) -> list[Row]:
        return sweep_rows(self.answer)

    @cached_property
    def sweep_panels(self) -> list[tuple[str, Markup]]:
        """One an arm: the metric under each setting."""
        names = [short_name(setting) for setting in self.answer.sweep]
        base, *arms = [[row for row in self.sweep_rows if row.arm is arm] for arm in self.answer.every_arm]
        means, shown = [row.mean for row in base], [(rows[0].arm.name, rows) for rows in arms]
        return [
            (name, sweep_panel(name, names, means, [(row.mean, row.effect) for row in rows], self.metric, self.inline))
            for name, rows in shown
        ]

    @property
    def steps_to_base(self) -> dict[str, str]:
        return dict(all_steps_to_base(self.answer))

    @cached_property
    def seeds(self) -> list[int]:
        """Those with which a trial has ended."""
        arms = self.answer.every_arm
        ended = {trial.seed for arm in arms for trial in arm.counted if trial.ended or trial.status == "failed"}
        return [seed for seed in self.answer.base.scores if seed in ended]

    @property
    def other_warnings(self) -> list[str]:
        return [warning for warning in self.answer.warnings if warning not in self.answer.doubts]

    @cached_property
    def forests(self) -> list[Markup]:
        """The interval plot for wide and for narrow screens; none where no arm shares a seed with base yet."""
        effects = [effect for effect in text.ranked_effects(self.answer) if effect.n]
        margin = self.answer.margin
        return [forest(effects, margin, self.metric, self.inline, narrow) for narrow in (False, True) if effects]

    @cached_property
    def steps(self) -> list[Step]:
        return what_now(self.answer)

    @property
    def pairs(self) -> list[tuple[str, str, Pair]]:
        """(arm, other, arm minus other); empty of two."""
        pairs = self.answer.decision.pairs
        return [(arm, other, pair) for (arm, other), pair in pairs.items()] if len(pairs) > 1 else []

    @property
    def loss(self) -> Metric | None:
        """Log loss, where it was measured beside another metric."""
        return self.answer.other_metrics.get(NLL)

    @property
    def published(self) -> list[ArmView]:
        """Arms that have a published gain to stand beside ours."""
        return [view for view in self.cards if view.published]

    @cached_property
    def comparison(self) -> Comparison | None:
        return comparison(self.answer)

    @property
    def base_names(self) -> str:
        """The models that arms are compared on."""
        if not several_bases(self.answer):
            return self.answer.base.model.name
        return ", ".join(dict.fromkeys(str(setting.values["base"]) for setting in self.answer.sweep))

    @property
    def split(self) -> str:
        """The images that the answer is about."""
        return " and ".join(self.answer.splits)

    @property
    def test_images(self) -> int:
        """How many there are in these splits."""
        return sum(self.answer.data["splits"][name]["count"] for name in self.answer.splits)

    @property
    def digits(self) -> int:
        return 2 if self.metric.unit == "%" else 4

    def score(self, value: float | None) -> str:
        """A value of the metric as the tables show it."""
        return text.score(self.metric, value)

    @property
    def percent(self) -> str:
        """What follows the metric's name in a table of its values."""
        return f" in {self.metric.unit}" if self.metric.unit else ""

    @property
    def points(self) -> list[list[str]]:
        """The grid, a word or two a field of each point."""
        points = self.answer.base.tuning.points if self.answer.base.tuning else ()
        return [[text.point_text({name: value}) for name, value in point.values.items()] for point in points]

    def range(self, scores: Mapping[int, float | None]) -> str:
        """The lowest and the highest of several scores."""
        known = [score for score in scores.values() if score is not None]
        return f"{self.score(min(known))} to {self.score(max(known))}" if len(known) > 1 else ""

    def diverged(self, arm: ArmAnswer, point: Mapping[str, Any]) -> int:
        return sum(trial.status == "diverged" and trial.point == point for trial in arm.trials)

    @property
    def tuned(self) -> list[tuple[ArmAnswer, Tuning]]:
        """(arm, its tuning), base first; empty where nothing was tuned."""
        arms = (self.answer.base, *(view.arm for view in self.arms))
        return [(arm, arm.tuning) for arm in arms if arm.tuning]

    @cached_property
    def tuning_panels(self) -> list[tuple[str, Markup]]:
        (_, base), *arms = self.tuned
        return [(arm.name, tuning_panel(arm.name, base, tuning, self.metric, self.inline)) for arm, tuning in arms]

    @property
    def edges(self) -> list[str]:
        """Arms whose chosen value is the first or last that was tried, as `dpn: lr 0.001`."""
        return [
            f"{arm.name}: {text.point_text({field: (tuning.chosen or {})[field] for field in tuning.at_the_edge})}"
            for arm, tuning in self.tuned
            if tuning.at_the_edge
        ]

    @property
    def other_metrics(self) -> list[Metric]:
        """All that was measured beside the study's."""
        return list(self.answer.other_metrics.values())

    @property
    def other_means(self) -> list[tuple[str, list[str]]]:
        """(arm, its mean over seeds of each of the other metrics), base first."""
        known = self.answer.other_metrics.items()
        arms = (self.answer.base, *(view.arm for view in self.arms))
        return [(arm.name, [_mean(metric, arm.other_metrics.get(name, {})) for name, metric in known]) for arm in arms]

    @cached_property
    def curves(self) -> list[dict[str, Any]]:
        """One entry for each axis: its label and a panel an arm."""
        metric = self.answer.curves
        if metric is None:
            return []
        found: list[dict[str, Any]] = []
        for setting in [setting.values for setting in self.answer.sweep] or [{}]:
            place = f", {text.point_text(setting)}" if setting else ""
            base, *rest = (
                lines([trial for trial in arm.counted if trial.setting == setting], metric)
                for arm in (self.answer.base, *(view.arm for view in self.arms))
            )
            if not any((base, *rest)):
                continue
            arms = [(view.name + place, own) for view, own in zip(self.arms, rest, strict=True) if own]
            for i, axis in enumerate(axes_of([base, *rest])):
                panels = [
                    (name, curve_panel(name, base, own, axis, metric, self.inline))
                    for name, own in arms or [("base" + place, [])]
                ]
                if i == len(found):
                    found.append({"label": axis.label, "panels": []})
                found[i]["panels"] += panels
        return found

    @property
    def is_drawn(self) -> bool:
        """Whether base is a vitmods ViT; of other models there is a table of modules."""
        return "modules" not in self.answer.base.model.config

    @property
    def base_drawing(self) -> Markup:
        return draw(self.answer.base.model.config, None, "Base")

    def drawing(self, view: ArmView) -> Markup:
        return draw(view.arm.model.config, self.answer.base.model.config, view.name)

    @cached_property
    def inside(self) -> list[Shown]:
        """Figures of what trials recorded and of their weights."""
        return inside_the_models(self.answer, self.inline)

    @cached_property
    def samples(self) -> list[dict[str, str | bool]]:
        return facts.thumbnails(self.answer.samples)

    @cached_property
    def examples(self) -> facts.ExampleTable | None:
        """Evaluated images with what every arm finds in them, by its first trial that has any."""
        arms = (self.answer.base, *(view.arm for view in self.arms))
        trials = {
            arm.name: [self.answer.path / trial.folder for trial in arm.counted if trial.status == "finished"]
            for arm in arms
        }
        return facts.example_table(trials)


def _mean(metric: Metric, scores: Mapping[int, float]) -> str:
    mean = mean_of(scores.values())
    return "–" if mean is None else metric.shown(mean)
