"""Trials on a Ray cluster: its nodes start worker processes like those of one machine, over a folder that all share."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter, deque
from contextlib import chdir, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitmods.study.executors import ClusterOptions, Source
from vitmods.study.executors.processes import SAVE_GRACE_S, Processes, Worker
from vitmods.study.plan import Work
from vitmods.study.store import StudyFolder
from vitmods.train.interrupt import StopRequest, stop_on_signals
from vitmods.util.errors import UserError

_POLL_S = 0.5


class Node:
    """A place for one trial at a time somewhere in the cluster, as a Ray actor; it lives as long as its node."""

    def __init__(self, processes: Processes, index: int) -> None:
        self._processes, self._index = processes, index
        self._worker: Worker | None = None

    def run(self, work: dict[str, Any]) -> str | None:
        """Do a piece of work; why it failed, or None."""
        worker = self._worker or self._processes.start(self._index)
        self._worker = worker
        worker.send(work)
        answer = worker.answer()
        if answer is None:
            self._worker = None
        failure = worker.failure_reason() if answer is None else answer["failure"]
        started_in = self._processes.stand_in
        if failure is not None and started_in is not None and not os.path.isdir(started_in):
            missing = f"{started_in}, where the study was started, is not here."
            failure = f"{failure.rstrip('.')}. Relative paths fail on this node: {missing}"
        return failure

    def stop(self) -> None:
        """Let the trial save its checkpoint and end."""
        if self._worker is not None:
            self._worker.stop()


@dataclass
class RayCluster:
    """As many trials at a time as the cluster has room for, also when nodes join or leave while it runs.

    processes: how a worker is started. A trial whose node is lost goes on from its newest checkpoint on another; after
    `retries` losses it has failed. The study's folder and the images have to be at the same path on all nodes.
    """

    processes: Processes
    options: ClusterOptions
    at_once: int | None = None
    """trials; None: as many as there is room for"""
    retries: int = 3

    def run(self, source: Source) -> None:
        ray = import_ray()
        own = not ray.is_initialized()
        if own:
            self._connect(ray)
        try:
            with stop_on_signals() as request:
                Run(self, ray, source, request).run()
        finally:
            if own:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        quiet |= {} if self.options.address else {"include_dashboard": False}
        try:
            # Ray puts the folder that one stands in first on the path of its processes: this one is on it anyway.
            with chdir(Path(os.__file__).parent):
                ray.init(address=self.options.address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"There is no Ray cluster at {self.options.address}: {reason} Start one with `ray start`."
            ) from error


class Run:
    """One run over the cluster."""

    def __init__(self, cluster: RayCluster, ray: Any, source: Source, request: StopRequest) -> None:
        self._cluster, self._ray, self._source, self._request = cluster, ray, source, request
        self._at_work: dict[Any, tuple[Any, Work]] = {}  # by the answer that will come
        self._idle: list[Any] = []
        self._again: deque[Work] = deque()
        self._lost: Counter[Work] = Counter()
        self._indices = itertools.count()

    def run(self) -> None:
        try:
            while True:
                while len(self._at_work) < self._room() and (work := self._next()) is not None:
                    node = self._idle.pop() if self._idle else self._node()
                    self._at_work[node.run.remote(work.to_dict())] = node, work
                for node in self._idle:  # its cores may be what a trial on another node waits for
                    self._ray.kill(node)
                self._idle.clear()
                if not self._at_work:
                    return
                ready, _ = self._ray.wait(list(self._at_work), timeout=_POLL_S)
                self._request.check()
                if not ready:
                    self._source.waiting()
                for answer in ready:
                    self._take(answer)
        finally:
            self._stop()

    def _next(self) -> Work | None:
        return self._again.popleft() if self._again else self._source.take()

    def _take(self, answer: Any) -> None:
        node, work = self._at_work.pop(answer)
        try:
            failure = self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:  # of the actor itself: a trial's own failures are answers
            failure = " ".join(str(error).split())[-500:]
        except self._ray.exceptions.RayError as error:
            self._lost[work] += 1
            if self._lost[work] <= self._cluster.retries:
                self._again.append(work)
                return
            failure = f"its node was lost {self._lost[work]} times, the last time by {type(error).__name__}"
        else:
            self._idle.append(node)
        self._source.ended(work, failure)

    def _room(self) -> int:
        """Trials that the cluster can run now."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        room = sum(map(self._on_node, nodes))
        if not self._at_work and not room:
            raise UserError(f"No node of the Ray cluster has room for a trial: the nodes have {nodes}.")
        return min(room, self._cluster.at_once or room)

    def _on_node(self, has: dict[str, float]) -> int:
        """Trials that fit one node: a trial does not spread over several."""
        each = self._cluster.options
        asked = {"CPU": each.cpus_per_trial, "GPU": each.gpus_per_trial, "memory": 1e9 * (each.memory_per_trial or 0)}
        return min(math.floor(has.get(name, 0) / count + 1e-9) for name, count in asked.items() if count)

    def _node(self) -> Any:
        each = self._cluster.options
        memory = {"memory": int(each.memory_per_trial * 1e9)} if each.memory_per_trial else {}
        how: dict[str, Any] = {"num_cpus": each.cpus_per_trial, "num_gpus": each.gpus_per_trial}
        how |= {"runtime_env": {"env_vars": {"PYTHONPATH": self._cluster.processes.path}}}
        # A second thread, so that it can be asked to stop while it works.
        actor = self._ray.remote(Node).options(max_restarts=0, max_concurrency=2, **how, **memory)
        mine = self._cluster.processes
        folder = StudyFolder(mine.folder.path.absolute())
        processes = replace(mine, folder=folder, threads=each.cpus_per_trial, stand_in=os.getcwd())
        return actor.remote(processes, next(self._indices))

    def _stop(self) -> None:
        """Nodes at work save and end; all are given back."""
        asked = [node.stop.remote() for node, _ in self._at_work.values()]
        if asked:
            with suppress(self._ray.exceptions.RayError):
                self._ray.wait(asked, num_returns=len(asked), timeout=SAVE_GRACE_S)
        for node in (*self._idle, *(node for node, _ in self._at_work.values())):
            self._ray.kill(node)


def import_ray() -> Any:
    """The package. UserError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise UserError(f"The executor ray needs Ray ({error}): pip install 'vitmods[ray]'.") from error
    return ray
