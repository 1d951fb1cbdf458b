"""The transfer sets: torchvision's files, the papers' splits."""

import json
import pickle

import numpy as np
import pytest
import scipy.io
from PIL import Image

from vitmods import data
from vitmods.data.sources import SOURCES, open_source
from vitmods.recipes import Augment
from vitmods.util.errors import UserError

AUGMENT = Augment(crop="none", flip=0.0, eval_crop=1.0)


def flowers(root, write_files, jpeg):
    """Twelve images: 1-4 train, 5-6 val, 7-12 test; of classes 1, 2, 3 in turn."""
    base = root / "flowers-102"
    write_files(base, {f"jpg/image_{i:05d}.jpg": jpeg(i) for i in range(1, 13)})
    scipy.io.savemat(base / "setid.mat", {"trnid": [[1, 2, 3, 4]], "valid": [[5, 6]], "tstid": [list(range(7, 13))]})
    scipy.io.savemat(base / "imagelabels.mat", {"labels": [[i % 3 + 1 for i in range(1, 13)]]})


def cars(root, write_files, jpeg):
    base = root / "stanford_cars"
    write_files(
        base, {f"cars_{split}/{i:05d}.jpg": jpeg(i + 10 * len(split)) for split in ("train", "test") for i in range(6)}
    )
    (base / "devkit").mkdir()
    fields = [("fname", "O"), ("class", "u2")]
    rows = np.array([[(f"{i:05d}.jpg", i % 2 + 1) for i in range(6)]], dtype=fields)
    scipy.io.savemat(base / "devkit" / "cars_train_annos.mat", {"annotations": rows})
    scipy.io.savemat(base / "cars_test_annos_withlabels.mat", {"annotations": rows})
    names = np.array(["Audi TT", "Ford GT"], dtype=object)
    scipy.io.savemat(base / "devkit" / "cars_meta.mat", {"class_names": names})


def sun(root, write_files, jpeg):
    """Two classes, one of them below a folder of two levels."""
    for c, name in enumerate(("a/abbey", "b/bow_window/indoor")):
        write_files(root / "SUN397" / name, {f"sun_{i:02d}.jpg": jpeg(100 * c + i) for i in range(10)})
    (root / "SUN397" / "ClassName.txt").write_text("/a/abbey\n/b/bow_window/indoor\n")


def test_flowers_are_trained_on_train_and_val_together(tmp_path, write_files, jpeg, monkeypatch):
    flowers(tmp_path, write_files, jpeg)
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
    dataset = data.load(f"flowers102:{tmp_path}", img_size=8, augment=AUGMENT, limit_val=3)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 3, "val": 3, "test": 6}


def test_cars(tmp_path, write_files, jpeg):
    cars(tmp_path, write_files, jpeg)
    source = open_source(f"cars:{tmp_path}")
    assert source.classes == ("Audi TT", "Ford GT")
    assert source.splits["test"].labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_cifar(tmp_path, monkeypatch):
    base = tmp_path / "cifar-100-python"
    base.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)
    for part in ("train", "test"):
        (base / part).write_bytes(pickle.dumps({"data": pixels, "fine_labels": [i % 5 for i in range(20)]}))
    (base / "meta").write_bytes(pickle.dumps({"fine_label_names": list("abcde")}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *arguments: True)
    dataset = data.load(f"cifar100:{tmp_path}", img_size=32, augment=AUGMENT)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 15, "val": 5, "test": 20}
    assert any(w.startswith("15 images of test are also in train") for w in dataset.summary()["warnings"])


def test_sun_without_lists_is_split_by_name_whatever_the_disks_order(tmp_path, write_files, jpeg):
    sun(tmp_path, write_files, jpeg)
    source = open_source(f"sun397:{tmp_path}")
    train = source.splits["train"]
    assert (list(source.splits), train.ids) == (["train"], tuple(sorted(train.ids)))
    assert train.ids[10] == "b/bow_window/indoor/sun_00.jpg"
    assert train.labels.tolist() == [0] * 10 + [1] * 10
    image = np.asarray(train.fetch(int(train.keys[10])))
    assert np.array_equal(image, np.asarray(Image.open(tmp_path / "SUN397" / train.ids[10])))
    assert any("its splits are drawn" in text for text in source.warnings)


def test_sun_with_the_lists_of_tensorflow_datasets(tmp_path, write_files, jpeg):
    sun(tmp_path, write_files, jpeg)
    for part, numbers in (("tr", (9, 1)), ("va", (2,)), ("te", (3, 4, 5))):
        lines = [f"/{name}/sun_{i:02d}.jpg\n" for name in ("b/bow_window/indoor", "a/abbey") for i in numbers]
        (tmp_path / f"sun397_tfds_{part}.txt").write_text("".join(lines))
    source = open_source(f"sun397:{tmp_path}")
    assert {name: len(records) for name, records in source.splits.items()} == {"train": 4, "val": 2, "test": 6}
    assert source.splits["train"].ids[:2] == ("b/bow_window/indoor/sun_09.jpg", "b/bow_window/indoor/sun_01.jpg")
    assert source.splits["train"].labels.tolist() == [1, 1, 0, 0]
    (tmp_path / "sun397_tfds_va.txt").unlink()
    with pytest.raises(UserError, match=r"sun397_tfds_va\.txt missing"):
        open_source(f"sun397:{tmp_path}")


def test_sun_with_its_partitions(tmp_path, write_files, jpeg):
    sun(tmp_path, write_files, jpeg)
    folder = tmp_path / "SUN397" / "Partitions"
    folder.mkdir()
    (folder / "Training_03.txt").write_text("/a/abbey/sun_01.jpg\r\n/b/bow_window/indoor/sun_01.jpg\r\n")
    (folder / "Testing_03.txt").write_text("/a/abbey/sun_02.jpg\n")
    source = open_source(f"sun397:{tmp_path}?partition=3")
    assert {name: records.labels.tolist() for name, records in source.splits.items()} == {"train": [0, 1], "test": [0]}
    (folder / "Testing_03.txt").write_text("/a/abbey/sun_99.jpg\n")
    with pytest.raises(UserError, match=r"names 1 images that are not in .*SUN397, .* a/abbey/sun_99\.jpg"):
        open_source(f"sun397:{tmp_path}?partition=3")
    with pytest.raises(UserError, match="partitions 1 to 10, not 11"):
        open_source(f"sun397:{tmp_path}?partition=11")


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "cars", "flowers102", "pets", "food101", "dtd", "sun397"])
def test_missing_files_are_named_with_their_places(tmp_path, name):
    with pytest.raises(UserError) as caught:
        open_source(f"{name}:{tmp_path}")
    text = str(caught.value)
    assert text.startswith(f"{SOURCES[name].title} was not found in {tmp_path}: torchvision's")
    assert f"  {tmp_path}/{SOURCES[name].layout[0]}\n" in text
    assert SOURCES[name].origin in text
    assert "download=True" not in text


def inaturalist(root, year, write_files, jpeg):
    categories = [{"id": i, "name": name} for i, name in ((30, "Bufo bufo"), (10, "Apis mellifera"), (20, "Bufo bufo"))]
    number = 0
    for split, count in (("train", 6), ("val", 3)):
        images, annotations = [], []
        for i in range(count):
            number += 1
            name = f"train_val{year}/Animalia/{number % 3}/{number}.jpg"
            write_files(root, {name: jpeg(number)})
            images.append({"id": number, "file_name": name})
            annotations.append({"id": 1000 - number, "image_id": number, "category_id": 10 * (i % 3 + 1)})
        table = {"images": images[::-1], "annotations": annotations, "categories": categories}
        (root / f"{split}{year}.json").write_text(json.dumps(table))


@pytest.mark.parametrize("year", [2018, 2019])
def test_inaturalist(tmp_path, write_files, jpeg, year):
    inaturalist(tmp_path, year, write_files, jpeg)
    dataset = data.load(f"inat{year}:{tmp_path}", img_size=8, augment=AUGMENT, val_fraction=0)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 6, "test": 3}
    assert dataset.classes == ("Apis mellifera", "Bufo bufo (1)", "Bufo bufo (2)")
    train = dict(zip(dataset.splits["train"].ids, dataset.splits["train"].labels.tolist(), strict=True))
    assert train == {f"train_val{year}/Animalia/{n % 3}/{n}.jpg": (n - 1) % 3 for n in range(1, 7)}
    assert f"test has 3 images; iNaturalist {year} as published has" in " ".join(dataset.summary()["warnings"])
    (tmp_path / f"val{year}.json").write_text('{"images": []}')
    with pytest.raises(UserError, match=f"val{year}.json is not iNaturalist's table"):
        open_source(f"inat{year}:{tmp_path}")
    (tmp_path / f"val{year}.json").unlink()
    with pytest.raises(UserError, match=rf"val{year}\.json is missing\.\n.*\n  .*train_val{year}/"):
        open_source(f"inat{year}:{tmp_path}")


def test_inaturalist_tables_of_different_years(tmp_path, write_files, jpeg):
    inaturalist(tmp_path, 2018, write_files, jpeg)
    table = json.loads((tmp_path / "val2018.json").read_text())
    table["annotations"][0]["category_id"] = 999
    (tmp_path / "val2018.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match="labels images or classes that are not listed"):
        open_source(f"inat2018:{tmp_path}")
