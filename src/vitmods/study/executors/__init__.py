"""Who runs the trials (and the evaluations of finished ones): this process, N worker processes on this machine, or a
cluster.

Each takes work from a schedule as long as there is any, tries each piece once and tells what went wrong. A trial that
fails never stops the others. Results travel through the study's folder, so an executor hands out names and nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.study.plan import Work


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
class ClusterOptions:
    """Where trials run, and what one needs of a machine."""

    executor: Literal["here", "ray", "slurm"] = "here"
    """this machine, a Ray cluster, or jobs of Slurm, whose machines see the study and the images at the same paths"""
    address: str | None = None
    """of the Ray cluster, or auto for the one that this machine is part of; None: a cluster of this machine alone"""
    cpus_per_trial: int = 1
    """cores of a trial on a cluster, which are also its threads"""
    gpus_per_trial: float = 0.0
    """GPUs of a trial on a cluster; with Ray a fraction shares one"""
    memory_per_trial: float | None = None
    """GB of memory that the cluster sets aside for a trial; None: none"""
    job_minutes: int = 60
    """of a Slurm job, after which it saves its state, is queued again and goes on"""

    def __post_init__(self) -> None:
        if self.cpus_per_trial < 1 or self.gpus_per_trial < 0 or (self.memory_per_trial or 1) <= 0:
            raise UserError("A trial on a cluster needs a core or more, and no negative GPUs or memory.")
        if self.job_minutes < 1:
            raise UserError(f"job_minutes must be at least 1, not {self.job_minutes}.")
        unread = {
            "here": ("address", "cpus_per_trial", "gpus_per_trial", "memory_per_trial", "job_minutes"),
            "ray": ("job_minutes",),
            "slurm": ("address",),
        }[self.executor]
        for name in unread:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise UserError(f"{name} says nothing to the executor {self.executor}: leave it out, or name another.")


HERE = ClusterOptions()


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
