"""Studies of sequences: our encoder, BigBird and Reformer, broken off and taken up, and from the shell to a report."""

import json

import numpy as np
import pytest

import vitmods as vm
from vitmods.cli import main
from vitmods.recipes import RECIPES
from vitmods.study.cells import Trial
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, trial_scores
from vitmods.train.interrupt import Interrupted
from vitmods.train.loop import TrialRun

SPEC = "listops:generated?train=96&val=24&test=40&min_length=5&max_length=30"
HF = {
    "big_bird": "hidden_size=16&num_hidden_layers=1&num_attention_heads=2&intermediate_size=32&block_size=2"
    "&num_random_blocks=1",
    "reformer": "hidden_size=16&num_attention_heads=2&attention_head_size=8&feed_forward_size=32"
    "&attn_layers=['lsh','local']&lsh_attn_chunk_length=4&local_attn_chunk_length=4&num_buckets=4",
}
BASES = {"ours": "LRA-64", **{name: f"hf-text:{name}?{options}" for name, options in HF.items()}}


@pytest.mark.parametrize(
    ("base", "arm"), [("ours", "dtn"), ("big_bird", "replace(batchnorm)"), ("reformer", "replace(dtn)")]
)
def test_a_trial_that_is_broken_off_ends_in_the_same_weights(tmp_path, monkeypatch, base, arm):
    recipe = RECIPES["listops"](6, batch_size=12).with_(dropout=0.1 if base == "ours" else None)
    sizes = {"img_size": (1, 29), "in_chans": 16}
    study = vm.Study(BASES[base], [arm], SPEC, recipe, task="sequence_classification", **sizes)
    runner, trial = TrialRunner(StudyFolder(tmp_path), study.settings.measure), Trial(study.settings.cells[1], 0)
    step = TrialRun._train_step

    def broken_off(run, batch):
        if run.step == 4:
            raise Interrupted("stopped", 2)
        step(run, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TrialRun, "_train_step", broken_off)
        with pytest.raises(Interrupted):
            runner.train(trial, tmp_path / "broken")
    first, second = (runner.train(trial, tmp_path / name) for name in ("whole", "broken"))
    assert (first["weights"], first["metrics"]) == (second["weights"], second["metrics"])
    np.testing.assert_equal(*(trial_scores(tmp_path / name, "test") for name in ("whole", "broken")))


def test_from_the_command_line_to_the_report(tmp_path, capsys, short_clocks):
    common = ["--data", SPEC, "--task", "sequence_classification", "--recipe", "listops(steps=4,batch_size=12)"]
    out = tmp_path / "study"
    command = ["compare", *common, "--arms", "dtn", "--seeds", "2", "--out", str(out), "--workers", "1"]
    assert main([*command, "--dry-run"]) == 0
    assert "96 train, 24 val, 40 test" in capsys.readouterr().out
    assert main([*command, "--cost-seconds", "0.1"]) == 0
    trial = out / "trials" / "dtn" / "seed0"
    scores = trial_scores(trial, "test")
    assert {"top1", "nll", "ids"} <= scores.keys()
    assert len(scores["ids"]) == 40
    page = (out / "report.html").read_text()
    assert "table of tokens" in page
    capsys.readouterr()

    lines = tmp_path / "expressions.txt"
    lines.write_text("[MAX 2 9 [MIN 4 7 ] 0 ]\n\n( ( [SM 2 ) 3 ) ]\n")
    assert main(["predict", str(trial), str(lines), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["image"] for row in rows] == [f"{lines}:1", f"{lines}:3"]
    assert all(abs(sum(row["probabilities"].values())) <= 1.0001 for row in rows)
    lines.write_text("[MAX 2 nine ]\n")
    assert main(["predict", str(trial), str(lines)]) == 2
    assert "'nine' is not a token" in capsys.readouterr().err

    assert main(["evaluate", str(trial), "--protocol", "top1", "calibration", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["top1"] == pytest.approx(scores["top1"].mean())
    assert main(["evaluate", str(trial), "--protocol", "corruptions"]) == 2
    assert "images" in capsys.readouterr().err
    assert main(["data", SPEC]) == 0
    assert "Tokens: shortest" in capsys.readouterr().out


def test_leaving_out_what_cannot_be_read_is_refused(capsys, tmp_path):
    command = ["compare", "--task", "sequence_classification", "--data", SPEC, "--arms", "layerscale"]
    assert main([*command, "--unreadable", "skip", "--out", str(tmp_path / "x"), "--dry-run", "--quiet"]) == 2
    assert "leave unreadable=skip out" in capsys.readouterr().err
