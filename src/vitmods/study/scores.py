"""The scores of a study's trials as `vitmods.stats` reads them, what its designs say of them, and the looks of a study:
what is decided of its arms at so many seeds, and which arms stop there.

A fixed study is looked at once, when its seeds are done. One that runs until it is decided is looked at after 4, 5, 6,
8, ... seeds, each time at a level that keeps false claims of the whole study at 5 %. Looks follow from the scores
alone, so a study that was killed, or got more seeds, has the same ones. A factorial study is looked at after 2, 3, 4, 6
and 8 seeds, and stops as a whole: every run tells of every change.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from vitmods.stats.decide import decide
from vitmods.stats.decision import Decision
from vitmods.stats.factorial import LOOKS as FACTORIAL_LOOKS
from vitmods.stats.factorial import Factorial, factorial
from vitmods.stats.sequential import LOOKS, next_maximum
from vitmods.stats.settings import OverSettings, over_settings
from vitmods.stats.verdict import FRACTION, Effect
from vitmods.study.arms import BASE
from vitmods.study.plan import AS_IS, Point, Trial
from vitmods.util.address import named
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.study.state import StudyState, TrialRecord


def decision_at(
    state: StudyState,
    seeds: Sequence[int],
    setting: Point = AS_IS,
    frozen: Mapping[str, Effect] | None = None,
    base: str = BASE,
    without: Container[str] = (),
) -> Decision:
    """What the finished trials of these seeds say of every arm; `frozen` are the effects of arms that have stopped.

    Raises UserError where trials were evaluated on different images.
    """
    records = _records_of(state, seeds, setting, without)
    values, failed, constant, how = _scores(state, {setting: records})
    return decide(
        values[setting], base, failed=failed[setting], constant=constant[setting], family=_family(state, base),
        frozen=frozen, most_seeds=_most(state, LOOKS), planned=len(seeds), resampled=state.images.sizes, **how,
    )  # fmt: skip


def factorial_at(state: StudyState, seeds: Sequence[int], setting: Point = AS_IS) -> Factorial:
    """The same of the changes of a factorial study, on average over the other changes."""
    assert state.settings.design is not None
    values, failed, constant, how = _scores(state, {setting: _records_of(state, seeds, setting)})
    return factorial(
        values[setting], state.settings.design.design, failed=failed[setting], constant=constant[setting],
        most_seeds=_most(state, FACTORIAL_LOOKS), planned=len(seeds), **how,
    )  # fmt: skip


def over_settings_at(state: StudyState, base: str = BASE) -> OverSettings:
    """The same of every arm on average over the settings of a sweep, and under each."""
    settings = state.settings
    records = {point: _records_of(state, settings.seeds, point) for point in settings.sweep.points}
    values, failed, constant, how = _scores(state, records)
    by_name = [{str(point): own for point, own in found.items()} for found in (values, failed, constant)]
    return over_settings(
        by_name[0], base, failed=by_name[1], constant=by_name[2], planned=len(settings.seeds),
        family=_family(state, base), **how,
    )  # fmt: skip


def _family(state: StudyState, base: str) -> int | Literal["pairs"]:
    """The arms that were planned, or have been added; all pairs for a reference, chosen when scores are known."""
    return max(len(state.settings.arms), state.images.family) if base == BASE else "pairs"


def records_of_arm(
    state: StudyState, setting: Point, arm: str, seeds: Sequence[int]
) -> list[tuple[Trial, TrialRecord]]:
    """The trials that an arm is answered by; none before its point is chosen."""
    trials = [state.trial(setting, arm, seed) for seed in seeds]
    return [(trial, state.answered[trial]) for trial in trials if trial is not None]


Records = Mapping[str, Mapping[int, "TrialRecord"]]


def _records_of(state: StudyState, seeds: Sequence[int], setting: Point, without: Container[str] = ()) -> Records:
    arms = [arm.name for arm in state.settings.every_arm if arm.name not in without]
    return {arm: {trial.seed: one for trial, one in records_of_arm(state, setting, arm, seeds)} for arm in arms}


def _scores(
    state: StudyState, records: Mapping[Point, Records]
) -> tuple[dict[Point, Any], dict[Point, Any], dict[Point, Any], dict[str, Any]]:
    """Setting -> arm -> seed -> score, the same for why a trial diverged, setting -> arm -> seeds whose trials predict
    a single class, and how scores are read."""
    settings, metric = state.settings, state.settings.measure.metric
    every = chain.from_iterable(own.values() for arms in records.values() for own in arms.values())
    finished = [one for one in every if one.status == "finished"]
    folds = settings.folds or 1  # trials of one fold, or all, have the same images
    evaluated = {(one.seed % folds, one.images.images) for one in finished if one.images is not None}
    if len(evaluated) > len({fold for fold, _ in evaluated}):
        raise UserError(
            f"Trials in {named(state.folder.path)} were evaluated on different images, so they cannot be compared. Run "
            "the study again in another folder."
        )
    whole = all(one.images is not None for one in finished)

    def score(one: TrialRecord) -> Any:
        images = one.images if one.status == "finished" and whole else None
        return one.score(metric.name) if images is None else images.values

    values = {
        setting: {arm: {seed: score(one) for seed, one in own.items()} for arm, own in arms.items()}
        for setting, arms in records.items()
    }
    failed = {
        setting: {
            arm: {seed: one.message or "diverged" for seed, one in own.items() if one.status == "diverged"}
            for arm, own in arms.items()
        }
        for setting, arms in records.items()
    }
    constant = {
        setting: {arm: {seed for seed, one in own.items() if one.constant} for arm, own in arms.items()}
        for setting, arms in records.items()
    }
    how = {
        "margin": settings.margin,
        "unit": FRACTION if metric.unit == "%" else metric.unit,
        "higher_is_better": metric.higher_is_better,
        "generalize": settings.generalize,
        "chance": state.images.constant.get(metric.name),
        "groups": state.images.groups if whole and finished else None,
    }
    return values, failed, constant, how


def _most(state: StudyState, looks: Sequence[int]) -> int | None:
    """The most seeds of a study that is looked at more than once; None: its seeds were fixed before."""
    count, planned = len(state.settings.seeds), state.images.planned
    if state.settings.until_decided or state.images.looked:
        return min(max(count, looks[0]), looks[-1])
    extended = 1 < planned < count and not state.settings.folds
    return min(next_maximum(count), looks[-1]) if extended else None


@dataclass(frozen=True)
class Look:
    """What was decided on the first `seeds` seeds; `stopped` are the arms that end there."""

    seeds: int
    decision: Decision | Factorial
    stopped: tuple[str, ...]


def looks(
    state: StudyState, setting: Point = AS_IS, retried: Container[Trial] | None = None, known: Sequence[Look] = ()
) -> list[Look]:
    """The looks of a study that runs until it is decided, as far as its trials reach; none of a fixed one.

    An arm one of whose trials failed, e.g. for want of memory, is left out of a look: no verdict waits for it.

    Args:
        retried: trials that a run has tried; those that failed before it are waited for. None: not waited for.
        known: the first looks, as an earlier call of the same run gave them.
    """
    settings = state.settings
    found = list(known)
    stopped_at = ((arm, look.decision.effects[arm]) for look in known if not settings.design for arm in look.stopped)
    frozen: dict[str, Effect] = dict(stopped_at)
    if known and (known[-1].stopped if settings.design else len(frozen) == len(settings.arms)):
        return found
    for count in settings.looks[len(known) :]:
        seeds = settings.seeds[:count]
        records = {arm.name: records_of_arm(state, setting, arm.name, seeds) for arm in settings.every_arm}
        failed = {
            arm for arm, own in records.items() if arm not in frozen and any(_failed(*one, retried) for one in own)
        }
        if found and len(frozen) + len(failed - {BASE}) == len(settings.arms):
            break
        waited = [own for arm, own in records.items() if arm not in failed and arm not in frozen]
        if (
            BASE in failed
            or (settings.design and failed)
            or not all(len(own) == count and all(one.ended for _, one in own) for own in waited)
        ):
            break
        if settings.design is not None:
            changes = factorial_at(state, seeds, setting)
            ended = changes.is_decided
            found.append(Look(count, changes, tuple(arm.name for arm in settings.arms if ended)))
            if ended:
                break
            continue
        decision = decision_at(state, seeds, setting, frozen, without=failed)
        effects = {arm: effect for arm, effect in decision.effects.items() if arm not in frozen}
        stopped = {arm: effect for arm, effect in effects.items() if effect.stops or effect.futile}
        found.append(Look(count, decision, tuple(stopped)))
        frozen |= stopped
        if len(frozen) + len(failed) == len(settings.arms):
            break
    return found


def _failed(trial: Trial, record: TrialRecord, retried: Container[Trial] | None) -> bool:
    return record.status in ("failed", "damaged") and (retried is None or trial in retried)
