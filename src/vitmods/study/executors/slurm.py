"""Trials as jobs of Slurm, by submitit, in arrays; a time limit ends in a checkpoint, and the job is requeued."""

from __future__ import annotations

import itertools
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitmods.study.executors import ClusterOptions, Source
from vitmods.study.executors.processes import Processes, Worker
from vitmods.study.plan import Work
from vitmods.train.interrupt import stop_on_signals
from vitmods.util.errors import UserError

_POLL_S = 0.5
_REQUEUED = 10_000  # times that a job whose time is over is queued again
_SAVE_S = 120  # before the time limit, in which a trial writes its checkpoint


class SlurmJob:
    """A piece of work as submitit pickles it; a requeued job gets a new one with the same content."""

    def __init__(self, processes: Processes, index: int, work: dict[str, Any]) -> None:
        self.processes, self.index, self.work = processes, index, work
        self._worker: Worker | None = None

    def __call__(self) -> str | None:
        """Do the work; return why it failed, or None."""
        self._worker = worker = self.processes.start(self.index)
        worker.send(self.work)
        answer = worker.answer()
        if answer is None:
            return worker.failure_reason()
        worker.dismiss()
        return answer["failure"]  # type: ignore[no-any-return]

    def checkpoint(self) -> Any:
        """Save and requeue: submitit calls this shortly before the time is over, or if the job is preempted."""
        from submitit.helpers import DelayedSubmission

        if self._worker is not None:
            self._worker.stop()
        return DelayedSubmission(SlurmJob(self.processes, self.index, self.work))


@dataclass
class Slurm:
    """Runs as many jobs at a time as Slurm allows. The study's folder and the images must be on a shared disk.

    processes: how a worker is started. cluster "local" runs the jobs here, without Slurm, to try it out.
    """

    processes: Processes
    options: ClusterOptions
    at_once: int = 32
    cluster: Literal["slurm", "local"] = "slurm"

    def run(self, source: Source) -> None:
        processes = replace(self.processes, threads=self.options.cpus_per_trial)
        jobs: list[tuple[Any, Work]] = []
        with stop_on_signals() as request:
            executor, indices = self._executor(), itertools.count()
            try:
                while True:
                    pending: list[Work] = []
                    while len(jobs) + len(pending) < self.at_once and (work := source.take()) is not None:
                        pending.append(work)
                    if pending:
                        with executor.batch():  # one array
                            submitted = [
                                executor.submit(SlurmJob(processes, next(indices), work.to_dict())) for work in pending
                            ]
                        jobs += zip(submitted, pending, strict=True)
                    if not jobs:
                        return
                    done = [(job, work) for job, work in jobs if job.done()]
                    request.check()
                    for job, work in done:
                        jobs.remove((job, work))
                        failure = job.result() if (error := job.exception()) is None else None
                        if error is not None:
                            lines = [line for line in str(error).strip().splitlines() if line.strip()]
                            failure = f"its job {job.job_id} ended: {lines[-1] if lines else type(error).__name__}"
                        source.ended(work, failure)
                    if not done:
                        source.waiting()
                        time.sleep(_POLL_S)
            except BaseException:
                for job, _ in jobs:
                    job.cancel()
                raise

    def _executor(self) -> Any:
        if self.options.gpus_per_trial % 1:
            raise UserError("A job of Slurm has whole GPUs: give --gpus-per-trial a whole number, or use Ray.")
        if 60 * self.options.job_minutes < 3 * _SAVE_S:
            raise UserError(f"A job saves its state {_SAVE_S // 60} minutes before its end: give it 6 minutes or more.")
        try:
            import submitit
        except ImportError as error:
            raise UserError(f"The executor slurm needs submitit ({error}): pip install 'vitmods[slurm]'.") from error
        # -P, as for workers: modules in the current folder are not imported.
        options: dict[str, Any] = {f"{self.cluster}_python": f"{shlex.quote(sys.executable)} -P"}
        limits: dict[str, Any] = {
            "timeout_min": self.options.job_minutes,
            "cpus_per_task": self.options.cpus_per_trial,
            "name": "vitmods",
        }
        if self.options.gpus_per_trial:
            limits["gpus_per_node"] = int(self.options.gpus_per_trial)
        if self.options.memory_per_trial:
            limits["mem_gb"] = self.options.memory_per_trial
        if self.cluster == "slurm":
            options["slurm_max_num_timeout"] = _REQUEUED
            limits |= {"slurm_array_parallelism": self.at_once, "slurm_signal_delay_s": _SAVE_S}
        try:
            folder = Path(self.processes.folder.logs) / "slurm"
            executor = submitit.AutoExecutor(folder=folder, cluster=self.cluster, **options)
        except RuntimeError as error:
            raise UserError(f"Slurm is missing here ({error}): run this where `sbatch` exists.") from error
        executor.update_parameters(**limits)
        return executor
