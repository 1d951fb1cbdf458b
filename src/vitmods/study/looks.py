"""The looks of a study: what is decided of its arms at so many seeds, and which arms stop there.

A fixed study is looked at once, when its seeds are done. One that runs until it is decided is looked at after 4, 5, 6,
8, ... seeds, each time at a level that keeps false claims of the whole study at 5 %. Looks follow from the scores
alone, so a study that was killed, or got more seeds, has the same ones.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitmods.stats.decide import decide
from vitmods.stats.decision import Decision
from vitmods.stats.sequential import LOOKS
from vitmods.stats.sequential import looks as looks_up_to
from vitmods.stats.verdict import FRACTION, Effect
from vitmods.study.arms import BASE
from vitmods.study.plan import Trial
from vitmods.study.tuning import AS_IS, Point
from vitmods.tasks.base import TASKS
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.study.state import StudyState, TrialRecord


@dataclass(frozen=True)
class Look:
    """What was decided on the first `seeds` seeds; `stopped` are the arms that end there."""

    seeds: int
    decision: Decision
    stopped: tuple[str, ...]


def looks(state: StudyState, setting: Point = AS_IS, retried: Container[Trial] | None = None) -> list[Look]:
    """The looks of a study that runs until it is decided, as far as its trials reach; none of a fixed one.

    An arm one of whose trials failed, e.g. for want of memory, is left out of a look: no verdict waits for it.

    Args:
        retried: trials that a run has tried; those that failed before it are waited for. None: not waited for.
    """
    settings = state.settings
    frozen: dict[str, Effect] = {}
    found: list[Look] = []
    for count in looks_up_to(len(settings.seeds)) if settings.until_decided else ():
        seeds = settings.seeds[:count]
        records = {arm.name: _records(state, setting, arm.name, seeds) for arm in settings.every_arm}
        failed = {
            arm for arm, own in records.items() if arm not in frozen and any(_failed(*one, retried) for one in own)
        }
        waited = [own for arm, own in records.items() if arm not in failed and arm not in frozen]
        if BASE in failed or not all(len(own) == count and all(one.ended for _, one in own) for own in waited):
            break
        decision = decision_at(state, seeds, setting, frozen, without=failed)
        effects = {arm: effect for arm, effect in decision.effects.items() if arm not in frozen}
        stopped = {arm: effect for arm, effect in effects.items() if effect.stops or effect.futile}
        found.append(Look(count, decision, tuple(stopped)))
        frozen |= stopped
        if len(frozen) + len(failed) == len(settings.arms):
            break
    return found


def decision_at(
    state: StudyState,
    seeds: Sequence[int],
    setting: Point = AS_IS,
    frozen: Mapping[str, Effect] | None = None,
    base: str = BASE,
    without: Container[str] = (),
) -> Decision:
    """What the finished trials of these seeds say; `frozen` are the effects of arms that have stopped.

    Raises UserError where trials were evaluated on different images.
    """
    settings, metric = state.settings, state.settings.measure.metric
    arms = [arm.name for arm in settings.every_arm if arm.name not in without]
    records = {arm: dict(_records(state, setting, arm, seeds)) for arm in arms}
    finished = [one for own in records.values() for one in own.values() if one.status == "finished"]
    if len({one.images.images for one in finished if one.images is not None}) > 1:
        raise UserError(
            f"Trials in {state.folder.path} were evaluated on different images, so they cannot be compared. Run the "
            "study again in another folder."
        )
    whole = all(one.images is not None for one in finished)
    task, planned = TASKS[settings.fixed["task"]], state.images.planned
    extended = 0 < planned < len(settings.seeds)
    return decide(
        {
            arm: {trial.seed: _score(one, metric.name, whole) for trial, one in own.items()}
            for arm, own in records.items()
        },
        base=base,
        margin=settings.margin,
        unit=FRACTION if metric.unit == "%" else metric.unit,
        higher_is_better=metric.higher_is_better,
        generalize=settings.generalize,
        most_seeds=min(max(len(settings.seeds), LOOKS[0]), LOOKS[-1]) if settings.until_decided or extended else None,
        family=len(settings.arms),
        failed={
            arm: {trial.seed: one.message or "diverged" for trial, one in own.items() if one.status == "diverged"}
            for arm, own in records.items()
        },
        chance=task.chance(metric.name, state.images.classes),
        groups=state.images.groups if whole and finished else None,
        frozen=frozen,
    )


def _records(state: StudyState, setting: Point, arm: str, seeds: Sequence[int]) -> list[tuple[Trial, TrialRecord]]:
    trials = [state.trial(setting, arm, seed) for seed in seeds]
    return [(trial, state.answered[trial]) for trial in trials if trial is not None]


def _score(record: TrialRecord, metric: str, whole: bool) -> Any:
    """None of a trial that has none."""
    images = record.images if record.status == "finished" and whole else None
    return record.score(metric) if images is None else images.values


def _failed(trial: Trial, record: TrialRecord, retried: Container[Trial] | None) -> bool:
    return record.status in ("failed", "damaged") and (retried is None or trial in retried)
