"""Sweeps: base and arms under several settings, their effects in each and on average."""

import csv
import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from vitmods.cli import main as shell
from vitmods.data.loading import load
from vitmods.recipes import Augment, plain
from vitmods.report import render
from vitmods.study import Answer, Study
from vitmods.study.tables import over_studies
from vitmods.util.errors import UserError
from vitmods.util.files import write_json

pytestmark = pytest.mark.usefixtures("short_clocks")

RECIPE = plain(epochs=2).with_(batch_size=64)
HOW = {"workers": 1, "device": "cpu", "cost_seconds": 0.05, "progress": False}


def make(sweep, seeds=3, **options):
    return Study("mu/4", ["dpn"], "digits", RECIPE, seeds, sweep=sweep, **options)


@pytest.fixture(scope="module")
def fractions(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep") / "out"
    return make({"limit_train": [0.25, 1]}).run(out, **HOW), out


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    out = tmp_path_factory.mktemp("bases") / "out"
    return make({"base": ["mu/4", "mu/2"]}, seeds=2, limit_train=256).run(out, **HOW), out


def test_the_headline_is_the_average_over_settings(fractions):
    answer, out = fractions
    each = {name: effects["dpn"] for name, effects in answer.questions["settings"].groups.items()}
    assert answer.complete
    assert list(each) == ["limit_train=0.25", "limit_train=1"]
    assert answer["dpn"].effect == pytest.approx(np.mean([effect.effect for effect in each.values()]))
    for setting in answer.sweep:
        gaps = [setting.scores["dpn"][seed] - setting.scores["base"][seed] for seed in range(3)]
        assert each[setting.name].effect == pytest.approx(100 * np.mean(gaps))
    means = [[setting.scores["base"][seed] for setting in answer.sweep] for seed in range(3)]
    assert list(answer.base.scores.values()) == pytest.approx(np.mean(means, 1))
    assert json.loads((out / "results.json").read_text()) == answer.to_dict() == Answer.load(out).to_dict()


def test_a_fraction_of_the_images_is_trained_on(fractions):
    _, out = fractions
    folders = [out / f"trials/limit_train={fraction}/base/seed0" for fraction in ("0.25", "1")]
    few, many = (json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])["step"] for path in folders)
    whole = load("digits", img_size=8, augment=Augment(), in_chans=1)
    quarter = load("digits", img_size=8, augment=Augment(), in_chans=1, limit_train=0.25)
    assert len(quarter.splits["train"]) == round(len(whole.splits["train"]) / 4)
    assert set(quarter.splits["train"].ids) < set(whole.splits["train"].ids)
    assert list(quarter.splits["test"].ids) == list(whole.splits["test"].ids)
    assert few == 2 * quarter.steps_per_epoch(64) < many


def test_steps_to_base_are_when_val_first_reached_bases_end(fractions):
    answer, _ = fractions
    for setting in answer.sweep:
        own = {arm.name: [t for t in arm.trials if t.setting == setting.values] for arm in answer.every_arm}
        target = np.mean([trial.curve.score[-1] for trial in own["base"]])
        for trial in (*own["base"], *own["dpn"]):
            reached = [step for step, score in zip(trial.curve.step, trial.curve.score) if score >= target]
            assert trial.steps_to_base == (reached[0] if reached else None)
    assert any(trial.steps_to_base for trial in answer.arms[0].trials)


def test_the_table_and_the_page_have_averages_and_every_setting(fractions, tmp_path):
    text = render(fractions[0], 120)
    assert re.match(r"On average over 2 settings, dpn |Nothing is decided", text)
    assert re.search(r"^limit_train=0.25\n  base .*\n  dpn ", text, re.MULTILINE)
    assert "steps to base" in text
    assert max(len(line) for line in render(fractions[0], 80).splitlines() if "vm.Study(" not in line) <= 80
    page = fractions[0].report(tmp_path / "report.html").read_text()
    assert "2 settings" in page
    assert page.count("under each setting. dpn: 0.25: ") == 1
    assert page.count('class="setting"') == 2
    assert "dpn, limit_train 0.25" in page


def test_the_trials_are_a_flat_table_as_the_csv_is(fractions):
    answer, out = fractions
    rows = answer.trials_table()
    written = list(csv.DictReader((out / "results.csv").open()))
    assert [list(row) for row in rows] == [list(written[0])] * 12
    base = {(row["limit_train"], row["seed"]): row["top1"] for row in rows if row["arm"] == "base"}
    for row, in_file in zip(rows, written, strict=True):
        assert (row["limit_train"], row["arm"], row["seed"], row["status"]) == (
            float(in_file["limit_train"]), in_file["arm"], int(in_file["seed"]), "finished"
        )  # fmt: skip
        assert row["top1"] == float(in_file["top1"])
        assert row["wall_s"] == float(in_file["wall_s"]) > 0
        assert row["reused"] == ""
        if row["arm"] == "base":
            assert row["difference_points"] is None
        else:
            gap = 100 * (row["top1"] - base[row["limit_train"], row["seed"]])
            assert float(in_file["difference_points"]) == pytest.approx(gap)
    mean = pd.DataFrame(rows).groupby(["limit_train", "arm"])["top1"].mean()
    for setting in answer.sweep:
        assert mean[setting.values["limit_train"], "dpn"] == pytest.approx(np.mean([*setting.scores["dpn"].values()]))


def test_several_bases_have_their_own_models_and_costs(bases):
    answer, out = bases
    models = json.loads((out / "study.json").read_text())["models"]
    assert models["base=mu/4, base"]["config"]["patch_size"] != models["base=mu/2, base"]["config"]["patch_size"]
    assert set(json.loads((out / "costs.json").read_text())) == {"mu/4", "mu/2"}
    assert answer.base_cost is None
    assert [setting.base_cost.macs for setting in answer.sweep] == sorted(s.base_cost.macs for s in answer.sweep)
    assert all(setting.costs["dpn"].params > 1 for setting in answer.sweep)
    text = render(answer, 80)
    assert re.search(r"^base=mu/2\n  base .*\n  dpn .*×.*×$", text, re.MULTILINE)
    assert "base (mu/4)" not in text
    page = answer.report().read_text()
    assert "which change helps?" in page
    assert "Costs of all arms, mu/2" in page


def test_a_sweep_grows_and_can_be_read_at_any_time(tmp_path):
    first, out = make({"lr": [1e-3, 1e-2]}, seeds=1, limit_train=128), tmp_path / "out"
    assert first.run(out, **HOW).complete
    wider = make({"lr": [1e-3, 1e-2, 1e-4]}, seeds=2, limit_train=128)
    for budget in (2, 5):
        answer = wider.run(out, budget=budget, **HOW)
        assert answer.report().exists()
    assert len(answer.trials) == 12
    assert sum(trial.ended for trial in answer.trials) == 4 + 7
    assert not answer.complete


def test_data_sets_have_a_study_each_and_an_average(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vitmods.stats.gains.has_learned", lambda *arm: True)  # 3 steps teach little
    photos = tmp_path / "photos"
    for number in range(90):
        folder = photos / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 128, (16, 16, 3)) + 100 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    out = tmp_path / "sets"
    command = ["compare", "--sweep", f"data=digits,{photos}", "--arms", "dpn", "--base", "mu/4", "--epochs", "1"]
    command += ["--warmup-epochs", "0", "--batch-size", "16", "--limit-train", "48", "--workers", "1"]
    command += ["--device", "cpu", "--cost-seconds", "0", "--seeds", "3"]
    assert shell([*command, "--quiet", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "dpn on each data set" in printed
    assert "On average over 2 data sets" in printed
    assert "was shown before" not in printed

    folders = [path.parent for path in sorted(out.glob("*/study.json"))]
    studies = [Answer.load(folder) for folder in folders]
    assert {study.settings["in_chans"] for study in studies} == {1, 3}  # as fits each
    over = over_studies(folders)
    assert over["dpn"].effect == pytest.approx(np.mean([study["dpn"].effect for study in studies]))
    assert over["dpn"].images == sum(study["dpn"].images for study in studies)
    written = json.loads((out / "over_data.json").read_text())
    assert written["average"]["effects"]["dpn"]["effect"] == pytest.approx(over["dpn"].effect)
    assert set(written["each"]["dpn"]) == {"digits", str(photos)}

    before = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    assert shell([*command, "--quiet", "--dry-run", "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("0 trials to run (6 are finished)") == 2
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    assert written["shown"] == [["digits", str(photos)]]
    write_json(out / "over_data.json", {**written, "shown": [["digits", "others"], *written["shown"]]})
    assert shell([*command[:-2], "--quiet", "--out", str(out)]) == 0, "without --seeds a study keeps its own"
    assert "The average was shown before over digits and others. Sets that are" in capsys.readouterr().out
    assert len(json.loads((out / "over_data.json").read_text())["shown"]) == 2
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    monkeypatch.undo()
    assert "digits" in over_studies(folders).left_out
    again = shutil.copytree(folders[0], tmp_path / "again")
    stored = json.loads((again / "study.json").read_text())
    stored["settings"]["data"] += "/"
    (again / "study.json").write_text(json.dumps(stored))
    for same in (folders[0], again):
        with pytest.raises(UserError, match="Two studies are of"):
            over_studies([folders[0], same])
    assert shell([*command, "--data", "digits"]) == 2
    missing = [word.replace(f",{photos}", f",{tmp_path}/missing") for word in command]
    assert shell([*missing, "--out", str(tmp_path / "refused")]) == 2
    assert not (tmp_path / "refused").exists()
    study = Study("mu/4", ["dpn"], sweep={"data": ["digits", str(photos)]}, seeds=3)
    assert study.data_sets == ("digits", str(photos))
    for call in (study.run, study.pilot, study.retrain):
        with pytest.raises(UserError, match="In Python, run_over_data runs the study of each"):
            call(out)
    with pytest.raises(UserError, match="call run"):
        Study("mu/4", ["dpn"]).run_over_data(out)
