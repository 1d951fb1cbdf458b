"""Where the rows of a trial go beside metrics.jsonl and TensorBoard: services that collect runs, a file each."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from vitmods.util.errors import UserError
from vitmods.util.limits import read_json
from vitmods.util.registry import Registry

CLOSING_S = 60.0  # that a logger may take to send what waits, before the trial goes on without it


@dataclass(frozen=True)
class LoggedRun:
    """A trial, or a verdict, as loggers know it.

    study:  what groups runs, the name of the study's folder
    name:   for readers
    key:    tells it from all other runs, and is the same when a trial goes on
    fields: to filter and group by: study, arm, seed, base, ...; of a verdict also what it says
    folder: where local files may lie, the trial's or the study's; None: wherever the logger puts them
    config: all settings, as config.json has them
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
    """An open run. Whatever its methods raise costs the log, never the trial."""

    resumed: bool
    """whether it has the rows of an earlier part of this run"""

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Numbers by name, `train/loss`, `val/top1`, ..., after so many steps; there may be several calls a step."""

    def close(self, status: str, scalars: Mapping[str, float]) -> None:
        """status: finished, diverged, stopped or failed; with the last numbers, as `test/top1`."""


@dataclass(frozen=True)
class LoggerKind:
    """What opens runs.

    needs: the library's module; its extra has the logger's name
    check: UserError, before any work, where runs could not be opened here
    """

    open: Callable[[LoggedRun], Logger]
    needs: str | None = None
    check: Callable[[], None] = lambda: None


LOGGERS: Registry[LoggerKind] = Registry("logger", "vitmods.train.loggers")


def check_loggers(names: Iterable[str]) -> None:
    """Raise UserError if a logger is unknown, is not installed, or has no account here."""
    for name in names:
        kind = LOGGERS[name]
        if kind.needs and importlib.util.find_spec(kind.needs) is None:
            raise UserError(f"The logger {name} needs {kind.needs}: pip install 'vitmods[{name}]', or leave it out.")
        kind.check()


def key_of(*parts: str) -> str:
    """A short digest of what tells a run from all others."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl by name: `train/loss`, `val/top1`, ..."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {f"{row['split']}/{name}": numbers[name] for name in numbers if name not in ("step", "epoch")}


class Logs:
    """Rows to several loggers; one that fails is warned of once, and left out from then on."""

    def __init__(self, names: Sequence[str], run: LoggedRun, rows: Sequence[Mapping[str, Any]] = (), known: int = 0):
        """rows: that are written already; known: how many an earlier part of the run has sent, some of which will come
        again. A logger that has these gets no row twice; one that has none gets all."""
        self._open: dict[str, Logger] = {}
        self._skip: dict[str, int] = {}
        self._run = run
        for name in names:
            self._try(name, self._begin, rows, known)

    def _begin(self, name: str, rows: Sequence[Mapping[str, Any]], known: int) -> None:
        logger = self._open[name] = LOGGERS[name].open(self._run)
        self._skip[name] = max(0, known - len(rows)) if logger.resumed else 0
        for row in () if logger.resumed else rows:
            logger.write(scalars_of(row), row["step"])

    def write(self, row: Mapping[str, Any]) -> None:
        for name in list(self._open):
            self._try(name, self._send, row)

    def _send(self, name: str, row: Mapping[str, Any]) -> None:
        if self._skip[name]:
            self._skip[name] -= 1
            return
        self._open[name].write(scalars_of(row), row["step"])

    def close(self, status: str, scalars: Mapping[str, float]) -> tuple[str, ...]:
        """The names of the loggers that took all."""
        for name in list(self._open):
            self._try(name, self._end, status, scalars)
        done = tuple(self._open)
        self._open.clear()
        return done

    def _end(self, name: str, status: str, scalars: Mapping[str, float]) -> None:
        errors: list[Exception] = []

        def end() -> None:
            try:
                self._open[name].close(status, scalars)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=end, daemon=True)  # a service that is not reached may never answer
        thread.start()
        thread.join(CLOSING_S)
        if thread.is_alive():
            raise TimeoutError(f"it did not take the last rows within {CLOSING_S:.0f} s")
        if errors:
            raise errors[0]

    def _try(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(name, *arguments)
        except Exception as error:  # whatever a network and a foreign library raise
            self._open.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            warnings.warn(
                f"The logger {name} failed and gets no more of {self._run.name}: {reason}. metrics.jsonl and tb/ have "
                "all rows.",
                stacklevel=2,
            )


def open_logs(
    names: Sequence[str],
    run: LoggedRun | None,
    folder: Path,
    seed: int,
    rows: Sequence[Mapping[str, Any]],
    known: int,
) -> Logs:
    """Open the loggers of the trial in a folder. run: None identifies a trial outside of studies by its folder. rows,
    known: see `Logs`."""
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    where, arm = folder.resolve(), config.get("arm", "base")
    fields = {"study": where.name, "arm": arm, "seed": seed, "changes": config.get("changes", "")}
    run = run or LoggedRun(where.name, f"{arm} seed {seed}", key_of(str(where)), fields)
    return Logs(names, replace(run, folder=folder, config=config), rows, known)


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings as `recipe.optimizer.lr` -> value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) and value else {f"{before}{name}": value}
    return found
