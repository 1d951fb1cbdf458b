"""MLflow: a run a trial, in the experiment that the study's name gives; fields are tags, settings are parameters.

Where to is MLflow's own affair: MLFLOW_TRACKING_URI and the like. Its client alone is used, which has no state of the
whole process.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vitmods.train.loggers import LOGGERS, LoggedRun, LoggerKind, flat
from vitmods.util.errors import UserError

KEY = "vitmods.key"
_MOST, _LONGEST = 100, 500  # parameters a call, and characters of one, that every store of MLflow takes
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # of the check
_SHORT = 300  # letters
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


class Mlflow:
    """A run of MLflow."""

    def __init__(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        self._client, self._metric, self._last = MlflowClient(), Metric, 0
        experiment = self._experiment(run.study, MlflowException)
        found = self._client.search_runs([experiment], f"tags.`{KEY}` = '{run.key}'", max_results=1)
        self.resumed = bool(found)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment, tags={KEY: run.key}, run_name=run.name).info.run_id
            settings = {**run.fields, **flat(run.config)}
            params = [Param(_plain(name), str(value)[:_LONGEST]) for name, value in settings.items()]
            for start in range(0, len(params), _MOST):
                self._client.log_batch(self._id, params=params[start : start + _MOST])
        for name, value in {**run.fields, "kind": run.kind}.items():
            self._client.set_tag(self._id, name, str(value))

    def _experiment(self, name: str, taken: type[Exception]) -> str:
        known = self._client.get_experiment_by_name(name)
        if known is None:
            try:
                return str(self._client.create_experiment(name))
            except taken:  # by another worker, just now
                known = self._client.get_experiment_by_name(name)
                if known is None:
                    raise
        return str(known.experiment_id)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(_plain(name), float(value), now, step) for name, value in scalars.items()]
        self._client.log_batch(self._id, metrics=metrics)
        self._last = step

    def close(self, status: str, scalars: Mapping[str, float]) -> None:
        self.write(scalars, self._last)
        self._client.set_tag(self._id, "status", status)
        self._client.set_terminated(self._id, _STATUS.get(status, "FAILED"))


def _plain(name: str) -> str:
    """MLflow takes letters, digits and a few signs in names."""
    return "".join(sign if sign.isalnum() or sign in "_-./: " else "-" for sign in name)


def _check() -> None:
    """UserError, within seconds, where its store cannot be opened."""
    import mlflow

    try:
        with _impatient():
            client: Any = mlflow.MlflowClient()
            client.search_experiments(max_results=1)
    except Exception as error:  # of a missing library, a path or a network
        raise UserError(
            f"MLflow cannot open {mlflow.get_tracking_uri()}: {_beginning(' '.join(str(error).split()))} Set "
            "MLFLOW_TRACKING_URI to your server. Without one, a folder on this machine needs "
            "MLFLOW_ALLOW_FILE_STORE=true, and a database (sqlite:///mlflow.db) `pip install sqlalchemy alembic`."
        ) from error


@contextmanager
def _impatient() -> Iterator[None]:
    """MLflow's own patience with a server that does not answer is many minutes; what the user has set stays."""
    brief = {name: value for name, value in _PATIENCE.items() if name not in os.environ}
    os.environ.update(brief)
    try:
        yield
    finally:
        for name in brief:
            os.environ.pop(name, None)


def _beginning(text: str) -> str:
    """The first sentences, as many as are short, at least one of them."""
    first, *others = re.split(r"(?<=[.!?])\s+", text.rstrip(".") + ".")
    for sentence in others:
        if len(first) + len(sentence) > _SHORT:
            break
        first += f" {sentence}"
    return first


LOGGERS.add("mlflow", LoggerKind(Mlflow, needs="mlflow", check=_check))
