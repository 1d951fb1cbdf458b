"""What goes wrong around a trial: too little memory, a clock that jumps, images that changed, calls that fail."""

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from vitmods.cli import main as shell
from vitmods.recipes import plain
from vitmods.study import Study

from . import faults

COMMAND = ["train", "--base", "mu2/2", "--recipe", "plain", "--epochs", "4", "--batch-size", "32"]
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


def test_a_trial_of_images_that_changed_says_what_changed(tmp_path, capsys, draw_images):
    images = draw_images(tmp_path / "images", ("train", "test"), count=4)
    command = ["train", "--data", str(images), "--base", "mu/4", "--img-size", "8", "--recipe", "plain"]
    command += ["--epochs", "1", "--batch-size", "2", "--device", "cpu", "--quiet", "--out", str(tmp_path / "out")]
    assert shell(command) == 0
    listed = (tmp_path / "out" / "split.csv").read_bytes()
    Image.new("RGB", (8, 8), (9, 9, 9)).save(images / "train/cat/0.png")
    (images / "test/dog/1.png").unlink()
    assert shell(command) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "is of other images: since it began 0 added, 1 removed, 1 changed" in told
    assert (tmp_path / "out" / "split.csv").read_bytes() == listed
    assert shell([*command, "--lr", "0.5"]) == 2


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
