"""Progress of a study: how much there is to do, a line for each finished trial, and a bar on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from vitmods.study.plan import Work, trial_of
from vitmods.study.state import StudyState
from vitmods.util.files import LenientStream, progress_console
from vitmods.util.limits import parse_json
from vitmods.util.text import duration

_TAIL = 1024  # bytes that surely hold the last whole row of a metrics.jsonl


class Progress:
    """Prints nothing if `quiet`, and a bar only on a terminal outside of CI."""

    def __init__(self, folder: Callable[[Work], Path], steps: Callable[[Work], int], workers: int, quiet: bool):
        """folder, steps: of a piece of work. workers: pieces of work at a time."""
        self._folder, self._steps, self._workers, self._quiet = folder, steps, workers, quiet
        self._finished = self._past_steps = 0
        self._left: Collection[Work] = ()
        self._started: dict[Work, tuple[float, int]] = {}
        self._ran_s, self._ran_steps = 0.0, 0
        self._stream = LenientStream(sys.stderr)
        has_bar = workers > 1 and not quiet and self._stream.isatty() and not os.environ.get("CI")
        self._bar = self._make_bar() if has_bar else None

    def remaining(self, pending: Collection[Work]) -> None:
        """Set the work that is known to remain."""
        self._left = pending
        self.waiting()

    def started(self, work: Work) -> None:
        self._started[work] = time.monotonic(), self._steps_done(work)

    def ended(self, work: Work, failure: str | None, state: StudyState) -> float:
        """Print the outcome of work that the state has read; returns the seconds that it took."""
        began, resumed_at = self._started.pop(work)
        seconds = time.monotonic() - began
        if failure is None and not resumed_at:  # the first steps of a resumed trial are slow
            self._ran_s, self._ran_steps = self._ran_s + seconds, self._ran_steps + self._steps_done(work)
        self._past_steps += self._steps(work)
        self._finished += 1
        pending = len(self._left) + len(self._started)
        to_go = ""
        if pending and self._ran_steps:
            steps = sum(map(self._steps, (*self._left, *self._started))) - sum(map(self._steps_done, self._started))
            to_go = f", about {duration(steps * self._ran_s / self._ran_steps / self._workers)} to go"
        total = self._finished + pending
        self.say(f"{self._finished:>3} of {total}  {work}: {_outcome(work, failure, state)}  ({seconds:.0f} s{to_go})")
        return seconds

    def waiting(self) -> None:
        if self._bar is not None:
            now = sum(map(self._steps_done, self._started))
            total = self._past_steps + sum(map(self._steps, (*self._left, *self._started)))
            self._bar.update(self._task, completed=self._past_steps + now, total=total)

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        elif not self._quiet:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _steps_done(self, work: Work) -> int:
        return min(_last_step(self._folder(work) / "metrics.jsonl"), self._steps(work))

    def _make_bar(self) -> Any:
        from rich import progress

        bar = progress.Progress(
            progress.TextColumn("all trials"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
            console=progress_console(),
        )
        self._task = bar.add_task("", total=None)
        bar.start()
        return bar


def _outcome(work: Work, failure: str | None, state: StudyState) -> str:
    if failure is not None:
        return f"failed: {failure}"
    trial = trial_of(work)
    record = state.answered.get(trial) or state.tried[trial]
    if record.status == "unfinished" and trial in state.tried:  # not yet evaluated on the answer's split
        record = state.tried[trial]
    metric = state.settings.measure.metric
    score = record.score(metric.name)
    if score is None:
        return record.message or record.status
    return f"{metric.title} {metric.shown(score)}{', a single class for all images' if record.constant else ''}"


def _last_step(metrics: Path) -> int:
    """The step of the last row that is whole; 0 where there is none yet."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(parse_json(line)["step"])
        except (KeyError, TypeError, ValueError):  # a row that is being written, or the cut one at the start
            continue
    return 0
