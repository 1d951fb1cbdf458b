"""`predict`: the evaluation's own view of images, by trials and by what was exported of them."""

import csv
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitmods as vm
from vitmods.cli import main
from vitmods.recipes import Recipe
from vitmods.study import open_trial
from vitmods.study.checkpoints import Checkpoint
from vitmods.study.trial import load_images
from vitmods.tasks.base import make_task
from vitmods.tasks.multilabel import MultiLabel
from vitmods.util.errors import UserError


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Color images of two classes, of many sizes."""
    root, rng = tmp_path_factory.mktemp("data") / "images", np.random.default_rng(0)
    for number, name in enumerate(("=apples", "beans")):
        (root / name).mkdir(parents=True)
        for i in range(10):
            pixels = np.clip(rng.normal(90 + 70 * number, 30, (20 + 3 * i, 31 - i, 3)), 0, 255).astype("uint8")
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def trial(images, tmp_path_factory):
    out = tmp_path_factory.mktemp("trials") / "seed0"
    settings = ["--data", str(images), "--base", "mu/4", "--img-size", "16", "12", "--in-chans", "3", "--epochs", "2"]
    prepared = ["--mean", "0.4", "0.5", "0.6", "--std", "0.2", "0.3", "0.4", "--eval-crop", "0.7", "--batch-size", "8"]
    assert main(["train", *settings, *prepared, "--device", "cpu", "--quiet", "--out", str(out)]) == 0
    return out


def test_images_are_seen_as_the_evaluation_sees_them(trial, images):
    config = json.loads((trial / "config.json").read_text())
    dataset = load_images(config["images"], Recipe.from_dict(config["recipe"]))
    paths = [images / name for name in dataset.splits["test"].ids]
    (batch,) = dataset.eval_batches("test", 100)
    with torch.inference_mode():
        expected = open_trial(trial)(batch.inputs).softmax(dim=1)
    predictions = vm.predict(trial, paths, device="cpu")
    assert [prediction["image"] for prediction in predictions] == list(map(str, paths))
    for prediction, p in zip(predictions, expected, strict=True):
        probabilities = prediction["probabilities"]
        assert probabilities == pytest.approx(dict(zip(dataset.classes, p.tolist(), strict=True)), abs=1e-6)
        assert prediction["predicted"] == [max(probabilities, key=probabilities.get)]
    again = vm.predict(trial, paths, batch_size=3, workers=2, device="cpu")
    assert [prediction["image"] for prediction in again] == list(map(str, paths))


SUFFIXES = {"onnx": "onnx", "torch": "pt2", "safetensors": "safetensors"}


@pytest.mark.parametrize("kind", SUFFIXES)
def test_what_is_exported_predicts_the_same_and_holds_what_other_programs_need(kind, trial, images, tmp_path):
    path = tmp_path / f"m.{SUFFIXES[kind]}"
    batch, trust = (["--batch", "8"], ["--trust"]) if kind == "torch" else ([], [])
    assert main(["export", str(trial), "--to", kind, *batch, "--out", str(path)]) == 0
    expected, exported = (vm.predict(model, images, device="cpu", trust=bool(trust)) for model in (trial, path))
    assert len(exported) == 20
    for prediction, other in zip(exported, expected, strict=True):
        assert prediction["probabilities"] == pytest.approx(other["probabilities"], abs=1e-4)
    assert main(["predict", str(path), str(images), "--top", "1", "--out", str(tmp_path / "p.csv"), *trust]) == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 21
    facts = {"input_size": [3, 16, 12], "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4], "crop_pct": 0.7}
    facts |= {"interpolation": "bicubic", "label_names": ["=apples", "beans"], "task": "classification"}
    if kind == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
        metadata = session.get_modelmeta().custom_metadata_map
        assert {name: json.loads(text) for name, text in metadata.items()} == facts
    elif kind == "torch":
        extra = {"metadata.json": ""}
        torch.export.load(path, extra_files=extra)
        assert json.loads(extra["metadata.json"]) == facts


def test_several_labels(images, tmp_path):
    model = vm.vit("mu1/4", img_size=8, num_classes=3).eval()
    model.pretrained_cfg.update(task="multilabel", label_names=("a", "b", "c"))
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([1.0, -1.0, 2.0]))
    vm.export(model, tmp_path / "m.safetensors")
    (prediction, *_) = vm.predict(tmp_path / "m.safetensors", images, top=2)
    checkpoint = Checkpoint.open(str(tmp_path / "m.safetensors"))
    assert isinstance(make_task("multilabel", checkpoint.recipe), MultiLabel), "`vitmods evaluate` makes it so"
    assert prediction["predicted"] == ["a", "c"]
    assert prediction["probabilities"] == pytest.approx({"c": 0.880797, "a": 0.731059})


def test_the_shell_prints_csv_where_nobody_looks(trial, images, capsys, monkeypatch):
    monkeypatch.chdir(images)
    assert main(["predict", str(trial), "=apples/0.png", "beans/*.png", "--device", "cpu"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 2 * 11
    assert rows[0]["image"] == "'=apples/0.png"
    assert {row["class"] for row in rows} == {"'=apples", "beans"}
    assert [row["predicted"] for row in rows[:2]] == ["1", "0"]
    assert main(["predict", str(trial), "=apples/0.png", "--format", "json", "--top", "1"]) == 0
    (prediction,) = json.loads(capsys.readouterr().out)
    assert prediction["image"] == "=apples/0.png"
    assert main(["predict", str(trial), "=apples/0.png", "--format", "table"]) == 0
    assert "beans" in capsys.readouterr().out
    assert main(["predict", str(trial), "=apples/0.png", "--format", "table", "--out", "t.txt"]) == 2
    assert "table is for the terminal" in capsys.readouterr().err


def test_an_image_that_cannot_be_read(trial, images, tmp_path):
    (tmp_path / "bad.png").write_text("no image")
    with pytest.raises(UserError, match=r"bad\.png: not an image"):
        vm.predict(trial, [images, tmp_path])
    with pytest.warns(UserWarning, match=r"1 of 21 images were left out: .*bad\.png"):
        assert len(vm.predict(trial, [images, tmp_path], unreadable="skip")) == 20
    with pytest.warns(UserWarning, match="left out"), pytest.raises(UserError, match="None of the 1 images"):
        vm.predict(trial, tmp_path, unreadable="skip")


@pytest.mark.parametrize(("options", "words"), [
    ({"top": 0}, "numbers from 1 on"),
    ({"batch_size": 0}, "numbers from 1 on"),
    ({"unreadable": "ignore"}, 'must be "stop" or "skip"'),
    ({"draw": "drawn"}, "does not draw predictions"),
    ({"annotations": "found"}, "does not write annotations"),
    ({"images": []}, "Name at least one image"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(trial, images, options, words):
    with pytest.raises(UserError, match=words):
        vm.predict(trial, **{"images": images, **options})


@pytest.mark.parametrize(
    ("checkpoint", "given", "words"),
    [
        ("trial", "empty", "empty does not contain images"),
        ("trial", "nothing/*.png", r"nothing/\*\.png does not contain images"),
        ("trial", "nothing.png", r"nothing\.png does not exist"),
        ("empty", "images", "empty does not hold a finished trial"),
        ("empty/no.onnx", "images", r"no\.onnx does not exist"),
        ("bad.onnx", "images", r"bad\.onnx cannot be read"),
        ("bad.pt2", "images", r"bad\.pt2 is a program: .*--trust"),
        ("four.safetensors", "images", r"four\.safetensors takes 4 channels"),
        ("backbone.safetensors", "images", r"has no head: it gives features, not classes\. Train one with"),
        ("two", "images", r"two holds several trained models: give one, .*seed0 or .*seed1"),
    ],
)
def test_bad_requests_name_what_is_wrong(checkpoint, given, words, trial, images, tmp_path):
    (tmp_path / "empty").mkdir()
    for seed in (0, 1):
        (tmp_path / "two" / f"seed{seed}").mkdir(parents=True)
        (tmp_path / "two" / f"seed{seed}" / "model.safetensors").touch()
    for name in ("bad.onnx", "bad.pt2"):
        (tmp_path / name).write_text("x")
    vm.export(vm.vit("mu1/4", img_size=8, in_chans=4, num_classes=2).eval(), tmp_path / "four.safetensors")
    vm.adapters.save(vm.vit("mu/8", img_size=16, num_classes=0), tmp_path / "backbone.safetensors")
    paths = {"trial": trial, "images": images, "empty": tmp_path / "empty"}
    with pytest.raises(UserError, match=words):
        vm.predict(paths.get(checkpoint, tmp_path / checkpoint), paths.get(given, given), device="cpu")
