"""What is found in a folder, and what is said of the rest."""

import os
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import vitmods as vm
from vitmods import data
from vitmods.data.read import Unreadable
from vitmods.data.sources.folder import folder
from vitmods.util.errors import UserError


def warned(root):
    return "\n".join(folder(str(root)).warnings)


@pytest.mark.parametrize(
    ("folders", "classes", "labels"),
    [
        ({"dog": 2, "cat": 3}, ("cat", "dog"), [0, 0, 0, 1, 1]),
        ({"train": 2, "bus": 2, "test": 2}, ("bus", "test", "train"), [0, 0, 1, 1, 2, 2]),
        ({"cat/indoor/old": 2, "cat/outdoor": 1, "dog": 1}, ("cat", "dog"), [0, 0, 0, 1]),
        ({"cat/train": 2, "cat/wild": 2, "dog/train": 2, "dog/wild": 1}, ("cat", "dog"), [0] * 4 + [1] * 3),
        ({"cat": 3}, ("cat",), [0, 0, 0]),
    ],
)
def test_class_folders(make_folder, folders, classes, labels):
    root = make_folder(folders)
    source = folder(root)
    assert (source.name, source.classes, set(source.splits)) == ("pets", classes, {"train"})
    assert source.splits["train"].ids == tuple(sorted(p.relative_to(root).as_posix() for p in root.rglob("*.png")))
    assert source.splits["train"].labels.tolist() == labels
    assert not [text for text in source.warnings if "not used" in text]


def test_a_listed_image_takes_little_memory_and_its_folder_is_read_once(tmp_path, monkeypatch):
    """Every worker of a study lists all images: a million must not take seconds and gigabytes in each."""
    for number in range(2000):
        path = tmp_path / f"class{number % 2}" / f"{number:06d}.png"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    read: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: read.append(Path(path).name) or scandir(path))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        source = folder(tmp_path)
        bytes_an_image = (tracemalloc.get_traced_memory()[0] - before) / 2000
    finally:
        tracemalloc.stop()
    assert len(source.splits["train"]) == 2000
    assert bytes_an_image < 600
    assert sorted(name for name in read if name.startswith("class")) == ["class0", "class1"]


@pytest.mark.parametrize("val", ["val", "valid", "validation", "Validation", "dev"])
@pytest.mark.parametrize(("train", "test"), [("train", "test"), ("training", "Testing")])
def test_split_folders_under_usual_names(make_folder, val, train, test):
    for split in (train, val, test):
        root = make_folder({f"{split}/a": 1, f"{split}/b": 1})
    source = folder(str(root))
    assert set(source.splits) == {"train", "val", "test"}
    assert source.splits["val"].ids == (f"{val}/a/000.png", f"{val}/b/000.png")


def test_what_is_not_used_is_reported(make_folder):
    root = make_folder({"train/cat": 2, "train/dog": 2})
    (root / "train" / "empty").mkdir()
    (root / "train" / "loose.jpg").write_bytes(b"x")
    (root / "train" / "cat" / "notes.txt").write_text("x")
    (root / "train" / "cat" / ".hidden.jpg").write_bytes(b"x")
    (root / "masks").mkdir()
    text = warned(root)
    assert "1 images directly in" in text
    assert "do not hold images and are not classes: empty" in text
    assert "not used: 1 .txt" in text
    assert "these folders were not used: masks" in text
    assert "hidden" not in text
    assert folder(str(root)).classes == ("cat", "dog")


def test_links_that_loop_end(make_folder):
    root = make_folder({"cat": 2, "dog": 2})
    (root / "cat" / "up").symlink_to(root)
    (root / "dog" / "self").symlink_to(root / "dog")
    (root / "dog" / "other").symlink_to(root / "cat")
    (root / "dog" / "ring.png").symlink_to(root / "dog" / "ring.png")
    source = folder(str(root))
    assert sorted(source.splits["train"].ids) == [
        *("cat/000.png", "cat/001.png", "dog/000.png", "dog/001.png", "dog/ring.png")
    ]
    assert "were not read again" in warned(root)
    records = source.splits["train"]
    with pytest.raises(Unreadable, match="symbolic links"):
        records.fetch(records.ids.index("dog/ring.png"))


def test_linked_files_and_class_folders_are_read(make_folder, tmp_path):
    elsewhere = make_folder({"x": 2}, under="elsewhere")
    root = make_folder({"cat": 1})
    (root / "dog").symlink_to(elsewhere / "x")
    (root / "cat" / "linked.png").symlink_to(elsewhere / "x" / "000.png")
    assert folder(str(root)).splits["train"].ids == ("cat/000.png", "cat/linked.png", "dog/000.png", "dog/001.png")


def test_a_pipe_named_like_an_image_does_not_block(make_folder):
    root = make_folder({"cat": 1, "dog": 1})
    os.mkfifo(root / "cat" / "pipe.png")
    records = folder(str(root)).splits["train"]
    with pytest.raises(Unreadable, match="not a regular file"):
        records.fetch(records.ids.index("cat/pipe.png"))


def test_names_of_all_kinds(make_folder):
    long = "n" * 251 + ".png"
    root = make_folder({"猫 & <b>": 1, "cafe\u0301": 1, "-rf": 1})
    os.rename(root / "-rf" / "000.png", root / "-rf" / long)
    source = folder(str(root))
    assert source.classes == ("-rf", "caf\u00e9", "猫 & <b>")
    assert source.splits["train"].ids[0] == f"-rf/{long}"
    assert all(source.splits["train"].fetch(i) for i in range(3))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse names that are not text")
def test_a_name_that_is_not_text_can_be_printed(make_folder):
    root = make_folder({"cat": 1})
    os.rename(os.fsencode(root / "cat"), os.fsencode(root) + b"/caf\xe9")
    source = folder(str(root))
    assert source.classes == (r"caf\udce9",)
    assert source.splits["train"].fetch(0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", r"The folder .*nowhere does not exist.*digits"),
        ("x" * 5000, "is too long for this system"),
        ("list.txt", "is a file"),
    ],
)
def test_paths_that_are_not_folders(tmp_path, name, message):
    (tmp_path / "list.txt").write_text("x")
    with pytest.raises(UserError, match=message):
        folder(str(tmp_path / name))


def test_a_folder_that_may_not_be_listed(make_folder, monkeypatch):
    root = make_folder({"cat": 1, "dog": 1})
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UserError, match=r"dog cannot be listed: Permission denied"):
        folder(str(root))


def test_records_have_stamps_and_can_be_taken(make_folder):
    root = make_folder({"cat": 2})
    before = folder(str(root)).splits["train"].stamps
    (root / "cat" / "000.png").write_bytes(b"other")
    after = folder(str(root)).splits["train"].stamps
    assert before[0] != after[0]
    assert before[1] == after[1]
    records = folder(str(make_folder({"cat": 3}))).splits["train"].take(np.array([2, 0]))
    assert records.ids == ("cat/002.png", "cat/000.png")
    assert records.keys.tolist() == [2, 0]


ABOVE = "is above the folders of the classes. Give .*"


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ("all/pets/train/cat all/pets/train/dog all/pets/test/cat", f"{ABOVE}all/pets"),
        ("pets/train/cat pets/train/dog", f"{ABOVE}pets"),
        ("all/pets/cat all/pets/dog", f"{ABOVE}all/pets"),
        ("ILSVRC/Data/CLS/train/cat ILSVRC/Data/CLS/train/dog", f"{ABOVE}ILSVRC/Data/CLS"),
        ("pets/big/cat pets/big/dog pets/small/cat pets/small/dog", f"{ABOVE}big or .*small"),
        ("pets/train/cat pets/train/dog cars/train/bus cars/train/van", f"{ABOVE}cars or .*pets"),
        ("val/a val/b test/a test/b", "holds test and val with class folders, but not a train folder"),
        ("train/a val/a valid/a", r"val and valid .* keep one"),
        ("", r"No images in class folders under .*Expected FOLDER/class/image.jpg"),
    ],
)
def test_folders_that_are_refused(make_folder, folders, message):
    root = make_folder(dict.fromkeys(folders.split(), 2), under="root")
    root.mkdir(exist_ok=True)
    (root / "list.csv").write_text("a,b")
    with pytest.raises(UserError, match=message):
        folder(root)


@pytest.mark.parametrize(("images", "masks"), [("images", "masks"), ("train/images", "train/masks"), ("Image", "GT")])
def test_images_beside_their_masks_are_not_two_classes(make_folder, images, masks):
    root = make_folder({images: 3, masks: 3})
    with pytest.raises(UserError, match=r"look like images and their masks.*if they are classes, rename one"):
        folder(str(root))
    (root / masks).rename((root / masks).with_name("hats"))
    assert len(folder(str(root)).classes) == 2


def test_images_without_class_folders_have_no_class(make_folder):
    root = make_folder({"train": 3, "val": 2})
    source = folder(str(root))
    assert source.target == "none"
    assert {name: len(part) for name, part in source.splits.items()} == {"train": 3, "val": 2}
    augment = vm.Recipe().augment
    for path in (root / "train", make_folder({"cat": 5}, under="one")):
        with pytest.raises(UserError, match=r"no class of each image, not a class.*folder|All images have one class"):
            data.load(path, img_size=8, augment=augment)
        dataset = data.load(path, img_size=8, augment=augment, target="none", test_fraction=0.2, val_fraction=0.2)
        batch = next(dataset.train_batches(seed=0, epoch=0, batch_size=2))
        assert batch.targets.tolist() == [0] * len(batch.inputs)
        assert dataset.classes == ("image",)
        assert [text for text in dataset.summary()["warnings"] if "no label" in text] == []
    with pytest.raises(UserError, match="no class of each image, not a class"):
        data.check(root / "train")
