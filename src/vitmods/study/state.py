"""A study's folder as it stands: how every trial ended, which points are chosen, and what is still to be done."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vitmods.study.measure import Measure, options_from
from vitmods.study.plan import Candidate, Evaluation, Settings, Trial
from vitmods.study.store import WARNINGS, StudyFolder, read_json, read_object
from vitmods.study.tuning import AS_IS, VAL, Grid, Point, choose
from vitmods.util.errors import UserError

Status = Literal["finished", "diverged", "failed", "damaged", "unfinished"]
HIDDEN = {"json": False}  # of a field that results.json leaves out


@dataclass(frozen=True)
class Curve:
    """The scores of one trial on the way, by the validation split; all have the same length."""

    step: tuple[int, ...] = ()
    wall_s: tuple[float, ...] = ()
    score: tuple[float, ...] = ()


@dataclass(frozen=True)
class TrialRecord:
    """How a trial stands on a split.

    status: `finished` with its metric known, `diverged`, `failed` (the next run tries again), `damaged` (a file of it
            cannot be read), or `unfinished`
    folder: below the study's
    point:  values of the recipe fields that are tuned
    """

    arm: str
    seed: int
    status: Status
    folder: str
    point: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    wall_s: float | None = None
    message: str | None = None
    warnings: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict, metadata=HIDDEN)
    curve: Curve = field(default=Curve(), metadata=HIDDEN)

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.arm, str(Point.from_dict(self.point)), f"seed {self.seed}")))

    @property
    def ended(self) -> bool:
        """Whether it has an outcome, so that no run repeats it."""
        return self.status in ("finished", "diverged")

    def score(self, metric: str) -> float | None:
        return self.metrics.get(metric) if self.status == "finished" else None


@dataclass(frozen=True)
class Selection:
    """What validation says of a candidate's points.

    scores: point -> seed -> the metric on val; None where the trial diverged or has not ended
    chosen: the best point once all trials have ended, else None; where nothing is tuned the recipe as it is
    """

    candidate: Candidate
    scores: Mapping[Point, Mapping[int, float | None]]
    chosen: Point | None

    @property
    def trials(self) -> list[Trial]:
        """Those that the candidate is evaluated by; none before the choice."""
        return [] if self.chosen is None else self.candidate.trials(self.chosen)


class StudyState:
    """The folder of a study, read once.

    trained:    every planned trial, as it stands on the split that trials are evaluated on by themselves
    selections: one for each candidate, in their order
    answered:   the trials of the selections, as they stand on the split that the answer is about
    """

    def __init__(self, folder: StudyFolder, settings: Settings, split: str):
        self.folder, self.settings, self.split = folder, settings, split
        own = settings.evaluated_on(split)
        self.trained = {trial: read_trial(folder, trial, own, settings.measure) for trial in settings.trials()}
        self.selections = [self._selection(candidate) for candidate in settings.candidates()]
        chosen = [trial for selection in self.selections for trial in selection.trials]
        self.answered = {
            trial: self.trained[trial] if own == split else read_trial(folder, trial, split, settings.measure)
            for trial in chosen
        }

    @property
    def records(self) -> dict[Trial, TrialRecord]:
        """Every trial, those that the answer counts as they stand on its split."""
        return {**self.trained, **self.answered}

    @property
    def missing(self) -> list[Trial]:
        """Trials without an outcome."""
        return [trial for trial, record in self.trained.items() if not record.ended]

    @property
    def evaluations(self) -> list[Evaluation]:
        """Of the chosen points' finished trials, on test. Where nothing is tuned, trials do that themselves."""
        finished = [trial for trial in self.answered if self.trained[trial].status == "finished"]
        return [Evaluation(trial, self.split) for trial in finished] if self.settings.grid else []

    @property
    def missing_evaluations(self) -> list[Evaluation]:
        return [one for one in self.evaluations if self.answered[one.trial].status != "finished"]

    def chosen_before(self, selection: Selection) -> list[Point]:
        """Points that are not chosen, but were when there were fewer seeds or values, and were evaluated on test."""
        others = [point for point in selection.scores if selection.chosen and point != selection.chosen]
        trials = {point: selection.candidate.trials(point) for point in others}
        return [point for point in others if any(self.folder.was_evaluated(one, self.split) for one in trials[point])]

    def _selection(self, candidate: Candidate) -> Selection:
        grid, metric = self.settings.grid, self.settings.measure.metric
        if not grid:
            return Selection(candidate, {}, AS_IS)
        records = {point: [self.trained[trial] for trial in candidate.trials(point)] for point in grid.points}
        scores = {point: {one.seed: one.score(metric.name) for one in found} for point, found in records.items()}
        ended = all(one.ended for found in records.values() for one in found)
        return Selection(candidate, scores, choose(scores, metric.higher_is_better) if ended else None)


def read_trial(folder: StudyFolder, trial: Trial, split: str, measure: Measure) -> TrialRecord:
    """A trial as its folder tells. What a protocol found with other options than the measure's is not known."""
    path = folder.trial(trial)
    record = TrialRecord(
        trial.arm.name, trial.seed, "unfinished", path.relative_to(folder.path).as_posix(), trial.point.to_dict()
    )
    try:
        result, found = read_object(path / "result.json"), folder.found(trial, split)
        environment = read_object(path / "config.json").get("environment", {})
        warned = tuple(map(str, read_json(path / WARNINGS) or ()))
        status, message = _status(result, path), result.get("message")
        asked = [
            one["metrics"] for one in found["protocols"].values() if options_from(one["options"]) == measure.options
        ]
        trained = result.get("metrics", {}) if result.get("split") == split and status != "failed" else {}
        metrics = {str(name): float(value) for some in (*asked, trained) for name, value in some.items()}
    except UserError as error:
        return replace(record, status="damaged", message=str(error))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        text = f"a file in {path} is damaged ({error!r}). Remove that folder and run the same command again."
        return replace(record, status="damaged", message=text)
    if status == "finished" and measure.name not in metrics:
        status, message = "failed" if found["failed"] else "unfinished", found["failed"]
    return replace(
        record, status=status, metrics=metrics, wall_s=result.get("wall_s"), message=message, warnings=warned,
        environment=environment,
    )  # fmt: skip


def _status(result: Mapping[str, Any], path: Path) -> Status:
    if not (path / "result.json").exists():
        return "unfinished"
    status: Status = result["status"]
    if status not in ("finished", "diverged", "failed"):
        raise ValueError(f"the status {status!r}")
    return status


def read_curves(path: Path, metrics: Iterable[str]) -> dict[str, Curve]:
    """What a trial's training logged on val of the metrics, as far as it did; a damaged row is left out."""
    try:
        lines = (path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    rows = [row for line in lines if (row := _row(line)) is not None]
    found = {}
    for name in metrics:
        known = [row for row in rows if name in row and math.isfinite(row[name])]
        if known:
            found[name] = Curve(*zip(*((row["step"], row.get("wall_s", math.nan), row[name]) for row in known)))
    return found


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # the last line of a trial that is being written, or was killed
        return None
    return row if isinstance(row, dict) and row.get("split") == VAL and "step" in row else None


def at_the_edge(grid: Grid, chosen: Point) -> list[str]:
    """Fields whose chosen number is the smallest or the largest that was tried: a wider grid may hold a better one."""
    numbers = {name: values for name, values in grid.fields if all(isinstance(one, int | float) for one in values)}
    tried = {name: values for name, values in numbers.items() if len(values) > 1}
    return [name for name, value in chosen.values if name in tried and value in (min(tried[name]), max(tried[name]))]
