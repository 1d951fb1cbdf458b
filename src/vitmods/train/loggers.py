"""Logs of a trial: means over steps, gradient norms and lambdas, metrics.jsonl (the record), TensorBoard, a progress
bar, and services that collect the rows: Weights & Biases, MLflow, and those of plugins."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from textwrap import shorten
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from vitmods.finetune.roles import parameter_roles
from vitmods.layers import DynamicTokenNorm
from vitmods.tasks.metrics import Metric
from vitmods.train.distributed import ALONE, Processes
from vitmods.util.errors import UserError, explaining
from vitmods.util.files import LenientStream, disk_errors, log, progress_console
from vitmods.util.limits import parse_json, read_bytes, read_json
from vitmods.util.registry import Registry
from vitmods.util.text import duration, flatten

CLOSING_S = 60.0  # time for a logger to send its last rows before the trial continues without it
FIRST_LINE_S = 20.0  # of training, after which a line has the time left where there is no bar
DATA_WAIT_SHOWN = 0.05  # fraction of the time in which the model waits for images, from which the bar shows it
GRADIENT, LAMBDA = "gradient/", "lambda"
STEM, HEAD = "stem", "head"
_MUST_BE_FINITE = {"loss": "loss", "grad_norm": "gradient", "gradient": "gradient"}
_NOT_ALLOWED = re.compile(r"[^\w\-./: ]")  # in names of MLflow
_BLOCK = re.compile(r"(?:[A-Za-z_]\w*\.)+?\d+(?:\.blocks\.\d+)?(?=\.)")


class Diverged(Exception):
    """A loss or a gradient was not finite: an outcome of the trial, not a fault of the program."""


class Window:
    """0-d statistics by name, one dict per step, left on the device until a row is logged: reading waits for it.

    Of several processes each holds its part of a sum, which is made when the statistics are read.
    """

    def __init__(self, processes: Processes = ALONE) -> None:
        self._steps: list[dict[str, Tensor]] = []
        self._processes = processes
        self.images = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, statistics: dict[str, Tensor], images: int) -> None:
        self._steps.append(statistics)
        self.images += images

    def take(self, step: int) -> dict[str, float]:
        """Return the means over the steps, the last of which was number `step`, and empty the window.

        Raises:
            Diverged: a loss or gradient norm among them is not finite; names the first such step.
        """
        columns, count = self.state_dict(), len(self._steps)
        self._steps, self.images = [], 0
        for i in range(count):
            for name, values in columns.items():
                kind = _MUST_BE_FINITE.get(name.partition("/")[0])
                if kind and not math.isfinite(values[i]):
                    raise Diverged(f"the {kind} was not finite at step {step - count + 1 + i}")
        return {name: math.fsum(values) / count for name, values in columns.items()}

    def state_dict(self) -> dict[str, list[float]]:
        """Return the statistics of each step, of those that every step has."""
        if not self._steps:
            return {}
        names = [name for name in self._steps[0] if all(name in step for step in self._steps)]
        table = torch.stack([torch.stack([step[name].float() for name in names]) for step in self._steps])
        table = self._processes.total(table)
        return dict(zip(names, table.T.tolist(), strict=True))

    def load_state_dict(self, columns: dict[str, list[float]], device: torch.device) -> None:
        rows = list(zip(*columns.values(), strict=True))
        if not self._processes.first:  # the first holds the sum
            rows = [(0.0,) * len(columns) for _ in rows]
        self._steps = [
            {name: torch.tensor(value, device=device) for name, value in zip(columns, row, strict=True)} for row in rows
        ]


def layers_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the trained parameters of each layer: `stem`, the blocks by their names in order, `head`.

    The stem is what the patches are projected with, without its norms, so that models with and without norms there are
    compared by the same parameters. A block is all that it trains. The head is the classifier with a representation
    layer or pooling before it. Positions, tokens and norms outside of blocks belong to no layer.
    """
    roles, layers = parameter_roles(model), dict[str, list[nn.Parameter]]()
    for name, parameter in model.named_parameters():
        role, name = roles[name], name.removeprefix("backbone.")
        block = _BLOCK.match(name) if role not in (STEM, HEAD) else None
        layer = block[0] if block else role if role in (STEM, HEAD) else None
        if parameter.requires_grad and layer is not None and not (role == "norms" and name.startswith("patch_embed.")):
            layers.setdefault(layer, []).append(parameter)
    order = {STEM: 0, HEAD: 2}
    return dict(sorted(layers.items(), key=lambda item: order.get(item[0], 1)))


@torch.no_grad()
def gradient_norms(layers: Mapping[str, list[nn.Parameter]], processes: int = 1) -> dict[str, Tensor]:
    """Return the norm of the gradient of each layer's parameters before clipping; 0-d, on the device.

    processes: that train together; statistics are parts of a sum over them.
    """
    gradients = {layer: [p.grad for p in parameters if p.grad is not None] for layer, parameters in layers.items()}
    return {GRADIENT + layer: nn.utils.get_total_norm(g) / processes for layer, g in gradients.items() if g}


@torch.no_grad()
def lambdas_of(model: nn.Module) -> dict[str, list[float]]:
    """Return `mean` and `variance` with the name of each dynamic token norm -> its learned lambda of each head."""
    lambdas: dict[str, list[float]] = {}
    for name, module in model.named_modules():
        if isinstance(module, DynamicTokenNorm):
            for statistic, values in zip(("mean", "variance"), module.lambdas(), strict=True):
                if isinstance(values, Tensor):
                    lambdas[f"{statistic} {name.removeprefix('backbone.')}"] = [round(v, 6) for v in values.tolist()]
    return lambdas


class MetricsFile:
    """metrics.jsonl: one JSON object a line, in the order of the steps.

    The file is cut to `length` bytes when opened: what was written after the checkpoint that a trial resumes from
    comes again. A TensorBoard log in `tensorboard`, if given, is rebuilt from the rows that stay. `logs`, once set, get
    the rows that follow.
    """

    logs: Logs | None = None

    def __init__(self, path: Path, length: int, tensorboard: Path | None) -> None:
        self.path = path
        with (
            disk_errors(path),
            explaining(lambda error: f"{path} is damaged ({error}). Delete its folder to train again.", ValueError),
        ):
            path.touch()
            written = read_bytes(path, "text")
            if len(written) < length:
                raise UserError(f"{path} is shorter than its checkpoint says. Delete its folder to train again.")
            rows = [parse_json(line) for line in written[:length].splitlines()] if tensorboard else []
            os.truncate(path, length)
            self._file = open(path, "ab")  # noqa: SIM115, closed by close()
        try:
            self._board = TensorBoard(tensorboard, rows) if tensorboard else None
        except BaseException:
            self._file.close()
            raise

    def write(self, row: dict[str, Any]) -> None:
        with disk_errors(self.path):
            self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            self._file.flush()
        if self._board is not None:
            self._board.write(row)
        if self.logs is not None:
            self.logs.write(row)

    def sync(self) -> int:
        """Put all rows on the disk; returns the length of the file in bytes."""
        with disk_errors(self.path):
            os.fsync(self._file.fileno())
            return self._file.tell()

    def close(self, status: str = "finished", scalars: Mapping[str, float] | None = None) -> None:
        """Tell the loggers how the trial ended, with its last numbers."""
        if self.logs is not None:
            self.logs.close(status, scalars or {})
        try:
            with disk_errors(self.path):
                self._file.close()
        finally:
            if self._board is not None:
                self._board.close()


class TensorBoard:
    """The rows of metrics.jsonl as TensorBoard scalars `train/loss`, `val/top1`, ..., in one event file.

    Written at once: TensorBoard's own writer uses a thread, where a full disk ends in a stray traceback.
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
            self._file = open(folder / name, "wb")  # noqa: SIM115, closed by close()
        self._records = RecordWriter(self._file)
        try:
            self._add(file_version="brain.Event:2")
            for row in rows:
                self.write(row)
        except BaseException:
            with suppress(OSError):  # a full disk refuses what is buffered, too
                self._file.close()
            raise

    def write(self, row: dict[str, Any]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars_of(row).items()]
        self._add(step=row["step"], summary=self._summary(value=values))

    def close(self) -> None:
        with disk_errors(self.folder):
            self._file.close()

    def _add(self, **event: Any) -> None:
        with disk_errors(self.folder):
            self._records.write(self._event(wall_time=time.time(), **event).SerializeToString())
            self._file.flush()


class ProgressBar:
    """Steps done, loss, metrics of training steps, images/s and time left, on the terminal's error stream.

    Without a terminal, and in continuous integration (the variable CI is set), one line reports the time left of a
    training that takes longer. Silent if `shown` is false.
    """

    def __init__(self, shown: bool, title: str, total: int, done: int, metrics: Sequence[Metric] = ()) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self._metrics, self._title, self._total = metrics, title, total
        self._began, self._first, self._has_line = time.monotonic(), done, not shown
        self._bar = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=24)),
            BarColumn(16),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=progress_console(),
            expand=True,
            disable=not shown or not LenientStream(sys.stderr).isatty() or bool(os.environ.get("CI")),
        )
        self._task = self._bar.add_task(title, total=total, completed=done, numbers="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, step: int) -> None:
        if not self._bar.disable:
            self._bar.update(self._task, completed=step)

    def show(self, row: dict[str, Any]) -> None:
        """Show the newest training row."""
        seconds = time.monotonic() - self._began
        if self._bar.disable and not self._has_line and seconds >= FIRST_LINE_S and row["step"] > self._first:
            self._has_line = True
            time_left = duration(seconds / (row["step"] - self._first) * (self._total - row["step"]))
            log(f"{self._title}: step {row['step']:,} of {self._total:,}, about {time_left} left")
        parts = [f"loss {row['loss']:.3f}"]
        parts += [f"{metric.title} {metric.shown(row[metric.name])}" for metric in self._metrics if metric.name in row]
        parts.append(f"{row['images_per_s']:.0f} images/s")
        if row["data_wait"] >= DATA_WAIT_SHOWN:
            parts.append(f"{100 * row['data_wait']:.0f} % waiting for images")
        self._bar.update(self._task, numbers="  ".join(parts))


@dataclass(frozen=True)
class LoggedRun:
    """A trial, or a verdict, as loggers identify it."""

    study: str
    """name of the study's folder; groups runs"""
    name: str
    """for readers"""
    key: str
    """unique to the run, and the same when a trial resumes"""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """to filter and group by: study, arm, seed, base, ...; for a verdict also the verdict itself"""
    folder: Path | None = None
    """place for local files, the trial's or the study's folder; None: the logger's default"""
    config: Mapping[str, Any] = field(default_factory=dict)
    """all settings, as in config.json"""

    @property
    def group(self) -> str:
        return str(self.fields.get("arm", ""))

    @property
    def kind(self) -> str:
        return "verdict" if "verdict" in self.fields else "trial"


class Logger(Protocol):
    """An open run, or one that goes on. An error in a method ends the log, never the trial."""

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Log `train/loss`, `val/top1`, ... after this step; a step may have several calls."""

    def close(self, status: str, scalars: Mapping[str, float]) -> None:
        """End the run as finished, diverged, stopped or failed, with its last numbers, such as `test/top1`."""


@dataclass(frozen=True)
class LoggerKind:
    """How to open runs."""

    open: Callable[[LoggedRun], Logger]
    needs: str | None = None
    """module of the library; the extra of vitmods has the logger's name"""
    check: Callable[[], None] = lambda: None
    """raises UserError, before any work, if runs cannot be opened here"""


LOGGERS: Registry[LoggerKind] = Registry("logger")


def check_loggers(names: Iterable[str]) -> None:
    """Raise UserError if a logger is unknown or not installed, or needs a login."""
    for name in names:
        kind = LOGGERS[name]
        if kind.needs and importlib.util.find_spec(kind.needs) is None:
            raise UserError(f"The logger {name} needs {kind.needs}: pip install 'vitmods[{name}]', or drop it.")
        kind.check()


def key_of(*parts: str) -> str:
    """Return a short digest that identifies a run."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of metrics.jsonl by name: `train/loss`, `val/top1`, ..."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {f"{row['split']}/{name}": numbers[name] for name in numbers if name not in ("step", "epoch")}


class Logs:
    """Sends rows to several loggers; one that fails is reported once and dropped."""

    def __init__(self, names: Sequence[str], run: LoggedRun) -> None:
        self._run = run
        self._loggers: dict[str, Logger] = {}

        def open_run(name: str) -> None:
            self._loggers[name] = LOGGERS[name].open(run)

        self._for_each(names, open_run)

    def write(self, row: Mapping[str, Any]) -> None:
        def write_row(name: str) -> None:
            self._loggers[name].write(scalars_of(row), row["step"])

        self._for_each(tuple(self._loggers), write_row)

    def close(self, status: str, scalars: Mapping[str, float]) -> tuple[str, ...]:
        """End all runs; returns the names of the loggers that have received everything."""

        def close_run(name: str) -> None:
            ended = SimpleQueue[Exception | None]()

            def close() -> None:
                try:
                    self._loggers[name].close(status, scalars)
                    ended.put(None)
                except Exception as error:
                    ended.put(error)

            threading.Thread(target=close, daemon=True).start()  # an unreachable service may never answer
            try:
                error = ended.get(timeout=CLOSING_S)
            except Empty:
                raise TimeoutError(f"it did not take the last rows within {CLOSING_S:.0f} s") from None
            if error is not None:
                raise error

        self._for_each(tuple(self._loggers), close_run)
        names = tuple(self._loggers)
        self._loggers.clear()
        return names

    def _for_each(self, names: Iterable[str], call: Callable[[str], None]) -> None:
        for name in names:
            try:
                call(name)
            except Exception as error:  # whatever a network and a foreign library raise
                self._loggers.pop(name, None)
                reason = " ".join(str(error).split()) or type(error).__name__
                warnings.warn(
                    f"The logger {name} failed and gets no more of {self._run.name}: {reason}. metrics.jsonl and tb/ "
                    "have all rows.",
                    stacklevel=2,
                )


def open_logs(names: Sequence[str], run: LoggedRun | None, folder: Path, seed: int) -> Logs:
    """Open the loggers of the trial in a folder. run: None identifies a trial outside of studies by its folder."""
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    place, arm = folder.resolve(), config.get("arm", "base")
    fields = {"study": place.name, "arm": arm, "seed": seed, "changes": config.get("changes", "")}
    run = run or LoggedRun(place.name, f"{arm} seed {seed}", key_of(str(place)), fields)
    return Logs(names, replace(run, folder=folder, config=config))


class Wandb:
    """A run of Weights & Biases. WANDB_MODE, WANDB_ENTITY, WANDB_DIR and similar variables apply.

    Offline, files go to `wandb/` of the trial's folder for `wandb sync`; each part of a resumed trial has a folder.
    """

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=run.study,
            id=run.key,
            name=run.name,
            group=run.group,
            job_type=run.kind,
            config={**run.fields, "config": dict(run.config)},
            allow_val_change=True,
            dir=os.environ.get("WANDB_DIR") or (run.folder and str(run.folder.resolve())),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self, status: str, scalars: Mapping[str, float]) -> None:
        self._run.summary.update({**scalars, "status": status})
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _check_wandb() -> None:
    """Raise UserError if nobody is logged in: W&B would ask in the middle of the work."""
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.api.api_key:
        raise UserError(
            "Not logged in to W&B: run `wandb login`, or set WANDB_MODE=offline and send the runs later with "
            "`wandb sync`."
        )


class Mlflow:
    """A run of MLflow, in the experiment named after the study; fields are tags, settings are parameters.

    MLFLOW_TRACKING_URI and similar variables apply. Only MLflow's client is used, which keeps no global state.
    """

    def __init__(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client: Any = MlflowClient()
        self._last_step = 0
        with suppress(MlflowException):  # it exists, or the next call says what is wrong
            self._client.create_experiment(run.study)
        experiment: Any = self._client.get_experiment_by_name(run.study)
        experiment_id = experiment.experiment_id
        earlier = self._client.search_runs([experiment_id], f"tags.`vitmods.key` = '{run.key}'", max_results=1)
        tags = {"vitmods.key": run.key}
        opened = earlier[0] if earlier else self._client.create_run(experiment_id, tags=tags, run_name=run.name)
        self._id = opened.info.run_id
        if earlier:
            self._client.update_run(self._id, status="RUNNING")
        else:
            settings = {**run.fields, **(flatten(run.config) if run.config else {})}
            params = [Param(_NOT_ALLOWED.sub("-", name), str(value)[:500]) for name, value in settings.items()]
            for start in range(0, len(params), 100):  # the limits of all stores: 100 in a call, of 500 characters
                self._client.log_batch(self._id, params=params[start : start + 100])
        for name, value in {**run.fields, "kind": run.kind}.items():
            self._client.set_tag(self._id, name, str(value))

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_NOT_ALLOWED.sub("-", name), float(value), now, step) for name, value in scalars.items()]
        self._client.log_batch(self._id, metrics=metrics)
        self._last_step = step

    def close(self, status: str, scalars: Mapping[str, float]) -> None:
        self.write(scalars, self._last_step)
        self._client.set_tag(self._id, "status", status)
        self._client.set_terminated(self._id, {"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))


def _check_mlflow() -> None:
    """Raise UserError within seconds if the store cannot be opened; by default MLflow retries for many minutes."""
    import mlflow

    brief = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
    unset = brief.keys() - os.environ.keys()
    try:
        os.environ.update({name: brief[name] for name in unset})
        client: Any = mlflow.MlflowClient()
        client.search_experiments(max_results=1)
    except Exception as error:  # of a missing library, a path or a network
        raise UserError(
            f"MLflow cannot open {mlflow.get_tracking_uri()}. Set MLFLOW_TRACKING_URI to your server. Without one, a "
            "folder on this machine needs MLFLOW_ALLOW_FILE_STORE=true, and a database (sqlite:///mlflow.db) `pip "
            f"install sqlalchemy alembic`. The error was: {shorten(str(error), 400)}"
        ) from error
    finally:
        for name in unset:
            del os.environ[name]


LOGGERS.add("wandb", LoggerKind(Wandb, needs="wandb", check=_check_wandb))
LOGGERS.add("mlflow", LoggerKind(Mlflow, needs="mlflow", check=_check_mlflow))
