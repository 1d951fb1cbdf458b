"""Trials in worker processes on this machine.

A worker process, `python -P -m vitmods.study.executors.processes TASK`: trials come on stdin, answers go to stdout. On
Linux and a CPU it is a copy of a process that has imported everything before (`Template`). Where several train each
trial together they are a `Team`, whose members get the same trials and join like those of `vitmods train --devices`.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from vitmods.study.cells import Trial
from vitmods.study.executors import MOST_WORKERS, StudyOptions, WorkSource
from vitmods.study.executors.sharing import Sharing, mps_runs
from vitmods.study.store import StudyFolder
from vitmods.train.interrupt import stop_on_signals
from vitmods.train.launch import PEER_ENDED, import_path, seats
from vitmods.train.options import RunOptions
from vitmods.util.files import disk_errors

MODULE = "vitmods.study.executors.processes"  # also where this file runs as __main__
ENDING_S = 5.0  # that a process may take to be gone after its connections are
SAVE_GRACE_S = 60.0  # how long an interrupted worker may take to write its checkpoint before it is killed
OUT_OF_MEMORY = "out of memory? Run fewer workers, or cut the batch into more parts with accumulate."


class Template:
    """A process that imports what workers need while the study is prepared, and forks one at each request.

    It never computes anything, so it lacks threads whose locks a copy would inherit. `threads` are those of a worker,
    since OpenMP reads their number when it is loaded. Use it as a context.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self._inherited = threads, _inherited_by_copies()
        self._requests, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, "--fork", str(remote.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_thread_variables(threads), "PYTHONPATH": import_path()},
                pass_fds=(remote.fileno(),),
                process_group=0,
            )

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it, also while it imports; its copies stay."""
        self._requests.close()
        self._process.kill()
        self._process.wait()

    @property
    def is_as_new(self) -> bool:
        """Whether copies would inherit the same of a template that is started now."""
        return self._inherited == _inherited_by_copies()

    def start(self, task: dict[str, Any], output: IO[bytes]) -> Copy:
        """Fork a worker once the imports are done. Raises OSError if the template has died."""
        work, answers, status = os.pipe(), os.pipe(), os.pipe()
        remote = work[0], answers[1], status[1]
        try:
            socket.send_fds(self._requests, [json.dumps(task).encode()], [*remote, output.fileno()])
        except OSError:
            for end in (work[1], answers[0], status[0]):
                os.close(end)
            raise
        finally:
            for end in remote:
                os.close(end)
        return Copy(open(work[1], "wb"), open(answers[0], "rb"), open(status[0], "rb", buffering=0))


class Copy:
    """A worker that a template has forked: what `Worker` uses of a Popen.

    status: lines with its process id and, once it has ended, its exit code

    Threads and signal handlers may call its methods at the same time, as those of a Popen. So the status stays open
    until the object is deleted.
    """

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes], status: IO[bytes]) -> None:
        self.stdin, self.stdout, self._status = stdin, stdout, status
        weakref.finalize(self, status.close)
        self._code: int | None = None
        self._reading = threading.RLock()
        if not (line := status.readline()):
            raise ProcessLookupError("the template has ended")
        self.pid = int(line)
        self._process: int | None = None
        with suppress(ProcessLookupError):  # it has ended already
            self._process = os.pidfd_open(self.pid)  # of itself: the process that waits for it may be killed
            weakref.finalize(self, os.close, self._process)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code, negative for a signal. Raises TimeoutExpired."""
        if self._process is not None and not wait([self._process], timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        with self._reading:
            if self._code is None:
                self._code = int(self._status.readline() or -signal.SIGKILL)
        return self._code

    def terminate(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        self.terminate(signal.SIGKILL)


_early: ContextVar[Template | None] = ContextVar("_early", default=None)


@contextmanager
def start_template_early(options: StudyOptions) -> Iterator[None]:
    """Start the template of the studies in this context before this process imports torch: both take seconds. Does
    nothing where they would not use it, as far as that is known without torch."""
    cores = _cores() if sys.platform == "linux" else 1
    processes = min(options.workers * options.processes if options.workers else MOST_WORKERS, cores)
    has_gpu = options.device == "auto" and any(Path("/dev").glob("nvidia[0-9]*"))
    is_cpu = options.device in ("auto", "cpu") and not has_gpu
    if processes <= 1 or not is_cpu or options.cluster.executor != "here" or _early.get():
        yield
        return
    with Template(cores // processes) as template:
        token = _early.set(template)
        try:
            yield
        finally:
            _early.reset(token)


def get_template(threads: int | None) -> AbstractContextManager[Template | None]:
    """Return the early template if a new one would be the same, else end it and return a new one.

    threads: of each worker; None: no template is needed
    """
    early = _early.get()
    if early is not None:
        if early.threads == threads and early.is_as_new:
            return nullcontext(early)
        early.stop()
        _early.set(None)
    return nullcontext() if threads is None else Template(threads)


def _cores() -> int:
    """Count the cores that torch will use: without hyper-threads, unless OMP_NUM_THREADS sets them."""
    cores = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if cores.isdecimal() and int(cores):
        return int(cores)
    cpus = os.sched_getaffinity(0)
    with suppress(OSError):
        siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        return len({Path(siblings.format(cpu)).read_text() for cpu in cpus})
    return len(cpus)


def _inherited_by_copies() -> tuple[str, dict[str, str]]:
    """Return import path and environment, without what torch sets there when it is imported."""
    return import_path(), {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}


def import_all() -> None:
    """Import what a worker needs. The first optimizer of a process imports as much again as torch itself."""
    import torch

    import vitmods.study.trial  # noqa: F401

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a worker at each request: returns its task in the worker, and None in the template when its parent is done.

    Between the two is a process that waits for the worker, to report its end.
    """
    import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with requests:
        while True:
            task, ends, *_ = socket.recv_fds(requests, 1 << 20, 4)
            if not task:
                return None
            if not os.fork():
                break
            for end in ends:
                os.close(end)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    work, answers, status, log = ends
    if worker := os.fork():
        for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the worker may need time to save
            signal.signal(asked, signal.SIG_IGN)
        for end in (work, answers, log):
            os.close(end)
        with suppress(BrokenPipeError), os.fdopen(status, "w", buffering=1) as file:
            print(worker, file=file)
            print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), file=file)
        os._exit(0)
    os.close(status)
    os.setpgid(0, 0)
    for number, end in enumerate((work, answers, log)):
        os.dup2(end, number)
        os.close(end)
    return dict(json.loads(task))


def _thread_variables(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


@dataclass
class LocalProcesses:
    """Trials at a time in teams of workers, each a separate interpreter with its fraction of the threads and a GPU.

    A worker holds a lock and dies when this process does (its input pipe closes), so a killed run leaves no process
    that still writes when the next one begins.

    workers: teams, which train a trial each. team: workers of each. sharing: how many of the teams are used.
    path, working_folder: what workers import from, and their current folder if it exists; None: as this process.
    template: what workers are copies of; None: each is a fresh interpreter.
    """

    folder: StudyFolder
    workers: int
    threads: int
    options: RunOptions = RunOptions()  # noqa: RUF009, frozen
    plugins: tuple[str, ...] = ()
    path: str = field(default_factory=import_path)
    working_folder: str | None = None
    template: Template | None = None
    team: int = 1
    sharing: Sharing | None = None

    def run(self, source: WorkSource) -> None:
        running: dict[Any, Team] = {}  # by the pipes that answers come through
        free: dict[int, Team | None] = dict.fromkeys(range(self.workers))
        with stop_on_signals() as request:
            try:
                while True:
                    limit = self.sharing.limit if self.sharing else self.workers
                    while free and min(free) < limit and (trial := source.take()) is not None:
                        index = min(free)
                        team = free.pop(index) or Team(index, [self.start(index, seat) for seat in seats(self.team)])
                        running |= team.begin(trial)
                    if not running:
                        break
                    is_used = bool(free) and source.use_idle_core()
                    ready = wait(list(running), timeout=0.0 if is_used else 0.5)
                    request.check()
                    if not ready:
                        source.waiting()
                        if self.sharing:
                            self.sharing.look({team.trial for team in running.values()})
                    for answers in ready:
                        if (one := running.get(answers)) is not None and one.hear(answers):
                            running = {pipe: other for pipe, other in running.items() if other is not one}
                            free[one.index] = one if one.is_alive else None
                            source.ended(one.trial, reason(one.failures))
                        running.pop(answers, None)
            except BaseException:
                teams = {id(team): team for team in (*running.values(), *filter(None, free.values()))}
                workers = [worker for team in teams.values() for worker in team.workers]
                stop(workers)
                for worker in workers:
                    worker.dismiss()
                raise
            for idle in filter(None, free.values()):
                for worker in idle.workers:
                    worker.dismiss()

    def start(self, index: int, seat: Mapping[str, str] = MappingProxyType({})) -> Worker:
        """Start a worker of the team with this number on this machine.

        seat: variables of the environment in which it joins the others of its team; none where it is alone
        """
        rank = f"-{seat['RANK']}" if seat.get("RANK", "0") != "0" else ""
        log = self.folder.logs / f"worker{index}{rank}.txt"
        folder = self.working_folder
        with disk_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            start = log.stat().st_size if log.exists() else 0
            with open(log, "ab") as output:
                if self.template is not None:
                    with suppress(OSError):  # it has died, perhaps for lack of memory
                        return Worker(self.template.start(self.task(index) | {"seat": {**seat}}, output), log, start)
                process = subprocess.Popen(
                    # -P: modules in the current folder are not imported; what was on sys.path comes by PYTHONPATH.
                    [sys.executable, "-P", "-m", MODULE, json.dumps(self.task(index) | {"seat": {**seat}})],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env=self.environment(index * self.team + int(seat.get("LOCAL_RANK", 0))),
                    cwd=folder if folder and os.path.isdir(folder) else None,
                    process_group=0,  # Ctrl-C in a terminal reaches this process alone, which then stops the workers
                )
        return Worker(process, log, start)

    def task(self, index: int) -> dict[str, Any]:
        """The argument of a worker process."""
        options = replace(self.options, progress=False).to_dict()
        return {"folder": str(self.folder.path), "index": index, "plugins": self.plugins, "options": options}

    def environment(self, index: int) -> dict[str, str]:
        """The environment of the worker process with this number, of all teams."""
        variables = {**_thread_variables(self.threads), "PYTHONPATH": self.path}
        gpus = visible_gpus() if self.options.device in ("auto", "cuda") else []
        if len(gpus) > 1:
            variables["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
        return {**os.environ, **variables}


@dataclass
class Team:
    """The workers that train one trial at a time together; mostly one.

    failures: of each; the first one ends the others, who would wait for it
    """

    index: int
    workers: list[Worker]
    trial: Trial = field(init=False)
    failures: list[str | None] = field(init=False)
    is_alive: bool = True

    def begin(self, trial: Trial) -> dict[Any, Team]:
        """Send a trial to all; returns the pipes to wait for, of which `hear` is told."""
        self.trial, self.failures = trial, [PEER_ENDED for _ in self.workers]
        self._unheard = list(self.workers)
        for worker in self.workers:
            worker.send(trial.to_dict())
        return {worker.answers: self for worker in self.workers}

    def hear(self, answers: Any) -> bool:
        """Read an answer from a pipe; returns whether the trial has ended in all workers."""
        worker = next(worker for worker in self._unheard if worker.answers is answers)
        self._unheard.remove(worker)
        failure, is_alive = worker.answer()
        self.failures[self.workers.index(worker)] = failure
        if is_alive and (failure is None or len(self.workers) == 1):
            return not self._unheard
        self.is_alive = False
        # One that others find gone may be about to end: on a busy machine the news of its connections come first.
        patience = ENDING_S if failure is not None and failure.startswith(PEER_ENDED) else 0.0
        until = time.monotonic() + patience
        ended = [other.has_ended(max(0.0, until - time.monotonic())) for other in self._unheard]
        stop([other for other in self.workers if other is not worker])
        for other, has_ended in zip(self._unheard, ended, strict=True):
            failure, has_answered = other.answer()
            if has_answered or has_ended:  # not because it was stopped
                self.failures[self.workers.index(other)] = failure
        for other in self.workers:
            other.dismiss()
        return True


def reason(failures: Sequence[str | None]) -> str | None:
    """Return why a trial failed, from what its workers say by rank, some of them only that another one has ended."""
    if failures[0] is None:  # all is written
        return None
    return min(filter(None, failures), key=lambda failure: failure.startswith(PEER_ENDED), default=None)


def stop(workers: Sequence[Worker]) -> None:
    """Let workers save their checkpoints at the same time, and end."""
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.stop()


@dataclass(eq=False)
class Worker:
    """A process that runs one trial after the other."""

    process: subprocess.Popen[bytes] | Copy
    log: Path
    log_start: int

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def send(self, trial: dict[str, Any]) -> None:
        """Ask for a trial; `answer` waits for it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead already: its answers end too
            self.process.stdin.write(json.dumps(trial).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self) -> tuple[str | None, bool]:
        """Wait for its end; returns why it failed, or None, and whether the process is alive."""
        line = self.answers.readline()
        if line.endswith(b"\n"):
            return json.loads(line)["failure"], True
        return self._why_it_ended(), False

    def has_ended(self, patience: float = 0.0) -> bool:
        """Whether the process is gone, by itself or not, within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(patience) is not None
        return False

    def stop(self) -> None:
        """Let it save its checkpoint and end; kill it if it does not.

        Its pipes stay open: another thread, or the code that a signal handler interrupts, may be in `answer`.
        """
        self.process.terminate()
        try:
            self.process.wait(SAVE_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _why_it_ended(self) -> str:
        code = self.process.wait()
        self.dismiss()
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            reason = f"its worker process was killed by {name}"
            return f"{reason}: {OUT_OF_MEMORY}" if -code == signal.SIGKILL else reason
        with open(self.log, "rb") as log:
            log.seek(self.log_start)
            lines = log.read().decode(errors="replace").strip().splitlines()
        return f"its worker process ended with code {code}: {lines[-1] if lines else 'nothing in'} ({self.log})"

    def dismiss(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self.process.wait()


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as entries for CUDA_VISIBLE_DEVICES."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [entry for entry in listed.split(",") if entry.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def free_memory(gpu: int) -> int:
    """Return the free bytes of one of the visible GPUs, 0 if it admits a single process. The driver's program knows:
    CUDA would make a context in this process, and such a GPU then refuses workers."""
    query = ["nvidia-smi", "--query-gpu=memory.free,compute_mode", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, LookupError, subprocess.SubprocessError):
        query += ["-i", visible_gpus()[gpu]]
        free, mode = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split(",")
        return 0 if "Exclusive" in mode and not mps_runs() else int(free) << 20
    import torch

    return int(torch.cuda.mem_get_info(gpu)[0])


def main(task: dict[str, Any]) -> None:
    """Run the trials that the parent names, until it closes the pipe or dies."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to the log, never between the answers
    names: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        """Queue what the parent asks. Its pipe closes when it is done or dead: nothing may be written after that."""
        partial_line = b""
        while chunk := os.read(0, 4096):  # not sys.stdin, whose lock would block the interpreter's end
            *lines, partial_line = (partial_line + chunk).split(b"\n")
            for line in lines:
                names.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()

    from vitmods.study.executors import describe
    from vitmods.study.store import StudyFolder
    from vitmods.study.trial import TrialRunner
    from vitmods.train.distributed import ALONE, join
    from vitmods.util.registry import load_plugins

    folder, options, seat = StudyFolder(task["folder"]), RunOptions(**task["options"]), task["seat"]
    os.environ |= seat
    with folder.worker_lock(task["index"]) if seat.get("RANK", "0") == "0" else nullcontext():
        load_plugins(task["plugins"])
        settings = folder.known_facts().study()
        runner: TrialRunner | None = None
        while True:
            name = json.loads(names.get())
            failure = None
            try:
                if runner is None:
                    processes = join(options.device) if seat else ALONE
                    runner = TrialRunner(folder, settings.measure, options, processes)
                runner(settings.trial(name))
            except Exception as error:
                traceback.print_exc()
                failure = describe(error)
            answers.write(json.dumps({"failure": failure}) + "\n")
            if failure is not None and seat:
                os._exit(1)  # the others of the team may wait for it in the middle of a step


if __name__ == "__main__":
    try:
        task = serve(socket.socket(fileno=int(sys.argv[2]))) if sys.argv[1] == "--fork" else json.loads(sys.argv[1])
        if task is not None:
            main(task)
    except KeyboardInterrupt:  # the trial has saved its checkpoint
        sys.exit(143)
