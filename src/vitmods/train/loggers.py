"""Services that collect the rows of metrics.jsonl: Weights & Biases, MLflow, trackio, and those of plugins."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from vitmods.util.errors import UserError
from vitmods.util.limits import read_json
from vitmods.util.registry import Registry

CLOSING_S = 60.0  # time for a logger to send its last rows before the trial continues without it


@dataclass(frozen=True)
class LoggedRun:
    """A trial, or a verdict, as loggers identify it.

    study:  name of the study's folder; groups runs
    name:   for readers
    key:    unique to the run, and the same when a trial resumes
    fields: to filter and group by: study, arm, seed, base, ...; for a verdict also the verdict itself
    folder: place for local files, the trial's or the study's folder; None: the logger's default
    config: all settings, as in config.json
    """

    study: str
    name: str
    key: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return str(self.fields.get("arm", ""))

    @property
    def kind(self) -> str:
        return "verdict" if "verdict" in self.fields else "trial"


class Logger(Protocol):
    """An open run. An error in a method ends the log, never the trial."""

    resumed: bool
    """whether it already has the rows of an earlier part of this run"""

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Log `train/loss`, `val/top1`, ... after this step; a step may have several calls."""

    def close(self, status: str, scalars: Mapping[str, float]) -> None:
        """End the run as finished, diverged, stopped or failed, with its last numbers, such as `test/top1`."""


@dataclass(frozen=True)
class LoggerKind:
    """How to open runs.

    needs: module of the library; the extra of vitmods has the logger's name
    check: raises UserError, before any work, if runs cannot be opened here
    """

    open: Callable[[LoggedRun], Logger]
    needs: str | None = None
    check: Callable[[], None] = lambda: None


LOGGERS: Registry[LoggerKind] = Registry("logger")


def check_loggers(names: Iterable[str]) -> None:
    """Raise UserError if a logger is unknown, is not installed, or has no account here."""
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

    def __init__(self, names: Sequence[str], run: LoggedRun, rows: Sequence[Mapping[str, Any]] = (), sent: int = 0):
        """rows: those written already. sent: how many an earlier part of the run has sent; those beyond `rows` will be
        written again. A resumed logger gets no row twice; a new one gets all."""
        self._run = run
        self._loggers: dict[str, Logger] = {}
        self._skip: dict[str, int] = {}

        def open_run(name: str) -> None:
            logger = self._loggers[name] = LOGGERS[name].open(run)
            self._skip[name] = max(0, sent - len(rows)) if logger.resumed else 0
            for row in () if logger.resumed else rows:
                logger.write(scalars_of(row), row["step"])

        for name in names:
            self._try(name, open_run)

    def write(self, row: Mapping[str, Any]) -> None:
        for name in list(self._loggers):
            if self._skip[name]:
                self._skip[name] -= 1
            else:
                self._try(name, lambda name: self._loggers[name].write(scalars_of(row), row["step"]))

    def close(self, status: str, scalars: Mapping[str, float]) -> tuple[str, ...]:
        """End all runs; returns the names of the loggers that have received everything."""
        for name in list(self._loggers):
            self._try(name, lambda name: _within(CLOSING_S, lambda: self._loggers[name].close(status, scalars)))
        names = tuple(self._loggers)
        self._loggers.clear()
        return names

    def _try(self, name: str, call: Callable[[str], None]) -> None:
        try:
            call(name)
        except Exception as error:  # whatever a network and a foreign library raise
            self._loggers.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            warnings.warn(
                f"The logger {name} failed and gets no more of {self._run.name}: {reason}. metrics.jsonl and tb/ have "
                "all rows.",
                stacklevel=2,
            )


def _within(seconds: float, call: Callable[[], None]) -> None:
    """Call in a thread: a service that cannot be reached may never answer."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"it did not take the last rows within {seconds:.0f} s")
    if errors:
        raise errors[0]


def open_logs(
    names: Sequence[str],
    run: LoggedRun | None,
    folder: Path,
    seed: int,
    rows: Sequence[Mapping[str, Any]],
    sent: int,
) -> Logs:
    """Open the loggers of the trial in a folder. run: None identifies a trial outside of studies by its folder. rows,
    sent: see `Logs`."""
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    place, arm = folder.resolve(), config.get("arm", "base")
    fields = {"study": place.name, "arm": arm, "seed": seed, "changes": config.get("changes", "")}
    run = run or LoggedRun(place.name, f"{arm} seed {seed}", key_of(str(place)), fields)
    return Logs(names, replace(run, folder=folder, config=config), rows, sent)


class Wandb:
    """A run of Weights & Biases. WANDB_MODE, WANDB_ENTITY, WANDB_DIR and similar variables apply.

    Offline, files go to `wandb/` of the trial's folder for `wandb sync`; the newest folder of a resumed trial has all
    rows.
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
            resume=None if wandb.setup().settings.mode == "offline" else "allow",  # offline it cannot be asked
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.resumed = bool(self._run.resumed)

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
            "W&B has no account here: run `wandb login`, or set WANDB_MODE=offline and send the runs later with "
            "`wandb sync`."
        )


class Trackio:
    """A run of trackio, which identifies it by project and name: the name ends in the run's key."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        with redirect_stdout(io.StringIO()) as output:  # stdout may be read by programs
            self._run: Any = trackio.init(
                project=re.sub(r"[^A-Za-z0-9_.-]+", "-", run.study),
                name=f"{run.name} {run.key[:6]}",
                group=run.group,
                config={**run.fields, "kind": run.kind, "config": dict(run.config)},
                resume="allow",
                embed=False,
                auto_log_cpu=False,
            )
        self.resumed = "Resumed existing run" in output.getvalue()
        self._last_step = 0

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)
        self._last_step = step

    def close(self, status: str, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "status": status}, step=self._last_step)
        with redirect_stdout(io.StringIO()):
            self._run.finish()


class Mlflow:
    """A run of MLflow, in the experiment named after the study; fields are tags, settings are parameters.

    MLFLOW_TRACKING_URI and similar variables apply. Only MLflow's client is used, which keeps no global state.
    """

    def __init__(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client, self._last_step = MlflowClient(), 0
        try:
            experiment = self._client.create_experiment(run.study)
        except MlflowException:  # it exists
            if (existing := self._client.get_experiment_by_name(run.study)) is None:
                raise
            experiment = existing.experiment_id
        earlier = self._client.search_runs([experiment], f"tags.`vitmods.key` = '{run.key}'", max_results=1)
        self.resumed = bool(earlier)
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment, tags={"vitmods.key": run.key}, run_name=run.name).info.run_id
            settings = {**run.fields, **_flat(run.config)}
            params = [Param(_allowed(name), str(value)[:500]) for name, value in settings.items()]
            for start in range(0, len(params), 100):  # the limits of all stores: 100 in a call, of 500 characters
                self._client.log_batch(self._id, params=params[start : start + 100])
        for name, value in {**run.fields, "kind": run.kind}.items():
            self._client.set_tag(self._id, name, str(value))

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_allowed(name), float(value), now, step) for name, value in scalars.items()]
        self._client.log_batch(self._id, metrics=metrics)
        self._last_step = step

    def close(self, status: str, scalars: Mapping[str, float]) -> None:
        self.write(scalars, self._last_step)
        self._client.set_tag(self._id, "status", status)
        self._client.set_terminated(self._id, {"finished": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))


def _allowed(name: str) -> str:
    """Replace the characters that MLflow does not allow in names."""
    return "".join(sign if sign.isalnum() or sign in "_-./: " else "-" for sign in name)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to `recipe.optimizer.lr` -> value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        flat |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


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
        sentences = re.split(r"(?<=[.!?])\s+", " ".join(str(error).split()).rstrip(".") + ".")
        count = max(1, sum(len(" ".join(sentences[:end])) <= 300 for end in range(1, len(sentences) + 1)))
        raise UserError(
            f"MLflow cannot open {mlflow.get_tracking_uri()}: {' '.join(sentences[:count])} Set "
            "MLFLOW_TRACKING_URI to your server. Without one, a folder on this machine needs "
            "MLFLOW_ALLOW_FILE_STORE=true, and a database (sqlite:///mlflow.db) `pip install sqlalchemy alembic`."
        ) from error
    finally:
        for name in unset:
            del os.environ[name]


LOGGERS.add("wandb", LoggerKind(Wandb, needs="wandb", check=_check_wandb))
LOGGERS.add("trackio", LoggerKind(Trackio, needs="trackio"))
LOGGERS.add("mlflow", LoggerKind(Mlflow, needs="mlflow", check=_check_mlflow))
