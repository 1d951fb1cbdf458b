"""`vitmods decide`: from a CSV file to a table, and what a file can lack."""

import csv
import json
import re

import numpy as np
import pytest

import vitmods as vm
from vitmods.stats.read import read_csv

LINES = ["arm,seed,score", "base,0,0.80", "base,1,0.81", "base,2,0.79", "dpn,0,0.90", "dpn,1,0.91", "dpn,2,0.905"]


def written(folder, lines):
    path = folder / "scores.csv"
    path.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    return str(path)


def test_a_score_for_each_trial(tmp_path, said):
    output = said("decide", written(tmp_path, LINES)).out
    for words in ("dpn", "helps", "these images"):
        assert words in output
    equal = ["arm,seed,score", *(f"{arm},{seed},0.5" for arm in ("base", "dpn") for seed in range(3))]
    output = said("decide", written(tmp_path, equal)).out
    assert "pooled sd 0, 2 df" in output
    assert "nan" not in output


def test_a_score_for_each_image_in_any_order(tmp_path, said):
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
    assert json.loads(said("decide --json", tmp_path / "scores.csv").out)["effects"]["b"]["low"] == pytest.approx(
        expected["b"].low
    )


def test_forms_and_settings(tmp_path, said, refused):
    path = written(tmp_path, LINES)
    for option, sign in (
        ("--markdown", "| dpn | +10."),
        ("--latex", r"\begin{tabular}"),
        ("--json", '"verdict": "helps"'),
    ):
        assert sign in said("decide", path, option).out
    effect = json.loads(said("decide --base dpn --margin 0.1 --json", path).out)["effects"]["base"]
    assert (effect["verdict"], effect["margin"]) == ("hurts", 0.1)
    effects = json.loads(said("decide --unit nats --lower-is-better --json", path).out)["effects"]
    assert effects["dpn"]["verdict"] == "hurts"
    assert "one of --markdown" in refused("decide --markdown --json", path)


def test_a_trial_that_diverged(tmp_path):
    scores = read_csv(written(tmp_path, [*LINES, "dpn,3,diverged", "base,3,0.8", "base,4,NaN"]))
    assert np.isnan(scores["dpn"][3])
    assert np.isnan(scores["base"][4])
    per_image = ["arm,seed,image,score", "base,0,a,1", "base,0,b,0", "dpn,0,,diverged"]
    assert np.isnan(read_csv(written(tmp_path, per_image))["dpn"][0])


ONE = ["arm,seed,score", "base,0,0.8", "dpn,0,0.9"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "it is empty"),
        (["arm,seed,accuracy", *LINES[1:]], "does not have the column score"),
        ([*LINES, "rms,0,good"], "line 8: the score must be a number (or `diverged`), not 'good'"),
        ([*LINES, "rms,0,"], "line 8: the score must be a number"),
        ([*LINES, "rms,first,0.9"], "line 8: the seed must be a whole number, not 'first'"),
        ([*LINES, ",0,0.9"], "line 8: the name of the arm is missing"),
        ([*LINES, "dpn,2,0.9"], "line 8: dpn with this seed has a score already; remove one"),
        (
            [f"{LINES[0]},epoch", *(f"{line},1" for line in LINES[1:]), "dpn,2,0.9,2"],
            "differ in epoch, which is not read",
        ),
        (
            ["arm,seed,image,score", "base,0,a,1", "base,0,,1", "dpn,0,a,1"],
            "base with seed 0 has scores of images, and one",
        ),
        (ONE, "No arm shares two seeds with base"),
        ([ONE[0], "bass,0,0.8", ONE[2]], "Unknown arm base to compare with. Did you mean 'bass'?"),
        (ONE[:2], "base is the only arm"),
        ([ONE[0], "base,0,80", "dpn,0,90"], "unit='points'"),
        (ONE[:1], "does not contain a score"),
        (["arm,seed,image,score", "base,0,a,1", "base,0,b,1", "dpn,0,a,1"], "not have the same images as base with"),
        ([ONE[0], "base,0,\udcff\udcfe"], "the score must be a number"),
    ],
)
def test_what_cannot_be_decided_is_refused(tmp_path, refused, lines, message):
    assert message in refused("decide", written(tmp_path, lines))


def test_options_that_do_not_fit_are_refused(tmp_path, refused):
    path = written(tmp_path, LINES)
    assert "margin must be 0 or more" in refused("decide --margin -1", path)
    assert "4 to 32 seeds" in refused("decide --most-seeds 2", path)
    assert "is a fraction too" in refused("decide --chance 5", path)
    assert "does not exist" in refused("decide", tmp_path / "other.csv")
    assert "is not a file" in refused("decide", tmp_path)
    assert "is a stream" in refused("decide", "/dev/null")


def test_an_arm_whose_trials_all_diverged_hurts(tmp_path, said):
    lines = [LINES[0], *(f"base,{i},0.8{i}" for i in range(5)), *(f"dpn,{i},diverged" for i in range(5))]
    assert re.search(r"dpn .*hurts", said("decide --base base", written(tmp_path, lines)).out)
