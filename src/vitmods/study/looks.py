"""The looks of a study: what is decided of its arms at so many seeds, and which arms stop there.

A fixed study is looked at once, when its seeds are done. One that runs until it is decided is looked at after 4, 5, 6,
8, ... seeds, each time at a level that keeps false claims of the whole study at 5 %. Looks follow from the scores
alone, so a study that was killed, or got more seeds, has the same ones. A factorial study is looked at after 2, 3, 4, 6
and 8 seeds, and stops as a whole: every run tells of every change.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitmods.stats.decision import Decision
from vitmods.stats.factorial import Factorial
from vitmods.stats.verdict import Effect
from vitmods.study.arms import BASE
from vitmods.study.plan import Trial
from vitmods.study.scores import decision_at, factorial_at, records_of_arm
from vitmods.study.tuning import AS_IS, Point

if TYPE_CHECKING:
    from vitmods.study.state import StudyState, TrialRecord


@dataclass(frozen=True)
class Look:
    """What was decided on the first `seeds` seeds; `stopped` are the arms that end there."""

    seeds: int
    decision: Decision | Factorial
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
    for count in settings.looks:
        seeds = settings.seeds[:count]
        records = {arm.name: records_of_arm(state, setting, arm.name, seeds) for arm in settings.every_arm}
        failed = {
            arm for arm, own in records.items() if arm not in frozen and any(_failed(*one, retried) for one in own)
        }
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
