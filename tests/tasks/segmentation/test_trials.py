"""Segmentation from a folder of images and masks to weights, report and drawings; killed on the way, too."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitmods as vm
from vitmods.cli import main
from vitmods.recipes import small_segmentation
from vitmods.study.retrain import export_line
from vitmods.study.trial import trial_scores
from vitmods.tasks import Segmentation
from vitmods.train.trial import read_examples

RECIPE = small_segmentation(2, batch_size=6).with_(lr=1e-2, accumulate=2, ema=0.5)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory, example):
    """40 images of 32 pixels: train 28, val 4, test 8."""
    folder = tmp_path_factory.mktemp("shapes")
    example("segmentation").write_images(folder, 40)
    return folder


@pytest.mark.parametrize("at", [2, 5])
def test_a_broken_off_trial_ends_in_the_same_bits(shapes, tmp_path, ends_in_the_same_bits, at):
    def make():
        task = Segmentation.from_recipe(RECIPE)
        dataset = task.load_data(f"masks:{shapes}", img_size=16, augment=RECIPE.augment)
        torch.manual_seed(0)
        return task.wrap(vm.vit("mu2/4", img_size=16, num_classes=0, drop_path=0.2), 3), task, dataset

    ends_in_the_same_bits(make, RECIPE, tmp_path, "test", stop_at=at, checkpoint_every_steps=3)


def test_other_image_sizes_reach_a_vit_by_its_positions(shapes):
    model = Segmentation().wrap(vm.vit("mu2/4", img_size=16, num_classes=0), 3).eval()
    assert model(torch.zeros(1, 3, 22, 17)).shape == (1, 3, 22, 17)
    assert model.vit_config.img_size == (16, 16)


@pytest.fixture(scope="module")
def study(shapes, tmp_path_factory, short_clocks):
    """Base and dpn, one seed, from the shell."""
    out = tmp_path_factory.mktemp("runs") / "shapes"
    command = ["compare", "--task", "segmentation", "--data", f"masks:{shapes}", "--base", "mu2/4", "--img-size", "16"]
    command += ["--arms", "dpn", "--seeds", "1", "--epochs", "2", "--lr", "0.01", "--eval-flip"]
    assert main([*command, "--workers", "1", "--cost-seconds", "0.1", "--out", str(out), "--quiet"]) == 0
    return out


def test_a_study_is_answered_and_its_report_shows_masks(study):
    results = json.loads((study / "results.json").read_text())
    assert results["metric"]["name"] == "miou"
    assert set(results["other_metrics"]) >= {"image_miou", "pixel_accuracy"}
    trial = study / "trials" / "dpn" / "seed0"
    assert trial_scores(trial, "test")["image_miou"].shape == (8,)
    settings = json.loads((trial / "config.json").read_text())["recipe"]["segmentation"]
    assert (settings["eval_flip"], settings["resize_range"]) == (True, [0.75, 1.5]), "the task's own recipe"
    page = (study / "report.html").read_text()
    assert "Predictions</h2>" in page
    assert page.count('alt="images/') >= 4 * 4  # image, annotation, base, dpn
    assert "background:#e69f00" in page
    examples = read_examples(trial)
    assert list(examples.legend) == ["background", "disc", "square"]
    assert len(examples.ids) == len(examples.panels) == 4


def test_a_trial_is_evaluated_again_and_not_exported(study, tmp_path, capsys):
    trial = study / "trials" / "base" / "seed0"
    assert main(["evaluate", str(trial), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    expected = json.loads((trial / "result.json").read_text())["metrics"]
    for name in ("miou", "image_miou", "pixel_accuracy"):
        assert evaluated["metrics"][name] == pytest.approx(expected[name])
    assert set(evaluated["protocols"]["segmentation"]["iou"]) == {"background", "disc", "square"}
    assert list(evaluated["intervals"]) == ["image_miou", "pixel_accuracy", "miou"]
    assert export_line(trial) == f"vitmods predict {trial} path/to/images"
    (tmp_path / "config.json").write_text("[")
    assert export_line(tmp_path) == f"vitmods export {tmp_path} --to onnx"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A trial of a task that draws nothing, beside an image."""
    out = tmp_path_factory.mktemp("digits")
    assert main(["train", "--base", "mu2/2", "--epochs", "1", "--out", str(out / "trial"), "--quiet"]) == 0
    Image.new("L", (8, 8)).save(out / "image.png")
    return out


ONE = "train --data masks:{shapes} --base mu2/4 --img-size 16 --out {out}/runs"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("evaluate {study}/trials/base/seed0 --protocol top1", "trained by their mask"),
        ("export {study}/trials/base/seed0 --out {out}/model.onnx", "contains modules of its task"),
        ("predict {digits}/trial {digits}/image.png --draw {out}", "classification does not draw predictions"),
        ("predict {digits}/trial {digits}/image.png --annotations {out}", "classification does not write annotations"),
        (f"{ONE} --task segmentation --mixup 0.2", "segmentation does not read mixup"),
        (ONE, "--task segmentation"),
        ("train --photometric 0.5 --out {out}/runs", "classification does not read photometric"),
    ],
)
def test_what_does_not_apply_is_refused(study, shapes, digits, tmp_path, capsys, command, words):
    places = {"study": study, "shapes": shapes, "digits": digits, "out": tmp_path}
    assert main([word.format(**places) for word in command.split()]) == 2
    assert words in capsys.readouterr().err


def test_fractions_of_the_images_are_one_study(shapes, tmp_path, capsys):
    command = f"{ONE} --task segmentation --arms dpn --seeds 2 --epochs 1 --sweep limit_train=1/2,1 --dry-run".split()
    assert main(["compare", *(word.format(shapes=shapes, out=tmp_path) for word in command[1:])]) == 0
    assert "0.5" in capsys.readouterr().out


def test_predict_says_and_draws_what_is_in_images(study, shapes, tmp_path, capsys):
    trial, images = study / "trials" / "base" / "seed0", shapes / "images"
    large = Image.open(images / "000.png").resize((70, 50))
    large.save(tmp_path / "large.png")
    paths = [str(images / "001.png"), str(tmp_path / "large.png")]
    command = ["predict", str(trial), *paths, "--draw", str(tmp_path / "drawn")]
    command += ["--annotations", str(tmp_path / "masks")]
    assert main([*command, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [Path(row["drawn"]).name for row in rows] == ["001.png", "large.png"]
    assert Image.open(rows[1]["drawn"]).size == (70, 50)
    assert all(sum(row["pixels"].values()) == pytest.approx(1, abs=1e-4) for row in rows)
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("image,rank,class,fraction,predicted")
    predicted = vm.predict(trial, paths)
    assert predicted[1]["mask"].shape == (50, 70)
    assert np.bincount(predicted[1]["mask"].ravel(), minlength=3).argmax() == 0, "most is background"
    assert (tmp_path / "masks/classes.txt").read_text().split() == ["background", "disc", "square"]
    for name, row in (("001", predicted[0]), ("large", predicted[1])):
        assert (np.asarray(Image.open(tmp_path / f"masks/{name}.png")) == row["mask"]).all()
