"""trackio: a run a trial, in the project of the study's name; on this machine, or where TRACKIO_SPACE_ID says."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from typing import Any

from vitmods.train.loggers import LOGGERS, LoggedRun, LoggerKind


class Trackio:
    """A run of trackio, which knows it by project and name alone: the name ends in the run's key."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        said = io.StringIO()
        with contextlib.redirect_stdout(said):  # it talks on stdout, which may be read by programs
            self._run: Any = trackio.init(
                project=re.sub(r"[^A-Za-z0-9_.-]+", "-", run.study),
                name=f"{run.name} {run.key[:6]}",
                group=run.group,
                config={**run.fields, "kind": run.kind, "config": dict(run.config)},
                resume="allow",
                embed=False,
                auto_log_cpu=False,
            )
        self.resumed = "Resumed existing run" in said.getvalue()
        self._last = 0

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)
        self._last = step

    def close(self, status: str, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "status": status}, step=self._last)
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


LOGGERS.add("trackio", LoggerKind(Trackio, needs="trackio"))
