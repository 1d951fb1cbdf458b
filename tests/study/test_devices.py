"""Trials on several devices each: the numbers of one process, in one folder, and resumed by another number of them."""

import json
import os
import signal
import subprocess
import time
import warnings
from contextlib import nullcontext
from multiprocessing.connection import wait

import pytest
import torch

import vitmods as vm
from vitmods.recipes import Recipe
from vitmods.study.budget import Budget
from vitmods.study.cells import Trial
from vitmods.study.executors import ClusterOptions, StudyOptions
from vitmods.study.executors.processes import LocalProcesses, Team, Template, Worker, reason
from vitmods.study.prepare import check_devices, crowded, open_study, threads_for, workers_for
from vitmods.study.stopwatch import TRIAL_S, Pace, Stopwatch
from vitmods.study.store import StudyFolder
from vitmods.train.interrupt import Interrupted
from vitmods.train.launch import PEER_ENDED, seats
from vitmods.train.loop import TrialRun
from vitmods.train.trial import identify
from vitmods.util.errors import UserError

RECIPE = Recipe().with_(epochs=6, batch_size=40, lr=1e-3, crop="pad", mixup=0.4, ema=0.9)
QUIET = {"cost_seconds": 0, "progress": False, "device": "cpu"}


def study(**options):
    settings = {"base": "mu1/2", "arms": None, "data": "digits", "recipe": RECIPE, "limit_train": 160, "seeds": 2}
    return vm.Study(**{"limit_val": 40, **settings, **options})


def records(out, name="result.json"):
    return {path.name: json.loads((path / name).read_text()) for path in (out / "trials").glob("base/seed*")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    study().run(out, workers=1, **QUIET)
    return out


def check_same(out, alone):
    assert records(out).keys() == {"seed0", "seed1"}
    for trial, result in records(out).items():
        assert result["metrics"] == pytest.approx(records(alone)[trial]["metrics"], abs=1e-6)
        config, config_alone = (records(folder, "config.json")[trial] for folder in (out, alone))
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
    check_same(out, alone)


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
    check_same(tmp_path, alone)
    assert {result["how"]["processes"] for result in records(tmp_path).values()} == {2}


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
    for given, processes, share, gpus in (
        (None, 1, None, 0),
        (1, 1, 1, 1),
        ("2", 2, 1, 2),
        ("1/4", 1, 4, 0.25),
        (0.5, 1, 2, 0.5),
    ):
        options = StudyOptions(devices_per_trial=given)
        assert (options.processes, options.trials_per_device, options.gpus) == (processes, share, gpus)
        assert StudyOptions("cpu", devices_per_trial=given).gpus == 0
    assert StudyOptions("cuda").gpus == 1
    for wrong in (0, -1, "3/2", "two", "1/0", 1.5, float("inf"), float("nan")):
        with pytest.raises(UserError, match="devices_per_trial is a whole number of devices"):
            StudyOptions(devices_per_trial=wrong)


def test_teams_fill_the_cores(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for devices, workers, threads in ((1, 8, 1), (2, 4, 1), (3, 2, 1), (8, 1, 1)):
        options = StudyOptions("cpu", devices_per_trial=devices)
        assert workers_for(options, 100, 1 << 20) == workers
        assert threads_for(options, 1 << 20) == threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert {threads_for(StudyOptions("cpu", devices_per_trial=n), 1 << 20) for n in (1, 2, 3, 5)} == {2}, "as in ids"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert threads_for(StudyOptions("cpu", devices_per_trial=2, workers=2), 1 << 20) == 2


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


RAY, SLURM = ClusterOptions("ray"), ClusterOptions("slurm")


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"devices_per_trial": 3}, {}, "3 devices per trial are more than the 2 cores of this machine.*at most 2, or"),
        ({"devices_per_trial": 2}, {"recipe": RECIPE.with_(batch_size=33)}, "multiple of 2, or their number to 1 or 3"),
        ({"devices_per_trial": 2}, {"arms": ["dpn"], "tune": {"batch_size": [40, 33]}}, "A batch of 33 images cannot"),
        ({"devices_per_trial": "1/4"}, {}, "Trials share a GPU, and this is a CPU: 4 at a time are --workers"),
        ({"devices_per_trial": "1/4", "cluster": RAY}, {}, "With Ray 4 trials share a GPU: drop --device cpu"),
        ({"devices_per_trial": 2, "shard": True}, {"recipe": RECIPE.with_(precision="fp16-mixed")}, "scaled gradients"),
        ({"devices_per_trial": 40, "cluster": SLURM}, {}, ""),
        ({"devices_per_trial": "1/4", "cluster": SLURM}, {}, ""),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_images_are_read(monkeypatch, options, settings, message) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    asked = study(**settings).settings, StudyOptions("cpu", **options)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_devices(*asked)
