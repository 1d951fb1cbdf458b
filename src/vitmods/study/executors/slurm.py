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
from vitmods.train.interrupt import StopRequest, stop_on_signals
from vitmods.util.errors import UserError

_POLL_S = 0.5
_REQUEUED = 10_000  # times that a job whose time is over is queued again
_SAVE_S = 120  # before the time limit, in which a trial writes its checkpoint


class Piece:
    """A piece of work as submitit pickles it. It is made again from what it is made of where a job is requeued."""

    def __init__(self, processes: Processes, index: int, work: dict[str, Any]) -> None:
        self.processes, self.index, self.work = processes, index, work
        self._worker: Worker | None = None

    def __call__(self) -> str | None:
        """Why it failed, or None."""
        self._worker = worker = self.processes.start(self.index)
        worker.send(self.work)
        answer = worker.answer()
        if answer is None:
            return worker.failure_reason()
        worker.dismiss()
        return answer["failure"]  # type: ignore[no-any-return]

    def checkpoint(self) -> Any:
        """Called by submitit shortly before the time is over, or where the job has to make room for others."""
        from submitit.helpers import DelayedSubmission

        if self._worker is not None:
            self._worker.stop()
        return DelayedSubmission(Piece(self.processes, self.index, self.work))


@dataclass
class Slurm:
    """As many jobs at a time as Slurm lets run. The study's folder and the images have to be on a shared disk.

    processes: how a worker is started. cluster "local" runs the jobs here, without Slurm, to try it out.
    """

    processes: Processes
    options: ClusterOptions
    at_once: int = 32
    cluster: Literal["slurm", "local"] = "slurm"

    def run(self, source: Source) -> None:
        with stop_on_signals() as request:
            self._run(source, request)

    def _run(self, source: Source, request: StopRequest) -> None:
        executor, indices = self._executor(), itertools.count()
        jobs: list[tuple[Any, Work]] = []
        try:
            while True:
                new: list[Work] = []
                while len(jobs) + len(new) < self.at_once and (work := source.take()) is not None:
                    new.append(work)
                if new:
                    processes = replace(self.processes, threads=self.options.cpus_per_trial)
                    with executor.batch():  # one array
                        pieces = [executor.submit(Piece(processes, next(indices), one.to_dict())) for one in new]
                    jobs += zip(pieces, new, strict=True)
                if not jobs:
                    return
                done = [(job, work) for job, work in jobs if job.done()]
                request.check()
                for job, work in done:
                    jobs.remove((job, work))
                    source.ended(work, _outcome(job))
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
        folder = Path(self.processes.folder.logs) / "slurm"
        try:
            # -P, as for workers: what lies where the user stands is not imported.
            given: dict[str, Any] = {f"{self.cluster}_python": f"{shlex.quote(sys.executable)} -P"}
            given |= {"slurm_max_num_timeout": _REQUEUED} if self.cluster == "slurm" else {}
            executor = submitit.AutoExecutor(folder=folder, cluster=self.cluster, **given)
        except RuntimeError as error:
            raise UserError(f"There is no Slurm here ({error}): run this where `sbatch` is found.") from error
        limits: dict[str, Any] = {
            "timeout_min": self.options.job_minutes,
            "cpus_per_task": self.options.cpus_per_trial,
            "name": "vitmods",
        }
        limits |= {"gpus_per_node": int(self.options.gpus_per_trial)} if self.options.gpus_per_trial else {}
        limits |= {"mem_gb": self.options.memory_per_trial} if self.options.memory_per_trial else {}
        if self.cluster == "slurm":
            limits |= {"name": "vitmods", "slurm_array_parallelism": self.at_once, "slurm_signal_delay_s": _SAVE_S}
        executor.update_parameters(**limits)
        return executor


def _outcome(job: Any) -> str | None:
    error = job.exception()
    if error is None:
        found: str | None = job.result()
        return found
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"its job {job.job_id} ended: {lines[-1] if lines else type(error).__name__}"
