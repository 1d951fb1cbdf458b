"""Trials on a cluster, whose machines start worker processes like those of one machine, over a shared folder: with Ray,
or as jobs of Slurm, by submitit, in arrays.

Of a trial on several devices each process is on its own: an actor of a placement group, or a task of a job.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
import sys
import time
from collections import Counter, deque
from contextlib import chdir, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitmods.study.cells import Trial
from vitmods.study.executors import StudyOptions, WorkSource
from vitmods.study.executors.processes import SAVE_GRACE_S, LocalProcesses, Worker, reason, stop
from vitmods.study.store import StudyFolder
from vitmods.train.interrupt import StopRequest, stop_on_signals
from vitmods.train.launch import PEER_ENDED, free_port
from vitmods.util.errors import UserError, first_line
from vitmods.util.errors import needs as requires

_POLL_S = 0.5


class RayWorker:
    """A Ray actor that runs one trial at a time somewhere in the cluster; it lives as long as its node."""

    def __init__(self, processes: LocalProcesses, index: int) -> None:
        self._processes, self._index = processes, index
        self._worker: Worker | None = None

    def place(self) -> tuple[str, int]:
        """Return an address for the workers of a trial to meet: this node's, and a free port."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address()), free_port()  # type: ignore[no-untyped-call]

    def run(self, trial: dict[str, Any], rank: int = 0, place: tuple[str, int] | None = None) -> str | None:
        """Run a trial, or its process of this rank; return why it failed, or None."""
        seat: dict[str, str] = {}
        if place is not None:
            seat = {"MASTER_ADDR": place[0], "MASTER_PORT": str(place[1]), "RANK": str(rank), "LOCAL_RANK": "0"}
            seat |= {"WORLD_SIZE": str(self._processes.team), "LOCAL_WORLD_SIZE": "1"}
        worker = self._worker = self._worker or self._processes.start(self._index, *filter(None, [seat]))
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
    options: StudyOptions
    at_once: int | None = None
    """trials; None: as many as there is room for"""
    retries: int = 3

    def run(self, source: WorkSource) -> None:
        with requires("The executor ray needs Ray", "ray"):
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
        if not (address := self.options.cluster.address):
            options["include_dashboard"] = False
        try:
            # Ray puts the current folder first on the path of its processes: this one is on it anyway.
            with chdir(Path(os.__file__).parent):
                ray.init(address=address, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = first_line(error)
            raise UserError(
                f"Cannot connect to a Ray cluster at {address}: {reason} Start one with `ray start`."
            ) from error


@dataclass(eq=False)
class Crew:
    """The actors that train one trial at a time together; mostly one. `group`: the placement group of several.

    failures: of each, by rank. lost: the error of the node that was lost. unheard: those at work
    """

    actors: list[Any]
    group: Any
    trial: Trial = field(init=False)
    failures: list[str | None] = field(init=False)
    lost: str | None = None
    unheard: int = 0


class Run:
    """One run over the cluster."""

    def __init__(self, cluster: RayCluster, ray: Any, source: WorkSource, request: StopRequest) -> None:
        self._cluster, self._ray, self._source, self._request = cluster, ray, source, request
        self._running: dict[Any, tuple[Crew, int]] = {}  # pending answer -> (crew, rank)
        self._busy: list[Crew] = []
        self._idle: list[Crew] = []
        self._lost_trials: deque[Trial] = deque()  # to be tried again
        self._losses: Counter[Trial] = Counter()
        self._indices = itertools.count()

    def run(self) -> None:
        try:
            while True:
                while len(self._busy) < self.room():
                    trial = self._lost_trials.popleft() if self._lost_trials else self._source.take()
                    if trial is None:
                        break
                    self._begin(self._idle.pop() if self._idle else self._start_crew(), trial)
                while self._idle:  # its cores may be what a trial on another node waits for
                    self._end(self._idle.pop())
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
            actors = [actor for crew in self._busy for actor in crew.actors]
            if stopping := [actor.stop.remote() for actor in actors]:
                with suppress(self._ray.exceptions.RayError):
                    self._ray.wait(stopping, num_returns=len(stopping), timeout=SAVE_GRACE_S)
            for crew in (*self._idle, *self._busy):
                self._end(crew)

    def _begin(self, crew: Crew, trial: Trial) -> None:
        count = len(crew.actors)
        crew.trial, crew.failures, crew.unheard = trial, [PEER_ENDED] * count, count
        self._busy.append(crew)
        place = crew.actors[0].place.remote() if count > 1 else None
        for rank, actor in enumerate(crew.actors):
            self._running[actor.run.remote(trial.to_dict(), rank, place)] = crew, rank

    def _end(self, crew: Crew) -> None:
        for actor in crew.actors:
            self._ray.kill(actor)
        if crew.group is not None:
            self._ray.util.remove_placement_group(crew.group)

    def _take(self, answer: Any) -> None:
        """Book the outcome of a trial once all its processes have ended, or try it again if a node was lost."""
        crew, rank = self._running.pop(answer)
        try:
            failure = self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:  # of the actor itself: a trial's own failures are answers
            failure = " ".join(str(error).split())[-500:]
        except self._ray.exceptions.RayError as error:
            failure = crew.lost = type(error).__name__
        crew.failures[rank], trial = failure, crew.trial
        crew.unheard -= 1
        if failure is not None and crew.unheard:
            for actor in crew.actors:
                actor.stop.remote()
        if crew.unheard:
            return
        self._busy.remove(crew)
        if crew.lost or (len(crew.actors) > 1 and any(crew.failures)):
            self._end(crew)
        else:
            self._idle.append(crew)
        failure = reason(crew.failures)
        if crew.lost and failure is not None:
            self._losses[trial] += 1
            if self._losses[trial] <= self._cluster.retries:
                self._lost_trials.append(trial)
                return
            failure = f"its node was lost {self._losses[trial]} times, the last time by {crew.lost}"
        self._source.ended(trial, failure)

    def room(self) -> int:
        """Count the trials that the cluster can run now; a process does not spread over several nodes."""
        options, needs = self._cluster.options, self._cluster.options.cluster
        gpus = options.gpus / options.processes
        need = {"CPU": needs.cpus_per_trial, "GPU": gpus, "memory": 1e9 * (needs.memory_per_trial or 0)}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        room = 0
        for resources in nodes:
            room += min(math.floor(resources.get(name, 0) / count + 1e-9) for name, count in need.items() if count)
        room //= options.processes
        if not self._busy and not room:
            raise UserError(f"No node of the Ray cluster has room for a trial: the nodes have {nodes}.")
        return min(room, self._cluster.at_once or room)

    def _start_crew(self) -> Crew:
        options, processes = self._cluster.options, self._cluster.processes
        needs, count, group = options.cluster, options.processes, None
        gpus, memory = options.gpus / count, int((needs.memory_per_trial or 0) * 1e9)
        how: dict[str, Any] = {
            "num_cpus": needs.cpus_per_trial,
            "num_gpus": gpus,
            **({"memory": memory} if memory else {}),
        }
        if count > 1:
            bundle = {"CPU": needs.cpus_per_trial, "GPU": gpus, "memory": memory}
            group = self._ray.util.placement_group([{name: n for name, n in bundle.items() if n}] * count, "PACK")
            how["scheduling_strategy"] = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        environment = {"env_vars": {"PYTHONPATH": processes.path}}
        # A second thread, so that it can be asked to stop while it works.
        actor = self._ray.remote(RayWorker).options(max_restarts=0, max_concurrency=2, runtime_env=environment, **how)
        folder = StudyFolder(processes.folder.path.absolute())
        started = replace(processes, folder=folder, threads=needs.cpus_per_trial, working_folder=os.getcwd())
        index = next(self._indices)
        return Crew([actor.remote(started, index) for _ in range(count)], group)


_REQUEUED = 10_000  # times that a job whose time is over is queued again
_SAVE_S = 120  # before the time limit, in which a trial writes its checkpoint


class SlurmJob:
    """Trials that share a job, as submitit pickles it; a requeued job gets a new one with the same content.

    Where a trial has several processes, each task of the job runs one of them.
    """

    def __init__(self, processes: LocalProcesses, index: int, *trials: dict[str, Any]) -> None:
        self.processes, self.index, self.trials = processes, index, trials
        self._workers: list[Worker] = []

    def __call__(self) -> list[str | None]:
        """Run them; return why each failed, or None."""
        seat: dict[str, str] = {}
        if self.processes.team > 1:
            from submitit.helpers import TorchDistributedEnvironment

            names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            of_task = TorchDistributedEnvironment()
            seat = {name: str(getattr(of_task, name.lower())) for name in names}
        for number, trial in enumerate(self.trials):
            self._workers.append(self.processes.start(self.index + number, seat))
            self._workers[-1].send(trial)
        failures = []
        for worker in self._workers:
            failure, is_alive = worker.answer()
            if is_alive:
                worker.dismiss()
            failures.append(failure)
        return failures

    def checkpoint(self) -> Any:
        """Save and requeue: submitit calls this shortly before the time is over, or if the job is preempted."""
        from submitit.helpers import DelayedSubmission

        stop(self._workers)
        return DelayedSubmission(SlurmJob(self.processes, self.index, *self.trials))


@dataclass
class Slurm:
    """Runs as many jobs at a time as Slurm allows. The study's folder and the images must be on a shared disk.

    processes: how a worker is started. at_once: trials, of which several may share a job.
    """

    processes: LocalProcesses
    options: StudyOptions
    at_once: int = 32

    def run(self, source: WorkSource) -> None:
        processes = replace(self.processes, threads=self.options.cluster.cpus_per_trial)
        share = self.options.trials_per_device or 1
        jobs: list[tuple[Any, list[Trial]]] = []
        with stop_on_signals() as request:
            executor, indices = self._executor(), itertools.count(step=share)
            try:
                while True:
                    pending: list[Trial] = []
                    busy = sum(len(trials) for _, trials in jobs)
                    while busy + len(pending) < self.at_once and (trial := source.take()) is not None:
                        pending.append(trial)
                    if pending:
                        parts = [pending[i : i + share] for i in range(0, len(pending), share)]
                        with executor.batch():  # one array
                            submitted = [
                                executor.submit(SlurmJob(processes, next(indices), *(t.to_dict() for t in trials)))
                                for trials in parts
                            ]
                        jobs += zip(submitted, parts, strict=True)
                    if not jobs:
                        return
                    done = [(job, trials) for job, trials in jobs if job.done()]
                    request.check()
                    for job, trials in done:
                        jobs.remove((job, trials))
                        if (error := job.exception()) is None:
                            failures = [reason(of_tasks) for of_tasks in zip(*job.results(), strict=True)]
                        else:
                            lines = [line for line in str(error).strip().splitlines() if line.strip()]
                            text = f"its job {job.job_id} ended: {lines[-1] if lines else type(error).__name__}"
                            failures = [text] * len(trials)
                        for trial, failure in zip(trials, failures, strict=True):
                            source.ended(trial, failure)
                    if not done:
                        source.waiting()
                        time.sleep(_POLL_S)
            except BaseException:
                for job, _ in jobs:
                    job.cancel()
                raise

    def _executor(self) -> Any:
        needs = self.options.cluster
        count = self.options.processes // self.options.nodes
        share = self.options.trials_per_device or 1
        if 60 * needs.job_minutes < 3 * _SAVE_S:
            raise UserError(f"A job saves its state {_SAVE_S // 60} minutes before its end: give it 6 minutes or more.")
        with requires("The executor slurm needs submitit", "slurm"):
            import submitit
        cluster = needs.address or "slurm"
        # -P, as for workers: modules in the current folder are not imported.
        options: dict[str, Any] = {f"{cluster}_python": f"{shlex.quote(sys.executable)} -P"}
        limits: dict[str, Any] = {
            "timeout_min": needs.job_minutes,
            "nodes": self.options.nodes,
            "tasks_per_node": count,
            "cpus_per_task": share * needs.cpus_per_trial,
            "name": "vitmods",
        }
        if self.options.gpus:
            limits["gpus_per_node"] = math.ceil(self.options.gpus / self.options.nodes)
        if needs.memory_per_trial:
            limits["mem_gb"] = count * share * needs.memory_per_trial  # of each node
        if cluster == "slurm":
            options["slurm_max_num_timeout"] = _REQUEUED
            limits |= {"slurm_array_parallelism": self.at_once, "slurm_signal_delay_s": _SAVE_S}
        try:
            folder = Path(self.processes.folder.logs) / "slurm"
            executor = submitit.AutoExecutor(folder=folder, cluster=cluster, **options)
        except RuntimeError as error:
            raise UserError(f"Slurm is missing here ({error}): run this where `sbatch` exists.") from error
        executor.update_parameters(**limits)
        return executor
