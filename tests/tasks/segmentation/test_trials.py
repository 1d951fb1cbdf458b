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
from vitmods.train import RunOptions, train_trial
from vitmods.train.trial import read_examples

RECIPE = small_segmentation(2, batch_size=6).with_(lr=1e-2, accumulate=2, ema=0.5)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory, example):
    """40 images of 32 pixels: train 28, val 4, test 8."""
    folder = tmp_path_factory.mktemp("shapes")
    example("segmentation").write_images(folder, 40)
    return folder


def test_a_broken_off_trial_ends_in_the_same_bits(shapes, tmp_path, ends_in_the_same_bits):
    def train(out):
        task = Segmentation.from_recipe(RECIPE)
        dataset = task.load_data(f"masks:{shapes}", img_size=16, augment=RECIPE.augment)
        torch.manual_seed(0)
        model = task.wrap(vm.vit("mu2/4", img_size=16, num_classes=0, drop_path=0.2), 3)
        options = RunOptions("cpu", tensorboard=False, progress=False, checkpoint_every_steps=3)
        train_trial(model, task, dataset, RECIPE, out=out, options=options)

    ends_in_the_same_bits(train, tmp_path, "test", stop_at=5)


@pytest.fixture(scope="module")
def study(shapes, tmp_path_factory, short_clocks):
    """Base and dpn, one seed, from the shell."""
    out = tmp_path_factory.mktemp("runs") / "shapes"
    command = f"compare --task segmentation --data masks:{shapes} --base mu2/4 --img-size 16 --arms dpn --seeds 1"
    command += f" --epochs 2 --lr 0.01 --eval-flip --workers 1 --cost-seconds 0.1 --out {out} --quiet"
    assert main(command.split()) == 0
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


def test_a_trial_is_evaluated_again_and_not_exported(study, tmp_path, said):
    trial = study / "trials" / "base" / "seed0"
    evaluated = json.loads(said(f"evaluate {trial} --json").out)
    expected = json.loads((trial / "result.json").read_text())["metrics"]
    for name in ("miou", "image_miou", "pixel_accuracy"):
        assert evaluated["metrics"][name] == pytest.approx(expected[name])
    assert set(evaluated["protocols"]["segmentation"]["iou"]) == {"background", "disc", "square"}
    assert list(evaluated["intervals"]) == ["image_miou", "pixel_accuracy", "miou"]
    assert export_line(trial) == f"vitmods predict {trial} path/to/images"
    (tmp_path / "config.json").write_text("[")
    assert export_line(tmp_path) == f"vitmods export {tmp_path} --to onnx"


def test_what_does_not_apply_is_refused(study, shapes, tmp_path, refused, said):
    said(f"train --base mu2/2 --epochs 1 --limit-train 64 --out {tmp_path}/digits --quiet")  # its task draws nothing
    trial, image = study / "trials/base/seed0", shapes / "images/001.png"
    one = f"train --data masks:{shapes} --base mu2/4 --img-size 16 --out {tmp_path}/runs"
    for command, words in {
        f"evaluate {trial} --protocol top1": "trained by their mask",
        f"export {trial} --out {tmp_path}/model.onnx": "contains modules of its task",
        f"predict {tmp_path}/digits {image} --draw {tmp_path}": "classification does not draw predictions",
        f"predict {tmp_path}/digits {image} --annotations {tmp_path}": "classification does not write annotations",
        f"{one} --task segmentation --mixup 0.2": "segmentation does not read mixup",
        one: "--task segmentation",
        f"train --photometric 0.5 --out {tmp_path}/runs": "classification does not read photometric",
    }.items():
        assert words in refused(command)
    sweep = "--arms dpn --seeds 2 --epochs 1 --sweep limit_train=1/2,1 --dry-run"
    assert "0.5" in said(f"{one} --task segmentation {sweep}".replace("train", "compare", 1)).out


def test_predict_says_and_draws_what_is_in_images(study, shapes, tmp_path, said):
    trial, images = study / "trials" / "base" / "seed0", shapes / "images"
    large = Image.open(images / "000.png").resize((70, 50))
    large.save(tmp_path / "large.png")
    paths = [str(images / "001.png"), str(tmp_path / "large.png")]
    command = ["predict", trial, *paths, "--draw", tmp_path / "drawn", "--annotations", tmp_path / "masks"]
    rows = json.loads(said("", *command, "--format", "json").out)
    assert [Path(row["drawn"]).name for row in rows] == ["001.png", "large.png"]
    assert Image.open(rows[1]["drawn"]).size == (70, 50)
    assert all(sum(row["pixels"].values()) == pytest.approx(1, abs=1e-4) for row in rows)
    assert said("", *command).out.startswith("image,rank,class,fraction,predicted")
    predicted = vm.predict(trial, paths)
    assert predicted[1]["mask"].shape == (50, 70)
    assert np.bincount(predicted[1]["mask"].ravel(), minlength=3).argmax() == 0, "most is background"
    assert (tmp_path / "masks/classes.txt").read_text().split() == ["background", "disc", "square"]
    for name, row in (("001", predicted[0]), ("large", predicted[1])):
        assert (np.asarray(Image.open(tmp_path / f"masks/{name}.png")) == row["mask"]).all()
