"""Trials on several devices each, on a Ray cluster of two nodes one of which is killed, and as jobs by submitit: as in
one process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from multiprocessing.connection import wait
from types import SimpleNamespace

import pytest
import torch

import vitmods as vm
from vitmods.recipes import Recipe
from vitmods.study.budget import Budget
from vitmods.study.cells import Trial
from vitmods.study.executors import ClusterOptions, StudyOptions
from vitmods.study.executors.clusters import RayCluster, RayWorker, Run, Slurm, SlurmJob
from vitmods.study.executors.processes import LocalProcesses, Team, Template, Worker, reason
from vitmods.study.prepare import check_devices, crowded, open_study, threads_for, workers_for
from vitmods.study.stopwatch import TRIAL_S, Pace, Stopwatch
from vitmods.study.store import StudyFolder
from vitmods.train import RunOptions
from vitmods.train.interrupt import Interrupted
from vitmods.train.launch import PEER_ENDED, seats
from vitmods.train.loop import TrialRun
from vitmods.train.trial import identify
from vitmods.util.errors import UserError

RECIPE = Recipe().with_(epochs=6, batch_size=40, lr=1e-3, crop="pad", mixup=0.4, ema=0.9)
QUIET = {"cost_seconds": 0, "progress": False, "device": "cpu"}
RAY, SLURM = ClusterOptions("ray"), ClusterOptions("slurm")


def study(**options):
    settings = {"base": "mu1/2", "arms": None, "data": "digits", "recipe": RECIPE, "limit_train": 160, "seeds": 2}
    return vm.Study(**{"limit_val": 40, **settings, **options})


def records(out, name="result.json"):
    return {path.name: json.loads((path / name).read_text()) for path in (out / "trials").glob("base/seed*")}


def results(out):
    return {seed: (record["weights"], record["metrics"], record["status"]) for seed, record in records(out).items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    study().run(out, workers=1, **QUIET)
    return out


def check_same(out, alone, seeds=1, processes=2):
    """Up to rounding."""
    found = records(out)
    assert len(found) == seeds
    for seed, result in found.items():
        assert result["status"] == "finished"
        assert result["metrics"] == pytest.approx(records(alone)[seed]["metrics"], abs=1e-6)
        assert processes is None or result["how"]["processes"] == processes
        config, config_alone = (records(folder, "config.json")[seed] for folder in (out, alone))
        assert config["id"] == config_alone["id"] == identify(config)


@pytest.mark.long  # on a busy machine the trial may end before it is killed
def test_two_processes_are_one_also_where_one_of_them_is_killed_and_one_resumes(alone, tmp_path) -> None:
    out, folder = tmp_path, StudyFolder(tmp_path)
    study().run(out, workers=1, budget=Budget(trials=0), **QUIET)  # no trial is begun
    whole, broken = (Trial(study().settings.cells[0], seed) for seed in (1, 0))
    options = StudyOptions("cpu", checkpoint_every_steps=1, progress=False)
    with Template(1) as template:
        processes = LocalProcesses(folder, 1, 1, options, template=template, team=2)
        team = Team(0, [processes.start(0, seat) for seat in seats(2)])
        running = team.begin(whole)
        while not all(team.hear(pipe) for pipe in wait(list(running))):
            pass
        assert team.failures == [None, None]
        assert records(out)["seed1"]["how"]["processes"] == 2
        assert (folder.logs / "worker0-1.txt").exists()
        assert team.is_alive
        running = team.begin(broken)
        while not (folder.trial(broken) / "checkpoint.pt").exists():
            time.sleep(0.01)
        os.kill(team.workers[1].process.pid, signal.SIGKILL)
        while not any(team.hear(pipe) for pipe in wait(list(running), 60)):
            pass
    assert "killed by SIGKILL" in reason(team.failures)
    assert not team.is_alive
    assert not (folder.trial(broken) / "model.safetensors").exists()
    with pytest.warns(UserWarning, match="resumed in another environment.*processes was 2, now 1"):
        study().run(out, workers=1, **QUIET)
    check_same(out, alone, seeds=2, processes=None)


def test_the_one_that_was_killed_is_named_where_another_says_first_that_it_is_gone(tmp_path) -> None:
    """As on a busy machine, where connections break before a process is gone."""
    said, trial = json.dumps({"failure": f"{PEER_ENDED} without a message"}), Trial(study().settings.cells[0], 0)
    commands = [f"echo '{said}'; exec cat >&2", "sleep 1; kill -9 $$"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    team = Team(0, [Worker(subprocess.Popen(["sh", "-c", command], **pipes), tmp_path, 0) for command in commands])
    first, _ = team.begin(trial)
    assert team.hear(first)
    assert not team.is_alive
    assert reason(team.failures).startswith("its worker process was killed by SIGKILL")


@pytest.mark.slow
def test_a_study_on_two_devices_resumes_what_one_began(alone, tmp_path, monkeypatch) -> None:
    step = TrialRun._train_step

    def stops(run, batch):
        if run.step == 5:
            raise Interrupted("stopped", signal.SIGINT)
        step(run, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TrialRun, "_train_step", stops)
        with pytest.raises(Interrupted):
            study().run(tmp_path, workers=1, **QUIET)
    assert [path.parent.name for path in tmp_path.rglob("checkpoint.pt")] == ["seed0"]
    study().run(tmp_path, devices_per_trial=2, **QUIET)
    check_same(tmp_path, alone, seeds=2)


# ---- clusters


@pytest.fixture
def hostile(tmp_path_factory, monkeypatch):
    """Stand in a folder whose modules have the names of others; a file says that one was imported."""
    folder = tmp_path_factory.mktemp("hostile")
    mark = folder / "mark"
    for name in ("queue", "random", "json", "threading", "statistics", "numpy", "torch"):
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\nraise ImportError('taken')\n")
    monkeypatch.chdir(folder)
    return mark


@pytest.fixture(scope="module")
def two_nodes():
    """A cluster of a head and a node with a core each, which sees within seconds that a node is gone."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"period_ms": 500, "failure_threshold": 3, "timeout_ms": 60_000}.items():
            patched.setenv(f"RAY_health_check_{name}", str(value))
        patched.setenv("RAY_DEDUP_LOGS", "0")
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            cluster.add_node(num_cpus=1)
            yield cluster
        finally:
            cluster.shutdown()


@pytest.mark.slow
def test_processes_on_two_nodes_train_a_trial_together(two_nodes, alone, tmp_path) -> None:
    study(seeds=1).run(tmp_path, cluster=ClusterOptions("ray", two_nodes.address), devices_per_trial=2, **QUIET)
    check_same(tmp_path, alone)


@pytest.mark.slow
def test_a_node_that_is_killed_loses_nothing(hostile, two_nodes, alone, tmp_path) -> None:
    killed = []

    def kill():
        while len(list((tmp_path / "trials").rglob("metrics.jsonl"))) < 2:
            time.sleep(0.05)
        (node,) = two_nodes.worker_nodes
        two_nodes.remove_node(node, allow_graceful=False)
        killed.append(time.monotonic())

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    study().run(os.path.relpath(tmp_path), cluster=ClusterOptions("ray", two_nodes.address), **QUIET)
    thread.join(timeout=60)
    two_nodes.add_node(num_cpus=1)
    assert killed
    assert results(tmp_path) == results(alone)
    assert not [path for path in (tmp_path / "trials").rglob("*") if "fail" in path.name]
    assert not hostile.exists()


@pytest.mark.parametrize("answer", [("there is no data at images", True), ("it was killed", False)])
def test_a_failure_on_a_node_without_the_folder_of_the_start_says_so(tmp_path, monkeypatch, answer) -> None:
    worker = SimpleNamespace(send=lambda work: None, answer=lambda: answer)
    monkeypatch.setattr(LocalProcesses, "start", lambda self, index: worker)
    for folder, is_elsewhere in ((tmp_path, False), (tmp_path / "elsewhere", True)):
        node = RayWorker(LocalProcesses(StudyFolder(tmp_path), workers=1, threads=1, working_folder=str(folder)), 0)
        assert (f". Relative paths fail on this node: {folder}, where the study" in node.run({})) is is_elsewhere


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "count"), [pytest.param(None, 2, marks=pytest.mark.long), ("1/2", 1)])
def test_jobs_are_the_study_in_one_process(hostile, alone, tmp_path, monkeypatch, devices, count) -> None:
    """Two jobs, or one of both trials."""
    pytest.importorskip("submitit")

    def controller(command, **how):  # what stands for Slurm on this machine is not what is tested
        assert command[1:3] == ["-m", "submitit.local._local"]
        return subprocess.Popen([command[0], "-P", *command[1:]], **how)

    monkeypatch.setattr("submitit.local.local.subprocess", SimpleNamespace(Popen=controller))
    here = ClusterOptions("slurm", "local")
    study().run(tmp_path, workers=2, cluster=here, devices_per_trial=devices, **QUIET)
    assert results(tmp_path) == results(alone)
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
    study(seeds=1).run(out, cluster=SLURM, devices_per_trial="2x1", **QUIET)
    check_same(out, alone)
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


@pytest.mark.slow
def test_a_job_whose_time_is_over_saves_and_goes_on(tmp_path) -> None:
    pytest.importorskip("submitit")
    long = study(recipe=RECIPE.with_(epochs=30), seeds=1)  # still training when a busy machine signals
    unbroken, broken = tmp_path / "whole", tmp_path / "broken"
    long.run(unbroken, workers=1, **QUIET)
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
    assert results(broken) == results(unbroken)


# ---- what is asked for


@pytest.mark.parametrize(
    ("nodes", "options", "room"),
    [
        (({"CPU": 3}, {"CPU": 3}), {"cpus_per_trial": 2}, 2),  # a process does not spread over nodes
        (({"CPU": 3}, {"CPU": 3}), {"cpus_per_trial": 4}, None),
        (({"CPU": 8, "GPU": 1},), {"devices_per_trial": "1/5"}, 5),
        (({"CPU": 8, "GPU": 3}, {"CPU": 8, "GPU": 2}), {"devices_per_trial": 2}, 2),
        (({"CPU": 8, "GPU": 3}, {"CPU": 8, "GPU": 2}), {"device": "cuda"}, 5),
        (({"CPU": 1}, {"CPU": 3}), {"devices_per_trial": 2, "device": "cpu"}, 2),
        (({"CPU": 8, "memory": 5e9}, {"CPU": 1, "memory": 1e9}), {"memory_per_trial": 2.0}, 2),
    ],
)
def test_there_is_room_on_each_node_by_itself(nodes, options, room) -> None:
    needs = {name: value for name, value in options.items() if name in ("cpus_per_trial", "memory_per_trial")}
    others = {name: value for name, value in options.items() if name not in needs}
    cluster = RayCluster(None, StudyOptions(cluster=ClusterOptions("ray", **needs), **others))
    ray = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": node} for node in nodes])
    run = Run(cluster, ray, None, None)
    with nullcontext() if room else pytest.raises(UserError, match="No node of the Ray cluster has room for a trial"):
        assert run.room() == room


def test_the_dry_run_derives_the_time_of_both_layouts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # 8 would stay for later tests
    monkeypatch.setattr(Stopwatch, "_read", lambda *_: (0.04, 0.0))
    monkeypatch.setattr(Stopwatch, "pace", lambda *_: Pace(image_s=0.01, update_s=0.002, infer_s=0.0))
    planned = study(seeds=8).dry_run(tmp_path, devices_per_trial=2, device="cpu", progress=False)
    (base,) = planned.arms
    assert base.step_s == pytest.approx(40 * 0.01 / 2 + 0.002 + 0.04 / 2)
    assert base.trial_s == pytest.approx(TRIAL_S + 24 * base.step_s)
    assert base.alone_s == pytest.approx(TRIAL_S + 24 * (40 * 0.01 + 0.002 + 0.04))
    text = " ".join(str(planned).split())
    assert "On 2 devices per trial, 4 at a time: about 13 s (derived from one device" in text
    assert "On one, 8 at a time, if a trial fits it: about 12 s." in text
    assert "devices per trial" not in str(study(seeds=8).dry_run(tmp_path, device="cpu", progress=False))


def test_devices_are_a_whole_number_or_a_part() -> None:
    for given, expected in {None: (1, None, 0), "2": (2, 1, 2), "1/4": (1, 4, 0.25), 0.5: (1, 2, 0.5)}.items():
        options = StudyOptions(devices_per_trial=given)
        assert (options.processes, options.trials_per_device, options.gpus) == expected
        assert StudyOptions("cpu", devices_per_trial=given).gpus == 0
    assert StudyOptions("cuda").gpus == 1
    for wrong in (0, -1, "3/2", "two", "1/0", 1.5, float("inf"), float("nan"), "0x2", "2x1/2", "2x", "x2"):
        with pytest.raises(UserError, match="devices_per_trial is a whole number"):
            StudyOptions(cluster=SLURM, devices_per_trial=wrong)


def test_teams_fill_the_cores(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for devices, workers, threads in ((1, 8, 1), (2, 4, 1), (3, 2, 1), (8, 1, 1)):
        options = StudyOptions("cpu", devices_per_trial=devices)
        assert workers_for(options, 100, 1 << 20) == workers
        assert threads_for(options, 1 << 20) == threads
    assert threads_for(StudyOptions("cpu", devices_per_trial=2, workers=2), 1 << 20) == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert {threads_for(StudyOptions("cpu", devices_per_trial=n), 1 << 20) for n in (1, 2, 3, 5)} == {2}, "as in ids"


def test_several_threads_on_a_busy_machine_are_a_warning(monkeypatch, tmp_path) -> None:
    prepared = open_study(StudyFolder(tmp_path), study().settings, StudyOptions("cpu", workers=1))
    monkeypatch.setattr("vitmods.study.prepare.cores", lambda: 2)
    busy = "a load of 9.0 on 2 cores.*: OMP_NUM_THREADS=1"
    cases = ((1, 9.0, 2.0, ""), (2, 1.5, 2.0, ""), (2, 9.0, 1.0, ""), (2, 9.0, 2.0, busy))
    for threads, load, slower, text in cases:
        monkeypatch.setattr("vitmods.study.prepare.slowdown", lambda slower=slower: slower)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        with pytest.warns(match=text) if text else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("always" if text else "error")
            prepared.warn()
    for options in (StudyOptions("cpu", cluster=SLURM), StudyOptions("cuda")):
        assert crowded(options, 2) == ""


NODES = "2x2 is for several nodes of Slurm: give 4"


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"devices_per_trial": 3}, {}, "3 devices per trial are more than the 2 cores of this machine.*at most 2, or"),
        ({"devices_per_trial": 2}, {"recipe": RECIPE.with_(batch_size=33)}, "multiple of 2, or their number to 1 or 3"),
        ({"devices_per_trial": 2}, {"arms": ["dpn"], "tune": {"batch_size": [40, 33]}}, "A batch of 33 images cannot"),
        ({"devices_per_trial": "1/4"}, {}, "Trials share a GPU, and this is a CPU: 4 at a time are --workers"),
        ({"devices_per_trial": "1/4", "cluster": "ray"}, {}, "With Ray 4 trials share a GPU: drop --device cpu"),
        ({"devices_per_trial": 2, "shard": True}, {"recipe": RECIPE.with_(precision="fp16-mixed")}, "scaled gradients"),
        ({"devices_per_trial": 40, "cluster": "slurm"}, {}, ""),
        ({"devices_per_trial": "1/4", "cluster": "slurm"}, {}, ""),
        ({"devices_per_trial": "2x2", "cluster": "ray"}, {}, NODES),
        ({"devices_per_trial": "2x2"}, {}, NODES),
        ({"cpus_per_trial": 2}, {}, "executor here does not use cpus_per_trial"),
        ({"cluster": "slurm", "address": "auto"}, {}, "executor slurm does not use address"),
        ({"cluster": "ray", "cpus_per_trial": 0}, {}, "A trial on a cluster needs at least one core"),
        ({"cluster": "ray", "memory_per_trial": -2.0}, {}, "A trial on a cluster needs at least one core"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_images_are_read(monkeypatch, options, settings, message) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    of_cluster = {name: options[name] for name in ("address", "cpus_per_trial", "memory_per_trial") if name in options}
    others = {name: options[name] for name in ("devices_per_trial", "shard") if name in options}
    with pytest.raises(UserError, match=message) if message else nullcontext():
        cluster = ClusterOptions(options.get("cluster", "here"), **of_cluster)
        check_devices(study(**settings).settings, StudyOptions("cpu", cluster=cluster, **others))
