"""How a study runs: how many trials at a time, where, and which weights it keeps. Nothing here is part of the study.

An executor runs trials: in this process, in worker processes or on a cluster. It takes them from a schedule until there
is none, tries each once and reports what went wrong. A trial that fails never stops the others. Results travel through
the study's folder: an executor only hands out names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from vitmods.train.options import RunOptions, check_at_least
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.study.cells import Trial


Keep = Literal["all", "best", "none"]


@dataclass(frozen=True)
class ClusterOptions:
    """Where trials run, and what a trial needs there."""

    executor: Literal["here", "ray", "slurm"] = "here"
    """this machine, a Ray cluster, or Slurm jobs; all machines must see the study and the images at the same paths"""
    address: str | None = None
    """address of the Ray cluster, or auto for the one of this machine; None: start a cluster on this machine. local, of
    slurm: run its jobs here without Slurm, to try it out"""
    cpus_per_trial: int = 1
    """cores per process of a trial on a cluster; also its number of threads"""
    memory_per_trial: float | None = None
    """GB of memory that the cluster reserves per process of a trial; None: no reservation"""
    job_minutes: int = 60
    """time limit of a Slurm job; it then saves its state and is queued again"""

    def __post_init__(self) -> None:
        if self.cpus_per_trial < 1 or (self.memory_per_trial or 1) <= 0:
            raise UserError("A trial on a cluster needs at least one core, and no negative memory.")
        check_at_least("job_minutes", self.job_minutes, 1)
        unused = {
            "here": ("address", "cpus_per_trial", "memory_per_trial", "job_minutes"),
            "ray": ("job_minutes",),
            "slurm": ("address",) if self.address != "local" else (),
        }[self.executor]
        for name in unused:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise UserError(f"The executor {self.executor} does not use {name}: drop it, or choose another.")


HERE = ClusterOptions()
MOST_WORKERS = 8  # by default; beyond that a machine's memory bandwidth is the limit


@dataclass(frozen=True)
class StudyOptions(RunOptions):
    """Machine settings. Results are unaffected, up to rounding."""

    workers: int | None = None
    """trials at a time, each in its own process; None: as many as cores, memory or GPUs allow"""
    devices_per_trial: str | float | None = None
    """2: each trial trains on two devices, with a process each; 2x8: on eight devices of each of two nodes of Slurm;
    1/4: four trials share a GPU, or a job of Slurm. None: one device, shared as far as that pays; on a cluster no GPU
    unless --device is cuda (docs/clusters.md)"""
    cost_seconds: float = 30.0
    """time limit for benchmarking each base in seconds, and never over a tenth of the training time; 0: do not measure
    costs"""
    keep_weights: Keep = "all"
    """final weights to keep: of all trials, of the best seed of each arm on val, or none; another --metric, `evaluate`,
    `predict` and --from need the weights they read (docs/study.md)"""
    cluster: ClusterOptions = HERE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.devices_per_trial is not None:
            nodes, each = self._layout
            object.__setattr__(self, "devices_per_trial", f"{nodes}x{each}" if nodes > 1 else str(each))
            if nodes > 1 and (self.cluster.executor != "slurm" or self.cluster.address == "local"):
                raise UserError(f"devices_per_trial {nodes}x{each} is for several nodes of Slurm: give {nodes * each}.")
        self.check_processes(self.processes)
        check_at_least("workers", self.workers, 1)
        check_at_least("cost_seconds", self.cost_seconds, 0)
        if self.keep_weights not in get_args(Keep):
            raise UserError(f"keep_weights is {', '.join(get_args(Keep))}, not {self.keep_weights!r}.")

    @property
    def processes(self) -> int:
        """How many train each trial together, on a device each."""
        nodes, each = self._layout
        return max(1, int(nodes * each))

    @property
    def nodes(self) -> int:
        """How many nodes of Slurm they are on, as many on each."""
        return self._layout[0]

    @property
    def trials_per_device(self) -> int | None:
        """How many trials share a device; None: not given."""
        return None if self.devices_per_trial is None else self._layout[1].denominator

    @property
    def gpus(self) -> float:
        """GPUs that a cluster reserves for each trial, one per process or a part of one."""
        is_cpu = self.device == "cpu" or (self.device == "auto" and self.devices_per_trial is None)
        nodes, each = self._layout
        return 0.0 if is_cpu else float(nodes * each)

    @cached_property
    def _layout(self) -> tuple[int, Fraction]:
        return _nodes_and_devices(1 if self.devices_per_trial is None else self.devices_per_trial)


def _nodes_and_devices(text: str | float) -> tuple[int, Fraction]:
    """Read 2x8, 2, 1/4 or 0.25 as the nodes of a trial and the devices on each. Raises UserError for other numbers."""
    with suppress(ValueError, ZeroDivisionError, OverflowError):
        count, _, devices = text.partition("x") if isinstance(text, str) and "x" in text else ("1", "", text)
        nodes, fraction = int(count), Fraction(devices).limit_denominator(1000)
        is_part = nodes == 1 and fraction.numerator == 1
        if nodes > 0 and fraction > 0 and (is_part or fraction.denominator == 1):
            return nodes, fraction
    raise UserError(
        f"devices_per_trial is a whole number of devices, as many on each of several nodes such as 2x8, or a part of "
        f"one such as 1/4, which four trials share, not {text}."
    )


class WorkSource(Protocol):
    """Where trials come from, and who records the result: `vitmods.study.schedule.TrialSchedule`."""

    def take(self) -> Trial | None:
        """The next one; None where there is none now, of which there may be more once another has ended."""

    def ended(self, trial: Trial, failure: str | None) -> None:
        """Called for each trial that was taken, except where the run itself is interrupted."""

    def use_idle_core(self) -> bool:
        """Called while trials run on this machine's other cores and none is left to begin; False: nothing to do."""

    def waiting(self) -> None:
        """Called about twice a second while nothing else happens."""


@dataclass
class Inline:
    """One trial after the other in this process."""

    run_trial: Callable[[Trial], Any]

    def run(self, source: WorkSource) -> None:
        while (trial := source.take()) is not None:
            failure = None
            try:
                self.run_trial(trial)
            except Exception as error:
                failure = describe(error)
            source.ended(trial, failure)


def describe(error: BaseException) -> str:
    """One line for a failed trial: the message of an error made for users, type and message of any other."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
