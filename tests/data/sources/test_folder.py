"""What is found in a folder, and what is said of the rest."""

import os
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitmods import data
from vitmods.data.read import Unreadable
from vitmods.data.sources.folder import folder
from vitmods.util.errors import UserError

from ..support import counts, load, noise, write_files


def test_class_folders_whose_records_have_stamps_and_can_be_taken(make_folder):
    root = make_folder({"cat/indoor/old": 2, "cat/outdoor": 1, "dog": 1})
    source = folder(root)
    assert (source.name, source.classes, set(source.splits)) == ("pets", ("cat", "dog"), {"train"})
    records = source.splits["train"]
    assert records.ids == tuple(sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png")))
    assert records.labels.tolist() == [0, 0, 0, 1]
    (root / records.ids[0]).write_bytes(b"other")
    before, after = records.stamps, folder(root).splits["train"].stamps
    assert (before[0] == after[0], before[1:] == after[1:]) == (False, True)
    taken = records.take(np.array([2, 0]))
    assert (taken.ids, taken.keys.tolist()) == ((records.ids[2], records.ids[0]), [2, 0])
    assert folder(make_folder({"cat": 3}, under="one")).classes == ("cat",)


def test_a_listed_image_takes_little_memory_and_its_folder_is_read_once(tmp_path, monkeypatch):
    """Every worker of a study lists all images: a million must not take seconds and gigabytes in each."""
    write_files(tmp_path, [f"class{number % 2}/{number:06d}.png" for number in range(2000)])
    read, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: read.append(Path(path).name) or scandir(path))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        source = folder(tmp_path)
        bytes_an_image = (tracemalloc.get_traced_memory()[0] - before) / 2000
    finally:
        tracemalloc.stop()
    assert counts(source) == {"train": 2000}
    assert bytes_an_image < 600
    assert sorted(name for name in read if name.startswith("class")) == ["class0", "class1"]


def test_what_is_not_used_is_reported(make_folder):
    root = make_folder({"train/cat": 2, "train/dog": 2})
    write_files(root / "train", {"loose.jpg": "x", "cat/notes.txt": "x", "cat/.hidden.jpg": "x"})
    for name in ("train/empty", "masks"):
        (root / name).mkdir()
    source = folder(root)
    text = "\n".join(source.warnings)
    for words in ("1 images directly in", "do not hold images and are not classes: empty", "not used: 1 .txt",
                  "these folders were not used: masks"):  # fmt: skip
        assert words in text
    assert "hidden" not in text
    assert source.classes == ("cat", "dog")


def test_links_are_followed_until_they_loop(make_folder):
    elsewhere = make_folder({"x": 2}, under="elsewhere")
    root = make_folder({"cat": 1, "dog": 1})
    links = {"cat/up": root, "dog/self": root / "dog", "dog/ring.png": root / "dog/ring.png", "dog/other": root / "cat"}
    for name, to in {**links, "fox": elsewhere / "x", "cat/linked.png": elsewhere / "x/000.png"}.items():
        (root / name).symlink_to(to)
    source = folder(root)
    records = source.splits["train"]
    images = "cat/000.png cat/linked.png dog/000.png dog/ring.png fox/000.png fox/001.png"
    assert records.ids == tuple(images.split())
    assert "were not read again" in "\n".join(source.warnings)
    os.mkfifo(root / "cat" / "pipe.png")
    for name, words in (("dog/ring.png", "symbolic links"), ("cat/pipe.png", "not a regular file")):
        records = folder(root).splits["train"]
        with pytest.raises(Unreadable, match=words):
            records.fetch(records.ids.index(name))


def test_names_of_all_kinds(make_folder):
    long = "n" * 251 + ".png"
    root = make_folder({"猫 & <b>": 1, "cafe\u0301": 1, "-rf": 1})
    os.rename(root / "-rf" / "000.png", root / "-rf" / long)
    source = folder(root)
    assert source.classes == ("-rf", "caf\u00e9", "猫 & <b>")
    assert source.splits["train"].ids[0] == f"-rf/{long}"
    assert all(source.splits["train"].fetch(i) for i in range(3))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse names that are not text")
def test_a_name_that_is_not_text_can_be_printed(make_folder):
    root = make_folder({"cat": 1})
    os.rename(os.fsencode(root / "cat"), os.fsencode(root) + b"/caf\xe9")
    source = folder(root)
    assert source.classes == (r"caf\udce9",)
    assert source.splits["train"].fetch(0)


def test_a_folder_that_may_not_be_listed(make_folder, monkeypatch):
    root, scandir = make_folder({"cat": 1, "dog": 1}), os.scandir

    def refusing(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UserError, match=r"dog cannot be listed: Permission denied"):
        folder(root)


def test_images_without_class_folders_have_no_class(make_folder):
    root = make_folder({"train": 3, "val": 2})
    assert folder(root).target == "none"
    assert counts(folder(root)) == {"train": 3, "val": 2}
    for path in (root / "train", make_folder({"cat": 5}, under="one")):
        with pytest.raises(UserError, match=r"does not say the class of its images.*folder|All images have one class"):
            load(path)
        dataset = load(path, target="none", test_fraction=0.2, val_fraction=0.2)
        batch = next(dataset.train_batches(seed=0, epoch=0, batch_size=2))
        assert batch.targets.tolist() == [0] * len(batch.inputs)
        assert dataset.classes == ("image",)
        assert [text for text in dataset.summary()["warnings"] if "no label" in text] == []
    with pytest.raises(UserError, match="does not say the class of its images"):
        data.check(root / "train")


HEIC = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic"


@pytest.mark.parametrize(("name", "content", "words"), [
    ("a{}.HEIC", HEIC, "HEIC: install what reads it with pip install 'vitmods[heic]'"),
    ("a{}.png", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer: fetch the image with git lfs"),
    ("a{}.jpg", b"<!DOCTYPE html><html>", r"a web page (HTML): download it again"),
    ("a{}.psd", b"8BPS\0\1", "a Photoshop file: convert it"),
    ("a{}", HEIC, "HEIC: install"),
])  # fmt: skip
def test_a_class_of_pictures_that_cannot_be_read_does_not_vanish(make_folder, name, content, words):
    root = make_folder({"bird": 6, "dog": 6})
    write_files(root, {f"cat/{name.format(i)}": content for i in range(6)})
    checked = data.check(root)
    assert not checked.fit
    assert words in checked.text
    for unreadable in ("stop", "skip"):
        with pytest.raises(UserError, match="No image of cat can be read"):
            load(root, unreadable=unreadable)
    assert load(f"{root}?allow=missing", unreadable="skip").summary()["left_out"] == 6


def test_a_heic_photo_is_read_with_the_extra(make_folder):
    pillow_heif = pytest.importorskip("pillow_heif", reason="needs the heic extra")
    root = make_folder({"cat": 3, "dog": 3})
    pillow_heif.register_heif_opener()
    noise(9, (24, 24)).save(root / "cat" / "photo.heic")
    assert data.check(root).summary["splits"]["train"]["per_class"]["cat"] > 2


@pytest.mark.parametrize(("made", "of", "size", "left"), [
    ("@eaDir/{}.png/SYNOPHOTO_M.jpg", "000", 6, 0),  # by its folder, whatever its pixels
    ("small/{}.jpg", "same", 6, 0),
    ("{}_thumb.jpg", "same", 6, 0),
    ("{}-150x150.jpg", "same", 4, 0),
    ("small/{}.jpg", "other", 6, 6),  # other pictures of the same names
    ("{}_2.jpg", "other", 6, 6),
    ("{}_2.jpg", "other", 12, 6),
])  # fmt: skip
def test_smaller_copies_are_left_out_by_their_pixels(make_folder, made, of, size, left):
    root = make_folder({"cat": 6, "dog": 6})
    for i in range(6):
        path = root / "cat" / made.format(f"{i:03d}")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = noise(i if of == "same" else 5000 + i, (12, 12))
        picture.resize((size, size), Image.Resampling.BILINEAR).save(path, quality=95)
    source = folder(root)
    assert counts(source) == {"train": 12 + left}
    assert any("6 smaller copies" in text for text in source.warnings) == (not left)


def test_several_pages_are_counted(make_folder):
    root = make_folder({"cat": 6, "dog": 6})
    pages = [noise(i) for i in range(900, 903)]
    pages[0].save(root / "cat" / "stack.tif", save_all=True, append_images=pages[1:])
    pages[1].save(root / "cat" / "moving.gif", save_all=True, append_images=pages[:1])
    pages[2].save(root / "dog" / "still.tif")
    texts = data.check(root).summary["warnings"]
    assert "2 files with several pages or frames" in " ".join(texts)
    assert "2 files with several pages or frames" in " ".join(load(root).summary()["warnings"])
