"""What a run does next: the trials that are missing, one by one, as far as arms are open and the budget lasts; and
which weights stay.

A trial's weights go as soon as nothing of the study needs them: when it has ended. What is known of a trial (metrics,
scores of each image, curves) stays.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from vitmods.study.arms import BASE
from vitmods.study.budget import ENDLESS, Budget
from vitmods.study.cells import Trial
from vitmods.study.executors import Keep
from vitmods.study.grid import Point
from vitmods.study.progress import Progress, seconds_left
from vitmods.study.questions import Look, looks, spare_trials
from vitmods.study.settings import VAL
from vitmods.study.state import StudyState, read_curves
from vitmods.tasks.base import TASKS
from vitmods.train import checkpoint
from vitmods.train.trial import MODULES, WEIGHTS
from vitmods.util.errors import UserError
from vitmods.util.files import check_weights_kept
from vitmods.util.lease import Lease
from vitmods.util.text import listing, plural

FOR_NEW = 0.8  # of the seconds that a seed may end late: the rest is for one that has begun and is slow


def prune(state: StudyState, keep: Keep, ended: Trial | None = None) -> None:
    """Delete the weights that `keep` does not ask for, as far as nothing of the study needs them any more; of the arm
    of one trial that has ended alone, where it is given.

    `best` keeps one trial of each arm: of its finished seeds (at the chosen point) the one with the best score in the
    last evaluation of its training, which is on val where there is val. The score is the study's metric where training
    measures that, else the task's own.
    """
    if keep == "all":
        return
    metrics = TASKS[state.settings.fixed["task"]].metrics
    metric = next((metric for metric in metrics if metric.name == state.settings.measure.name), metrics[0])

    def last_score(trial: Trial) -> float:
        curves = read_curves(state.folder.trial(trial), [metric.name])
        score = curves[metric.name].score[-1] if curves else math.nan
        return -math.inf if math.isnan(score) else score if metric.higher_is_better else -score

    records = state.records
    for arm, setting in {(trial.arm.name, trial.setting) for trial in ([ended] if ended else records)}:
        done = [t for t, record in records.items() if record.ended and (t.arm.name, t.setting) == (arm, setting)]
        best = None
        if keep == "best":
            finished = [t for t in done if t in state.answered and state.answered[t].status == "finished"]
            with_weights = [trial for trial in finished if (state.folder.trial(trial) / WEIGHTS).exists()]
            best = max(with_weights, key=last_score, default=None)
        for trial in done:
            if trial != best:
                for name in (WEIGHTS, MODULES):
                    state.folder.delete(state.folder.trial(trial) / name)


def check_weights_are_there(state: StudyState) -> None:
    """UserError where something that is still to be found needs weights that were not kept."""
    gone = []
    for trial in state.missing:
        try:
            check_weights_kept(state.folder.trial(trial))
        except UserError:  # it has finished, and its weights were deleted
            gone.append(str(trial))
    if gone:
        some = listing([*gone[:3], *([f"{len(gone) - 3} more"] if len(gone) > 3 else [])])
        raise UserError(
            f"{state.settings.measure.name} has to be computed from the weights of {plural(len(gone), 'trial')} "
            f"({some}), and these were not kept (--keep-weights best or none), or the study that trained them is gone. "
            "Compare a metric that is known, or run the study in another folder with --keep-weights all."
        )


class TrialSchedule:
    """Hands out trials to an executor, each once in a run, and takes in what came of it.

    Trials that points are chosen by come first; then seed by seed, in a seed base first. With a budget, no seed
    begins that is expected to end later for base or an arm, except by `Budget.over_s`. Of a study that runs until
    it is decided, arms that have stopped get no more seeds, and the widest interval comes first in a seed. Workers
    that are free before the last trials of a look have ended take the next seeds of the arms that are open.
    """

    def __init__(
        self,
        state: StudyState,
        progress: Progress,
        budget: Budget | None = None,
        keep: Keep = "all",
        lease: Lease | None = None,
        meanwhile: Iterator[None] | None = None,
        planned: int | None = None,
        reuse: Callable[[StudyState, Sequence[Trial]], None] = lambda state, trials: None,
    ) -> None:
        """keep: the weights of which trials stay. lease: the hold of the folder, without which nothing is done.
        meanwhile: steps of what follows the trials and may be done beside the last of them. planned: the number of
        seeds; those after them are run if the budget lasts, and counted once they have begun. None: all. reuse:
        copies those of some trials that are finished elsewhere."""
        self.state, self._progress, self._budget, self._keep = state, progress, budget or ENDLESS, keep
        self._lease, self._meanwhile, self._reuse = lease, meanwhile or iter(()), reuse
        self._spare = set(() if planned is None else state.settings.seeds[planned:])
        self._given: set[Trial] = set()
        self._at_work: dict[Trial, float] = {}  # when each began
        self._ended = 0
        self._seconds: dict[tuple[Point, str], list[float]] = {}  # of trials by setting and arm
        for trial, record in state.records.items():
            if record.wall_s is not None:
                self._seconds.setdefault((trial.setting, trial.arm.name), []).append(record.wall_s)
        self._looks: dict[Point, list[Look]] = {point: [] for point in state.settings.sweep.points}
        self._update()

    def take(self) -> Trial | None:
        """The next trial; None where there is none now. There may be one once another has ended. UserError
        where another run has taken the folder over."""
        if not self._wanted or not self._affordable(self._wanted[0]):
            return None
        if self._lease:
            self._lease.confirm()
        trial = self._wanted.popleft()
        self._given.add(trial)
        self._at_work[trial] = time.monotonic()
        self._show_remaining()
        self._progress.started(trial)
        return trial

    @property
    def has_begun(self) -> bool:
        """Whether a trial was handed out."""
        return bool(self._given)

    @property
    def left(self) -> list[Trial]:
        """The trials that remain, as far as they are known now."""
        return list(self._wanted)

    def ended(self, trial: Trial, failure: str | None) -> None:
        """Book what came of a trial; None: it went well. UserError where another run has taken the folder over."""
        if self._lease:
            self._lease.confirm()
        if failure is not None:
            split = VAL if trial.for_tuning else self.state.splits[-1]
            self.state.folder.record_failure(trial, split, failure)
        known = self.state.records
        self.state.read_again(trial)
        prune(self.state, self._keep, trial if self._ended else None)  # what an earlier run kept, once
        self._ended += 1
        del self._at_work[trial]
        took_s = self._progress.ended(trial, failure, self.state)
        self._seconds.setdefault((trial.setting, trial.arm.name), []).append(took_s)
        if chosen := [planned for planned in self.state.records if planned not in known]:
            self._reuse(self.state, chosen)
            self._progress.reused(sum(self.state.records[planned].ended for planned in chosen))
        if self._may_change(trial):
            self._update()

    def _may_change(self, ended: Trial) -> bool:
        """Whether the end of a trial may change what comes next: a point may be chosen by it, a look be due, or an arm
        be lost. Planning anew looks at all trials, which after each of 1,000 would take longer than reading them."""
        settings = self.state.settings
        record = self.state.answered.get(ended)
        if settings.tune or (settings.until_decided and (record is None or not record.ended)):
            return True
        if not settings.until_decided:
            return False
        done = len(self._looks[ended.setting])
        if done == len(settings.looks):
            return False
        needed = {seed: place for place, seed in enumerate(settings.seeds_of(BASE))}
        return all(needed[trial.seed] >= settings.looks[done] for trial in (*self._at_work, *self._wanted))

    def clear(self) -> None:
        """Delete the checkpoints of trials that no look will count."""
        for setting, taken in self._looks.items():
            for trial in spare_trials(self.state, taken):
                if trial.setting == setting and not self.state.answered[trial].ended:
                    for name in (checkpoint.NAME, checkpoint.PREVIOUS):
                        self.state.folder.delete(self.state.folder.trial(trial) / name)

    def use_idle_core(self) -> bool:
        """Make a step of what follows the trials. False: none is left, or more trials follow once a point is chosen."""
        if any(not record.ended for record in self.state.tried.values()):
            return False
        return any(True for _ in itertools.islice(self._meanwhile, 1))

    def waiting(self) -> None:
        """While nothing else happens."""
        if self._lease:
            self._lease.check()

    def _show_remaining(self) -> None:
        trials = self._budget.trials
        spare = self._spare - {trial.seed for trial in self._given}
        counted = (trial for trial in self._wanted if trial.seed not in spare)
        most = None if trials is None else max(0, trials - len(self._given))
        self._progress.remaining([*itertools.islice(itertools.chain(counted, self.state.unchosen), most)])

    def _update(self) -> None:
        for setting, before in self._looks.items():
            self._looks[setting] = looks(self.state, setting, self._given, before)
            for look in self._looks[setting][len(before) :]:
                verdicts = ", ".join(f"{arm} {effect.verdict}" for arm, effect in look.decision.effects.items())
                ended = f"; no more seeds for {', '.join(look.stopped)}" if look.stopped else ""
                self._progress.say(f"Look at {look.seeds} seeds: {verdicts}{ended}.")
                self.state.enter_look()
        self._wanted = deque(trial for trial in self._missing() if trial not in self._given)
        self._show_remaining()

    def _missing(self) -> Iterator[Trial]:
        state = self.state
        yield from (trial for trial, record in state.tried.items() if not record.ended)
        stopped = {setting: {arm for look in taken for arm in look.stopped} for setting, taken in self._looks.items()}
        decided = {setting for setting, names in stopped.items() if names and len(names) == len(state.settings.arms)}
        # Arms one of whose trials failed in this run: no look counts them, so more seeds would be for nothing.
        lost = set()
        for trial, record in state.answered.items() if state.settings.until_decided else ():
            if record.status in ("failed", "damaged") and trial in self._given and trial.arm.name != BASE:
                lost.add(trial.arm.name)
        records = state.records
        for trial in sorted({**state.answered, **state.matched}, key=self._priority):
            is_over = trial.setting in decided or state.arms_of(trial) <= stopped[trial.setting]
            if not (records[trial].ended or is_over or trial.arm.name in lost):
                yield trial

    def _priority(self, trial: Trial) -> tuple[int, int, float]:
        """Seed by seed, in a seed base first and then the widest interval; settings stay in their order."""
        taken = self._looks[trial.setting]
        effect = taken[-1].decision.effects.get(trial.arm.name) if taken else None
        width = effect.high - effect.low if effect else 0.0
        seed = self.state.settings.seeds_of(BASE).index(trial.seed)
        return seed, trial.arm.name != BASE, 0.0 if math.isnan(width) else -width

    def _affordable(self, trial: Trial) -> bool:
        budget = self._budget
        if budget.trials is not None and len(self._given) >= budget.trials:
            return False
        if budget.seconds is None:
            return True
        settings = self.state.settings
        now, row, left_s, over_s = time.monotonic(), [trial], budget.left_s, budget.over_s
        at_work = [max(0.0, began + self._expected_s(other) - now) for other, began in self._at_work.items()]
        is_new = all(other.seed != trial.seed for other in self._given)
        if not (settings.until_decided or settings.tune) and (is_new or over_s):
            row = [other for other in self._wanted if other.seed == trial.seed]  # all trials of a seed, or none
        if is_new:
            over_s = min(FOR_NEW * over_s, left_s - max(at_work, default=0.0))
        workers = max(self._progress.workers, len(at_work) + 1)  # a cluster may have more at work
        return seconds_left(at_work, map(self._expected_s, row), workers) <= left_s + over_s

    def _expected_s(self, trial: Trial) -> float:
        """Seconds of a trial, by those before it; 0 before the first."""
        seconds = self._seconds.get((trial.setting, trial.arm.name)) or [*itertools.chain(*self._seconds.values())]
        return statistics.median(seconds or [0.0])
