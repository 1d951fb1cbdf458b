"""Which point of the grid each arm is evaluated by, as its folder tells, and the evaluations on test that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitmods.study.plan import Candidate, Evaluation, Settings, Trial
from vitmods.study.store import StudyFolder
from vitmods.study.tuning import AS_IS, VAL, Grid, Point, choose


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


def selections(folder: StudyFolder, settings: Settings) -> list[Selection]:
    """One for each candidate, in their order."""
    return [_choice(folder, settings, candidate) for candidate in settings.candidates()]


def evaluations(folder: StudyFolder, settings: Settings, split: str) -> list[Evaluation]:
    """Of the chosen points' finished trials, on test. Where nothing is tuned, trials do that themselves."""
    if not settings.grid:
        return []
    chosen = [trial for selection in selections(folder, settings) for trial in selection.trials]
    ends = ((trial, folder.trial_result(trial) or {}) for trial in chosen)
    return [Evaluation(trial, split) for trial, end in ends if end.get("status") == "finished"]


def seen_before(folder: StudyFolder, selection: Selection, split: str) -> list[Point]:
    """Points that are not chosen, but were when there were fewer seeds or values, and have been evaluated on test."""
    others = (point for point in selection.scores if point != selection.chosen)
    return [
        point
        for point in others
        if any(folder.found(trial, split)["protocols"] for trial in selection.candidate.trials(point))
    ]


def _choice(folder: StudyFolder, settings: Settings, candidate: Candidate) -> Selection:
    grid, measure = settings.grid, settings.measure
    if not grid:
        return Selection(candidate, {}, AS_IS)
    trials = {point: candidate.trials(point) for point in grid.points}
    scores = {
        point: {trial.seed: folder.metrics(trial, VAL, measure).get(measure.name) for trial in listed}
        for point, listed in trials.items()
    }
    ended = all(folder.is_done(trial, VAL, measure) for listed in trials.values() for trial in listed)
    return Selection(candidate, scores, choose(scores, measure.metric.higher_is_better) if ended else None)


def at_the_edge(grid: Grid, chosen: Point) -> list[str]:
    """Fields whose chosen number is the smallest or the largest that was tried: a wider grid may hold a better one."""
    tried = {name: values for name, values in grid.fields if len(values) > 1 and all(map(_is_number, values))}
    return [name for name, value in chosen.values if name in tried and value in (min(tried[name]), max(tried[name]))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
