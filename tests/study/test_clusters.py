"""Studies on a Ray cluster of two nodes, one of which is killed, and as jobs by submitit: as in one process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import vitmods as vm
from vitmods.study.budget import Budget
from vitmods.study.cells import Trial
from vitmods.study.executors import ClusterOptions, StudyOptions
from vitmods.study.executors.clusters import RayCluster, RayWorker, Run, Slurm, SlurmJob
from vitmods.study.executors.processes import LocalProcesses, Template
from vitmods.study.store import StudyFolder
from vitmods.train import RunOptions
from vitmods.util.errors import UserError

RECIPE = vm.recipes.digits().with_(epochs=2)


def study(**options):
    settings = {"base": "mu2/2", "arms": ["dpn"], "data": "digits", "recipe": RECIPE, "limit_train": 200, "seeds": 1}
    return vm.Study(**{**settings, **options})


QUIET = {"cost_seconds": 0, "progress": False, "device": "cpu"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    study().run(out, workers=1, **QUIET)
    return results(out)


def results(out):
    records = {
        path.parent.relative_to(out): json.loads(path.read_text()) for path in (out / "trials").rglob("result.json")
    }
    return {trial: (record["weights"], record["metrics"], record["status"]) for trial, record in records.items()}


@pytest.fixture
def hostile(tmp_path_factory, monkeypatch):
    """Stand in a folder whose modules have the names of others; a file says that one was imported."""
    folder = tmp_path_factory.mktemp("hostile")
    mark = folder / "mark"
    for name in ("queue", "random", "json", "threading", "statistics", "numpy", "torch"):
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\nraise ImportError('taken')\n")
    monkeypatch.chdir(folder)
    return mark


@pytest.fixture
def two_nodes(monkeypatch):
    """A cluster of a head and a node with a core each, which sees within seconds that a node is gone."""
    pytest.importorskip("ray")
    for name, value in {"period_ms": 500, "failure_threshold": 3, "timeout_ms": 60_000}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield cluster, cluster.add_node(num_cpus=1)
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_a_node_that_is_killed_loses_nothing(hostile, two_nodes, alone, tmp_path) -> None:
    cluster, node = two_nodes
    killed = []

    def kill():
        while len(list((tmp_path / "trials").rglob("metrics.jsonl"))) < 2:
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)
        killed.append(time.monotonic())

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    study().run(os.path.relpath(tmp_path), cluster=ClusterOptions("ray", cluster.address), **QUIET)
    thread.join(timeout=60)
    assert killed
    assert results(tmp_path) == alone
    failures = [path for path in (tmp_path / "trials").rglob("*") if "fail" in path.name]
    assert not failures
    assert not hostile.exists()


@pytest.mark.parametrize("answer", [("there is no data at images", True), ("it was killed", False)])
def test_a_failure_on_a_node_without_the_folder_of_the_start_says_so(tmp_path, monkeypatch, answer) -> None:
    worker = SimpleNamespace(send=lambda work: None, answer=lambda: answer)
    monkeypatch.setattr(LocalProcesses, "start", lambda self, index: worker)
    for folder, is_elsewhere in ((tmp_path, False), (tmp_path / "elsewhere", True)):
        node = RayWorker(LocalProcesses(StudyFolder(tmp_path), workers=1, threads=1, working_folder=str(folder)), 0)
        assert (f". Relative paths fail on this node: {folder}, where the study" in node.run({})) is is_elsewhere


@pytest.mark.slow
def test_processes_on_two_nodes_train_a_trial_together(two_nodes, alone, tmp_path) -> None:
    cluster, _ = two_nodes
    study(arms=None).run(tmp_path, cluster=ClusterOptions("ray", cluster.address), devices_per_trial=2, **QUIET)
    check_equal_up_to_rounding(tmp_path, alone)


def check_equal_up_to_rounding(out, alone):
    for trial, (_, metrics, status) in results(out).items():
        assert metrics == pytest.approx(alone[trial][1], abs=1e-6)
        assert status == "finished"
        assert json.loads((out / trial / "result.json").read_text())["how"]["processes"] == 2
    assert [trial.parent.name for trial in results(out)] == ["base"]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "count"), [(None, 2), ("1/2", 1), (2, 1)])
def test_jobs_are_the_study_in_one_process(hostile, alone, tmp_path, monkeypatch, devices, count) -> None:
    """Two jobs, one of both trials, and one of base whose trial has two processes."""
    pytest.importorskip("submitit")

    def controller(command, **how):  # what stands for Slurm on this machine is not what is tested
        assert command[1:3] == ["-m", "submitit.local._local"]
        return subprocess.Popen([command[0], "-P", *command[1:]], **how)

    monkeypatch.setattr("submitit.local.local.subprocess", SimpleNamespace(Popen=controller))
    arms = None if devices == 2 else ["dpn"]
    study(arms=arms).run(
        tmp_path, workers=2, cluster=ClusterOptions("slurm", "local"), devices_per_trial=devices, **QUIET
    )
    if devices == 2:
        check_equal_up_to_rounding(tmp_path, alone)
    else:
        assert results(tmp_path) == alone
    jobs = {path.name.partition("_")[0] for path in (tmp_path / "logs/slurm").glob("*_submitted.pkl")}
    assert len(jobs) == count
    assert not hostile.exists()


SLURM_STANDS_IN = {
    "sbatch": """cp "$1" "$PRETENDED/job.sh"
export SLURM_JOB_ID=$$ SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=2 SLURM_JOB_NODELIST=localhost,elsewhere
bash "$1" < /dev/null > "$PRETENDED/log" 2>&1 &
echo Submitted batch job $$""",
    "srun": """while [[ $1 == --* ]]; do [[ $1 == --unbuffered ]] || shift; shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" & done
wait""",
    "sacct": "",
}
"""programs of Slurm, for a job of two nodes with a task on each"""


@pytest.mark.slow
def test_a_job_of_two_nodes_is_one_process(alone, tmp_path, monkeypatch) -> None:
    pytest.importorskip("submitit")
    programs, out = tmp_path / "bin", tmp_path / "out"
    programs.mkdir()
    for name, lines in SLURM_STANDS_IN.items():
        (programs / name).write_text(f"#!/bin/bash\n{lines}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PRETENDED", str(tmp_path))
    study(arms=None).run(out, cluster=ClusterOptions("slurm"), devices_per_trial="2x1", **QUIET)
    check_equal_up_to_rounding(out, alone)
    asked = (tmp_path / "job.sh").read_text()
    assert "#SBATCH --nodes=2\n" in asked
    assert "#SBATCH --ntasks-per-node=1\n" in asked


@pytest.mark.parametrize(
    ("cluster", "options", "expected"),
    [
        ({}, {"devices_per_trial": 2}, (1, 2, 2, None)),
        ({"memory_per_trial": 4}, {"devices_per_trial": "2x8"}, (2, 8, 8, 32)),
        ({"memory_per_trial": 4}, {"devices_per_trial": "2x2", "device": "cpu"}, (2, 2, None, 8)),
        ({"memory_per_trial": 4}, {"devices_per_trial": "1/4"}, (1, 1, 1, 16)),
    ],
)
def test_what_a_job_asks_of_each_node(monkeypatch, tmp_path, cluster, options, expected) -> None:
    submitit = pytest.importorskip("submitit")
    asked = {}
    recorder = SimpleNamespace(update_parameters=lambda **limits: asked.update(limits))
    monkeypatch.setattr(submitit, "AutoExecutor", lambda **how: recorder)
    options = StudyOptions(cluster=ClusterOptions("slurm", **cluster), **options)
    Slurm(LocalProcesses(StudyFolder(tmp_path), 1, 1), options)._executor()
    assert tuple(map(asked.get, ("nodes", "tasks_per_node", "gpus_per_node", "mem_gb"))) == expected


@pytest.mark.parametrize(("rank", "local"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_the_tasks_of_a_job_meet_on_its_first_node(monkeypatch, tmp_path, rank, local) -> None:
    pytest.importorskip("submitit")
    task = {"PROCID": rank, "LOCALID": local, "NODEID": rank // 2, "NTASKS": 4, "JOB_NUM_NODES": 2, "JOB_ID": 7}
    for name, value in {**task, "JOB_NODELIST": "node[03-04]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    seats, worker = [], SimpleNamespace(send=lambda work: None, answer=lambda: (None, False))
    monkeypatch.setattr(LocalProcesses, "start", lambda self, index, seat: seats.append(seat) or worker)
    SlurmJob(LocalProcesses(StudyFolder(tmp_path), 1, 1, team=4), 0, {})()
    (seat,) = seats
    assert seat.pop("MASTER_PORT").isdecimal()
    sizes = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert seat == {"MASTER_ADDR": "node03", "RANK": str(rank), "LOCAL_RANK": str(local), **sizes}


@pytest.mark.slow
def test_a_job_whose_time_is_over_saves_and_goes_on(tmp_path) -> None:
    pytest.importorskip("submitit")
    long = study(recipe=RECIPE.with_(epochs=40), limit_val=40)  # still training when a busy machine signals
    unbroken, broken = tmp_path / "whole", tmp_path / "broken"
    long.run(unbroken, workers=1, budget=1, **QUIET)  # base alone
    long.run(broken, workers=1, budget=Budget(trials=0), **QUIET)  # no trial is begun
    trial = Trial(long.settings.cells[0], 0)
    folder = StudyFolder(broken)
    with Template(1) as template:  # here, not in each worker
        piece = SlurmJob(LocalProcesses(folder, 1, 1, RunOptions("cpu"), template=template), 0, trial.to_dict())

        def time_is_over(*_):  # as submitit does: in the handler of a signal, while the job waits for its worker
            again.append(piece.checkpoint())
            sys.exit(-1)

        def signal_once_it_trains():
            while not (folder.trial(trial) / "metrics.jsonl").exists():
                time.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)

        again, before = [], signal.signal(signal.SIGUSR2, time_is_over)
        try:
            threading.Thread(target=signal_once_it_trains, daemon=True).start()
            with pytest.raises(SystemExit):
                piece()
        finally:
            signal.signal(signal.SIGUSR2, before)
        assert not (folder.trial(trial) / "result.json").exists()
        assert (folder.trial(trial) / "checkpoint.pt").exists()
        assert again[0].function() == [None]
    (done,) = results(broken).items()
    assert done in results(unbroken).items()


@pytest.mark.parametrize(
    ("executor", "options", "message"),
    [
        ("here", {"cpus_per_trial": 2}, "executor here does not use cpus_per_trial"),
        ("slurm", {"address": "auto"}, "executor slurm does not use address"),
        ("ray", {"cpus_per_trial": 0}, "A trial on a cluster needs at least one core"),
        ("ray", {"memory_per_trial": -2.0}, "A trial on a cluster needs at least one core"),
    ],
)
def test_options_that_make_no_sense_are_refused(executor, options, message) -> None:
    with pytest.raises(UserError, match=message):
        ClusterOptions(executor, **options)


@pytest.mark.parametrize(
    ("executor", "devices", "message"),
    [
        ("slurm", "0x2", "devices_per_trial is a whole number"),
        ("slurm", "2x1/2", "devices_per_trial is a whole number"),
        ("slurm", "2x", "devices_per_trial is a whole number"),
        ("slurm", "x2", "devices_per_trial is a whole number"),
        ("ray", "2x2", "2x2 is for several nodes of Slurm: give 4"),
        ("here", "2x2", "2x2 is for several nodes of Slurm: give 4"),
    ],
)
def test_nodes_of_a_trial_that_cannot_be_are_refused(executor, devices, message) -> None:
    with pytest.raises(UserError, match=message):
        StudyOptions(cluster=ClusterOptions(executor), devices_per_trial=devices)


@pytest.mark.parametrize(
    ("nodes", "options", "room"),
    [
        (({"CPU": 3}, {"CPU": 3}), {"cpus_per_trial": 2}, 2),  # a process does not spread over nodes
        (({"CPU": 3}, {"CPU": 3}), {"cpus_per_trial": 4}, None),
        (({"CPU": 8, "GPU": 1},), {"devices_per_trial": "1/5"}, 5),
        (({"CPU": 8, "GPU": 3}, {"CPU": 8, "GPU": 2}), {"devices_per_trial": 2}, 2),
        (({"CPU": 8, "GPU": 3}, {"CPU": 8, "GPU": 2}), {"device": "cuda"}, 5),
        (({"CPU": 1}, {"CPU": 3}), {"devices_per_trial": 2, "device": "cpu"}, 2),
        (({"CPU": 1}, {"CPU": 3}), {"devices_per_trial": 8, "device": "cpu"}, None),
        (({"CPU": 8, "memory": 5e9}, {"CPU": 1, "memory": 1e9}), {"memory_per_trial": 2.0}, 2),
    ],
)
def test_there_is_room_on_each_node_by_itself(nodes, options, room) -> None:
    needs = {name: value for name, value in options.items() if name in ("cpus_per_trial", "memory_per_trial")}
    others = {name: value for name, value in options.items() if name not in needs}
    cluster = RayCluster(None, StudyOptions(cluster=ClusterOptions("ray", **needs), **others))
    run = Run(
        cluster, SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": node} for node in nodes]), None, None
    )
    with nullcontext() if room else pytest.raises(UserError, match="No node of the Ray cluster has room for a trial"):
        assert run.room() == room
