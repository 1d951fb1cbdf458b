"""Who runs the trials (and the evaluations of finished ones): this process, N worker processes on this machine, or a
cluster.

Each takes work from a schedule as long as there is any, tries each piece once and tells what went wrong. A trial that
fails never stops the others. Results travel through the study's folder, so an executor hands out names and nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from vitmods.study.plan import Work
from vitmods.util.errors import UserError


class Source(Protocol):
    """Where work comes from, and who books what came of it: `vitmods.study.schedule.Schedule`."""

    def take(self) -> Work | None:
        """The next piece; None where there is none now, of which there may be more once another has ended."""

    def ended(self, work: Work, failure: str | None) -> None:
        """Called for each piece that was taken, except where the run itself is interrupted."""

    def waiting(self) -> None:
        """Called about twice a second while nothing else happens."""


class Executor(Protocol):
    """Something that runs trials: one after the other, in processes, or on a cluster."""

    def run(self, source: Source) -> None:
        """Run each piece once. KeyboardInterrupt passes through."""


@dataclass(frozen=True)
class PerTrial:
    """What a trial on a cluster needs of a machine."""

    cpus: int = 1
    """cores, which are also its threads"""
    gpus: float = 0.0
    """GPUs; a fraction shares one"""
    memory_gb: float | None = None
    """memory that is set aside for it; None: none is"""

    def __post_init__(self) -> None:
        if self.cpus < 1 or self.gpus < 0 or (self.memory_gb is not None and self.memory_gb <= 0):
            raise UserError(f"A trial needs a core or more, and no negative numbers: {self}.")


@dataclass
class Inline:
    """One trial after the other in this process."""

    run_trial: Callable[[Work], Any]

    def run(self, source: Source) -> None:
        while (work := source.take()) is not None:
            failure = None
            try:
                self.run_trial(work)
            except Exception as error:
                failure = describe(error)
            source.ended(work, failure)


def describe(error: BaseException) -> str:
    """One line for a failed trial: the message of an error made for users, type and message of any other."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
