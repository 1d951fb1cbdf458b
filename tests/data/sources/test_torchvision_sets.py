"""torchvision's sets from the disk: small ones are written here in each layout that torchvision knows."""

import struct
from typing import ClassVar

import numpy as np
import pytest
import torchvision
from torchvision import datasets

from vitmods import data
from vitmods.data.sources import open_source
from vitmods.data.sources.torchvision import _labels
from vitmods.recipes import plain
from vitmods.util.errors import UserError

from ..support import counts, encoded, load, noise, write_files
from .layouts import clevr, eurosat


def mnist(root):
    """train=True / False; labels in `targets`."""
    for prefix, count in (("train", 40), ("t10k", 12)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = struct.pack(">4I", 0x803, count, 28, 28) + pixels.tobytes()
        files = {"images-idx3": images, "labels-idx1": struct.pack(">2I", 0x801, count) + labels.tobytes()}
        write_files(root / "MNIST" / "raw", {f"{prefix}-{name}-ubyte": content for name, content in files.items()})


def pets(root):
    """split="trainval" / "test"; labels in `_labels`."""
    for split, start in (("trainval", 0), ("test", 20)):
        names = [f"{('Abyssinian', 'pug')[i % 2]}_{i}" for i in range(start, start + 20)]
        files = {f"images/{name}.jpg": encoded(noise(i + start), "JPEG") for i, name in enumerate(names)}
        rows = "\n".join(f"{name} {i % 2 + 1} 1 1" for i, name in enumerate(names))
        write_files(root / "oxford-iiit-pet", {**files, f"annotations/{split}.txt": rows})


@pytest.mark.parametrize(("name", "make", "expected", "classes"), [
    ("MNIST", mnist, {"train": 40, "test": 12}, 10),
    ("EuroSAT", lambda root: eurosat(root, 10), {"train": 20}, 2),
    ("OxfordIIITPet", pets, {"train": 20, "test": 20}, 2),
    ("CLEVRClassification", lambda root: clevr(root, 16, 16), {"train": 16, "val": 16}, 11),
])  # fmt: skip
def test_splits_labels_and_images_are_torchvisions(tmp_path, name, make, expected, classes):
    make(tmp_path)
    source = open_source(f"torchvision:{name}?root={tmp_path}")
    assert counts(source) == expected
    assert len(source.classes) == classes
    secret = ["The labels of CLEVRClassification's test split are not public; it was not used."]
    assert source.warnings == (secret if "CLEVR" in name else [])
    argument = {"OxfordIIITPet": {"split": "trainval"}}.get(name, {})
    reference, actual = getattr(torchvision.datasets, name)(tmp_path, **argument), source.splits["train"]
    for i in (0, len(actual) - 1):
        assert reference[i][1] == actual.labels[i]
        assert np.array_equal(np.asarray(reference[i][0]), np.asarray(actual.fetch(i)))


def test_options_go_to_the_constructor(tmp_path):
    pets(tmp_path)
    source = open_source(f"torchvision:OxfordIIITPet?root={tmp_path}&split=test")
    assert counts(source) == {"train": 20}
    assert source.splits["train"].labels.tolist() == [0, 1] * 10
    with pytest.raises(UserError, match="does not take these options"):
        open_source(f"torchvision:OxfordIIITPet?root={tmp_path}&color=red")


def test_an_image_that_changed_has_another_stamp_and_one_that_went_missing_is_unreadable(tmp_path):
    pets(tmp_path)
    spec, changed = f"torchvision:OxfordIIITPet?root={tmp_path}", tmp_path / "oxford-iiit-pet/images/pug_1.jpg"
    before = open_source(spec).splits["train"].stamps
    assert open_source(spec).splits["train"].stamps == before
    noise(200, (9, 9)).save(changed)
    assert open_source(spec).splits["train"].stamps != before
    changed.unlink()
    with pytest.raises(UserError, match=r"OxfordIIITPet/train\[1\]: No such file"):
        data.load(spec, img_size=8, augment=plain().augment)
    assert load(spec, unreadable="skip").summary()["left_out"] == 1


def test_an_attribute_that_is_not_the_label_is_not_taken_for_it():
    class Odd:
        targets, _labels = (7, 7, 7), (0, 1, 0)

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return noise(i), (0, 1, 0)[i]

    assert _labels(Odd(), "Odd").tolist() == [0, 1, 0]
    Odd._labels = (5, 5, 5)
    assert _labels(Odd(), "Odd").tolist() == [0, 1, 0]


def test_other_tasks_are_refused(tmp_path):
    files = {"JPEGImages/a.jpg": encoded(noise(1), "JPEG"), "SegmentationClass/a.png": encoded(noise(1))}
    write_files(tmp_path / "VOCdevkit/VOC2012", {"ImageSets/Segmentation/train.txt": "a\n", **files})
    with pytest.raises(UserError, match="not a classification set"):
        open_source(f"torchvision:VOCSegmentation?root={tmp_path}")


class Fetched:
    """Stands in for a set of torchvision's that can be downloaded."""

    asked: ClassVar[list[bool]] = []

    def __init__(self, root, train=True, download=False):
        self.asked.append(download)
        if not download:
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        self.targets = [0, 1]

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return None, self.targets[i]


@pytest.mark.parametrize("spec", ["torchvision:CIFAR10?root={root}&", "cifar10:{root}?"])
def test_sets_are_downloaded_only_when_asked(tmp_path, spec, monkeypatch):
    monkeypatch.setattr(datasets, "CIFAR10", Fetched)
    monkeypatch.setattr(Fetched, "asked", [])
    spec = spec.format(root=tmp_path)
    with pytest.raises(UserError, match="Nothing is downloaded unless asked for") as caught:
        open_source(spec[:-1])
    assert "download=1" in str(caught.value)
    assert "download=True" not in str(caught.value)
    assert not any(Fetched.asked)
    assert counts(open_source(f"{spec}download=1")) == {"train": 2, "test": 2}
    with pytest.raises(UserError, match="Nothing is downloaded"):
        open_source(f"{spec}download=0")
    with pytest.raises(UserError, match="torchvision cannot download FakeData"):
        open_source(f"torchvision:FakeData?root={tmp_path}&download=1")
