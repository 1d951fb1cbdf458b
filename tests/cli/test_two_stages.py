"""`vitmods compare --pretrain`: one command trains without labels, then compares from these weights."""

import json
import os
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

import vitmods as vm
from vitmods.cli import main as shell
from vitmods.study.stages import read_pretraining
from vitmods.study.state import TrialRecord
from vitmods.train import TrialRun
from vitmods.util.errors import UserError

MASKED = "beit(epochs=1,codes=16,masked=0.4,batch_size=128,decoder_depth=1)"
COMMAND = ["compare", "--base", "mu1/2", "--arms", "dpn", "--seeds", "1", "--epochs", "1", "--limit-train", "200"]
COMMAND += ["--device", "cpu", "--workers", "1", "--cost-seconds", "0", "--pretrain", MASKED, "--quiet"]
COMMAND += ["--batch-size", "25"]


def content(folder, name):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob(name)}


@pytest.mark.usefixtures("short_clocks", "short_probes")
def test_both_stages_resume_in_the_same_bits(tmp_path, monkeypatch, capsys):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert shell([*COMMAND, "--out", str(whole), "--dry-run"]) == 0
    before = capsys.readouterr().out
    assert before.startswith("Pre-training (beit):")
    assert "In all: about" in before
    assert not whole.exists()
    assert shell([*COMMAND, "--out", str(whole)]) == 0
    for arm in ("base", "dpn"):
        first, second = (
            json.loads((folder / f"trials/{arm}/seed0/config.json").read_text())
            for folder in (whole / "pretraining", whole)
        )
        assert (first["task"], second["task"]) == ("beit", "classification")
        assert first["data"]["splits"]["train"]["count"] > second["data"]["splits"]["train"]["count"] == 200
        start = second["start"]
        assert start.get("arm", start["source"]).endswith(f"pretraining/trials/{arm}")
        assert (first["recipe"]["beit"]["codes"], second["arm"]) == (16, arm)
    step, steps, kills = TrialRun._train_step, [], [17, 28]

    def killed(run, batch):
        steps.append(run.folder)
        if len(steps) in kills:
            os.kill(os.getpid(), signal.SIGTERM)
        step(run, batch)

    monkeypatch.setattr(TrialRun, "_train_step", killed)
    codes = [shell([*COMMAND, "--out", str(broken)]) for _ in range(len(kills) + 1)]
    stages = {"pretraining" in str(steps[count - 1]) for count in kills}
    assert stages == {True, False}, "both stages must have been stopped"
    assert codes == [128 + signal.SIGTERM] * len(kills) + [0]
    weights = content(whole, "*.safetensors")
    assert len(weights) == 6  # of 2 trials in each stage; the first has modules of its task
    assert content(broken, "*.safetensors") == weights
    capsys.readouterr()
    assert shell([*COMMAND, "--out", str(whole), "--dry-run"]) == 0
    assert "In all: about 0 s" in capsys.readouterr().out
    for folder in (whole / "pretraining", whole):  # the command of both
        words = shlex.split(json.loads((folder / "study.json").read_text())["command"])
        assert shell([*words[1:], "--dry-run"]) == 0
    assert shell([*COMMAND, "--seeds", "2", "--out", str(whole), "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "2h"], "does not support --budget"),
        (["--sweep", "limit_train=0.5,1"], "does not support --sweep"),
        (["--from", "runs/x"], "does not support --from"),
        (["--pretrain", "classification"], "'classification'"),
        (["--pretrain", "augreg"], "'augreg'"),
        (["--pretrain", "beit(code=3)"], "does not have the setting 'code'"),
        (["--pretrain", "beit(codes=1)"], "codes"),
        (["--out", "file:///tmp/x"], "does not support addresses"),
        (["--arms", "dpn+train(attention)"], "does not support the arm dpn+train(attention)"),
        (["--arms", "attention"], "does not support the arm attention"),
        (["--pretrain", "dino(local_scale=(0.1,0.2,0.3))"], "local_scale is numbers"),
    ],
    ids=str,
)
def test_what_two_stages_cannot_do_is_refused(options, message, capsys):
    assert shell([*COMMAND, *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("options", "message"), [(["--metric", "miou"], "miou"), (["--task", "segmentation"], "mask")])
def test_the_second_stage_is_checked_before_the_first_trains(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitmods.study.run.run_study", lambda *_: pytest.fail("it trains"))
    assert shell([*COMMAND, *options, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    (tmp_path / "notes.txt").touch()
    assert shell([*COMMAND, "--out", str(tmp_path)]) == 2
    assert "notes.txt" in capsys.readouterr().err


def test_settings_of_the_first_stage():
    task, recipe, metric = read_pretraining("dino_small(epochs=3,metric=teacher_entropy,norm_last_layer=false)")
    assert (task, recipe.name, metric) == ("dino", "dino_small", "teacher_entropy")
    assert recipe.overrides == {"epochs": 3, "norm_last_layer": False}
    assert read_pretraining("beit")[:1] == ("beit",)
    text = "dino(local_scale=(0.1, 0.4),randaugment=(2,9),clip_norm=None,ema=none,lr=1e-3,step_at=0.5:0.7)"
    expected = {"local_scale": (0.1, 0.4), "randaugment": (2, 9.0), "clip_norm": None, "ema": None}
    assert read_pretraining(text)[1].overrides == {**expected, "lr": 1e-3, "step_at": (0.5, 0.7)}


def test_a_first_stage_without_all_weights_is_an_error(tmp_path, monkeypatch, capsys):
    runs = []

    def run(request, out, options, command):
        runs.append((out, options.keep_weights, request.settings))
        trials = [TrialRecord("base", 0, "finished", ""), TrialRecord("x", 1, "diverged", "")]
        return SimpleNamespace(complete=True, trials=trials, report=lambda: Path("report.html"))

    monkeypatch.setattr("vitmods.study.run.run_study", run)
    monkeypatch.setattr("vitmods.study.stages._check_second_stage", lambda *_: None)
    recipe = "beit_small(clip_norm=none,crop_scale=0.3:1,metric=code_top1,decay_all=true,clip_each=false)"
    options = ["--arms", "x=dpn", "y=rms", "--keep-weights", "none", "--out", str(tmp_path), "--pretrain", recipe]
    assert shell([*COMMAND, *options]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "x, seed 1 (diverged)" in said
    assert "another --out" in said
    ((folder, kept, settings),) = runs
    assert (folder, kept) == (tmp_path / "pretraining", "all")
    assert [arm.name for arm in settings.arms] == ["x", "y"]
    fixed, trained = settings.fixed, settings.recipe.settings()
    assert (fixed["task"], fixed["limit_train"], settings.measure.name) == ("beit", None, "code_top1")
    assert (trained["clip_norm"], trained["crop_scale"], trained["decay_all"]) == (None, (0.3, 1.0), True)
    assert trained["batch_size"] != 25


BEIT = "layer_scale=0.1&position=none&position_on_prefix=false&rel_pos=shared"


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ({}, ("beit", f"B/2?{BEIT}")),
        ({"base": "mu1/4", "pretrain": "beit(codes=9)"}, ("beit", f"mu1/4?{BEIT}")),
        ({"task": "beit"}, None),  # the first stage by itself
    ],
)
def test_a_table_of_two_stages_is_run_in_two_in_python_too(options, stage, tmp_path):
    study = vm.Study(arms="paper:tt-table7-beit", data="digits", **options)
    stages = study._several
    assert (stages and (stages.first.settings.fixed["task"], stages.first.settings.fixed["base"])) == stage
    if stages:
        assert study.settings.fixed["task"] == "classification"
        with pytest.raises(UserError, match="does not support --budget"):
            study.run(tmp_path, budget="2h")
