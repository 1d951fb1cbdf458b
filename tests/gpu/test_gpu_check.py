"""`make gpu-check` where there is no GPU: it says so, and its rehearsal goes through all of it and judges nothing."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

import vitmods as vm
from vitmods.tasks.base import TASKS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script(short_clocks):
    path = ROOT / "benchmarks/gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as for a script
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    module.BLOCK_S = 0.0  # each call is timed once
    return module


@pytest.fixture
def not_compiled(monkeypatch):
    """torch.compile takes a minute."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, mode=None: compiled.append(mode))
    return compiled


@pytest.mark.slow
def test_the_rehearsal_judges_nothing(script, tmp_path, capsys, monkeypatch, not_compiled):
    """But for most of what the pretend GPU measures below."""
    found = [script.Check.stem, script.Check.eager_steps, script.Check.compiled_steps]
    monkeypatch.setattr(script, "MEASUREMENTS", found)
    assert script.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("gpu_check-rehearsal-*.json")
    content = json.loads(path.read_text())
    assert (content["rehearsal"], content["tests"]["passed"]) == (True, None)
    rows = content["tables"]["steps"]
    made = {(row["precision"], row["mode"], row["library"]) for row in rows}
    modes = ("eager", "compiled", "reduce-overhead")
    assert made == set(product(("bf16-mixed", "32-true"), modes, ("vitmods", "timm"))), rows
    assert not_compiled == 2 * [None, None, "reduce-overhead", "reduce-overhead"]
    assert all(row["images_per_s"] > 0 and row["host_ms"] > 0 for row in rows)
    assert all(row["over_timm"]["ratio"] == 1 for row in rows if row["library"] == "timm")
    text = next(tmp_path.glob("*.md")).read_text()
    assert len(content["measured"]) == text.count("| not judged |") == 3
    for row in content["measured"]:
        assert f"| {row['name']} |" in text
        assert row["met"] is None
        assert 0 <= row["low"] <= row["value"] <= row["high"]
    assert "| mu1/4 | 4 | bf16-mixed | reduce-overhead | vitmods |" in text
    printed = capsys.readouterr().out
    assert "A rehearsal with tiny models" in printed
    assert "send it back" not in printed
    assert printed.count("not judged") == 3


@pytest.mark.long
def test_trials_train_together(script):
    run = script.Check(torch.device("cpu"), script.QUICK)
    run.trials_together()
    assert [row["trials"] for row in run.tables["together"]] == [1, 2]
    assert all(row["gain"] > 0 for row in run.tables["together"])


@pytest.mark.slow
def test_it_passes_on_the_pretend_gpu(script, tmp_path, gpu, monkeypatch):
    """But for torch.compile, other processes, and kernels' times."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    left_out = script.Check.compiled_steps, script.Check.trials_together
    monkeypatch.setattr(script, "MEASUREMENTS", [one for one in script.MEASUREMENTS if one not in left_out])
    monkeypatch.setattr(vm, "Study", partial(vm.Study, limit_train=64, limit_val=32))
    names = ("classification", "detection")
    monkeypatch.setattr(sys.modules["gpu_steps"], "TASKS", {name: TASKS[name] for name in names})
    add, met = script.Check._add, {}
    monkeypatch.setattr(
        script.Check, "_add", lambda check, name, *row: met.update({name: row[-1]}) or add(check, name, *row)
    )
    assert script.main(["--quick", "--out", str(tmp_path / "out")]) == 0
    path = tmp_path / "out/gpu_check-rehearsal-nvidia-pretend.json"
    content = json.loads(path.read_text())
    assert content["machine"]["device"] == "NVIDIA Pretend"
    assert path.stat().st_size < 200_000
    assert len(content["measured"]) == 13
    steps = content["tables"]["steps"]
    assert [row["precision"] for row in steps[::2]] == ["bf16-mixed", "tf32", "32-true", "fp16-mixed"]
    own, inside = content["tables"]["waits"]
    assert own["waits"] == 0 < min(inside["waits"], own["logging"])
    assert content["tables"]["reading"][0]["threads"] == 0
    assert set(content["machine"]) >= {"commit", "versions", "gpus", "topology", "mps"}
    assert met["a study by k-NN, broken off and resumed, seconds"] is True


def test_without_a_gpu_nothing_is_checked(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main(["--out", str(tmp_path / "out")]) == 2
    assert "no CUDA GPU here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="2"):
        script.main(["--device", "cpu"])
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    make = ["make", "gpu-check", f"VENV={tmp_path / 'venv'}", "PYTHON=false"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "There is no NVIDIA GPU here" in done.stderr
    assert not (tmp_path / "venv").exists(), "make says so before it builds an environment"


def test_a_measurement_that_fails_is_in_the_file_and_the_others_go_on(script, tmp_path, monkeypatch):
    def broken(run):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(script, "MEASUREMENTS", (broken, script.Check.stem))
    assert script.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["measured"]
    assert [row["name"] for row in rows] == ["dual patchnorm stem over the paper's listing, train", "broken"]
    assert rows[1]["error"] == "RuntimeError: no kernel image is available"


@pytest.mark.parametrize(
    ("ratio", "slower_is_met", "faster_is_met"), [(1.0, True, False), (0.5, True, True), (1.2, False, False)]
)
def test_goals_are_judged_by_their_side(script, monkeypatch, ratio, slower_is_met, faster_is_met):
    """The time of the other model over that of base; as throughput the inverse."""
    run = script.Check(torch.device("cpu"), script.FULL)
    base, other = object(), object()

    def measured(first, second):
        value = ratio if (first, second) == (base, other) else 1 / ratio
        return script.Ratio(value, value, value)

    monkeypatch.setattr(run, "_ratio", measured)
    run.most("time", 1.1, base, other)
    run.least("throughput", 1.8, base, other)
    assert [check.met for check in run.found] == [slower_is_met, faster_is_met]
    assert ("MISSED" in script.line(run.found[0])) != slower_is_met


def test_rows_without_time_are_named(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "MEASUREMENTS", (script.Check.compiled_steps,))
    monkeypatch.setattr(script, "MINUTES", 0.0)
    assert script.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.md")
    assert "Not measured (no time was left): mu1/4 4 bf16-mixed compiled; mu1/4 4 bf16-mixed" in path.read_text()
