"""What a study says while it runs: how much there is to do, a line a finished trial, and on a terminal a bar."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitmods.study.measure import Measure
from vitmods.study.plan import Evaluation, Work
from vitmods.study.state import read_trial
from vitmods.study.store import StudyFolder
from vitmods.util.files import LenientStream, progress_console
from vitmods.util.text import plural

_TAIL = 1024  # bytes that surely hold the last whole row of a metrics.jsonl


class Progress:
    """Listens to an executor. `quiet` says nothing; without a terminal, or in CI, there is no bar."""

    def __init__(
        self,
        folder: StudyFolder,
        measure: Measure,
        split: str,
        steps: Mapping[Work, int],
        done: int,
        workers: int,
        quiet: bool,
    ):
        """measure, split: what the lines tell of a trial; steps: of the work that is still to be done; done: trials
        finished before; workers: at a time."""
        self._folder, self._measure, self._split = folder, measure, split
        self._steps, self._quiet = dict(steps), quiet
        self._finished, self._total = done, done + len(self._steps)
        self._started: dict[Work, float] = {}
        self._past_steps = 0
        self._stream = LenientStream(sys.stderr)
        shown = workers > 1 and not quiet and self._stream.isatty() and not os.environ.get("CI")
        kind = "evaluation" if isinstance(next(iter(steps)), Evaluation) else "trial"
        before = f" ({done} are done)" if done else ""
        self._bar = None
        self.say(f"{plural(len(steps), kind)} to run{before}, {workers} at a time, in {folder.path}")
        self._bar = self._make_bar() if shown else None

    def started(self, trial: Work) -> None:
        self._started[trial] = time.monotonic()

    def ended(self, trial: Work, failure: str | None) -> None:
        seconds = time.monotonic() - self._started.pop(trial)
        self._past_steps += self._steps[trial]
        self._finished += 1
        self.waiting()
        self.say(f"{self._finished:>3} of {self._total}  {trial}: {self._outcome(trial, failure)}  ({seconds:.0f} s)")

    def waiting(self) -> None:
        if self._bar is not None:
            now = sum(min(_last_step(self._metrics(trial)), self._steps[trial]) for trial in self._started)
            self._bar.update(self._task, completed=self._past_steps + now)

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        elif not self._quiet:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _outcome(self, work: Work, failure: str | None) -> str:
        if failure is not None:
            return f"failed: {failure}"
        trial = work.trial if isinstance(work, Evaluation) else work
        record = read_trial(self._folder, trial, self._split, self._measure)
        score = record.score(self._measure.name)
        if score is None:
            return record.message or record.status
        return f"{self._measure.metric.title} {self._measure.metric.shown(score)}"

    def _metrics(self, work: Work) -> Path:
        return self._folder.trial(work.trial if isinstance(work, Evaluation) else work) / "metrics.jsonl"

    def _make_bar(self) -> Any:
        from rich import progress

        bar = progress.Progress(
            progress.TextColumn("all trials"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
            console=progress_console(),
        )
        self._task = bar.add_task("", total=sum(self._steps.values()))
        bar.start()
        return bar


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
            return int(json.loads(line)["step"])
        except ValueError:  # a row that is being written, or the cut one at the start
            continue
    return 0
