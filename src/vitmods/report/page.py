"""The report of a study: everything the template shows, put into words and images here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vitmods.evals.metrics import Metric
from vitmods.report.drawing import draw
from vitmods.report.figures import Row, axes_of, curve_panel, forest
from vitmods.report.images import thumbnails
from vitmods.report.load import Curve, read_curves, read_results, read_samples
from vitmods.report.settings import differences, pairs, sizes, splits
from vitmods.report.svg import Inliner
from vitmods.report.tuning import tuning_panel
from vitmods.stats.effects import CANNOT_TELL, FRACTION, Effect, digits_of, scale_of
from vitmods.study import words
from vitmods.study.measure import TOP1
from vitmods.study.results import every_trial
from vitmods.study.store import write_text
from vitmods.study.tuning import mean_of
from vitmods.util.files import disk_errors

FEW_SEEDS = 5
LOGGED = (TOP1, "top5")


def write_report(study_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a study, finished or not, as one HTML file without outside parts; returns its path.

    Reads results.json, the trials' metrics.jsonl and, if there, samples.npz. `out` None: report.html in the folder.

    Raises:
        UserError: the folder holds no results, or the file cannot be written.
    """
    study = Path(study_dir)
    path = Path(out) if out is not None else study / "report.html"
    page = render(study)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, page)
    return path


def render(study: Path) -> str:
    """The page as text. The same study gives the same text."""
    environment = Environment(
        loader=PackageLoader("vitmods.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals.update(words=words, link=_link)
    css = Markup((Path(__file__).parent / "style.css").read_text(encoding="utf-8"))
    return environment.get_template("template.html").render(page=Page(study, read_results(study)), css=css)


@dataclass(frozen=True)
class ArmView:
    """One arm as the page shows it."""

    anchor: str
    name: str
    raw: Mapping[str, Any]
    effect: Effect | None
    base: Mapping[str, Any]
    scale: float

    @property
    def verdict(self) -> str:
        return self.effect.verdict if self.effect else CANNOT_TELL

    @property
    def cost(self) -> Mapping[str, Any]:
        return self.raw.get("cost") or {}

    @property
    def differences(self) -> list[tuple[str, str, str]]:
        """(setting, base's value, the arm's value), recipe overrides included."""
        return differences(self.base["config"], self.raw["config"]) + [
            (f"recipe: {key}", "", str(value)) for key, value in (self.raw.get("recipe") or {}).items()
        ]

    def status(self, seed: str) -> str:
        """How the trial of one seed stands."""
        return next((str(t["status"]) for t in self.raw["trials"] if str(t["seed"]) == seed), "not run")

    def difference(self, seed: str) -> float | None:
        """The paired difference of one seed, in points where the metric is a fraction."""
        mine, bases = self.raw["values"].get(seed), self.base["values"].get(seed)
        return None if mine is None or bases is None else self.scale * (mine - bases)


class Page:
    """What the template asks for, computed once."""

    def __init__(self, study: Path, results: dict[str, Any]) -> None:
        self.study = study
        self.results = results
        self.base = results["base"]
        self.metric = words.metric_of(results)
        self.counted = words.of_metric(self.metric.unit, self.metric.title)
        self.margin = float(results["margin"])
        self.inline = Inliner()

    @cached_property
    def arms(self) -> list[ArmView]:
        """Best verdict first."""
        views = [
            ArmView(f"arm{i}", str(raw["name"]), raw, words.effect_of(raw), self.base, scale_of(self.metric.unit))
            for i, raw in enumerate(self.results["arms"])
        ]
        return sorted(views, key=lambda view: words.rank(view.effect))

    @property
    def title(self) -> str:
        return f"{self.results['data']['name']}: which change helps {self.base['name']}?"

    @property
    def headline(self) -> str:
        return words.headline(view.effect.verdict if view.effect else None for view in self.arms)

    @property
    def seeds(self) -> list[str]:
        return list(self.base["values"])

    @cached_property
    def warnings(self) -> list[str]:
        """What a reader must know before trusting the page; the gravest first."""
        return [*self._incomplete(), *map(str, self.results["warnings"]), *self._few_seeds()]

    def _incomplete(self) -> Iterator[str]:
        if self.results["complete"]:
            return
        trials = [trial for _, _, trial in every_trial(self.results)]
        done = sum(trial["status"] in ("finished", "diverged") for trial in trials)
        yield (
            f"This study is not complete: {done} of {len(trials)} trials have ended. Every verdict is provisional; "
            "run the command at the foot of the page again to finish it."
        )

    def _few_seeds(self) -> Iterator[str]:
        if len(self.seeds) >= FEW_SEEDS:
            return
        found = sorted(v.effect.detectable for v in self.arms if v.effect and v.effect.detectable > 0)
        middle = found[len(found) // 2] if found else 0.0
        fraction = self.metric.unit == FRACTION
        size = f"{middle:.1f} points" if fraction else f"{middle:.2g}{words.points(self.metric.unit)}"
        power = f" An effect smaller than about {size} would likely be missed." if middle else ""
        if fraction and middle > words.ALL_POINTS:
            power = " Hardly any effect could be reported from none."
        yield f"{words.plural(len(self.seeds), 'seed')} only: intervals are wide, and most verdicts stay open.{power}"

    @cached_property
    def forests(self) -> list[Markup]:
        """The interval plot for wide and for narrow screens; none where no arm has a pair yet."""
        rows = [
            Row(view.name, view.effect, [d for seed in self.seeds if (d := view.difference(seed)) is not None])
            for view in self.arms
            if view.effect and view.effect.n
        ]
        if not rows:
            return []
        return [forest(rows, self.margin, self.counted, self.inline, narrow) for narrow in (False, True)]

    @property
    def digits(self) -> int:
        return digits_of(self.metric.unit)

    def score(self, value: float | None) -> str:
        """A value of the metric as the tables show it."""
        return words.score(self.metric, value)

    @property
    def percent(self) -> str:
        """What follows the metric's name in a table of its values."""
        return f" in {self.metric.unit}" if self.metric.unit else ""

    @property
    def tuned(self) -> Mapping[str, Any] | None:
        """What was tried for every arm; None where nothing was."""
        return self.results.get("tuned")

    @property
    def tuned_text(self) -> str:
        return words.tuned_text(self.results)

    @property
    def points(self) -> list[list[str]]:
        """The grid, a word or two a field of each point."""
        points = (point["values"] for point in self.base["tuning"]["points"])
        return [[words.point_text({name: value}) for name, value in values.items()] for values in points]

    def range(self, point: Mapping[str, Any]) -> str:
        """The lowest and the highest score of a point, where there are several."""
        scores = [score for score in point["scores"].values() if score is not None]
        return f"{self.score(min(scores))} to {self.score(max(scores))}" if len(scores) > 1 else ""

    def diverged(self, point: Mapping[str, Any]) -> int:
        return sum(trial["status"] == "diverged" for trial in point["trials"])

    @property
    def tunings(self) -> list[tuple[str, Mapping[str, Any]]]:
        """(arm, its tuning), base first."""
        return [("base", self.base["tuning"]), *((view.name, view.raw["tuning"]) for view in self.arms)]

    @cached_property
    def tuning_panels(self) -> list[tuple[str, Markup]]:
        base, on = self.base["tuning"], str((self.tuned or {})["on"])
        return [
            (view.name, tuning_panel(view.name, base, view.raw["tuning"], self.metric, on, self.inline))
            for view in self.arms
        ]

    @property
    def edges(self) -> list[str]:
        """Arms whose chosen value is the first or last that was tried, as `dpn: lr 0.001`."""
        return [
            f"{name}: {words.point_text({field: tuning['chosen'][field] for field in tuning['at_the_edge']})}"
            for name, tuning in self.tunings
            if tuning["at_the_edge"]
        ]

    @property
    def other_metrics(self) -> list[tuple[Metric, list[tuple[str, str]]]]:
        """(metric, [(arm, mean over seeds)]) of all that was measured beside the study's."""
        arms = [("base", self.base), *((view.name, view.raw) for view in self.arms)]
        record = self.results.get("other_metrics") or {}
        metrics = [Metric(m["name"], m["title"], "", m["higher_is_better"], m["unit"]) for m in record.values()]
        return [
            (metric, [(name, metric.shown(mean)) for name, arm in arms if (mean := _mean_of(arm, metric)) is not None])
            for metric in metrics
        ]

    @cached_property
    def curves(self) -> list[dict[str, Any]]:
        """One entry for each axis: its label and a panel an arm."""
        metric = self.metric.name if self.metric.name in LOGGED else TOP1
        base = read_curves(self.study, self.base["trials"], metric)
        arms = [(view, read_curves(self.study, view.raw["trials"], metric)) for view in self.arms]
        groups: list[list[Curve]] = [base, *(curves for _, curves in arms)]
        if not any(groups):
            return []
        return [
            {
                "label": axis.label,
                "panels": [
                    (view, curve_panel(view.name, base, curves, axis, self.curve_metric, self.inline))
                    for view, curves in arms
                    if curves
                ]
                or [(None, curve_panel("base", base, [], axis, self.curve_metric, self.inline))],
            }
            for axis in axes_of(groups)
        ]

    @property
    def curve_metric(self) -> str:
        """What the training logs on the way: top-1, whatever the study compares."""
        return self.metric.title if self.metric.name in LOGGED else words.METRICS[TOP1]

    @property
    def is_drawn(self) -> bool:
        """Whether base is a vitmods ViT; of other models there is a table of modules."""
        return "modules" not in self.base["config"]

    @property
    def base_drawing(self) -> Markup:
        return draw(self.base["config"], None, "Base")

    def drawing(self, view: ArmView) -> Markup:
        return draw(view.raw["config"], self.base["config"], view.name)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        return thumbnails(read_samples(self.study))

    @property
    def splits(self) -> list[dict[str, Any]]:
        return splits(self.results["data"])

    @property
    def sizes(self) -> str:
        return sizes(self.results["data"])

    def pairs(self, name: str) -> list[tuple[str, str]]:
        """Flat (setting, value) pairs of one part of the results."""
        return pairs(self.results[name])


def _mean_of(arm: Mapping[str, Any], metric: Metric) -> float | None:
    return mean_of((arm.get("other_metrics") or {}).get(metric.name, {}).values())


def _link(url: Any) -> str | None:
    """The address of a citation, if it is one that a browser may follow."""
    text = str(url or "")
    return text if text.startswith(("https://", "http://")) else None
