"""The pretend GPU, a trial's own steps on it, and small sets for every task."""

import csv
import importlib.util
import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from PIL import Image


def _module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pretend = _module(Path(__file__).with_name("pretend.py"))


@pytest.fixture(autouse=True)
def some_gpu(request):
    """The tests of a real GPU run on the pretend one where there is none."""
    is_needed = request.node.get_closest_marker("gpu") and not pretend.torch.cuda.is_available()
    with pretend.gpu() if is_needed else nullcontext():
        yield


@dataclass
class Images:
    """What a run asks of images that it never reads."""

    eval_split = val_split = "val"
    splits = MappingProxyType({"train": range(64)})

    def steps_per_epoch(self, batch_size):
        return 9

    def encoded(self, encode):
        return self


@pytest.fixture
def gpu():
    """The pretend GPU, which is there during the test."""
    with pretend.gpu() as device:
        yield device


@pytest.fixture
def run_on_gpu(gpu, monkeypatch, tmp_path):
    """A trial's own steps in each precision, none of which may wait: gives the run."""
    from vitmods.train import RunOptions, TrialRun
    from vitmods.train.device import HALF, DeviceAndPrecision

    def run(model, task, recipe, batch, precisions=("32-true", *HALF), may_wait=False, **how):
        options = RunOptions("cuda:0", tensorboard=False, progress=False, **how)
        trial = TrialRun(model, task, Images(), recipe, folder=tmp_path, options=options)
        trial.metrics.close()
        for precision in precisions:
            trial.placement = DeviceAndPrecision(pretend.CUDA, precision)
            gpu.strict = not may_wait
            trial._train_step(batch)
            gpu.strict = False
        parameters = list(trial.model.parameters())
        assert all(type(p) is pretend.CudaTensor for p in parameters)
        assert all(p.grad is not None for p in parameters if p.requires_grad)
        assert len(trial._window) == len(precisions)
        return trial

    return run


SIZE = (16, 16)


def _image(path, seed, size=SIZE):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="session")
def sets(tmp_path_factory):
    """Name -> specification of a small set of 16 px: classes, labels, masks, boxes, pairs and sequences."""
    root = tmp_path_factory.mktemp("sets")
    for split, count in {"train": 8, "val": 6, "test": 6}.items():
        for label in ("cat", "dog"):
            for i in range(count):
                seed = 1000 * len(split) + 10 * i + "cd".index(label[0])
                _image(root / "classes" / split / label / f"{i}.png", seed)
        images, boxes = [], []
        for i in range(6 if split == "train" else 3):
            seed = 1000 * len(split) + i
            _image(root / "masks/images" / split / f"{i}.png", seed)
            marked = np.random.default_rng(seed).integers(0, 2, SIZE, np.uint8)
            (root / "masks/masks" / split).mkdir(parents=True, exist_ok=True)
            Image.fromarray(marked).save(root / "masks/masks" / split / f"{i}.png")
            _image(root / "boxes" / split / f"{i}.png", seed)
            images.append({"id": i, "file_name": f"{i}.png", "height": SIZE[0], "width": SIZE[1]})
            outline = [2, 2, 12, 2, 12, 10, 2, 10]
            boxes.append({"id": i, "image_id": i, "category_id": 1 + i % 2, "bbox": [2, 2, 10, 8], "area": 80.0,
                          "iscrowd": 0, "segmentation": [outline]})  # fmt: skip
        kinds = [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}]
        content = {"images": images, "annotations": boxes, "categories": kinds}
        (root / "boxes" / f"{split}.json").write_text(json.dumps(content))
    (root / "masks/classes.txt").write_text("sky\nroad")
    rows = [("file", "labels")]
    pairs = []
    for i in range(24):
        _image(root / "labels/images" / f"{i}.png", i)
        rows.append((f"images/{i}.png", ";".join("abc"[i % 3 :])))
        _image(root / "pairs" / f"{i}.png", 77 + i)
        pairs.append({"image": f"{i}.png", "captions": [f"a picture of number {i}", f"this is {i}"],
                      "split": "train" if i < 12 else "val" if i < 18 else "test"})  # fmt: skip
    with open(root / "labels/labels.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    (root / "pairs/pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return {
        "class": str(root / "classes"),
        "labels": str(root / "labels/labels.csv"),
        "mask": f"masks:{root / 'masks'}",
        "boxes": f"coco:{root / 'boxes'}",
        "instances": f"coco:{root / 'boxes'}",
        "text": f"pairs:{root / 'pairs/pairs.jsonl'}",
        "tokens": "listops:generated?train=96&val=24&test=24&min_length=5&max_length=30",
    }
