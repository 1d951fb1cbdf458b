"""Detection from a folder of images and boxes to weights, report and drawings; killed on the way, too."""

import json
import shutil

import pytest
import timm
import torch
from PIL import Image
from pycocotools.coco import COCO

from vitmods.cli import main
from vitmods.data.sources import open_source
from vitmods.recipes import small_detection
from vitmods.study.trial import trial_scores
from vitmods.tasks import TASKS
from vitmods.train import RunOptions, train_trial
from vitmods.train.trial import read_examples

RECIPE = small_detection(2, batch_size=4).with_(accumulate=2, ema=0.5, fpn_channels=16, drop_path=0.2)
SMALL = "embed_dims=(8,16,24,32)&num_heads=(1,2,3,4)&depths=(1,1,1,1)"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory, example):
    """12 images of 48 x 64 pixels: train 8, val 4."""
    return example("detection").write_shapes(tmp_path_factory.mktemp("shapes"), {"train": 8, "val": 4}, (48, 64))


@pytest.mark.parametrize("name", [pytest.param("detection", marks=pytest.mark.long), "instance_segmentation"])
def test_a_broken_off_trial_ends_in_the_same_bits(shapes, tmp_path, ends_in_the_same_bits, name):
    def train(out):
        task = TASKS[name].from_recipe(RECIPE)
        dataset = task.load_data(f"coco:{shapes}", img_size=64, augment=RECIPE.augment)
        torch.manual_seed(0)
        widths = {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4), "depths": (1, 1, 1, 1)}
        model = task.wrap(timm.create_model("pvt_v2_b0", num_classes=0, drop_path_rate=0.2, **widths), 2)
        if name == "instance_segmentation":
            model.detector.rpn._pre_nms_top_n = model.detector.rpn._post_nms_top_n = {"training": 20, "testing": 8}
            model.detector.roi_heads.fg_bg_sampler.batch_size_per_image = 8
            model.detector.roi_heads.detections_per_img = 5
        options = RunOptions("cpu", tensorboard=False, progress=False, checkpoint_every_steps=2)
        train_trial(model, task, dataset, RECIPE, out=out, options=options)

    ends_in_the_same_bits(train, tmp_path, "val", stop_at=3)


@pytest.fixture(scope="module")
def study(shapes, tmp_path_factory, short_clocks):
    """Base and DTN, one seed, from the shell."""
    out = tmp_path_factory.mktemp("runs") / "shapes"
    command = f"compare --task detection --data coco:{shapes} --base timm:pvt_v2_b0?{SMALL} --img-size 64"
    command += f" --arms dtn=replace(dtn) --seeds 1 --epochs 1 --fpn-channels 16 --workers 1 --out {out} --quiet"
    assert main([*command.split(), "--cost-seconds", "0.1"]) == 0
    return out


def test_a_study_is_answered_with_costs_its_report_shows_boxes_and_a_trial_is_evaluated_again(study, said):
    assert json.loads((study / "results.json").read_text())["metric"]["name"] == "ap"
    costs = json.loads((study / "costs.json").read_text())
    assert 1 < costs["arms"]["dtn"]["flops"] < 2
    assert costs["base"]["macs"] > 0
    trial = study / "trials" / "dtn" / "seed0"
    assert trial_scores(trial, "val")["image_ap50"].shape == (4,)
    config = json.loads((trial / "config.json").read_text())
    assert config["recipe"]["optimizer"]["lr"] == small_detection().optimizer.lr, "the task's own recipe"
    assert "Predictions</h2>" in (study / "report.html").read_text()
    examples = read_examples(trial)
    assert (list(examples.legend), len(examples.panels)) == (["disc", "square"], 4)
    assert not list(study.rglob("warnings.json")), [path.read_text() for path in study.rglob("warnings.json")]
    evaluated = json.loads(said(f"evaluate {trial} --json").out)
    expected = json.loads((trial / "result.json").read_text())["metrics"]
    for name in ("ap", "ap50", "image_ap50"):
        assert evaluated["metrics"][name] == pytest.approx(expected[name])
    (detail,) = evaluated["protocols"].values()
    assert set(detail["ap"]) == {"disc", "square"}
    assert sum(detail["ap"].values()) / 2 == pytest.approx(expected["ap"])


def test_masks_are_trained_from_the_shell_by_a_plain_vit_and_drawn(shapes, tmp_path, said):
    out = tmp_path / "trial"
    said(
        f"train --task instance_segmentation --data coco:{shapes} --base mu2/16 --img-size 32 --epochs 1 --arm rms "
        f"--fpn-channels 8 --limit-train 4 --limit-val 2 --out {out} --quiet"
    )
    metrics = json.loads((out / "result.json").read_text())["metrics"]
    assert {"ap", "mask_ap", "mask_ap50", "image_ap50"} <= set(metrics)
    Image.open(shapes / "val" / "000.png").resize((150, 120)).save(tmp_path / "large.png")
    paths = [str(shapes / "val" / "001.png"), str(tmp_path / "large.png")]
    written = tmp_path / "found/train.json"
    command = ["predict", out, *paths, "--draw", tmp_path / "drawn", "--annotations", written, "--format"]
    small, large = json.loads(said("", *command, "json").out)
    assert Image.open(large["drawn"]).size == (150, 120)
    for row, width in ((small, 64), (large, 150)):
        assert row["objects"]
        for path in row["objects"]:
            assert 0.05 < path["score"] <= 1
            assert 0 <= path["box"][0] < path["box"][2] <= width
            assert path["mask"]["size"][1] == width
    coco = COCO(written)  # annotations are COCO's results
    assert [image["file_name"] for image in coco.dataset["images"]] == ["001.png", "large.png"]
    assert len(coco.loadRes(coco.dataset["annotations"]).anns) == len(small["objects"]) + len(large["objects"])
    first, top = coco.anns[1], small["objects"][0]
    assert first["score"] == top["score"]
    assert coco.cats[first["category_id"]]["name"] == top["class"]
    assert first["bbox"][:2] == top["box"][:2]
    for image in paths:
        shutil.copy(image, written.parent)
    source = open_source(f"coco:{written.parent}")
    assert source.classes == ("disc", "square")
    assert "\nimage,rank,class," in said("", *command, "csv").out
