"""`vitmods decide`: from a CSV file to a table, and what a file can lack."""

import csv
import json
import re

import numpy as np
import pytest

import vitmods as vm
from vitmods.cli import main
from vitmods.stats.read import read_csv

LINES = ["arm,seed,score", "base,0,0.80", "base,1,0.81", "base,2,0.79", "dpn,0,0.90", "dpn,1,0.91", "dpn,2,0.905"]


def written(folder, lines):
    path = folder / "scores.csv"
    path.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    return str(path)


def refused(capsys, *arguments):
    assert main(["decide", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("vitmods decide: ")
    assert "not foreseen" not in printed.err
    return printed.err


def test_a_score_for_each_trial(tmp_path, capsys):
    assert main(["decide", written(tmp_path, LINES)]) == 0
    output = capsys.readouterr().out
    for words in ("dpn", "helps", "these images"):
        assert words in output
    equal = ["arm,seed,score", *(f"{arm},{seed},0.5" for arm in ("base", "dpn") for seed in range(3))]
    assert main(["decide", written(tmp_path, equal)]) == 0
    output = capsys.readouterr().out
    assert "pooled sd 0, 2 df" in output
    assert "nan" not in output


def test_a_score_for_each_image_in_any_order(tmp_path, capsys):
    x = (np.random.default_rng(0).random((3, 4, 30)) < 0.7).astype(int)
    rows = [(arm, s, f"{i:02}.png", x[a, s, i]) for a, arm in enumerate(("base", "a", "b")) for s in range(4)
            for i in range(30)]  # fmt: skip
    with (tmp_path / "scores.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", "image", "score"])
        writer.writerows(np.random.default_rng(1).permutation(np.array(rows, dtype=object)))
    expected = vm.decide({arm: dict(enumerate(x[a])) for a, arm in enumerate(("base", "a", "b"))})
    decision = vm.decide(tmp_path / "scores.csv")
    assert decision["a"].low == pytest.approx(expected["a"].low)
    assert decision["a"].images == 30
    assert main(["decide", str(tmp_path / "scores.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["effects"]["b"]["low"] == pytest.approx(expected["b"].low)


def test_forms_and_settings(tmp_path, capsys):
    path = written(tmp_path, LINES)
    for option, sign in (("--markdown", "| dpn | +10."), ("--latex", r"\toprule"), ("--json", '"verdict": "helps"')):
        assert main(["decide", path, option]) == 0
        assert sign in capsys.readouterr().out
    assert main(["decide", path, "--base", "dpn", "--margin", "0.1", "--json"]) == 0
    effect = json.loads(capsys.readouterr().out)["effects"]["base"]
    assert (effect["verdict"], effect["margin"]) == ("hurts", 0.1)
    assert main(["decide", path, "--unit", "nats", "--lower-is-better", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["effects"]["dpn"]["verdict"] == "hurts"
    assert "one of --markdown" in refused(capsys, path, "--markdown", "--json")


def test_a_trial_that_diverged(tmp_path):
    scores = read_csv(written(tmp_path, [*LINES, "dpn,3,diverged", "base,3,0.8", "base,4,NaN"]))
    assert np.isnan(scores["dpn"][3])
    assert np.isnan(scores["base"][4])
    per_image = ["arm,seed,image,score", "base,0,a,1", "base,0,b,0", "dpn,0,,diverged"]
    assert np.isnan(read_csv(written(tmp_path, per_image))["dpn"][0])


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([], [], "it is empty"),
        (["arm,seed,accuracy", *LINES[1:]], [], "column score is missing (it has arm, seed, accuracy)"),
        ([*LINES, "rms,0,good"], [], "line 8: the score must be a number (or `diverged`), not 'good'"),
        ([*LINES, "rms,0,"], [], "line 8: the score must be a number"),
        ([*LINES, "rms,first,0.9"], [], "line 8: the seed must be a whole number, not 'first'"),
        ([*LINES, ",0,0.9"], [], "line 8: the name of the arm is missing"),
        ([*LINES, "dpn,2,0.9"], [], "line 8: dpn with this seed has this score already"),
        (["arm,seed,score", "base,0,0.8", "dpn,0,0.9"], [], "No arm shares two seeds with base"),
        (["arm,seed,score", "bass,0,0.8", "dpn,0,0.9"], [], "Unknown arm base to compare with. Did you mean 'bass'?"),
        (["arm,seed,score", "base,0,0.8"], [], "base is the only arm"),
        (["arm,seed,score", "base,0,80", "dpn,0,90"], [], "unit='points'"),
        (["arm,seed,score"], [], "does not contain a score"),
        (
            ["arm,seed,image,score", "base,0,a,1", "base,0,b,1", "dpn,0,a,1"],
            [],
            "not have the same images as base with seed 0",
        ),
        (["arm,seed,score", "base,0,\udcff\udcfe"], [], "cannot be read as CSV"),
        (LINES, ["--margin", "-1"], "margin must be 0 or more"),
        (LINES, ["--most-seeds", "2"], "4 to 32 seeds"),
        (LINES, ["--chance", "5"], "is a fraction too"),
        (None, [], "does not exist"),
    ],
)
def test_what_cannot_be_decided_is_refused(tmp_path, capsys, lines, options, message):
    path = str(tmp_path / "other.csv") if lines is None else written(tmp_path, lines)
    assert message in refused(capsys, path, *options)


def test_an_arm_whose_trials_all_diverged_hurts(tmp_path, capsys):
    lines = [
        "arm,seed,score",
        *(f"base,{seed},0.8{seed}" for seed in range(5)),
        *(f"dpn,{i},diverged" for i in range(5)),
    ]
    assert main(["decide", str(written(tmp_path, lines)), "--base", "base"]) == 0
    assert re.search(r"dpn .*hurts", capsys.readouterr().out)
