"""VTAB-1k: 800, 200 and the test set, from lists, class folders or torchvision's files."""

import json

import numpy as np
import pytest

from vitmods import data
from vitmods.data.sources import open_source
from vitmods.papers.sources.transfer import TASKS
from vitmods.recipes import Augment
from vitmods.util.errors import UserError

AUGMENT = Augment(crop="none", flip=0.0, eval_crop=1.0)


def counts(spec):
    return {name: len(records) for name, records in open_source(spec).splits.items()}


def test_there_are_nineteen():
    groups = [task.group for task in TASKS.values()]
    assert [groups.count(group) for group in ("natural", "specialized", "structured")] == [7, 4, 8]


@pytest.fixture
def lists(tmp_path, write_files, jpeg):
    """A copy of VTAB-1k with a few images of one task, KITTI-Dist."""
    base = tmp_path / "vtab-1k" / "kitti"
    write_files(
        base, {f"images/{split}/{i}.jpg": jpeg(100 * len(split) + i) for split in ("train", "test") for i in range(8)}
    )
    (base / "train800.txt").write_text("".join(f"images/train/{i}.jpg {i % 4}\n" for i in (5, 0, 3, 2, 1)))
    (base / "val200.txt").write_text("".join(f"images/train/{i}.jpg {i % 4}\n" for i in (7, 6)))
    (base / "test.txt").write_text("".join(f"images/test/{i}.jpg {i % 3}\n" for i in range(8)))
    return tmp_path


def test_lists_are_followed_exactly(lists):
    for root in (lists, lists / "vtab-1k"):
        dataset = data.load(f"vtab:kitti-dist?root={root}", img_size=8, augment=AUGMENT)
        train = dataset.splits["train"]
        assert train.ids == tuple(f"images/train/{i}.jpg" for i in (5, 0, 3, 2, 1))
        assert train.labels.tolist() == [1, 0, 3, 2, 1]
        assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 5, "val": 2, "test": 8}
    assert dataset.summary()["warnings"][:3] == [
        "test has 8 images; VTAB's KITTI-Dist has 711.",
        "train has 5 images; VTAB-1k as published has 800.",
        "val has 2 images; VTAB-1k as published has 200.",
    ]
    assert dataset.name == "VTAB-1k KITTI-Dist"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("val200.txt", "images/a.jpg 4\n", "Line 1 of .*val200.txt is not an image's path and a class from 0 to 3"),
        ("test.txt", "images/a.jpg 0\nimages/b.jpg\n", "Line 2 of .*test.txt"),
        ("test.txt", "\n", "test.txt is empty"),
        ("test.txt", None, "kitti lacks test.txt"),
    ],
)
def test_lists_that_are_broken(lists, name, content, message):
    path = lists / "vtab-1k" / "kitti" / name
    path.write_text(content) if content is not None else path.unlink()
    with pytest.raises(UserError, match=message):
        open_source(f"vtab:kitti-dist?root={lists}")


@pytest.fixture
def resisc(tmp_path, write_files):
    """1,500 empty files of five classes, one of them rare."""
    sizes = {"airport": 500, "beach": 400, "church": 396, "desert": 202, "rare": 2}
    write_files(tmp_path / "resisc45", {f"train/{c}/{i}.jpg": b"" for c, n in sizes.items() for i in range(n)})
    write_files(tmp_path / "resisc45", {f"test/{c}/{i}.jpg": b"" for c in sizes for i in range(3)})
    return tmp_path


def test_class_folders_are_drawn_from(resisc, write_files):
    source = open_source(f"vtab:resisc45?root={resisc}")
    assert {name: len(records) for name, records in source.splits.items()} == {"train": 800, "val": 200, "test": 15}
    assert not set(source.splits["train"].ids) & set(source.splits["val"].ids)
    assert np.bincount(source.splits["train"].labels).tolist() == [267, 213, 211, 108, 1]
    assert any("are drawn at random" in text for text in source.warnings)
    assert any("5 classes; VTAB's Resisc45 has 45" in text for text in source.warnings)
    again = open_source(f"vtab:resisc45?root={resisc}")
    assert again.splits["val"].ids == source.splits["val"].ids


def test_folders_with_a_val_of_their_own_or_without_a_test(resisc, write_files):
    write_files(resisc / "resisc45", {f"val/beach/{i}.jpg": b"" for i in range(300)})
    source = open_source(f"vtab:resisc45?root={resisc}")
    assert {name.split("/")[0] for name in source.splits["val"].ids} == {"val"}
    assert len(source.splits["val"]) == 200
    (resisc / "resisc45" / "test").rename(resisc / "elsewhere")
    source = open_source(f"vtab:resisc45?root={resisc}")
    assert {name: len(records) for name, records in source.splits.items()} == {"train": 800, "val": 200, "test": 299}
    assert any("replaces VTAB's" in text for text in source.warnings)


def clevr(root, write_files):
    """Scenes of 3 to 10 things, 1,200 to train on and 16 in val."""
    base = root / "clevr" / "CLEVR_v1.0"
    for split, count in (("train", 1200), ("val", 16)):
        names = [f"CLEVR_{split}_{i:06d}.png" for i in range(count)]
        write_files(base / "images" / split, dict.fromkeys(names, b""))
        scenes = [{"image_filename": name, "objects": [0] * (3 + i % 8)} for i, name in enumerate(names)]
        write_files(base / "scenes", {f"CLEVR_{split}_scenes.json": json.dumps({"scenes": scenes}).encode()})
    write_files(base / "images" / "test", {"CLEVR_test_000000.png": b""})


def test_clevr_counts_from_three_and_is_tested_on_val(tmp_path, write_files, monkeypatch):
    from PIL import Image
    from torchvision.datasets import CLEVRClassification

    clevr(tmp_path, write_files)
    blank = Image.new("RGB", (4, 4))
    monkeypatch.setattr(CLEVRClassification, "__getitem__", lambda self, i: (blank, self._labels[i]))
    source = open_source(f"vtab:clevr-count?root={tmp_path}")
    assert {name: len(records) for name, records in source.splits.items()} == {"train": 800, "val": 200, "test": 16}
    assert source.classes == ("3", "4", "5", "6", "7", "8", "9", "10")
    assert source.splits["test"].labels.tolist() == [i % 8 for i in range(16)]
    assert np.bincount(source.splits["train"].labels).tolist() == [100] * 8


def test_eurosat_has_no_test_of_its_own_and_dmlab_too_few_images(tmp_path, write_files, monkeypatch):
    write_files(tmp_path / "dmlab", {f"train/{c}/{i}.jpg": b"" for c in "ab" for i in range(50)})
    with pytest.raises(UserError, match="200 images for val cannot be taken out of"):
        open_source(f"vtab:dmlab?root={tmp_path}")
    write_files(tmp_path / "eurosat" / "2750", {f"{c}/{i}.jpg": b"" for c in ("Forest", "River") for i in range(750)})
    from torchvision.datasets import EuroSAT

    monkeypatch.setattr(EuroSAT, "__getitem__", lambda self, i: (None, self.targets[i]))
    assert counts(f"vtab:eurosat?root={tmp_path}") == {"train": 800, "val": 200, "test": 300}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vtab:kiti?root={root}", "Did you mean 'kitti-dist'"),
        ("vtab:svhn", r"write vtab:TASK\?root=FOLDER"),
        ("vtab:dmlab?root={root}", "dmlab/train800.txt and a folder of the task are missing, and torchvision lacks it"),
        ("vtab:svhn?root={root}", "torchvision's SVHN cannot be read"),
        ("vtab:svhn?root={root}&rooot=x", 'unknown option "rooot" of vtab'),
    ],
)
def test_specs_of_what_is_not_there(tmp_path, spec, message):
    with pytest.raises(UserError, match=message):
        open_source(spec.format(root=tmp_path))
