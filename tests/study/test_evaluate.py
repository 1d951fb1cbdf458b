"""`evaluate` on trials and on other checkpoints, its table and its figures."""

import io
import json
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from scipy import stats

import vitmods as vm
from vitmods.adapters import load, save
from vitmods.cli import main
from vitmods.evals import Options
from vitmods.report.evaluation import draw_evaluation
from vitmods.report.tables import print_evaluation
from vitmods.study.checkpoints import Checkpoint
from vitmods.study.evaluate import evaluate, over_seeds, temperature_of
from vitmods.util.errors import UserError

ON_VAL = Options(temperature="val")
ALL = ("top1", "calibration", "confusion", "fewshot", "probe", "knn")


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """A folder with two trials on digits."""
    folder = tmp_path_factory.mktemp("trials")
    for seed in (0, 1):
        settings = ["--base", "mu/4", "--epochs", "1", "--limit-train", "300", "--device", "cpu", "--quiet"]
        assert main(["train", *settings, "--seed", str(seed), "--out", str(folder / f"seed{seed}")]) == 0
    return folder


@pytest.fixture(scope="module")
def found(seeds):
    return evaluate(seeds / "seed0", ALL, device="cpu", options=Options(shots=(1, 5)))[0]


@pytest.fixture
def two_classes(tmp_path, draw_images):
    """A folder of colored images, 12 px."""
    return str(draw_images(tmp_path, ["images"], ("apples", "beans"), count=12, size=(12, 12, 3)) / "images")


def table_of(found, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_evaluation(found, console)
    return console.file.getvalue()


def test_a_trial_by_all_protocols(found):
    assert list(found["protocols"]) == list(ALL)
    assert found["images"] == 359
    assert {"top1", "ece", "macro_f1", "fewshot5", "probe", "knn"} <= set(found["metrics"])
    assert "fewshot10" not in found["metrics"]
    low, high = found["intervals"]["top1"]
    assert low < found["metrics"]["top1"] < high
    json.dumps(found, allow_nan=False)
    text = table_of(found)
    for name in ("top1", "ece", "fewshot5", "probe"):
        assert f"{100 * found['metrics'][name]:.2f} %" in text
    assert f"{100 * low:.2f} to {100 * high:.2f}" in text
    assert "lower is better" in text
    assert max(map(len, table_of(found, 80).splitlines())) <= 80 + len(found["checkpoint"])
    assert "Mean of 2 checkpoints on 359 images of digits" in table_of(over_seeds([found, found]))


def test_several_checkpoints_have_an_interval_over_them(seeds):
    evaluations = evaluate(seeds, ["top1", "calibration"], device="cpu")
    assert [evaluation["checkpoint"] for evaluation in evaluations] == [str(seeds / "seed0"), str(seeds / "seed1")]
    assert evaluate([seeds / "seed1"], device="cpu")[0]["metrics"]["top1"] == evaluations[1]["metrics"]["top1"]
    together = over_seeds(evaluations)
    values = [evaluation["metrics"]["nll"] for evaluation in evaluations]
    assert together["metrics"]["nll"] == pytest.approx(np.mean(values))
    interval = stats.t.interval(0.95, 1, loc=np.mean(values), scale=stats.sem(values))
    assert together["intervals"]["nll"] == pytest.approx(list(interval))
    with pytest.raises(UserError, match="different images"):
        over_seeds([evaluations[0], {**evaluations[1], "split": "val"}])


def test_other_checkpoints_need_images(tmp_path, two_classes):
    weights = tmp_path / "own.safetensors"
    save(vm.vit("Ti/4", depth=1, img_size=8, num_classes=2), weights)
    with pytest.raises(UserError, match="are evaluated on the images of --data"):
        evaluate(str(weights))
    with pytest.warns(UserWarning, match="does not name its classes"):
        (evaluation,) = evaluate(str(weights), ["top1", "knn"], data=two_classes, device="cpu")
    assert evaluation["images"] == 4
    assert set(evaluation["metrics"]) == {"top1", "top5", "balanced_accuracy", "worst_class_accuracy", "knn"}


def test_images_of_other_classes_are_for_features_alone(seeds, tmp_path, two_classes):
    weights = tmp_path / "own.safetensors"
    save(vm.vit("Ti/4", depth=1, img_size=8, num_classes=7), weights)

    def evaluated(*protocols, shots=2):
        return evaluate(str(weights), protocols, data=two_classes, device="cpu", options=Options(shots=(shots,)))[0]

    assert set(evaluated("fewshot", "knn")["metrics"]) == {"fewshot2", "knn"}
    with pytest.raises(UserError, match="the model has 7 classes and images has 2"):
        evaluated("fewshot", "top1")
    with pytest.raises(UserError, match="10 shots need"):
        evaluated("fewshot", shots=10)
    with pytest.raises(UserError, match="the model has 10 classes and images has 2"):
        evaluate(seeds / "seed0", data=two_classes, device="cpu")
    assert evaluate(seeds / "seed0", ["knn"], data=two_classes, device="cpu")[0]["data"] == "images"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"protocols": ["calibrations"]}, "Did you mean 'calibration'"),
        ({"protocols": []}, "at least one"),
        ({"batch_size": 0}, "at least 1"),
        ({"split": "tset"}, 'The split "tset" does not exist'),
        ({"protocols": ["fewshot"], "split": "train"}, "evaluate it on another"),
        ({"protocols": ["fewshot"], "options": Options(shots=(90,))}, "90 shots need"),
        ({"protocols": ["calibration"], "options": ON_VAL, "split": "val"}, "evaluate another split"),
        ({"protocols": ["top1"], "options": ON_VAL}, "temperature"),
    ],
)
def test_what_is_wrong_is_reported_before_work(seeds, settings, message, monkeypatch):
    monkeypatch.setattr("vitmods.study.trial.run_protocols", lambda *_, **__: pytest.fail("work has begun"))
    with pytest.raises(UserError, match=message):
        evaluate(seeds / "seed0", device="cpu", **settings)


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [(["seed0", "seed0/"], "seed0/? is given twice"), (["seed0", "."], "seed0 is given twice"),
     (["nosuch"], "nosuch does not exist here. Weights that are not a trial's")],
)  # fmt: skip
def test_what_is_not_there_or_there_twice_is_named(seeds, checkpoints, message):
    with pytest.raises(UserError, match=message):
        evaluate([f"{seeds}/{name}" for name in checkpoints], device="cpu")


def test_a_temperature_calibrates_what_is_evaluated_and_what_is_exported(seeds, found, tmp_path, said):
    scaled = evaluate(seeds / "seed0", ["calibration", "top1"], device="cpu", options=ON_VAL)[0]
    t = scaled["protocols"]["calibration"]["temperature"]
    assert abs(t - 1) > 0.01, "an epoch leaves it uncertain"
    assert scaled["metrics"]["nll"] < found["metrics"]["nll"]
    assert scaled["metrics"]["top1"] == found["metrics"]["top1"]
    out = tmp_path / "model.safetensors"
    told = said(f"export {seeds}/seed0 --to safetensors --temperature val --out {out}").out
    assert f"The logits are divided by {t:.3g}, fitted on val." in told
    images = torch.randn(3, 1, 8, 8)
    before, after = Checkpoint.open(str(seeds / "seed0")).vit, load(out)
    torch.testing.assert_close(after.eval()(images), before.eval()(images) / t, rtol=1e-4, atol=1e-5)


CORRUPTED = {
    "images": 359,
    "clean_error": 0.2,
    "severities": [1, 3, 5],
    "errors": {"fog": [0.2, 0.4, 0.8], "jpeg_compression": [0.2, 0.25, 0.3]},
}


def test_what_has_no_temperature_is_named(seeds, tmp_path):
    trial = Checkpoint.open(str(seeds / "seed0"))
    without = {name: value for name, value in trial.settings.items() if name != "data"}
    for settings, message in (
        (without, "does not say which images it was trained on"),
        ({**trial.settings, "val_fraction": 0.0}, "do not have a split val"),
    ):
        with pytest.raises(UserError, match=message):
            temperature_of(replace(trial, settings=settings))


def test_the_shell_names_a_file_of_another_kind_and_what_is_not_drawn(seeds, tmp_path, refused, said):
    assert "end the name with .json" in refused(f"evaluate {seeds / 'seed0'} --out {tmp_path}/scores.csv")
    shutil.copytree(seeds / "seed0", tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "arm": "dpn"}))
    printed = said(f"evaluate {seeds / 'seed0'} {tmp_path / 'other'} --figures {tmp_path}/drawn --device cpu").err
    assert "the mean is over checkpoints of different names (base, dpn)" in printed
    assert "no figures: top1 has none" in printed


def test_figures_are_drawn(found, tmp_path):
    everything = {**found, "protocols": {**found["protocols"], "corruptions": CORRUPTED}}
    paths = draw_evaluation(everything, tmp_path / "figures", "a-")
    kinds = ("calibration", "confusion", "fewshot", "corruptions")
    assert [path.name for path in paths] == [f"a-{kind}.{form}" for kind in kinds for form in ("svg", "pdf", "png")]
    again = draw_evaluation({"protocols": {"corruptions": CORRUPTED}}, tmp_path / "again", "a-")
    assert all(path.read_bytes() == other.read_bytes() for path, other in zip(paths[-3:], again, strict=True))
    texts = {}
    for path in paths:
        if path.suffix == ".svg":
            texts[path.stem] = " ".join(ET.parse(path).getroot().itertext())
            assert "#0102" not in path.read_text()  # the report's stand-ins for colors
        elif path.suffix == ".png":
            assert min(Image.open(path).size) > 300
    assert f"ECE {100 * found['metrics']['ece']:.1f} %" in texts["a-calibration"]
    assert f"{100 * found['metrics']['fewshot5']:.1f}" in texts["a-fewshot"]
    assert "jpeg compression" in texts["a-corruptions"]
    assert "predicted class" in texts["a-confusion"]


@pytest.mark.parametrize("classes", [1, 25])
def test_a_confusion_matrix_of_any_size(classes, tmp_path):
    names = [f"$class$ {number}" * 3 for number in range(classes)]
    detail = {"images": 5, "classes": names, "matrix": np.eye(classes, dtype=int).tolist()}
    assert len(draw_evaluation({"protocols": {"confusion": detail}}, tmp_path)) == 3
    assert not draw_evaluation({"protocols": {"confusion": {"images": 5, "most_confused": []}}}, tmp_path)


def test_the_shell_draws_beside_the_json(seeds, tmp_path, said):
    line = f"evaluate {seeds}/seed0 --protocol top1 fewshot --shots 2 --device cpu"
    printed, written = json.loads(said(f"{line} --out {tmp_path}/a/e.json").out), tmp_path / "a/e.json"
    figures = {"fewshot.svg", "fewshot.pdf", "fewshot.png"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"e.json", *(f"e-{name}" for name in figures)}
    whole = json.loads(written.read_text())
    assert printed == {name: value for name, value in whole.items() if name != "protocols"}
    assert json.loads(said(f"{line} --json --figures {tmp_path}/b").out) == whole
    assert {path.name for path in (tmp_path / "b").iterdir()} == figures
    shutil.copytree(seeds / "seed1", tmp_path / "again")  # another folder with the same name of arm and seed
    said(f"evaluate {seeds} {tmp_path}/again --protocol confusion --device cpu --figures {tmp_path}/c")
    names = {path.stem for path in (tmp_path / "c").iterdir()}
    assert names == {"base-seed0-confusion", "base-seed1-1-confusion", "base-seed1-2-confusion"}
