"""What a trial says while it runs: means over steps, metrics.jsonl (the record), TensorBoard and a progress bar."""

import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from vitmods.tasks.metrics import Metric
from vitmods.train.distributed import ALONE, Processes
from vitmods.train.loggers import Logs, scalars_of
from vitmods.train.record import GRADIENT
from vitmods.util.errors import UserError
from vitmods.util.files import LenientStream, disk_errors, progress_console
from vitmods.util.limits import parse_json, read_bytes

WORTH_TELLING = 0.05  # fraction of the time in which the model waits for images
_MUST_BE_FINITE = {"loss": "loss", "grad_norm": "gradient", GRADIENT: "gradient"}
"""the beginning of a statistic's name -> what it is of"""


class Diverged(Exception):
    """A loss or a gradient was not finite: an outcome of the trial, not a fault of the program."""


class Window:
    """0-d statistics by name, one dict a step, left on the device until a row is logged: reading waits for it.

    Of several processes each holds its part of a sum, which is made when the statistics are read.
    """

    def __init__(self, processes: Processes = ALONE) -> None:
        self._steps: list[dict[str, Tensor]] = []
        self._processes = processes
        self.images = 0

    def add(self, statistics: dict[str, Tensor], images: int) -> None:
        self._steps.append(statistics)
        self.images += images

    def take(self, step: int) -> dict[str, float]:
        """Means over the steps, the last of which was number `step`; empties the window.

        Raises:
            Diverged: a loss or gradient norm among them is not finite; names the first such step.
        """
        columns, count = self._columns(), len(self._steps)
        self._steps, self.images = [], 0
        bad = [
            (i, words)
            for beginning, words in _MUST_BE_FINITE.items()
            for name in columns
            if name == beginning or (beginning.endswith("/") and name.startswith(beginning))
            for i, value in enumerate(columns[name])
            if not math.isfinite(value)
        ]
        if bad:
            first, words = min(bad, key=itemgetter(0))
            raise Diverged(f"the {words} was not finite at step {step - count + 1 + first}")
        return {name: math.fsum(values) / count for name, values in columns.items()}

    def state_dict(self) -> dict[str, list[float]]:
        return self._columns()

    def load_state_dict(self, columns: dict[str, list[float]], device: torch.device) -> None:
        rows = list(zip(*columns.values(), strict=True))
        if not self._processes.first:  # the first holds the sum
            rows = [(0.0,) * len(columns) for _ in rows]
        self._steps = [
            {name: torch.tensor(value, device=device) for name, value in zip(columns, row, strict=True)} for row in rows
        ]

    def _columns(self) -> dict[str, list[float]]:
        if not self._steps:
            return {}
        names = [name for name in self._steps[0] if all(name in step for step in self._steps)]
        table = torch.stack([torch.stack([step[name].float() for name in names]) for step in self._steps])
        table = self._processes.total(table)
        return dict(zip(names, table.T.tolist(), strict=True))


class NoMetrics:
    """In processes that write no files."""

    def write(self, row: dict[str, Any]) -> None: ...
    def sync(self) -> int:
        return 0

    def close(self, status: str = "finished", scalars: Mapping[str, float] | None = None) -> None: ...


class MetricsFile:
    """metrics.jsonl: one JSON object a line, in the order of the steps.

    The file is cut to `length` bytes when opened: what was written after the checkpoint that a trial resumes from
    comes again. A TensorBoard log in `tensorboard`, if given, is rebuilt from the rows that stay. `open_logs`, if
    given, gets these rows and how many there were before the cut, and opens loggers for those that follow.
    """

    def __init__(
        self,
        path: Path,
        length: int,
        tensorboard: Path | None,
        open_logs: Callable[[Sequence[Mapping[str, Any]], int], Logs] | None = None,
    ) -> None:
        self.path = path
        with disk_errors(path), ExitStack() as opened:
            known = self._content().count(b"\n") if open_logs and path.exists() else 0
            self._file = opened.enter_context(open(path, "ab"))
            if self._file.tell() < length:
                raise UserError(f"{path} is shorter than its checkpoint says. Delete its folder to train again.")
            self._file.truncate(length)
            self._file.seek(length)  # cutting a file does not move the position that sync() tells
            self._board = TensorBoard(tensorboard, self.rows()) if tensorboard else None
            self._logs = open_logs(self.rows(), known) if open_logs else None
            opened.pop_all()  # closed by close(), unless something went wrong

    def rows(self) -> list[dict[str, Any]]:
        """The rows so far. UserError where one is damaged."""
        try:
            return [parse_json(line) for line in self._content().splitlines()]
        except ValueError as error:
            raise self._damaged(error) from error

    def _content(self) -> bytes:
        try:
            return read_bytes(self.path, "text")
        except ValueError as error:
            raise self._damaged(error) from error

    def _damaged(self, error: ValueError) -> UserError:
        return UserError(f"{self.path} is damaged ({error}). Delete its folder to train again.")

    def write(self, row: dict[str, Any]) -> None:
        with disk_errors(self.path):
            self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            self._file.flush()
        if self._board is not None:
            self._board.write(row)
        if self._logs is not None:
            self._logs.write(row)

    def sync(self) -> int:
        """Put all rows on the disk; the length of the file in bytes."""
        with disk_errors(self.path):
            os.fsync(self._file.fileno())
            return self._file.tell()

    def close(self, status: str = "finished", scalars: Mapping[str, float] | None = None) -> None:
        """Loggers are given how the trial ended, and its last numbers."""
        if self._logs is not None:
            self._logs.close(status, scalars or {})
        try:
            with disk_errors(self.path):
                self._file.close()
        finally:
            if self._board is not None:
                self._board.close()


class TensorBoard:
    """The rows of metrics.jsonl as TensorBoard scalars `train/loss`, `val/top1`, ..., in one event file.

    Written here and now: TensorBoard's own writer does it in a thread, where a full disk ends in a stray traceback.
    """

    def __init__(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        # A quarter of a second to import.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder, self._event, self._summary = folder, Event, Summary
        with disk_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            with ExitStack() as opened:
                self._file = opened.enter_context(open(folder / name, "wb"))
                self._records = RecordWriter(self._file)
                self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
                for row in rows:
                    self.write(row)
                opened.pop_all()  # closed by close(), unless something went wrong

    def write(self, row: dict[str, Any]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars_of(row).items()]
        event = self._event(wall_time=time.time(), step=row["step"], summary=self._summary(value=values))
        with disk_errors(self.folder):
            self._add(event)

    def close(self) -> None:
        with disk_errors(self.folder):
            self._file.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()


class ProgressBar:
    """Steps done, loss, those of the metrics that each step has, images/s and time left on the terminal's error stream.

    Silent when `shown` is false, in continuous integration (the variable CI is set) and where there is no terminal.
    """

    def __init__(self, shown: bool, title: str, total: int, done: int, metrics: Sequence[Metric] = ()) -> None:
        self._bar: Any = None
        self._metrics = metrics
        if not (shown and LenientStream(sys.stderr).isatty() and not os.environ.get("CI")):
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self._bar = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=24)),
            BarColumn(16),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=progress_console(),
            expand=True,
        )
        self._task = self._bar.add_task(title, total=total, completed=done, numbers="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def show(self, row: dict[str, Any]) -> None:
        """The newest training row."""
        if self._bar is None:
            return
        parts = [f"loss {row['loss']:.3f}"]
        parts += [f"{metric.title} {metric.shown(row[metric.name])}" for metric in self._metrics if metric.name in row]
        parts.append(f"{row['images_per_s']:.0f} images/s")
        if row["data_wait"] >= WORTH_TELLING:
            parts.append(f"{100 * row['data_wait']:.0f} % waiting for images")
        self._bar.update(self._task, numbers="  ".join(parts))
