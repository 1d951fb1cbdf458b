"""Executors with trials that cost nothing; tests/study/test_kill.py has the real ones."""

import os
import signal
import subprocess
import sys
import time
from itertools import product
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import Mock

import pytest

from vitmods.recipes import Recipe
from vitmods.study.arms import Arm
from vitmods.study.cells import Cell, Trial
from vitmods.study.executors import ClusterOptions, Inline, StudyOptions, describe, processes
from vitmods.study.executors.processes import OUT_OF_MEMORY, SAVE_GRACE_S, Copy, LocalProcesses, Template
from vitmods.study.store import StudyFolder
from vitmods.train.launch import PEER_ENDED

TRIALS = [Trial(Cell(Arm("a"), {}, Recipe()), seed) for seed in range(4)]


class Queue:
    """Hands out a list, and remembers what came of it."""

    def __init__(self, work=TRIALS):
        self.left, self.outcomes = list(work), {}

    def take(self):
        return self.left.pop(0) if self.left else None

    def ended(self, work, failure):
        self.outcomes[work] = failure

    def use_idle_core(self):
        return False

    def waiting(self):
        pass


def ran(executor, queue=None):
    """What failed, once all trials have ended."""
    queue = queue or Queue()
    executor.run(queue)
    assert set(queue.outcomes) == set(TRIALS)
    return {work.seed: failure for work, failure in queue.outcomes.items() if failure is not None}


def test_inline_goes_on_after_a_failure_but_not_after_an_interruption():
    order = []

    def run(trial):
        order.append(trial.seed)
        if trial.seed == 1:
            raise RuntimeError("boom\nbang")

    assert ran(Inline(run)) == {1: "RuntimeError: boom bang"}
    assert order == [0, 1, 2, 3]
    with pytest.raises(KeyboardInterrupt):
        Inline(Mock(side_effect=KeyboardInterrupt)).run(Queue())
    assert describe(ValueError("give another folder")) == "give another folder"
    assert describe(MemoryError()) == "MemoryError: "


# A worker that follows the protocol of vitmods.study.executors.processes, and misbehaves as its task says.
WORKER = """
import json, os, signal, socket, sys, time
if sys.argv[1] == "--fork":
    from vitmods.study.executors.processes import serve
    task = serve(socket.socket(fileno=int(sys.argv[2])))
    if task is None:
        sys.exit()
    sys.stdin = open(0)
else:
    task = json.loads(sys.argv[1])
rank, said = task["seat"].get("RANK", "0"), task.get("said")
for line in sys.stdin:
    name = json.loads(line)
    if said and name["seed"] == 1:
        text = said[int(rank)]
        if text == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "waits":
            time.sleep(600)
        first = [other for other in said if other != "waits"][0 if rank == "1" else -1]
        while text in task["late"] and first != text and not os.path.exists(task["record"] + ".said"):
            time.sleep(0.01)
        print(json.dumps({"failure": text}), flush=True)
        open(task["record"] + ".said", "w").close()
        os._exit(1)
    with open(task["record"], "a") as record:
        record.write(f"{os.getpid()} {name['seed']} {os.environ['OMP_NUM_THREADS']} {rank}\\n")
    if name["seed"] == task.get("die_at"):
        os.kill(os.getpid(), task.get("die_by", signal.SIGKILL))
    if name["seed"] == task.get("exit_at"):
        sys.exit("no such thing")
    if name["seed"] == task.get("hang_at"):
        time.sleep(600)
    failure = "went wrong" if name["seed"] == task.get("fail_at") else None
    print(json.dumps({"failure": failure}), flush=True)
"""


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory):
    """The path of a Python that runs WORKER."""
    folder = tmp_path_factory.mktemp("python")
    (folder / "worker.py").write_text(WORKER)
    python = folder / "python"  # -P -m vitmods.study.executors.processes TASK, or --fork NUMBER
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder / "worker.py"}" "$4" "$5"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture(scope="module")
def template(misbehaving):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", misbehaving)
        started = Template(3)
    with started:
        yield started


@pytest.fixture
def pool(tmp_path, monkeypatch, request, misbehaving):
    """Processes whose workers run WORKER."""
    copies = getattr(request, "param", "fresh") == "copies"
    if copies and sys.platform != "linux":
        pytest.skip("workers are copies on Linux alone")
    template = request.getfixturevalue("template") if copies else None
    monkeypatch.setattr(sys, "executable", misbehaving)
    record = tmp_path / "record"

    def make(workers=2, team=1, **task):
        monkeypatch.setattr(LocalProcesses, "task", lambda executor, index: {"record": str(record), **task})
        return LocalProcesses(StudyFolder(tmp_path), workers, threads=3, template=template, team=team)

    make.record_file = record
    make.record = lambda: [line.split() for line in record.read_text().splitlines()]
    return make


fresh_and_copies = pytest.mark.parametrize("pool", ["fresh", "copies"], indirect=True)


KILLED = "its worker process was killed by "


@fresh_and_copies
@pytest.mark.parametrize(
    ("task", "failed", "processes"),
    [
        ({"workers": 2}, {}, 2),
        ({"workers": 1, "fail_at": 0}, {0: "went wrong"}, 1),
        ({"workers": 2, "die_at": 1, "die_by": 9}, {1: f"{KILLED}SIGKILL: {OUT_OF_MEMORY}"}, None),
        ({"workers": 1, "die_at": 1, "die_by": 11}, {1: f"{KILLED}SIGSEGV"}, 2),
        ({"workers": 1, "die_at": 1, "die_by": 40}, {1: f"{KILLED}signal 40"}, 2),
        ({"workers": 1, "exit_at": 2}, {2: "ended with code 1: no such thing"}, 2),
    ],
)
def test_a_killed_worker_loses_its_trial_alone(pool, task, failed, processes):
    """... as does one that ends by itself, which is quoted; one that reports a failure goes on."""
    found = ran(pool(**task))
    assert found.keys() == failed.keys()
    assert all(failed[seed] in found[seed] for seed in found)
    assert sorted(int(seed) for _, seed, *_ in pool.record()) == [0, 1, 2, 3]
    assert processes in (None, len({pid for pid, *_ in pool.record()}))
    assert {threads for _, _, threads, _ in pool.record()} == {"3"}


@fresh_and_copies
def test_every_trial_goes_to_all_workers_of_a_team(pool):
    assert ran(pool(team=2)) == {}
    assert sorted((int(seed), int(rank)) for _, seed, _, rank in pool.record()) == [*product(range(4), range(2))]
    teams = {}
    for pid, _, _, rank in pool.record():
        teams.setdefault(rank, set()).add(pid)
    assert [len(pids) for pids in teams.values()] == [2, 2]


def test_no_more_teams_begin_than_share_the_gpus(pool):
    looks = []
    executor = pool(workers=4)
    executor.sharing = Mock(limit=1, look=looks.append)
    assert ran(executor) == {}
    assert len({pid for pid, *_ in pool.record()}) == 1
    assert all(len(running) == 1 for running in looks)


ECHO = f"{PEER_ENDED} without a message"


@pytest.mark.parametrize(
    ("said", "failure"),
    [
        (["dies", "waits"], f"{KILLED}SIGKILL: {OUT_OF_MEMORY}"),
        (["waits", "the disk is full"], "the disk is full"),
        ([ECHO, "the disk is full"], "the disk is full"),
        (["the disk is full", ECHO], "the disk is full"),
        ([ECHO, "waits"], ECHO),
        ([None, "too late"], None),
    ],
)
def test_a_team_ends_with_its_first_failure_and_another_one_goes_on(pool, said, failure):
    assert ran(pool(workers=1, team=2, said=said, late=[ECHO, "too late"])) == ({1: failure} if failure else {})
    assert len({pid for pid, *_ in pool.record()}) == 4, "two teams"
    assert {seed for _, seed, *_ in pool.record()} == {"0", "2", "3"}


@pytest.mark.parametrize("pool", ["copies"], indirect=True)
def test_a_worker_is_told_to_end_after_what_waits_for_it_was_killed(pool):
    copy = pool().start(0).process
    waiter = int(Path(f"/proc/{copy.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(waiter, signal.SIGKILL)
    assert wait([copy._status.fileno()], 60), "the waiter is gone"
    with pytest.raises(subprocess.TimeoutExpired):
        copy.wait(0)
    copy.terminate()
    assert copy.wait(60) == -signal.SIGKILL  # its own code is lost
    copy.terminate()
    copy.stdin.close()
    copy.stdout.close()


def test_without_its_template_a_worker_is_a_fresh_interpreter(tmp_path, monkeypatch, misbehaving):
    monkeypatch.setattr(sys, "executable", misbehaving)
    monkeypatch.setattr(LocalProcesses, "task", lambda executor, index: {"record": str(tmp_path / "record")})
    with Template(3) as template:
        template._process.kill()
        template._process.wait()
        processes = LocalProcesses(StudyFolder(tmp_path), 1, threads=3, template=template)
        assert not isinstance(processes.start(0).process, Copy)
        assert ran(processes) == {}
        before = os.listdir("/proc/self/fd")
        with open(os.devnull, "wb") as output, pytest.raises(OSError, match=r"Broken pipe|Connection"):
            template.start({}, output)
        assert os.listdir("/proc/self/fd") == before


@pytest.mark.skipif(sys.platform != "linux", reason="workers are copies on Linux alone")
def test_the_shell_starts_the_template_before_a_study_asks_for_it(monkeypatch):
    monkeypatch.setattr(processes.subprocess, "Popen", Mock())
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    get, alive = processes.get_template, set()
    monkeypatch.setattr(Template, "__enter__", lambda self: alive.add(self) or self)
    monkeypatch.setattr(Template, "stop", lambda self: alive.discard(self))
    two = StudyOptions(device="cpu", workers=2)
    with processes.start_template_early(two):
        (early,) = alive
        assert early.threads == 2
        with get(2) as template, get(2) as again:
            assert template is again is early
        assert alive == {early}, "another study of the command may need it"
        with get(1) as other:
            assert alive == {other}, "copies of the early one have other threads"
    for change in (lambda: monkeypatch.setenv("HF_HOME", "x"), lambda: monkeypatch.syspath_prepend("/elsewhere")):
        with processes.start_template_early(two):
            change()
            with get(2):
                assert len(alive) == 1, "modules of the user could differ in its copies"
    with processes.start_template_early(two), get(None) as none:
        assert none is None
        assert not alive
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    slurm = StudyOptions(cluster=ClusterOptions("slurm"))
    for unused in (two, StudyOptions(device="cuda", workers=2), slurm):
        with processes.start_template_early(unused):
            assert not alive


@pytest.mark.parametrize(("workers", "steps"), [(1, 0), (2, 3)])
def test_an_idle_core_is_used_beside_the_last_trial(pool, workers, steps):
    class Meanwhile(Queue):
        steps = 0

        def use_idle_core(self):
            assert not self.left
            self.steps += 1
            return self.steps < 3

    queue = Meanwhile(TRIALS[:1])
    pool(workers=workers).run(queue)
    assert queue.outcomes == {TRIALS[0]: None}
    assert min(queue.steps, 3) == steps


@fresh_and_copies
def test_an_interruption_ends_the_workers(pool):
    class Stop(Queue):
        def waiting(self):
            if "0" in {seed for _, seed, *_ in pool.record()}:  # one hangs by now
                os.kill(os.getpid(), signal.SIGINT)

    pool.record_file.touch()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pool(hang_at=0).run(Stop(TRIALS))
    assert time.monotonic() - start < SAVE_GRACE_S
    for pid, *_ in pool.record():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_work_that_comes_up_later_is_done_and_no_worker_is_idle_then(pool):
    """As in a study that runs until it is decided: what comes next depends on what has ended."""

    class Growing(Queue):
        def ended(self, work, failure):
            super().ended(work, failure)
            if work.seed < 2:
                self.left.append(TRIALS[work.seed + 2])

    queue = Growing(TRIALS[:2])
    assert ran(pool(), queue) == {}
    assert len({pid for pid, *_ in pool.record()}) == 2
