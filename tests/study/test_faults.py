"""What goes wrong around trials: too little memory, a clock that jumps, calls that fail. And images that change: every
process compares before its first step, and the answer before its first number."""

import json
import os
import pkgutil
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vitmods.cli import main as shell
from vitmods.recipes import plain
from vitmods.study import Answer, Study
from vitmods.study.arms import BASE
from vitmods.study.cells import Trial
from vitmods.study.executors import StudyOptions
from vitmods.study.prepare import open_study
from vitmods.study.run import write_facts
from vitmods.study.settings import Settings
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner
from vitmods.train import RunOptions
from vitmods.util.errors import UserError

from . import faults

pytestmark = pytest.mark.usefixtures("short_clocks")
OPTIONS = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}


@pytest.fixture
def images(tmp_path, draw_images):
    return draw_images(tmp_path / "pets", ["train"], count=30)


def study(images, **options):
    return Study("mu/4", ["dpn"], images, recipe=plain(epochs=1).with_(batch_size=16), seeds=2, **options)


def added(images):
    Image.new("RGB", (8, 8), (9, 9, 9)).save(images / "train/cat/more.png")


def removed(images):
    (images / "train/cat/3.png").unlink()


def changed(images):
    Image.new("RGB", (8, 8), (9, 9, 9)).save(images / "train/cat/0.png")


def relabeled(images):
    (images / "train/cat/0.png").rename(images / "train/dog/0 of cat.png")


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({}, relabeled),
        ({"folds": 2}, removed),
        ({"sweep": {"lr": [1e-3, 2e-3]}}, changed),
    ],
)
def test_a_process_that_starts_after_the_images_changed_trains_nothing(images, tmp_path, options, change):
    """What a worker, a Ray node and a Slurm job do: they read study.json, and list the images."""
    folder = StudyFolder(tmp_path / "out")
    folder.path.mkdir()
    prepared = open_study(folder, study(images, **options).settings, StudyOptions(**OPTIONS))
    facts = write_facts(prepared, "command")

    def worker():
        settings = Settings.from_dict(folder.known_facts().settings)
        return TrialRunner(folder, settings.measure, RunOptions(device="cpu"))

    settings = Settings.from_dict(facts.settings)
    places = [(seed, setting) for setting in settings.sweep.points for seed in settings.seeds]
    trials = [Trial(settings.cell(BASE, setting), seed) for seed, setting in places]
    change(images)
    for trial in trials:
        with pytest.raises(UserError, match=r"is of other images.* Put the old ones"):
            worker()(trial)
        assert not (folder.trial(trial) / "metrics.jsonl").exists()


def test_the_answer_leaves_out_what_was_trained_on_other_images(images, tmp_path):
    study(images).run(tmp_path / "out", **OPTIONS)
    changed(images)
    study(images).run(tmp_path / "other", **OPTIONS)
    trial = "trials/dpn/seed1"
    shutil.rmtree(tmp_path / "out" / trial)
    shutil.copytree(tmp_path / "other" / trial, tmp_path / "out" / trial)
    answer = Answer.load(tmp_path / "out")
    assert not answer.complete
    assert answer["dpn"].n == 1
    assert "trained on other images. Remove it and run the same command again" in answer.failed[0]


def test_folds_of_images_that_change_while_they_are_listed_are_refused(images, tmp_path, monkeypatch):
    load = TrialRunner.dataset

    def change_between(runner, cell, seed=0):
        if seed == 1:
            changed(images)
        return load(runner, cell, seed)

    monkeypatch.setattr(TrialRunner, "dataset", change_between)
    with pytest.raises(UserError, match="The images changed while they were read"):
        study(images, folds=2).run(tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out" / "study.json").exists()
    monkeypatch.undo()
    assert study(images, folds=2).run(tmp_path / "out", **OPTIONS).complete


def test_a_study_from_before_the_images_of_all_settings_were_recorded_goes_on(images, tmp_path):
    first = study(images).run(tmp_path / "out", **OPTIONS)
    path = tmp_path / "out" / "study.json"
    facts = json.loads(path.read_text())
    assert list(facts["data"].pop("fingerprints").values()) == [facts["settings"]["images"]]
    path.write_text(json.dumps(facts))
    assert np.isfinite(study(images).run(tmp_path / "out", **OPTIONS)["dpn"].effect)
    assert repr(Answer.load(tmp_path / "out").effects) == repr(first.effects)
    changed(images)
    settings = Settings.from_dict(facts["settings"])
    with pytest.raises(UserError, match="1 changed"):
        TrialRunner(StudyFolder(tmp_path / "out"), settings.measure).dataset(settings.cell(BASE))


def swapped(images):
    first, second = images / "train/cat/1.png", images / "train/dog/1.png"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def unseen(images):
    """Another content of the same size, under the same time."""
    path = images / "train/dog/2.png"
    before, content = path.stat(), path.read_bytes()
    Image.new("RGB", (8, 8), (1, 2, 3)).save(path)
    path.write_bytes(path.read_bytes().ljust(len(content), b"\0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = [added, removed, changed, relabeled, swapped, unseen]
POINTS = {
    "before the first step": ("vitmods.study.trial.train_trial", 1),
    "between two trials": ("vitmods.study.trial.train_trial", 2),
    "before the last trial": ("vitmods.study.trial.train_trial", 4),
    "between training and evaluation": ("vitmods.study.trial.TrialRunner._evaluate", 1),
    "between two evaluations": ("vitmods.study.trial.TrialRunner._evaluate", 2),
    "after the listing": ("vitmods.study.run.write_facts", 1),
    "before the answer": ("vitmods.study.run.read_answer", 1),
    "before the third trial": ("vitmods.study.trial.TrialRunner.train", 3),
}
MOMENTS = [
    pytest.param(*moment, marks=() if number % 19 == 0 else pytest.mark.long)
    for number, moment in enumerate(
        (change, point, anew) for anew in (False, True) for change in CHANGES for point in POINTS
    )
]


def at_a_moment(monkeypatch, place, number, change):
    """Call change before the number-th call of a function."""
    owner, name = place.rsplit(".", 1)
    owner, calls = pkgutil.resolve_name(owner), []
    call = getattr(owner, name)

    def counted(*args, **options):
        calls.append(name)
        if len(calls) == number:
            change()
        return call(*args, **options)

    monkeypatch.setattr(owner, name, counted)


def scores_of(folder):
    """What the table is made from: the metrics of each trial's training, and of its evaluation."""
    files = [*folder.glob("trials/*/*/result.json"), *folder.glob("trials/*/*/test.json")]
    contents = {str(path.relative_to(folder)): json.loads(path.read_text()) for path in files}
    return {
        name: content["metrics"] if "metrics" in content else content["protocols"]["calibration"]["metrics"]
        for name, content in contents.items()
        if content.get("status", "finished") == "finished" and (content.get("metrics") or content.get("protocols"))
    }


@pytest.fixture(scope="module")
def one_version(tmp_path_factory, draw_images):
    """The trials of a study whose images stay."""
    images = draw_images(tmp_path_factory.mktemp("stay") / "pets", ["train"], count=30)
    study(images, metric="ece").run(images.parent / "out", **OPTIONS)
    return images, scores_of(images.parent / "out")


@pytest.mark.parametrize(("change", "point", "anew"), MOMENTS)
def test_whenever_the_images_change_a_table_is_of_one_version(one_version, tmp_path, monkeypatch, change, point, anew):
    """... and is completed once the old ones are back.

    anew: each trial lists the images for itself from then on, as worker processes do.
    """
    source, expected = one_version
    images = shutil.copytree(source, tmp_path / "pets")
    done, load, out = [], TrialRunner.dataset, tmp_path / "out"

    def act():
        change(images)
        done.append(change)

    def list_anew(runner, *place):
        if anew and done:
            runner._datasets.clear()
        return load(runner, *place)

    with monkeypatch.context() as patched:
        patched.setattr(TrialRunner, "dataset", list_anew)
        at_a_moment(patched, *POINTS[point], act)
        said = []
        try:
            answer = study(images, metric="ece").run(out, **OPTIONS)
            said = answer.failed
            assert answer.complete or said
        except UserError as error:
            said = [str(error)]
    assert all("other images" in text for text in said)
    assert done
    assert scores_of(out).items() <= expected.items()
    with pytest.raises(UserError, match="other images"):
        study(images, metric="ece").run(out, **OPTIONS)
    assert scores_of(out).items() <= expected.items()
    shutil.rmtree(images)
    shutil.copytree(source, images)
    assert study(images, metric="ece").run(out, **OPTIONS).complete
    assert scores_of(out) == expected


COMMAND = ["train", "--base", "mu2/2", "--recipe", "plain", "--epochs", "2", "--batch-size", "32"]
COMMAND += ["--limit-train", "128", "--device", "cpu", "--checkpoint-minutes", "0.01"]


def hungry(model):
    """Takes 64 GB in each training step."""

    class Hungry(nn.Module):
        def forward(self, x):
            return x + torch.zeros(2**34).sum() if self.training else x

    model.norm = nn.Sequential(model.norm, Hungry())
    return model


def test_an_arm_that_runs_out_of_memory_fails_alone_and_the_remedy_is_told(tmp_path):
    """A real limit, on the memory that the process may map."""
    study = Study(
        "mu/4", {"big": hungry, "dpn": "dpn"}, data="digits", recipe=plain(epochs=1).with_(batch_size=32),
        limit_train=64, seeds=1,
    )  # fmt: skip
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**32, before[1]))
    try:
        answer = study.run(tmp_path, workers=1, device="cpu", cost_seconds=0, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    (line,) = answer.failed
    assert line.startswith("big, seed 0: 32 images at once do not fit the memory of cpu. Cut the batch into more parts")
    assert "choose a smaller batch_size" in line
    assert answer["dpn"].n == 1
    assert json.loads((tmp_path / "trials/big/seed0/result.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing(tmp_path):
    """The time of day goes ten years ahead and twenty back, again and again, while a trial runs."""
    libfaketime = pytest.importorskip("libfaketime")
    (library,) = Path(libfaketime.__file__).parent.rglob("libfaketime.so.1")
    clock = tmp_path / "clock"
    clock.write_text("+0")
    fake = {"LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}
    fake["NO_FAKE_STAT"] = "1"  # a clock that jumps changes no dates of files
    command = [sys.executable, "-P", "-m", "vitmods", *COMMAND, "--out", str(tmp_path / "jumping")]
    began = time.monotonic()
    run = subprocess.Popen(command, env={**os.environ, **fake, "DONT_FAKE_MONOTONIC": "1", "CI": "1"})
    jumps = 0
    while run.poll() is None:
        time.sleep(0.05)
        clock.with_suffix(".new").write_text(("+10y", "-20y")[jumps % 2])
        clock.with_suffix(".new").replace(clock)
        jumps += 1
    assert run.returncode == 0
    assert shell([*COMMAND, "--out", str(tmp_path / "steady")]) == 0
    jumping, steady = (tmp_path / name for name in ("jumping", "steady"))
    assert (jumping / "model.safetensors").read_bytes() == (steady / "model.safetensors").read_bytes()
    rows = [json.loads(line) for line in (jumping / "metrics.jsonl").read_text().splitlines()]
    walls = [row["wall_s"] for row in rows]
    assert walls == sorted(walls)
    assert 0 < json.loads((jumping / "result.json").read_text())["wall_s"] < time.monotonic() - began
    assert all(row["images_per_s"] > 0 for row in rows if row["split"] == "train")
    assert jumps > 20


def test_a_trial_of_images_that_changed_says_what_changed(tmp_path, draw_images, said, refused):
    images = draw_images(tmp_path / "images", ("train", "test"), count=4)
    command = f"train --data {images} --base mu/4 --img-size 8 --recipe plain --epochs 1 --batch-size 2 --device cpu"
    command += f" --quiet --out {tmp_path}/out"
    said(command)
    listed = (tmp_path / "out" / "split.csv").read_bytes()
    changed(images)
    (images / "test/dog/1.png").unlink()
    assert "is of other images: since it began 0 added, 1 removed, 1 changed" in refused(command)
    assert (tmp_path / "out" / "split.csv").read_bytes() == listed
    refused(f"{command} --lr 0.5")


@pytest.mark.parametrize("count", [9, pytest.param(500, marks=pytest.mark.long)])
def test_a_study_with_reuse_a_resumed_one_and_a_report_survive_calls_that_fail(tmp_path, count):
    """A call of the operating system fails, whichever: one clear error or a failed trial, no rest of a file, and the
    study completes when it is run again."""
    if (library := faults.build(tmp_path)) is None:
        pytest.skip("cc compiles the library that lets calls fail, on Linux")
    result = faults.run(library, faults.spread(count), tmp_path / "root")
    assert result["problems"] == []
    assert sum(result["outcomes"].values()) == count
    assert all(calls > 3 for calls in result["calls"].values())
    assert any("clear error" in outcome or "failed" in outcome for outcome in result["outcomes"])
