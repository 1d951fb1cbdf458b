"""How a running study is shown: one bar, a line for each trial, the time left, and a report that follows the trials."""

from __future__ import annotations

import heapq
import math
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from vitmods.study.answer import Running
from vitmods.study.cells import Trial
from vitmods.study.state import StudyState
from vitmods.train.loggers import FIRST_LINE_S
from vitmods.util.files import LenientStream, progress_console
from vitmods.util.limits import parse_json
from vitmods.util.text import duration

Kind = tuple[str, str]
"""arm, and the setting and point under which it is trained: trials of one kind take equally long"""

_TAIL = 1 << 17  # bytes that hold the last whole row of a metrics.jsonl, also with all lambdas of many heads
RECENT = 5  # trials of a kind whose median pace counts: a machine may become faster or slower
TELLING = 0.1  # of a trial's steps: its own pace is known from then on
REFRESH_S = 0.5  # of the bar
BAR_WIDTH, NAME_WIDTH = 10, 26  # at least, and at most, in columns
REPORT_SHARE = 0.02  # of the time, at most, goes into the report of a running study
REPORT_S = 1.0  # that a report is assumed to take before the first one is written
PATIENCE = 2.0  # times the expected time until the next report, after which a run is taken to have stopped
GRACE_S = 60.0  # in addition


def kind_of(trial: Trial) -> Kind:
    """Return what decides how long a step of a trial takes."""
    return trial.arm.name, ", ".join(filter(None, (str(trial.setting), str(trial.point))))


class StepTimes:
    """Seconds of a step of each kind of trial, measured in this run.

    Kinds that this run has not measured follow from earlier runs, whose paces count relative to each other once this
    run has measured one, and otherwise from measured kinds: an arm costs the same multiple of another arm under every
    setting.
    """

    def __init__(self, earlier: Iterable[tuple[Kind, float]] = ()) -> None:
        """earlier: kinds and paces of trials that other runs trained on such a machine."""
        self._here: dict[Kind, list[float]] = {}
        before: dict[Kind, list[float]] = {}
        for kind, pace in earlier:
            before.setdefault(kind, []).append(pace)
        self._before = {kind: statistics.median(paces) for kind, paces in before.items()}

    def add(self, kind: Kind, seconds: float, steps: int) -> None:
        """Count a trial that this run trained from its first step."""
        if steps > 0 and seconds > 0:
            self._here.setdefault(kind, []).append(seconds / steps)

    def __call__(self, kind: Kind, running: Mapping[Kind, float] | None = None) -> float | None:
        """Return the seconds of a step; None before anything is known.

        running: paces of trials that have not ended, for kinds of which none has.
        """
        here = {other: statistics.median(paces[-RECENT:]) for other, paces in self._here.items()}
        here = {**(running or {}), **here}
        if kind in here:
            return here[kind]
        shared = here.keys() & self._before.keys()
        scale = 1.0
        if shared:
            scale = statistics.median(here[other] / self._before[other] for other in shared)
        elif here and self._before:
            scale = statistics.fmean(here.values()) / statistics.fmean(self._before.values())
        paces = {**{other: scale * pace for other, pace in self._before.items()}, **here}
        if kind in paces or not paces:
            return paces.get(kind)
        arm, place = kind
        beside = {other: pace for (other, where), pace in paces.items() if where == place}
        elsewhere = {where: pace for (other, where), pace in paces.items() if other == arm}
        ratios = [
            pace * elsewhere[where] / paces[other, where]
            for other, pace in beside.items()
            for where in elsewhere
            if (other, where) in paces
        ]
        if ratios:
            return statistics.median(ratios)
        return statistics.fmean((beside or elsewhere or paces).values())


def seconds_left(running: Sequence[float], waiting: Iterable[float], workers: int) -> float:
    """Return when the last trial ends, if workers that are free take the next one.

    running, waiting: seconds that each trial still takes.
    """
    free = [*running, *[0.0] * (workers - len(running))]
    heapq.heapify(free)
    for seconds in waiting:
        heapq.heappush(free, heapq.heappop(free) + seconds)
    return max(free, default=0.0)


class LiveReport:
    """Rewrites the report of a running study when a trial has ended, in at most a fiftieth of the time.

    A report that cannot be written is a warning: the trials matter more.
    """

    def __init__(self, write: Callable[[Running | None], object], after_s: float = 0.0) -> None:
        """write: the report of what the folder holds; None: of a study that no run works on. after_s: seconds between
        the last trial and the final report."""
        self._write, self._after_s, self._cost_s, self._written = write, after_s, REPORT_S, time.monotonic()
        self.is_running = False

    def update(self, left_s: float | None, next_s: float | None) -> None:
        """Write it, unless that takes too much time. next_s: seconds until another trial ends."""
        began = time.monotonic()
        wait_s = self._cost_s / REPORT_SHARE
        if began - self._written < wait_s or (left_s is not None and left_s + self._after_s < wait_s):
            return  # the final one comes sooner than another
        now = datetime.now().astimezone().replace(microsecond=0)
        due = None
        if next_s is not None:
            due_s = max(next_s, wait_s) + next_s + self._after_s
            due = now + timedelta(seconds=round(PATIENCE * due_s + GRACE_S))
        self.is_running = self._attempt(Running(now, left_s, due)) or self.is_running
        self._written = time.monotonic()
        self._cost_s = self._written - began

    def stop(self) -> None:
        """Where a page claims that the study runs, write one that does not."""
        if self.is_running and self._attempt(None):
            self.is_running = False

    def _attempt(self, running: Running | None) -> bool:
        try:
            self._write(running)
        except Exception as error:
            warnings.warn(f"The report of the running study was not written: {error}", stacklevel=3)
            return False
        return True


class Progress:
    """Shows a run on the error stream: a line for each trial that ends, and on a terminal a bar below them.

    Prints nothing if `quiet`, and a bar only on a terminal outside of CI.
    """

    def __init__(
        self,
        folder: Callable[[Trial], Path],
        steps: Callable[[Trial], int],
        workers: int,
        quiet: bool,
        *,
        pace: StepTimes | None = None,
        ended: int = 0,
        at_most: bool = False,
        limit_s: Callable[[], float] = lambda: math.inf,
        report: LiveReport | None = None,
    ) -> None:
        """folder, steps: of a trial. workers: trials at a time. ended: trials that earlier runs have ended. at_most:
        whether trials may turn out to be unnecessary. limit_s: seconds until the budget ends."""
        self._folder, self._steps, self.workers, self._quiet = folder, steps, workers, quiet
        self._pace, self._ended, self._at_most, self._limit_s = pace or StepTimes(), ended, at_most, limit_s
        self._report = report
        self._left: Collection[Trial] = ()
        self._started: dict[Trial, tuple[float, Mapping[str, Any]]] = {}
        """trial that runs -> when it began, on the monotonic clock, and its last row then"""
        self._most = 1  # trials at a time so far
        self._stream = LenientStream(sys.stderr)
        self._has_bar = not quiet and self._stream.isatty() and not os.environ.get("CI")
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._live: Any = None
        self._watch: threading.Thread | None = None
        self._has_line = quiet

    def remaining(self, pending: Collection[Trial]) -> None:
        """Set the trials that are known to remain, in their order."""
        with self._lock:
            self._left = tuple(pending)

    def started(self, trial: Trial) -> None:
        with self._lock:
            self._started[trial] = time.monotonic(), self._row(trial)
            self._most = max(self._most, len(self._started))
            if self._watch is None and not self._quiet:
                self._live = self._make_live() if self._has_bar else None
                self._watch = threading.Thread(target=self._show, daemon=True)
                self._watch.start()

    def reused(self, count: int) -> None:
        """Count trials that other studies have ended."""
        self._ended += count

    def ended(self, trial: Trial, failure: str | None, state: StudyState) -> float:
        """Print the outcome of a trial that the state has read, and update the report; returns the seconds it took."""
        row = self._row(trial)
        with self._lock:
            began, first_row = self._started.pop(trial)
            seconds = time.monotonic() - began
            if failure is None and not first_row:  # the first steps of a resumed trial are slow
                self._pace.add(kind_of(trial), seconds, min(row.get("step", 0), self._steps(trial)))
            self._ended += 1
            left_s, next_s = self.seconds_left()
            line = f"{self._ended:>3} of {self.total}  {trial}: {_outcome(trial, failure, state)}"
            time_left = f", {self._in_words(left_s)}" if left_s is not None and self._pending else ""
        self._has_line = True
        self.say(f"{line}  ({seconds:.0f} s{time_left})")
        if self._report is not None and self._pending:
            self._report.update(left_s, next_s)
        return seconds

    @property
    def total(self) -> int:
        """All trials, those of earlier runs included."""
        return self._ended + self._pending

    @property
    def _pending(self) -> int:
        return len(self._left) + len(self._started)

    def seconds_left(self) -> tuple[float | None, float | None]:
        """Return the seconds until the last trial ends, and until the next one does; None before anything is known."""
        now = time.monotonic()
        rows = {trial: self._row(trial) for trial in self._started}
        measured: dict[Kind, float] = {}
        for trial, (_, first_row) in self._started.items():
            step, before = rows[trial].get("step", 0), first_row.get("step", 0)
            seconds = rows[trial].get("wall_s", 0.0) - first_row.get("wall_s", 0.0)
            if step - before >= TELLING * self._steps(trial) and seconds > 0:
                measured[kind_of(trial)] = seconds / (step - before)
        running: list[float] = []
        for trial, (began, first_row) in self._started.items():
            if (pace := self._pace(kind_of(trial), measured)) is None:
                return None, None
            steps = self._steps(trial)
            rest_s = pace * max(0, steps - rows[trial].get("step", 0))
            if rows[trial] == first_row:  # no step is logged yet
                rest_s = max(0.0, rest_s - (now - began))
            running.append(rest_s)
        paces = {kind: self._pace(kind, measured) for kind in map(kind_of, self._left)}
        if None in paces.values():
            return None, None
        waiting = [(paces[kind_of(trial)] or 0.0) * self._steps(trial) for trial in self._left]
        seconds = seconds_left(running, waiting, min(self.workers, self._most))
        next_s = min([*running, *waiting[: 1 if self.workers > len(running) else 0]], default=0.0)
        return min(seconds, max(0.0, self._limit_s())), next_s

    def _in_words(self, left_s: float) -> str:
        return f"{'up to' if self._at_most else 'about'} {duration(left_s)} left"

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._live is not None:
            self._live.refresh()
            self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)
        elif not self._quiet:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        self._closed.set()
        if self._watch is not None:
            self._watch.join()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _row(self, trial: Trial) -> Mapping[str, Any]:
        """The last row that the trial has logged."""
        return last_row(self._folder(trial) / "metrics.jsonl")

    def _show(self) -> None:
        """Refresh the bar. Without one, a first trial that takes long gets one line with the time left."""
        began = time.monotonic()
        while not self._closed.wait(REFRESH_S):
            if self._live is not None:
                with suppress(Exception):  # nobody may be reading
                    self._live.refresh()
            elif not self._has_line and time.monotonic() - began > FIRST_LINE_S:
                with self._lock:
                    left_s, _ = self.seconds_left()
                    position = self._position()
                if left_s is not None and position:
                    self._has_line = True
                    self.say(f"{position[0]}, {position[1]}; {self._in_words(left_s)} for all trials")

    def _position(self) -> tuple[str, str] | None:
        """`dpn, seed 2` and `step 340/600` of the first trial that runs, and how many run at the same time."""
        if not self._started:
            return None
        trial = next(iter(self._started))
        steps, beside = self._steps(trial), len(self._started) - 1
        where = f"step {min(self._row(trial).get('step', 0), steps):,}/{steps:,}"
        return str(trial), f"{where} +{beside}" if beside else where

    def _make_live(self) -> Any:
        from rich.live import Live

        console = progress_console()
        live = Live(console=console, auto_refresh=False, get_renderable=lambda: self.bar(console.width), transient=True)
        live.start()
        return live

    def bar(self, width: int) -> Any:
        """Return the bar for rich: trials done, the trial at work with its step, and the time left; one line."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        with self._lock:
            name, step = self._position() or ("", "")
            count, done, total = f"{self._ended}/{self.total}", float(self._ended), self.total
            for trial in self._started:
                steps = self._steps(trial)
                done += min(self._row(trial).get("step", 0), steps) / steps
            left_s, _ = self.seconds_left()
        time_left = "measuring the time" if left_s is None else self._in_words(left_s)
        room = width - len(count) - BAR_WIDTH - len(time_left) - 3  # of a narrow terminal for the trial
        for_name = min(room - len(step) - 1, NAME_WIDTH)
        words = [text for text, is_shown in ((name, for_name >= 4), (step, room > len(step))) if is_shown]
        line = Table.grid(padding=(0, 1, 0, 0), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1, min_width=BAR_WIDTH)
        for text in words:
            line.add_column(no_wrap=True, overflow="ellipsis", max_width=for_name if text is name else None)
        line.add_column(no_wrap=True, justify="right")
        line.add_row(count, ProgressBar(total=total or 1, completed=done), *words, time_left)
        return line


def _outcome(trial: Trial, failure: str | None, state: StudyState) -> str:
    if failure is not None:
        return f"failed: {failure}"
    record = state.records[trial]
    metric = state.settings.measure.metric
    score = record.score(metric.name)
    if score is None:
        return record.message or record.status
    return f"{metric.title} {metric.shown(score)}{', a single class for all images' if record.constant else ''}"


def last_row(metrics: Path) -> dict[str, Any]:
    """Return the last whole row of a metrics.jsonl; empty where there is none yet."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return {}
    for line in reversed(lines):
        try:
            row = parse_json(line)
            return {"step": int(row["step"]), "wall_s": float(row.get("wall_s", 0.0))}
        except (AttributeError, KeyError, TypeError, ValueError):  # a row being written, or the cut one at the start
            continue
    return {}


def earlier_paces(state: StudyState, steps: Callable[[Trial], int], device: str) -> list[tuple[Kind, float]]:
    """Return the paces of trials that earlier runs of this study trained on such a device."""
    return [
        (kind_of(trial), record.wall_s / steps(trial))
        for trial, record in state.records.items()
        if record.status == "finished" and not record.reused and record.wall_s
        if record.environment.get("device") == device
    ]
