"""A study's folder as it stands: how every trial ended, what was chosen, and the scores that count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitmods.study.measure import Measure
from vitmods.study.plan import Candidate, Settings, Trial
from vitmods.study.selection import Selection, at_the_edge, selections
from vitmods.study.store import StudyFolder
from vitmods.study.tuning import VAL, mean_of


@dataclass(frozen=True)
class TrialEnd:
    """How a trial stands on a split: `finished`, `diverged`, `failed` (the next run tries again) or `unfinished`."""

    trial: Trial
    status: str
    folder: str
    metrics: Mapping[str, float]
    wall_s: float | None
    message: str | None

    def score(self, metric: str) -> float | None:
        return self.metrics.get(metric) if self.status == "finished" else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "seed": self.trial.seed,
            "status": self.status,
            "folder": self.folder,
            "wall_s": self.wall_s,
            "message": self.message,
        }


def trial_end(folder: StudyFolder, trial: Trial, split: str, measure: Measure) -> TrialEnd:
    """A trial as its folder tells; finished is one whose metric on the split is known."""
    path = folder.trial(trial)
    result = folder.result(trial)
    status, message = result.get("status", "unfinished"), result.get("message")
    if status == "finished" and not folder.is_done(trial, split, measure):
        message = folder.found(trial, split)["failed"]
        status = "failed" if message else "unfinished"
    name = path.relative_to(folder.path).as_posix()
    return TrialEnd(trial, status, name, folder.metrics(trial, split, measure), result.get("wall_s"), message)


class Reading:
    """The folder of a study, read for its answer."""

    def __init__(self, folder: StudyFolder, settings: Settings, split: str):
        self.folder, self.settings, self.split, self.measure = folder, settings, split, settings.measure
        self.selections = selections(folder, settings)
        self.evaluated = [self._end(trial, VAL if settings.grid else split) for trial in settings.trials()]
        self.counted = {
            selection.candidate: [self._end(trial, split) for trial in selection.trials]
            for selection in self.selections
        }

    def _end(self, trial: Trial, split: str) -> TrialEnd:
        return trial_end(self.folder, trial, split, self.measure)

    @property
    def ends(self) -> list[TrialEnd]:
        """Every trial, those that the answer counts as they stand on its split."""
        counted = {end.trial: end for ends in self.counted.values() for end in ends}
        return [counted.get(end.trial, end) for end in self.evaluated]

    @property
    def counted_trials(self) -> set[Trial]:
        return {end.trial for ends in self.counted.values() for end in ends}

    @property
    def on_val(self) -> dict[Trial, float | None]:
        """The metric by which points are chosen; empty where nothing is tuned."""
        return {
            trial: scores[trial.seed]
            for selection in self.selections
            for point, scores in selection.scores.items()
            for trial in selection.candidate.trials(point)
        }

    @property
    def other_names(self) -> list[str]:
        """The metrics that were measured beside the study's."""
        return list({name: None for selection in self.selections for name in self.other_metrics(selection.candidate)})

    def scores(self, candidate: Candidate) -> dict[int, float | None]:
        ends = {end.trial.seed: end for end in self.counted[candidate]}
        return {seed: ends[seed].score(self.measure.name) if seed in ends else None for seed in candidate.seeds}

    def diverged(self, candidate: Candidate) -> int:
        return sum(end.status == "diverged" for end in self.counted[candidate])

    def other_metrics(self, candidate: Candidate) -> dict[str, dict[str, float]]:
        """Metric -> seed -> value on the split, of those beside the study's."""
        found: dict[str, dict[str, float]] = {}
        for end in self.counted[candidate]:
            for name, value in end.metrics.items():
                if name != self.measure.name and end.status == "finished":
                    found.setdefault(name, {})[str(end.trial.seed)] = value
        return found

    def tuning(self, selection: Selection) -> dict[str, Any] | None:
        """What was tried, and what was chosen; None where nothing is tuned."""
        if not self.settings.grid:
            return None
        mine = set(selection.candidate.seeds)
        ends = [end for end in self.ends if end.trial.arm == selection.candidate.arm and end.trial.seed in mine]
        points = [
            {
                "values": point.to_dict(),
                "scores": {str(seed): score for seed, score in scores.items()},
                "mean": mean_of(scores.values()),
                "trials": [end.to_dict() for end in ends if end.trial.point == point],
            }
            for point, scores in selection.scores.items()
        ]
        chosen, edge = selection.chosen, at_the_edge(self.settings.grid, selection.chosen) if selection.chosen else []
        return {"chosen": None if chosen is None else chosen.to_dict(), "at_the_edge": edge, "points": points}
