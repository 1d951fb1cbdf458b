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


def warned(root: Path) -> str:
    return "\n".join(folder(str(root)).warnings)


def test_class_folders(make_folder) -> None:
    source = folder(str(make_folder({"dog": 2, "cat": 3})))
    assert source.name == "pets"
    assert source.classes == ("cat", "dog")
    assert source.splits["train"].ids == tuple(
        f"{c}/{i:03d}.png" for c, n in (("cat", 3), ("dog", 2)) for i in range(n)
    )
    assert source.splits["train"].labels.tolist() == [0, 0, 0, 1, 1]
    assert source.warnings == []


def test_a_listed_image_takes_little_memory_and_its_folder_is_read_once(tmp_path: Path, monkeypatch) -> None:
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
def test_split_folders_under_usual_names(make_folder, val: str, train: str, test: str) -> None:
    for split in (train, val, test):
        root = make_folder({f"{split}/a": 1, f"{split}/b": 1})
    source = folder(str(root))
    assert set(source.splits) == {"train", "val", "test"}
    assert source.splits["val"].ids == (f"{val}/a/000.png", f"{val}/b/000.png")


def test_a_class_may_be_called_train(make_folder) -> None:
    source = folder(str(make_folder({"train": 2, "bus": 2, "test": 2})))
    assert source.classes == ("bus", "test", "train")
    assert set(source.splits) == {"train"}


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (("val/a", "val/b", "test/a", "test/b"), "holds test and val with class folders, but no train folder"),
        (("train/a", "val/a", "valid/a"), r"val and valid .* keep one"),
    ],
)
def test_split_folders_that_are_refused(make_folder, classes, message) -> None:
    with pytest.raises(UserError, match=message):
        folder(str(make_folder(dict.fromkeys(classes, 1))))


def test_images_below_sub_folders_belong_to_the_class(make_folder) -> None:
    source = folder(str(make_folder({"cat/indoor/old": 2, "cat/outdoor": 1, "dog": 1})))
    assert source.classes == ("cat", "dog")
    assert source.splits["train"].labels.tolist() == [0, 0, 0, 1]


def test_what_is_not_used_is_reported(make_folder) -> None:
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


def test_links_that_loop_end(make_folder) -> None:
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


def test_linked_files_and_class_folders_are_read(make_folder, tmp_path: Path) -> None:
    elsewhere = make_folder({"x": 2}, under="elsewhere")
    root = make_folder({"cat": 1})
    (root / "dog").symlink_to(elsewhere / "x")
    (root / "cat" / "linked.png").symlink_to(elsewhere / "x" / "000.png")
    assert folder(str(root)).splits["train"].ids == ("cat/000.png", "cat/linked.png", "dog/000.png", "dog/001.png")


def test_a_pipe_named_like_an_image_does_not_block(make_folder) -> None:
    root = make_folder({"cat": 1, "dog": 1})
    os.mkfifo(root / "cat" / "pipe.png")
    records = folder(str(root)).splits["train"]
    with pytest.raises(Unreadable, match="not a regular file"):
        records.fetch(records.ids.index("cat/pipe.png"))


def test_names_of_all_kinds(make_folder) -> None:
    long = "n" * 251 + ".png"
    root = make_folder({"猫 & <b>": 1, "cafe\u0301": 1, "-rf": 1})
    os.rename(root / "-rf" / "000.png", root / "-rf" / long)
    source = folder(str(root))
    assert source.classes == ("-rf", "caf\u00e9", "猫 & <b>")
    assert source.splits["train"].ids[0] == f"-rf/{long}"
    assert all(source.splits["train"].fetch(i) for i in range(3))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse names that are not text")
def test_a_name_that_is_not_text_can_be_printed(make_folder) -> None:
    root = make_folder({"cat": 1})
    os.rename(os.fsencode(root / "cat"), os.fsencode(root) + b"/caf\xe9")
    source = folder(str(root))
    assert source.classes == (r"caf\udce9",)
    assert source.splits["train"].fetch(0)


@pytest.mark.parametrize("content", [{}, {"cat": 0, "dog": 0}])
def test_nothing_to_see(make_folder, tmp_path: Path, content: dict[str, int]) -> None:
    root = make_folder(content)
    root.mkdir(exist_ok=True)
    (root / "list.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"No images in class folders under .*Expected FOLDER/class/image.jpg"):
        folder(str(root))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", r"There is no folder .*nowhere.*digits"),
        ("x" * 5000, "is too long for this system"),
        ("list.txt", "is a file"),
    ],
)
def test_paths_that_are_not_folders(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "list.txt").write_text("x")
    with pytest.raises(UserError, match=message):
        folder(str(tmp_path / name))


def test_a_folder_that_may_not_be_listed(make_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_folder({"cat": 1, "dog": 1})
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UserError, match=r"dog cannot be listed: Permission denied"):
        folder(str(root))


def test_stamps_change_with_the_file(make_folder) -> None:
    root = make_folder({"cat": 2})
    before = folder(str(root)).splits["train"].stamps
    (root / "cat" / "000.png").write_bytes(b"other")
    after = folder(str(root)).splits["train"].stamps
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_records_take(make_folder) -> None:
    records = folder(str(make_folder({"cat": 3}))).splits["train"].take(np.array([2, 0]))
    assert records.ids == ("cat/002.png", "cat/000.png")
    assert records.keys.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("classes", "meant"),
    [
        ({"all/pets/train/cat": 2, "all/pets/train/dog": 2, "all/pets/test/cat": 1}, "all/pets"),
        ({"pets/train/cat": 2, "pets/train/dog": 2}, "pets"),
        ({"all/pets/cat": 2, "all/pets/dog": 2}, "all/pets"),
        ({"ILSVRC/Data/CLS/train/cat": 2, "ILSVRC/Data/CLS/train/dog": 2}, "ILSVRC/Data/CLS"),
        ({"pets/big/cat": 2, "pets/big/dog": 2, "pets/small/cat": 2, "pets/small/dog": 2}, "big or .*small"),
        ({"pets/train/cat": 2, "pets/train/dog": 2, "cars/train/bus": 2, "cars/train/van": 2}, "cars or .*pets"),
    ],
)
def test_a_folder_above_the_one_that_is_meant(make_folder, classes: dict[str, int], meant: str) -> None:
    with pytest.raises(UserError, match=f"is above the folders of the classes. Give .*{meant}"):
        folder(make_folder(classes, under="root"))


def test_folders_below_a_class_are_its_own(make_folder) -> None:
    root = make_folder({"cat/train": 2, "cat/wild": 2, "dog/train": 2, "dog/wild": 1})
    assert folder(root).classes == ("cat", "dog")
    assert folder(make_folder({"cat": 3}, under="alone")).classes == ("cat",)


@pytest.mark.parametrize(("images", "masks"), [("images", "masks"), ("train/images", "train/masks"), ("Image", "GT")])
def test_images_beside_their_masks_are_not_two_classes(make_folder, images, masks):
    root = make_folder({images: 3, masks: 3})
    with pytest.raises(UserError, match=r"look like images and their masks.*if they are classes, rename one"):
        folder(str(root))
    (root / masks).rename((root / masks).with_name("hats"))
    assert len(folder(str(root)).classes) == 2


def test_images_without_class_folders_have_no_class(make_folder, tmp_path):
    root = make_folder({"train": 3, "val": 2})
    source = folder(str(root))
    assert (source.target, {name: len(part) for name, part in source.splits.items()}) == (
        "nothing",
        {"train": 3, "val": 2},
    )
    flat = tmp_path / "flat"
    (root / "train").rename(flat)
    assert folder(str(flat)).splits["train"].ids == tuple(sorted(path.name for path in flat.iterdir()))
    augment = vm.Recipe().augment
    for path in (flat, make_folder({"cat": 5}, under="one")):
        with pytest.raises(UserError, match=r"no class of each image, not a class.*folder|There is one class only"):
            data.load(path, img_size=8, augment=augment)
        dataset = data.load(path, img_size=8, augment=augment, target="nothing", test_fraction=0.2, val_fraction=0.2)
        batch = next(dataset.train_batches(seed=0, epoch=0, batch_size=2))
        assert batch.targets.tolist() == [0] * len(batch.inputs)
        assert dataset.classes == ("image",)
        assert [text for text in dataset.summary()["warnings"] if "no label" in text] == []
    with pytest.raises(UserError, match="no class of each image, not a class"):
        data.check(flat)
