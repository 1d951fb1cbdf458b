"""Which point of the grid each arm is judged by, as its folder tells, and the evaluations on test that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitmods.study.plan import Contender, Evaluation, Settings, Trial
from vitmods.study.store import StudyFolder
from vitmods.study.tuning import AS_IS, VAL, Grid, Point, choose


@dataclass(frozen=True)
class Choice:
    """What validation says of a contender's points.

    scores: point -> seed -> the metric on val; None where the trial diverged or has not ended
    chosen: the best point once all trials have ended, else None; where nothing is tuned the recipe as it is
    """

    contender: Contender
    scores: Mapping[Point, Mapping[int, float | None]]
    chosen: Point | None

    @property
    def trials(self) -> list[Trial]:
        """Those that the contender is judged by; none before the choice."""
        return [] if self.chosen is None else self.contender.trials(self.chosen)


def choices(folder: StudyFolder, settings: Settings) -> list[Choice]:
    """One for each contender, in their order."""
    return [_choice(folder, settings, contender) for contender in settings.contenders()]


def evaluations(folder: StudyFolder, settings: Settings, split: str) -> list[Evaluation]:
    """Of the chosen points' finished trials, on test. Where nothing is tuned, trials do that themselves."""
    if not settings.grid:
        return []
    chosen = [trial for choice in choices(folder, settings) for trial in choice.trials]
    ends = ((trial, folder.trial_result(trial) or {}) for trial in chosen)
    return [Evaluation(trial, split) for trial, end in ends if end.get("status") == "finished"]


def seen_before(folder: StudyFolder, choice: Choice, split: str) -> list[Point]:
    """Points that are not chosen, but were when there were fewer seeds or values, and have been evaluated on test."""
    others = (point for point in choice.scores if point != choice.chosen)
    return [
        point
        for point in others
        if any(folder.found(trial, split)["protocols"] for trial in choice.contender.trials(point))
    ]


def _choice(folder: StudyFolder, settings: Settings, contender: Contender) -> Choice:
    grid, measure = settings.grid, settings.measure
    if not grid:
        return Choice(contender, {}, AS_IS)
    trials = {point: contender.trials(point) for point in grid.points}
    scores = {
        point: {trial.seed: folder.metrics(trial, VAL, measure).get(measure.name) for trial in listed}
        for point, listed in trials.items()
    }
    ended = all(folder.is_done(trial, VAL, measure) for listed in trials.values() for trial in listed)
    return Choice(contender, scores, choose(scores, measure.metric.higher_is_better) if ended else None)


def at_the_edge(grid: Grid, chosen: Point) -> list[str]:
    """Fields whose chosen number is the smallest or the largest that was tried: a wider grid may hold a better one."""
    tried = {name: values for name, values in grid.fields if len(values) > 1 and all(map(_is_number, values))}
    return [name for name, value in chosen.values if name in tried and value in (min(tried[name]), max(tried[name]))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
