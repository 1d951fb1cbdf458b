"""Which final weights of a study stay in its folder: of all trials, of the best of each arm, or none.

A trial's weights go as soon as nothing of the study needs them: when it has ended, and in a tuned study when a point
was chosen for its arm and evaluated. What is known of a trial (metrics, scores of each image, curves) stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from vitmods.study.plan import Trial
from vitmods.study.state import Selection, StudyState, read_curves
from vitmods.tasks.base import TASKS
from vitmods.train.trial import MODULES, WEIGHTS
from vitmods.util.errors import UserError
from vitmods.util.files import check_weights_kept
from vitmods.util.text import listing, plural

Keep = Literal["all", "best", "none"]


def prune(state: StudyState, keep: Keep, ended: Trial | None = None) -> None:
    """Delete the weights that `keep` does not ask for, as far as nothing of the study needs them any more; of the arm
    of one trial that has ended alone, where it is given.

    `best` keeps one trial of each arm: of its finished seeds (at the chosen point) the one with the best score in the
    last evaluation of its training, which is on val where there is val. The score is the study's metric where training
    measures that, else the task's own.
    """
    if keep == "all":
        return
    selections = state.selections
    for one in selections.values() if ended is None else [selections[ended.setting, ended.arm.name]]:
        if one.chosen is not None:
            _prune_arm(state, keep, one)


def _prune_arm(state: StudyState, keep: Keep, selection: Selection) -> None:
    place = selection.arm.name, selection.setting
    own = dict.fromkeys(one for one in (*state.tried, *state.answered) if (one.arm.name, one.setting) == place)
    # As it counts for the answer, where it does: a chosen one that is not evaluated yet has not ended.
    done = [one for one in own if (state.answered.get(one) or state.tried[one]).ended]
    best = _best(state, [one for one in done if one in state.answered]) if keep == "best" else None
    for trial in done:
        if trial != best:
            for name in (WEIGHTS, MODULES):
                state.folder.delete(state.folder.trial(trial) / name)


def check_weights_are_there(state: StudyState) -> None:
    """UserError where something that is still to be found needs weights that were not kept."""
    gone = [str(trial) for trial in state.missing if _gone(state.folder.trial(trial))]
    if gone:
        some = listing([*gone[:3], *([f"{len(gone) - 3} more"] if len(gone) > 3 else [])])
        raise UserError(
            f"{state.settings.measure.name} has to be computed from the weights of {plural(len(gone), 'trial')} "
            f"({some}), and these were not kept (--keep-weights best or none). Compare a metric that is known, or run "
            "the study in another folder with --keep-weights all."
        )


def _best(state: StudyState, trials: Iterable[Trial]) -> Trial | None:
    """Of those whose weights are still there."""
    metrics = TASKS[state.settings.fixed["task"]].metrics
    metric = next((one for one in metrics if one.name == state.settings.measure.name), metrics[0])
    sign = 1 if metric.higher_is_better else -1

    def worth(trial: Trial) -> float:
        curves = read_curves(state.folder.trial(trial), [metric.name])
        return sign * curves[metric.name].score[-1] if curves else -math.inf

    there = (one for one in trials if state.answered[one].status == "finished")
    return max((one for one in there if (state.folder.trial(one) / WEIGHTS).exists()), key=worth, default=None)


def _gone(folder: Path) -> bool:
    """Whether a trial has finished and its weights are not there any more."""
    try:
        check_weights_kept(folder)
    except UserError:
        return True
    return False
