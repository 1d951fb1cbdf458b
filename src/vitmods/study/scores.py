"""Decisions on a study's trials: their scores as `vitmods.stats` reads them, and the looks at which arms stop.

A fixed study is looked at once, when its seeds are done. One that runs until it is decided is looked at after 4, 5, 6,
8, ... seeds, each time at a level that keeps false claims of the whole study at 5 %. Looks follow from the scores
alone, so a study that was killed or extended has the same ones. A factorial study is looked at after 2, 3, 4, 6 and 8
seeds, and stops as a whole, since every run informs every change.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
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


Trials = Mapping[str, Mapping[int, "TrialRecord"]]
"""arm -> seed -> its trial"""
Arguments = dict[str, Any]
"""of `decide`"""


def decision_at(
    state: StudyState,
    seeds: Sequence[int],
    setting: Point = AS_IS,
    frozen: Mapping[str, Effect] | None = None,
    base: str = BASE,
    without: Container[str] = (),
) -> Decision:
    """Decide on every arm from the finished trials of these seeds; `frozen` are the effects of arms that have stopped.

    Raises UserError if trials were evaluated on different images.
    """
    scores, criteria = _scores(state, {setting: _trials(state, seeds, setting, without)})
    return decide(
        base=base, family=_family(state, base), frozen=frozen, most_seeds=_most(state, LOOKS), planned=len(seeds),
        resampled=state.images.sizes, **scores[setting], **criteria,
    )  # fmt: skip


def factorial_at(state: StudyState, seeds: Sequence[int], setting: Point = AS_IS) -> Factorial:
    """Decide on the changes of a factorial study, on average over the other changes."""
    assert state.settings.design is not None
    scores, criteria = _scores(state, {setting: _trials(state, seeds, setting)})
    return factorial(
        design=state.settings.design.design, most_seeds=_most(state, FACTORIAL_LOOKS), planned=len(seeds),
        **scores[setting], **criteria,
    )  # fmt: skip


def over_settings_at(state: StudyState, base: str = BASE) -> OverSettings:
    """Decide on every arm on average over the settings of a sweep, and under each."""
    seeds, points = state.settings.seeds, state.settings.sweep.points
    scores, criteria = _scores(state, {point: _trials(state, seeds, point) for point in points})
    by_setting: Arguments = {
        name: {str(point): scores[point][name] for point in points} for name in ("scores", "failed", "constant")
    }
    return over_settings(base=base, family=_family(state, base), planned=len(seeds), **by_setting, **criteria)


def _family(state: StudyState, base: str) -> int | Literal["pairs"]:
    """The arms that were planned or have been added; all pairs for a reference that was chosen after the scores."""
    return max(len(state.settings.arms), state.images.plan.family) if base == BASE else "pairs"


def _trials(state: StudyState, seeds: Sequence[int], setting: Point, without: Container[str] = ()) -> Trials:
    """The trials that each arm is answered by; an arm has none before its point is chosen."""
    trials: dict[str, dict[int, TrialRecord]] = {}
    for arm in state.settings.every_arm:
        if arm.name not in without:
            answers = (state.trial(setting, arm.name, seed) for seed in seeds)
            trials[arm.name] = {trial.seed: state.answered[trial] for trial in answers if trial is not None}
    return trials


def _scores(state: StudyState, by_setting: Mapping[Point, Trials]) -> tuple[dict[Point, Arguments], Arguments]:
    """Return `scores`, `failed` and `constant` of `decide` for each setting, and the criteria that they share."""
    settings, metric = state.settings, state.settings.measure.metric
    records = [trial for arms in by_setting.values() for seeds in arms.values() for trial in seeds.values()]
    finished = [trial for trial in records if trial.status == "finished"]
    folds = settings.folds or 1  # trials of one fold, or all, have the same images
    evaluated = {(trial.seed % folds, trial.images.images) for trial in finished if trial.images is not None}
    if len(evaluated) > len({fold for fold, _ in evaluated}):
        raise UserError(
            f"Trials in {named(state.folder.path)} were evaluated on different images, so they cannot be compared. Run "
            "the study again in another folder."
        )
    has_images = all(trial.images is not None for trial in finished)
    arguments: dict[Point, Arguments] = {}
    for setting, arms in by_setting.items():
        scores: dict[str, dict[int, Any]] = {arm: {} for arm in arms}
        failed: dict[str, dict[int, str]] = {arm: {} for arm in arms}
        constant: dict[str, set[int]] = {arm: set() for arm in arms}
        for arm, seeds in arms.items():
            for seed, trial in seeds.items():
                by_image = trial.images if trial.status == "finished" and has_images else None
                scores[arm][seed] = trial.score(metric.name) if by_image is None else by_image.values
                if trial.status == "diverged":
                    failed[arm][seed] = trial.message or "diverged"
                if trial.constant:
                    constant[arm].add(seed)
        arguments[setting] = {"scores": scores, "failed": failed, "constant": constant}
    criteria = {
        "margin": settings.margin,
        "unit": FRACTION if metric.unit == "%" else metric.unit,
        "higher_is_better": metric.higher_is_better,
        "generalize": settings.generalize,
        "chance": state.images.constant.get(metric.name),
        "groups": state.images.groups if has_images and finished else None,
    }
    return arguments, criteria


def _most(state: StudyState, looks: Sequence[int]) -> int | None:
    """The maximum of a study that is looked at more than once; None if its seeds were fixed before."""
    count, plan = len(state.settings.seeds), state.images.plan
    if state.settings.until_decided or plan.until_decided:
        return min(max(count, looks[0]), looks[-1])
    extended = 1 < plan.seeds < count and not state.settings.folds
    return min(next_maximum(count), looks[-1]) if extended else None


@dataclass(frozen=True)
class Look:
    """The decision on the first `seeds` seeds; `stopped` are the arms that end there."""

    seeds: int
    decision: Decision | Factorial
    stopped: tuple[str, ...]


def looks(
    state: StudyState, setting: Point = AS_IS, retried: Container[Trial] | None = None, known: Sequence[Look] = ()
) -> list[Look]:
    """Return the looks of a study that runs until it is decided, as far as its trials reach; none of a fixed study.

    An arm one of whose trials failed, e.g. for lack of memory, is left out of a look: no verdict waits for it.

    Args:
        retried: trials that a run has tried; trials that failed earlier are waited for. None: not waited for.
        known: the first looks, from an earlier call of the same run.
    """
    settings, taken = state.settings, list(known)
    frozen: dict[str, Effect] = {}
    if not settings.design:
        frozen = {arm: look.decision.effects[arm] for look in known for arm in look.stopped}
    if known and (known[-1].stopped if settings.design else len(frozen) == len(settings.arms)):
        return taken
    for count in settings.looks[len(known) :]:
        seeds = settings.seeds[:count]
        failed, is_complete = set(), True
        for arm in (arm.name for arm in settings.every_arm if arm.name not in frozen):
            trials = [trial for seed in seeds if (trial := state.trial(setting, arm, seed)) is not None]
            unfinished = [trial for trial in trials if not state.answered[trial].ended]
            if any(
                state.answered[trial].status in ("failed", "damaged") and (retried is None or trial in retried)
                for trial in unfinished
            ):
                failed.add(arm)
            elif unfinished or len(trials) < count:
                is_complete = False
        if taken and len(frozen) + len(failed - {BASE}) == len(settings.arms):
            break
        if BASE in failed or (settings.design and failed) or not is_complete:
            break
        if settings.design is not None:
            changes = factorial_at(state, seeds, setting)
            taken.append(Look(count, changes, tuple(arm.name for arm in settings.arms if changes.is_decided)))
            if changes.is_decided:
                break
            continue
        decision = decision_at(state, seeds, setting, frozen, without=failed)
        effects = {arm: effect for arm, effect in decision.effects.items() if arm not in frozen}
        stopped = {arm: effect for arm, effect in effects.items() if effect.stops or effect.futile}
        taken.append(Look(count, decision, tuple(stopped)))
        frozen |= stopped
        if len(frozen) + len(failed) == len(settings.arms):
            break
    return taken
