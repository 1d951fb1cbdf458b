"""torchvision's sets from the disk: small ones are written here in each layout that torchvision knows."""

import json
import struct
from typing import ClassVar

import numpy as np
import pytest
import torchvision
from PIL import Image
from torchvision import datasets

from vitmods import data
from vitmods.data.sources import open_source
from vitmods.data.sources.torchvision import _labels
from vitmods.recipes import plain
from vitmods.util.errors import UserError


def image(value):
    return Image.new("RGB", (10, 10), (value % 256, 50, 90))


def mnist(root):
    """train=True / False; labels in `targets`."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", 40), ("t10k", 12)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        head = struct.pack(">4I", 0x803, count, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + labels.tobytes())


def eurosat(root):
    """No splits; labels in `targets`."""
    for c, name in enumerate(("Forest", "River")):
        folder = root / "eurosat" / "2750" / name
        folder.mkdir(parents=True)
        for i in range(10):
            image(100 * c + i).save(folder / f"{i}.png")


def pets(root):
    """split="trainval" / "test"; labels in `_labels`."""
    base = root / "oxford-iiit-pet"
    (base / "images").mkdir(parents=True)
    (base / "annotations").mkdir()
    for split, start in (("trainval", 0), ("test", 20)):
        lines = []
        for i in range(start, start + 20):
            name = f"{('Abyssinian', 'pug')[i % 2]}_{i}"
            image(i).save(base / "images" / f"{name}.jpg")
            lines.append(f"{name} {i % 2 + 1} 1 1")
        (base / "annotations" / f"{split}.txt").write_text("\n".join(lines))


def clevr(root):
    """split="train" / "val" / "test"; the labels of test are not public."""
    base = root / "clevr" / "CLEVR_v1.0"
    (base / "scenes").mkdir(parents=True)
    for split in ("train", "val", "test"):
        (base / "images" / split).mkdir(parents=True)
        scenes = []
        for i in range(8):
            image(i).save(base / "images" / split / f"{split}_{i}.png")
            scenes.append({"image_filename": f"{split}_{i}.png", "objects": [0] * (3 + i % 2)})
        if split != "test":
            (base / "scenes" / f"CLEVR_{split}_scenes.json").write_text(json.dumps({"scenes": scenes}))


def segmentation(root):
    base = root / "VOCdevkit" / "VOC2012"
    for folder in ("ImageSets/Segmentation", "JPEGImages", "SegmentationClass"):
        (base / folder).mkdir(parents=True)
    (base / "ImageSets" / "Segmentation" / "train.txt").write_text("a\n")
    image(1).save(base / "JPEGImages" / "a.jpg")
    image(1).save(base / "SegmentationClass" / "a.png")


@pytest.mark.parametrize(
    ("name", "make", "counts", "classes"),
    [
        ("MNIST", mnist, {"train": 40, "test": 12}, 10),
        ("EuroSAT", eurosat, {"train": 20}, 2),
        ("OxfordIIITPet", pets, {"train": 20, "test": 20}, 2),
        ("CLEVRClassification", clevr, {"train": 8, "val": 8}, 5),
    ],
)
def test_splits_labels_and_images_are_torchvisions(tmp_path, name, make, counts, classes):
    make(tmp_path)
    source = open_source(f"torchvision:{name}?root={tmp_path}")
    assert {split: len(records) for split, records in source.splits.items()} == counts
    assert len(source.classes) == classes
    secret = ["The labels of CLEVRClassification's test split are not public; it was not used."]
    assert source.warnings == (secret if make is clevr else [])
    argument = {"OxfordIIITPet": {"split": "trainval"}}.get(name, {})
    reference = getattr(torchvision.datasets, name)(tmp_path, **argument)
    actual = source.splits["train"]
    for i in (0, len(actual) - 1):
        assert reference[i][1] == actual.labels[i]
        assert np.array_equal(np.asarray(reference[i][0]), np.asarray(actual.fetch(i)))


def test_options_go_to_the_constructor(tmp_path):
    pets(tmp_path)
    source = open_source(f"torchvision:OxfordIIITPet?root={tmp_path}&split=test")
    assert {split: len(records) for split, records in source.splits.items()} == {"train": 20}
    assert source.splits["train"].labels.tolist() == [0, 1] * 10
    with pytest.raises(UserError, match="does not take these options"):
        open_source(f"torchvision:OxfordIIITPet?root={tmp_path}&color=red")


def test_an_image_that_went_missing_is_unreadable(tmp_path):
    pets(tmp_path)
    (tmp_path / "oxford-iiit-pet" / "images" / "pug_1.jpg").unlink()
    spec = f"torchvision:OxfordIIITPet?root={tmp_path}"
    with pytest.raises(UserError, match=r"OxfordIIITPet/train\[1\]: No such file"):
        data.load(spec, img_size=8, augment=plain().augment)
    assert data.load(spec, img_size=8, augment=plain().augment, unreadable="skip").summary()["left_out"] == 1


def test_an_attribute_that_is_not_the_label_is_not_taken_for_it():
    class Odd:
        targets = (7, 7, 7)
        _labels = (0, 1, 0)

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return image(i), (0, 1, 0)[i]

    assert _labels(Odd(), "Odd").tolist() == [0, 1, 0]
    Odd._labels = (5, 5, 5)
    assert _labels(Odd(), "Odd").tolist() == [0, 1, 0]


def test_stamps_change_with_the_files(tmp_path):
    pets(tmp_path)
    spec = f"torchvision:OxfordIIITPet?root={tmp_path}"
    before = open_source(spec).splits["train"].stamps
    assert open_source(spec).splits["train"].stamps == before
    image(200).save(tmp_path / "oxford-iiit-pet" / "images" / "pug_1.jpg")
    assert open_source(spec).splits["train"].stamps != before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("torchvision:CIFAR10", r"write torchvision:CIFAR10\?root=FOLDER"),
        ("torchvision:CIFAR10?root={root}", "CIFAR10 cannot be read from .*Nothing is downloaded"),
        ("torchvision:Flowers102?root={root}", "Flowers102 cannot be read from"),
        (
            "torchvision:SEMEION?root={root}",
            "SEMEION cannot be read from .*: Dataset not found",
        ),  # downloads unless reported
        ("torchvision:CIFAR1?root={root}", "Did you mean 'CIFAR10'"),
        ("torchvision:?root={root}", "does not say where the images are: write torchvision:NAME"),
        ("", "No data given"),
    ],
)
def test_specs_that_name_nothing(tmp_path, spec, message):
    with pytest.raises(UserError, match=message):
        open_source(spec.format(root=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_other_tasks_are_refused(tmp_path):
    segmentation(tmp_path)
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


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(datasets, "CIFAR10", Fetched)
    monkeypatch.setattr(Fetched, "asked", [])


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("spec", ["torchvision:CIFAR10?root={root}", "cifar10:{root}"])
def test_only_when_asked(tmp_path, spec):
    with pytest.raises(UserError, match="Nothing is downloaded unless asked for") as caught:
        open_source(spec.format(root=tmp_path))
    assert "download=1" in str(caught.value)
    assert "download=True" not in str(caught.value)
    assert not any(Fetched.asked)
    separator = "&" if "?" in spec else "?"
    source = open_source(f"{spec.format(root=tmp_path)}{separator}download=1")
    assert {name: len(records) for name, records in source.splits.items()} == {"train": 2, "test": 2}
    with pytest.raises(UserError, match="Nothing is downloaded"):
        open_source(f"{spec.format(root=tmp_path)}{separator}download=0")


@pytest.mark.usefixtures("stand_in")
def test_sets_that_cannot_be_fetched(tmp_path):
    with pytest.raises(UserError, match="torchvision cannot download FakeData"):
        open_source(f"torchvision:FakeData?root={tmp_path}&download=1")
