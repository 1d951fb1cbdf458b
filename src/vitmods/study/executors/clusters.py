"""Trials on a cluster, whose machines start worker processes like those of one machine, over a shared folder: with Ray,
or as jobs of Slurm, by submitit, in arrays."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import sys
import time
from collections import Counter, deque
from contextlib import chdir, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitmods.study.cells import Trial
from vitmods.study.executors import ClusterOptions, WorkSource
from vitmods.study.executors.processes import SAVE_GRACE_S, LocalProcesses, Worker
from vitmods.study.store import StudyFolder
from vitmods.train.interrupt import StopRequest, stop_on_signals
from vitmods.util.errors import UserError, first_line, needs

_POLL_S = 0.5


class RayWorker:
    """A Ray actor that runs one trial at a time somewhere in the cluster; it lives as long as its node."""

    def __init__(self, processes: LocalProcesses, index: int) -> None:
        self._processes, self._index = processes, index
        self._worker: Worker | None = None

    def run(self, trial: dict[str, Any]) -> str | None:
        """Run a trial; return why it failed, or None."""
        worker = self._worker = self._worker or self._processes.start(self._index)
        worker.send(trial)
        failure, is_alive = worker.answer()
        if not is_alive:
            self._worker = None
        folder = self._processes.working_folder
        if failure is not None and folder is not None and not os.path.isdir(folder):
            missing = f"{folder}, where the study was started, is not here."
            failure = f"{failure.rstrip('.')}. Relative paths fail on this node: {missing}"
        return failure

    def stop(self) -> None:
        """Let the trial save its checkpoint and end."""
        if self._worker is not None:
            self._worker.stop()


@dataclass
class RayCluster:
    """Runs as many trials at a time as the cluster has room for, also when nodes join or leave.

    processes: how a worker is started. A trial whose node is lost resumes from its newest checkpoint on another node;
    after `retries` losses it has failed. The study's folder and the images must be at the same path on all nodes.
    """

    processes: LocalProcesses
    options: ClusterOptions
    at_once: int | None = None
    """trials; None: as many as there is room for"""
    retries: int = 3

    def run(self, source: WorkSource) -> None:
        with needs("The executor ray needs Ray", "ray"):
            import ray
        is_connected = ray.is_initialized()
        if not is_connected:
            self._connect(ray)
        try:
            with stop_on_signals() as request:
                Run(self, ray, source, request).run()
        finally:
            if not is_connected:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        if not self.options.address:
            options["include_dashboard"] = False
        try:
            # Ray puts the current folder first on the path of its processes: this one is on it anyway.
            with chdir(Path(os.__file__).parent):
                ray.init(address=self.options.address, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = first_line(error)
            raise UserError(
                f"Cannot connect to a Ray cluster at {self.options.address}: {reason} Start one with `ray start`."
            ) from error


class Run:
    """One run over the cluster."""

    def __init__(self, cluster: RayCluster, ray: Any, source: WorkSource, request: StopRequest) -> None:
        self._cluster, self._ray, self._source, self._request = cluster, ray, source, request
        self._running: dict[Any, tuple[Any, Trial]] = {}  # pending answer -> (actor, trial)
        self._idle: list[Any] = []
        self._lost_trials: deque[Trial] = deque()  # to be tried again
        self._losses: Counter[Trial] = Counter()
        self._indices = itertools.count()

    def run(self) -> None:
        try:
            while True:
                while len(self._running) < self.room():
                    trial = self._lost_trials.popleft() if self._lost_trials else self._source.take()
                    if trial is None:
                        break
                    actor = self._idle.pop() if self._idle else self._start_actor()
                    self._running[actor.run.remote(trial.to_dict())] = actor, trial
                for actor in self._idle:  # its cores may be what a trial on another node waits for
                    self._ray.kill(actor)
                self._idle.clear()
                if not self._running:
                    return
                answers, _ = self._ray.wait(list(self._running), timeout=_POLL_S)
                self._request.check()
                if not answers:
                    self._source.waiting()
                for answer in answers:
                    self._take(answer)
        finally:
            # Trials that run save and end; all cores are given back.
            actors = [actor for actor, _ in self._running.values()]
            if stopping := [actor.stop.remote() for actor in actors]:
                with suppress(self._ray.exceptions.RayError):
                    self._ray.wait(stopping, num_returns=len(stopping), timeout=SAVE_GRACE_S)
            for actor in (*self._idle, *actors):
                self._ray.kill(actor)

    def _take(self, answer: Any) -> None:
        """Book the outcome of a trial, or try it again if its node was lost."""
        actor, trial = self._running.pop(answer)
        try:
            failure = self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:  # of the actor itself: a trial's own failures are answers
            failure = " ".join(str(error).split())[-500:]
        except self._ray.exceptions.RayError as error:
            self._losses[trial] += 1
            if self._losses[trial] <= self._cluster.retries:
                self._lost_trials.append(trial)
                return
            failure = f"its node was lost {self._losses[trial]} times, the last time by {type(error).__name__}"
        else:
            self._idle.append(actor)
        self._source.ended(trial, failure)

    def room(self) -> int:
        """Count the trials that the cluster can run now; a trial does not spread over several nodes."""
        needs = self._cluster.options
        need = {"CPU": needs.cpus_per_trial, "GPU": needs.gpus_per_trial, "memory": 1e9 * (needs.memory_per_trial or 0)}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        room = 0
        for resources in nodes:
            room += min(math.floor(resources.get(name, 0) / count + 1e-9) for name, count in need.items() if count)
        if not self._running and not room:
            raise UserError(f"No node of the Ray cluster has room for a trial: the nodes have {nodes}.")
        return min(room, self._cluster.at_once or room)

    def _start_actor(self) -> Any:
        needs, processes = self._cluster.options, self._cluster.processes
        options: dict[str, Any] = {"num_cpus": needs.cpus_per_trial, "num_gpus": needs.gpus_per_trial}
        if needs.memory_per_trial:
            options["memory"] = int(needs.memory_per_trial * 1e9)
        environment = {"env_vars": {"PYTHONPATH": processes.path}}
        # A second thread, so that it can be asked to stop while it works.
        actor = self._ray.remote(RayWorker).options(
            max_restarts=0, max_concurrency=2, runtime_env=environment, **options
        )
        folder = StudyFolder(processes.folder.path.absolute())
        started = replace(processes, folder=folder, threads=needs.cpus_per_trial, working_folder=os.getcwd())
        return actor.remote(started, next(self._indices))


_REQUEUED = 10_000  # times that a job whose time is over is queued again
_SAVE_S = 120  # before the time limit, in which a trial writes its checkpoint


class SlurmJob:
    """A trial as submitit pickles it; a requeued job gets a new one with the same content."""

    def __init__(self, processes: LocalProcesses, index: int, trial: dict[str, Any]) -> None:
        self.processes, self.index, self.trial = processes, index, trial
        self._worker: Worker | None = None

    def __call__(self) -> str | None:
        """Run it; return why it failed, or None."""
        self._worker = worker = self.processes.start(self.index)
        worker.send(self.trial)
        failure, is_alive = worker.answer()
        if is_alive:
            worker.dismiss()
        return failure

    def checkpoint(self) -> Any:
        """Save and requeue: submitit calls this shortly before the time is over, or if the job is preempted."""
        from submitit.helpers import DelayedSubmission

        if self._worker is not None:
            self._worker.stop()
        return DelayedSubmission(SlurmJob(self.processes, self.index, self.trial))


@dataclass
class Slurm:
    """Runs as many jobs at a time as Slurm allows. The study's folder and the images must be on a shared disk.

    processes: how a worker is started. cluster "local" runs the jobs here, without Slurm, to try it out.
    """

    processes: LocalProcesses
    options: ClusterOptions
    at_once: int = 32
    cluster: Literal["slurm", "local"] = "slurm"

    def run(self, source: WorkSource) -> None:
        processes = replace(self.processes, threads=self.options.cpus_per_trial)
        jobs: list[tuple[Any, Trial]] = []
        with stop_on_signals() as request:
            executor, indices = self._executor(), itertools.count()
            try:
                while True:
                    pending: list[Trial] = []
                    while len(jobs) + len(pending) < self.at_once and (trial := source.take()) is not None:
                        pending.append(trial)
                    if pending:
                        with executor.batch():  # one array
                            submitted = [
                                executor.submit(SlurmJob(processes, next(indices), trial.to_dict()))
                                for trial in pending
                            ]
                        jobs += zip(submitted, pending, strict=True)
                    if not jobs:
                        return
                    done = [(job, trial) for job, trial in jobs if job.done()]
                    request.check()
                    for job, trial in done:
                        jobs.remove((job, trial))
                        failure = job.result() if (error := job.exception()) is None else None
                        if error is not None:
                            lines = [line for line in str(error).strip().splitlines() if line.strip()]
                            failure = f"its job {job.job_id} ended: {lines[-1] if lines else type(error).__name__}"
                        source.ended(trial, failure)
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
        with needs("The executor slurm needs submitit", "slurm"):
            import submitit
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
