"""Each task in two processes is that task in one: weights, metrics, and scores of each image."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

import vitmods as vm
from vitmods.recipes import RECIPES
from vitmods.study.cells import Trial
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner
from vitmods.train import Processes, RunOptions

pytestmark = pytest.mark.forks

EXACT = {"dino": {"prototypes": 32, "local_crops": 1, "local_size": 4}, "beit": {"codes": 8, "masked": 0.4}}
"""task -> settings; with SGD weights follow gradients, so that equal gradients give equal weights"""
PLAIN = {"optimizer": "sgd", "lr": 0.01, "clip_norm": None, "clip_each": False}
PYRAMID = "timm:pvt_v2_b0?embed_dims=(8,16,24,32)&num_heads=(1,2,3,4)&depths=(1,1,1,1)"


@pytest.fixture(scope="module")
def images(tmp_path_factory, example):
    folder = tmp_path_factory.mktemp("images")
    example("segmentation").write_images(folder, 20)
    example("detection").write_shapes(folder / "boxes", {"train": 8, "val": 5}, (48, 64))
    return folder


def studies(images):
    small = {"data": "digits", "base": "mu2/2", "limit_train": 96, "limit_val": 40, "test_fraction": 0.05}
    digits = {
        task: {**small, "recipe": RECIPES[f"{task}_small"](1, batch_size=24).with_(**PLAIN, **fields)}
        for task, fields in EXACT.items()
    }
    # Without resizing all pixels of a crop have a label: the mean over pixels is then that over processes.
    masks = RECIPES["small_segmentation"](1, batch_size=4).with_(resize_range=None, accumulate=2)
    boxes = RECIPES["small_detection"](1, batch_size=4).with_(fpn_channels=16, ema=0.5, drop_path=0.0)
    tokens = RECIPES["listops"](2, batch_size=12).with_(dropout=0.0)
    lists = {"data": "listops:generated?train=48&val=8&test=15&min_length=5&max_length=30", "base": "LRA-64"}
    return {
        "segmentation": {"data": f"masks:{images}", "base": "mu2/4", "img_size": 16, "recipe": masks},
        "detection": {"data": f"coco:{images}/boxes", "base": PYRAMID, "img_size": 64, "arms": ["replace(rms)"],
                      "recipe": boxes},
        "sequence_classification": {**lists, "img_size": (1, 29), "in_chans": 16, "arms": ["dtn"], "recipe": tokens},
        **digits,
    }  # fmt: skip


def train(images, out, processes, shard=False):
    for task, settings in studies(images).items():
        if shard and task in EXACT:  # a teacher is not divided
            continue
        study = vm.Study(**{"arms": ["rms"], "task": task, "seeds": 1, **settings})
        runner = TrialRunner(StudyFolder(out), study.settings.measure, RunOptions("cpu", shard=shard), processes)
        runner.train(Trial(study.settings.cells[1], 0), out / task)


def work(rank, store, images, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train(Path(images), Path(out), Processes(rank, 2, rank))
    train(Path(images), Path(out) / "sharded", Processes(rank, 2, rank), shard=True)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory, imported):
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        torch.set_num_threads(1)
        train(images, folder / "alone", Processes())
        arguments = (str(folder / "store"), str(images), str(folder / "together"))
        mp.start_processes(work, arguments, nprocs=2, start_method="fork")
    return folder


DIVIDED = [
    (task, divided) for task in ("segmentation", "detection", "sequence_classification") for divided in (False, True)
]


@pytest.mark.parametrize(("task", "divided"), DIVIDED + [(task, False) for task in EXACT])
def test_two_processes_are_one(trained, task, divided):
    most = 1e-6 if task in EXACT else 2e-3
    folders = trained / "alone" / task, trained / "together" / ("sharded" if divided else "") / task
    names = [path.name for path in folders[0].glob("*.safetensors")]
    assert "model.safetensors" in names
    for name in names:
        torch.testing.assert_close(*(load_file(folder / name) for folder in folders), atol=most, rtol=most)
    results = [json.loads((path / "result.json").read_text()) for path in folders]
    assert results[0]["metrics"] == pytest.approx(results[1]["metrics"], abs=1e-2)
    ids = [list(np.load(path / f"{results[0]['split']}.npz")["ids"]) for path in folders]
    assert ids[0] == ids[1]
    assert len(ids[0]) > 1
