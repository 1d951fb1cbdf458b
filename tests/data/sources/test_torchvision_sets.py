"""torchvision's sets from the disk, of which small ones are written here as torchvision knows them; and the transfer
sets and VTAB-1k: the papers' splits of these files, of lists and of class folders."""

import json
import pickle
import struct
from typing import ClassVar

import numpy as np
import pytest
import scipy.io
import torchvision
from PIL import Image
from torchvision import datasets

from vitmods.data.sources import open_source
from vitmods.data.sources.torchvision import _labels
from vitmods.papers.sources.transfer import TASKS
from vitmods.util.errors import UserError

from ..support import counts, encoded, load, noise, write_files

PNG = encoded(noise(0))


def jpegs(names, first=0):
    return {name: encoded(noise(i), "JPEG") for i, name in enumerate(names, first)}


def eurosat(root, count=10):
    """No splits; labels in `targets`."""
    files = {f"{name}/{i}.jpg": PNG for name in ("Forest", "River") for i in range(count)}
    write_files(root / "eurosat" / "2750", files)


def clevr(root, train=16):
    """Scenes of 3 to 10 things, split="train" / "val" / "test"; the labels of test are not public."""
    for split, count in (("train", train), ("val", 16), ("test", 1)):
        names = [f"CLEVR_{split}_{i:06d}.png" for i in range(count)]
        scenes = [{"image_filename": name, "objects": [0] * (3 + i % 8)} for i, name in enumerate(names)]
        files = {f"images/{split}/{name}": PNG for name in names}
        if split != "test":
            files[f"scenes/CLEVR_{split}_scenes.json"] = json.dumps({"scenes": scenes})
        write_files(root / "clevr" / "CLEVR_v1.0", files)


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
        files = jpegs([f"images/{name}.jpg" for name in names], start)
        rows = "\n".join(f"{name} {i % 2 + 1} 1 1" for i, name in enumerate(names))
        write_files(root / "oxford-iiit-pet", {**files, f"annotations/{split}.txt": rows})


@pytest.mark.parametrize(("name", "make", "expected", "classes"), [
    ("MNIST", mnist, {"train": 40, "test": 12}, 10),
    ("EuroSAT", eurosat, {"train": 20}, 2),
    ("OxfordIIITPet", pets, {"train": 20, "test": 20}, 2),
    ("CLEVRClassification", clevr, {"train": 16, "val": 16}, 11),
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


def test_options_and_an_image_that_changes_or_goes_missing(tmp_path):
    pets(tmp_path)
    spec, changed = f"torchvision:OxfordIIITPet?root={tmp_path}", tmp_path / "oxford-iiit-pet/images/pug_1.jpg"
    source = open_source(f"{spec}&split=test")
    assert counts(source) == {"train": 20}
    assert source.splits["train"].labels.tolist() == [0, 1] * 10
    with pytest.raises(UserError, match="does not take these options"):
        open_source(f"{spec}&color=red")
    before = open_source(spec).splits["train"].stamps
    assert open_source(spec).splits["train"].stamps == before
    noise(200, (9, 9)).save(changed)
    assert open_source(spec).splits["train"].stamps != before
    changed.unlink()
    with pytest.raises(UserError, match=r"OxfordIIITPet/train\[1\]: No such file"):
        load(spec)
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


# Transfer sets and VTAB-1k


def test_flowers_are_trained_on_train_and_val_together(tmp_path, monkeypatch):
    """Twelve images: 1-4 train, 5-6 val, 7-12 test; of classes 1, 2, 3 in turn."""
    base = write_files(tmp_path / "flowers-102", jpegs(f"jpg/image_{i:05d}.jpg" for i in range(1, 13)))
    scipy.io.savemat(base / "setid.mat", {"trnid": [[1, 2, 3, 4]], "valid": [[5, 6]], "tstid": [list(range(7, 13))]})
    scipy.io.savemat(base / "imagelabels.mat", {"labels": [[i % 3 + 1 for i in range(1, 13)]]})
    monkeypatch.setattr("torchvision.datasets.flowers102.check_integrity", lambda *arguments: True)
    source = open_source(f"flowers102:{tmp_path}")
    train, test = source.splits["train"], source.splits["test"]
    assert set(source.splits) == {"train", "test"}
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 2, 0, 1, 2, 0], [1, 2, 0, 1, 2, 0])
    assert train.ids[3:5] == ("Flowers102/train[3]", "Flowers102/val[0]")
    fetched = [np.asarray(train.fetch(int(key))).tobytes() for key in train.keys]
    assert len(set(fetched)) == 6
    shuffled = train.take(np.array([4, 0]))
    assert [np.asarray(shuffled.fetch(int(key))).tobytes() for key in shuffled.keys] == [fetched[4], fetched[0]]
    assert "train has 6 images; Oxford Flowers-102 as published has 2,040." in source.warnings
    assert counts(load(f"flowers102:{tmp_path}", limit_val=3)) == {"train": 3, "val": 3, "test": 6}


def test_cars(tmp_path):
    base, splits = tmp_path / "stanford_cars", ("train", "test")
    write_files(base, jpegs(f"cars_{split}/{i:05d}.jpg" for split in splits for i in range(6)) | {"devkit/list": ""})
    rows = np.array([[(f"{i:05d}.jpg", i % 2 + 1) for i in range(6)]], dtype=[("fname", "O"), ("class", "u2")])
    for name in ("devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat"):
        scipy.io.savemat(base / name, {"annotations": rows})
    names = np.array(["Audi TT", "Ford GT"], dtype=object)
    scipy.io.savemat(base / "devkit" / "cars_meta.mat", {"class_names": names})
    source = open_source(f"cars:{tmp_path}")
    assert source.classes == ("Audi TT", "Ford GT")
    assert source.splits["test"].labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_cifar(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)
    part = pickle.dumps({"data": pixels, "fine_labels": [i % 5 for i in range(20)]})
    files = {"train": part, "test": part, "meta": pickle.dumps({"fine_label_names": list("abcde")})}
    write_files(tmp_path / "cifar-100-python", files)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *arguments: True)
    dataset = load(f"cifar100:{tmp_path}", img_size=32)
    assert counts(dataset) == {"train": 15, "val": 5, "test": 20}
    assert any(w.startswith("15 images of test are also in train") for w in dataset.summary()["warnings"])


@pytest.fixture
def sun(tmp_path):
    """Two classes, one of them below a folder of two levels."""
    names = [f"{name}/sun_{i:02d}.jpg" for name in ("a/abbey", "b/bow_window/indoor") for i in range(10)]
    write_files(tmp_path / "SUN397", {**jpegs(names), "ClassName.txt": "/a/abbey\n/b/bow_window/indoor\n"})
    return tmp_path


def test_sun_without_lists_is_split_by_name_whatever_the_disks_order(sun):
    source = open_source(f"sun397:{sun}")
    train = source.splits["train"]
    assert (list(source.splits), train.ids) == (["train"], tuple(sorted(train.ids)))
    assert train.ids[10] == "b/bow_window/indoor/sun_00.jpg"
    assert train.labels.tolist() == [0] * 10 + [1] * 10
    image = np.asarray(train.fetch(int(train.keys[10])))
    assert np.array_equal(image, np.asarray(Image.open(sun / "SUN397" / train.ids[10])))
    assert any("its splits are drawn" in text for text in source.warnings)


def test_sun_with_lists_of_tensorflow_datasets_or_with_its_partitions(sun):
    folder = sun / "SUN397" / "Partitions"
    lists = {"Training_03.txt": "/a/abbey/sun_01.jpg\r\n/b/bow_window/indoor/sun_01.jpg\r\n"}
    write_files(folder, {**lists, "Testing_03.txt": "/a/abbey/sun_02.jpg\n"})
    source = open_source(f"sun397:{sun}?partition=3")
    assert {name: records.labels.tolist() for name, records in source.splits.items()} == {"train": [0, 1], "test": [0]}
    (folder / "Testing_03.txt").write_text("/a/abbey/sun_99.jpg\n")
    with pytest.raises(UserError, match=r"names 1 images that are not in .*SUN397, .* a/abbey/sun_99\.jpg"):
        open_source(f"sun397:{sun}?partition=3")
    with pytest.raises(UserError, match="partitions 1 to 10, not 11"):
        open_source(f"sun397:{sun}?partition=11")
    for part, numbers in (("tr", (9, 1)), ("va", (2,)), ("te", (3, 4, 5))):
        lines = [f"/{name}/sun_{i:02d}.jpg\n" for name in ("b/bow_window/indoor", "a/abbey") for i in numbers]
        (sun / f"sun397_tfds_{part}.txt").write_text("".join(lines))
    source = open_source(f"sun397:{sun}")
    assert counts(source) == {"train": 4, "val": 2, "test": 6}
    assert source.splits["train"].ids[:2] == ("b/bow_window/indoor/sun_09.jpg", "b/bow_window/indoor/sun_01.jpg")
    assert source.splits["train"].labels.tolist() == [1, 1, 0, 0]
    (sun / "sun397_tfds_va.txt").unlink()
    with pytest.raises(UserError, match=r"sun397_tfds_va\.txt missing"):
        open_source(f"sun397:{sun}")


@pytest.mark.parametrize("year", [2018, 2019])
def test_inaturalist(tmp_path, year):
    names, number = {30: "Bufo bufo", 10: "Apis mellifera", 20: "Bufo bufo"}, 0
    for split, count in (("train", 6), ("val", 3)):
        images, annotations = [], []
        for i in range(count):
            number += 1
            images.append({"id": number, "file_name": f"train_val{year}/Animalia/{number % 3}/{number}.jpg"})
            annotations.append({"id": 1000 - number, "image_id": number, "category_id": 10 * (i % 3 + 1)})
        write_files(tmp_path, {image["file_name"]: encoded(noise(image["id"])) for image in images})
        categories = [{"id": i, "name": name} for i, name in names.items()]
        content = {"images": images[::-1], "annotations": annotations, "categories": categories}
        (tmp_path / f"{split}{year}.json").write_text(json.dumps(content))
    spec, table = f"inat{year}:{tmp_path}", tmp_path / f"val{year}.json"
    dataset = load(spec, val_fraction=0)
    assert counts(dataset) == {"train": 6, "test": 3}
    assert dataset.classes == ("Apis mellifera", "Bufo bufo (1)", "Bufo bufo (2)")
    train = dict(zip(dataset.splits["train"].ids, dataset.splits["train"].labels.tolist(), strict=True))
    assert train == {f"train_val{year}/Animalia/{n % 3}/{n}.jpg": (n - 1) % 3 for n in range(1, 7)}
    assert f"test has 3 images; iNaturalist {year} as published has" in " ".join(dataset.summary()["warnings"])
    of_another_year = json.loads(table.read_text())
    of_another_year["annotations"][0]["category_id"] = 999
    for text, message in (
        (json.dumps(of_another_year), "labels images or classes that are not listed"),
        ('{"images": []}', f"val{year}.json is not iNaturalist's table"),
        (None, rf"val{year}\.json is missing\.\n.*\n  .*train_val{year}/"),
    ):
        table.unlink() if text is None else table.write_text(text)
        with pytest.raises(UserError, match=message):
            open_source(spec)


@pytest.fixture
def lists(tmp_path):
    """A copy of VTAB-1k with a few images of one task, KITTI-Dist."""
    files = jpegs(f"images/{split}/{i}.jpg" for split in ("train", "test") for i in range(8))
    for name, split, numbers, classes in (
        ("train800", "train", (5, 0, 3, 2, 1), 4), ("val200", "train", (7, 6), 4), ("test", "test", range(8), 3),
    ):  # fmt: skip
        files[f"{name}.txt"] = "".join(f"images/{split}/{i}.jpg {i % classes}\n" for i in numbers)
    write_files(tmp_path / "vtab-1k" / "kitti", files)
    return tmp_path


def test_lists_are_followed_exactly(lists):
    groups = [task.group for task in TASKS.values()]
    assert [groups.count(group) for group in ("natural", "specialized", "structured")] == [7, 4, 8]
    for root in (lists, lists / "vtab-1k"):
        dataset = load(f"vtab:kitti-dist?root={root}")
        assert dataset.splits["train"].ids == tuple(f"images/train/{i}.jpg" for i in (5, 0, 3, 2, 1))
        assert dataset.splits["train"].labels.tolist() == [1, 0, 3, 2, 1]
        assert counts(dataset) == {"train": 5, "val": 2, "test": 8}
    assert dataset.summary()["warnings"][:3] == [
        "test has 8 images; VTAB's KITTI-Dist has 711.",
        "train has 5 images; VTAB-1k as published has 800.",
        "val has 2 images; VTAB-1k as published has 200.",
    ]
    assert dataset.name == "VTAB-1k KITTI-Dist"


@pytest.mark.parametrize(("name", "content", "message"), [
    ("val200.txt", "images/a.jpg 4\n", "Line 1 of .*val200.txt is not an image's path and a class from 0 to 3"),
    ("test.txt", "images/a.jpg 0\nimages/b.jpg\n", "Line 2 of .*test.txt"),
    ("test.txt", "\n", "test.txt is empty"),
    ("test.txt", None, "kitti lacks test.txt"),
])  # fmt: skip
def test_lists_that_are_broken(lists, name, content, message):
    path = lists / "vtab-1k" / "kitti" / name
    path.write_text(content) if content is not None else path.unlink()
    with pytest.raises(UserError, match=message):
        open_source(f"vtab:kitti-dist?root={lists}")


def test_class_folders_are_drawn_from_with_a_val_of_their_own_or_without_a_test(tmp_path):
    """1,500 empty files of five classes, one of them rare."""
    root, spec = tmp_path / "resisc45", f"vtab:resisc45?root={tmp_path}"
    sizes = {"airport": 500, "beach": 400, "church": 396, "desert": 202, "rare": 2}
    write_files(root, [f"train/{c}/{i}.jpg" for c, n in sizes.items() for i in range(n)])
    write_files(root, [f"test/{c}/{i}.jpg" for c in sizes for i in range(3)])
    source = open_source(spec)
    assert counts(source) == {"train": 800, "val": 200, "test": 15}
    assert not set(source.splits["train"].ids) & set(source.splits["val"].ids)
    assert np.bincount(source.splits["train"].labels).tolist() == [267, 213, 211, 108, 1]
    assert any("are drawn at random" in text for text in source.warnings)
    assert any("5 classes; VTAB's Resisc45 has 45" in text for text in source.warnings)
    assert open_source(spec).splits["val"].ids == source.splits["val"].ids
    write_files(root, [f"val/beach/{i}.jpg" for i in range(300)])
    val = open_source(spec).splits["val"]
    assert (len(val), {name.split("/")[0] for name in val.ids}) == (200, {"val"})
    (root / "test").rename(tmp_path / "elsewhere")
    source = open_source(spec)
    assert counts(source) == {"train": 800, "val": 200, "test": 299}
    assert any("replaces VTAB's" in text for text in source.warnings)


def test_clevr_counts_from_three_and_is_tested_on_val(tmp_path):
    clevr(tmp_path, 1200)
    source = open_source(f"vtab:clevr-count?root={tmp_path}")
    assert counts(source) == {"train": 800, "val": 200, "test": 16}
    assert source.classes == ("3", "4", "5", "6", "7", "8", "9", "10")
    assert source.splits["test"].labels.tolist() == [i % 8 for i in range(16)]
    assert np.bincount(source.splits["train"].labels).tolist() == [100] * 8


def test_eurosat_has_no_test_of_its_own(tmp_path):
    eurosat(tmp_path, 750)
    assert counts(open_source(f"vtab:eurosat?root={tmp_path}")) == {"train": 800, "val": 200, "test": 300}
