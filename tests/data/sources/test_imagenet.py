"""ImageNet-1k: every layout gives the same images with the same labels."""

import gzip
import sys
import tarfile

import numpy as np
import pytest

from vitmods import data
from vitmods.data.records import Records, Source
from vitmods.data.sources import open_source
from vitmods.data.sources import wds as tars
from vitmods.papers.sources import imagenet as module
from vitmods.papers.sources.imagenet import titles, wnids
from vitmods.recipes import Augment
from vitmods.util.errors import UserError

CLASSES = (2, 517, 999)  # of the 1,000: what the small layouts hold
VAL = (999, 2, 517, 2, 999, 517)  # validation image i + 1 is of this class
AUGMENT = Augment(crop="none", flip=0.0, eval_crop=1.0)


def val_name(number):
    return f"ILSVRC2012_val_{number:08d}.JPEG"


@pytest.fixture
def train(jpeg):
    """Four images of each class, by class/name."""
    return {
        f"{wnids()[c]}/{wnids()[c]}_{i}.JPEG": jpeg(10 * c + i) for c in CLASSES for i in range(4)
    }  # their names go by class


@pytest.fixture
def val(jpeg):
    return {val_name(i): jpeg(50_000 + i) for i in range(1, len(VAL) + 1)}


def in_folders(root, train, val, write_files):
    write_files(root / "train", train)
    write_files(root / "val", {f"{wnids()[c]}/{name}": raw for c, (name, raw) in zip(VAL, val.items(), strict=True)})


def content(source):
    """For each split the title of every image's class, by its bytes."""
    return {
        split: {r.fetch(int(r.keys[i])): source.classes[r.labels[i]] for i in range(len(r))}
        for split, r in source.splits.items()
    }


@pytest.fixture
def expected(train, val):
    """content() of the set, whatever its layout."""
    by_wnid = dict(zip(wnids(), titles(), strict=True))
    return {
        "train": {raw: by_wnid[name.split("/")[0]] for name, raw in train.items()},
        "val": {raw: titles()[c] for c, raw in zip(VAL, val.values(), strict=True)},
    }


def test_names_of_classes_and_sets_of_all_of_them(tmp_path, write_files):
    assert wnids() == tuple(sorted(wnids()))
    assert len(set(titles())) == len(wnids()) == 1000
    assert titles()[0] == "tench"
    assert (titles()[134], titles()[517]) == ("crane (n02012849)", "crane (n03126707)")  # a bird and a machine
    write_files(tmp_path, {f"{split}/{wnid}/{split}.JPEG": b"" for split in ("train", "val") for wnid in wnids()})
    source = open_source(f"imagenet:{tmp_path}")
    assert source.class_map is None
    assert source.classes == titles()
    assert source.splits["val"].labels.tolist() == list(range(1000))


def test_folders(tmp_path, train, val, expected, write_files):
    in_folders(tmp_path, train, val, write_files)
    source = open_source(f"imagenet:{tmp_path}")
    assert content(source) == expected
    assert source.classes == tuple(titles()[c] for c in CLASSES)
    assert source.class_map == CLASSES
    assert source.splits["train"].ids[0] == "train/n01484850/n01484850_0.JPEG"
    assert [w for w in source.warnings if "ImageNet-1k as published" in w] == [
        "train has 12 images; ImageNet-1k as published has 1,281,167.",
        "val has 6 images; ImageNet-1k as published has 50,000.",
    ]


@pytest.mark.parametrize("inner", ["ILSVRC/Data/CLS-LOC", "Data/CLS-LOC"])
def test_kaggle(tmp_path, train, val, expected, write_files, inner):
    write_files(tmp_path / inner, {f"train/{name}": raw for name, raw in train.items()})
    write_files(tmp_path / inner, {f"val/{name}": raw for name, raw in val.items()})
    lines = [f"ILSVRC2012_val_{i:08d},{wnids()[c]} 1 2 3 4 {wnids()[c]} 5 6 7 8 " for i, c in enumerate(VAL, 1)]
    (tmp_path / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *lines[::-1]]))
    assert content(open_source(f"imagenet:{tmp_path}")) == expected


@pytest.mark.parametrize("form", ["archive", "folder", "numbers", "wnids", "synsets", "chosen"])
def test_flat_val_with_any_list(tmp_path, train, val, expected, write_files, write_devkit, form):
    write_files(tmp_path, {f"train/{name}": raw for name, raw in train.items()})
    write_files(tmp_path, {f"val/{name}": raw for name, raw in val.items()})
    spec = f"imagenet:{tmp_path}"
    pairs = [(val_name(i), c) for i, c in enumerate(VAL, 1)]
    if form in ("archive", "folder"):
        write_devkit(tmp_path, list(VAL))
    if form == "folder":
        with tarfile.open(tmp_path / "ILSVRC2012_devkit_t12.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
        (tmp_path / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    if form == "numbers":
        (tmp_path / "val.txt").write_text("".join(f"{name} {c}\n" for name, c in pairs[::-1]))
    if form == "wnids":
        (tmp_path / "val" / "val.txt").write_text("".join(f"{name}\t{wnids()[c]}\n" for name, c in pairs))
    if form == "synsets":
        names = "".join(f"{wnids()[c]}\n" for c in VAL)
        (tmp_path / "imagenet_2012_validation_synset_labels.txt").write_text(names)
    if form == "chosen":
        (tmp_path / "mine").write_text("".join(f"{name} {c}\n" for name, c in pairs))
        spec += f"?labels={tmp_path / 'mine'}"
    assert content(open_source(spec)) == expected


def test_the_devkit_is_read_as_torchvision_reads_it(tmp_path, write_devkit, monkeypatch):
    import torch
    from torchvision.datasets import imagenet as theirs

    from vitmods.papers.sources.imagenet import val_labels

    write_devkit(tmp_path, [5, 999, 0, 321])
    monkeypatch.setattr(theirs, "_verify_archive", lambda *arguments: None)
    theirs.parse_devkit_archive(tmp_path)
    _, val_wnids = torch.load(tmp_path / "meta.bin", weights_only=True)
    actual = val_labels([tmp_path], None)
    assert [wnids()[actual[i]] for i in range(1, 5)] == val_wnids


@pytest.fixture
def archives(tmp_path, train, val, write_tar, write_devkit):
    """The official files: a tar of tars, a tar of images, the devkit."""
    root = tmp_path / "archives"
    inner = {}
    for c in CLASSES:
        of_class = {name.split("/")[1]: raw for name, raw in train.items() if name.startswith(wnids()[c])}
        write_tar(tmp_path / "inner.tar", of_class)
        inner[f"{wnids()[c]}.tar"] = (tmp_path / "inner.tar").read_bytes()
    write_tar(root / "ILSVRC2012_img_train.tar", inner)
    write_tar(root / "ILSVRC2012_img_val.tar", dict(reversed(val.items())))
    write_devkit(root, list(VAL))
    return root


def test_official_archives_are_read_in_place(archives, expected):
    before = sorted(archives.iterdir())
    source = open_source(f"imagenet:{archives}")
    assert content(source) == expected
    assert source.splits["val"].ids[0] == f"ILSVRC2012_img_val.tar/{val_name(1)}"
    assert source.splits["train"].ids[0] == "ILSVRC2012_img_train.tar/n01484850/n01484850_0.JPEG"
    assert sorted(archives.iterdir()) == before
    dataset = data.load(f"imagenet:{archives}", img_size=8, augment=AUGMENT)
    assert next(iter(dataset.eval_batches("val", 6))).targets.tolist() == [CLASSES.index(c) for c in VAL]
    assert dataset.class_map == CLASSES
    assert dataset.summary()["class_map"] == list(CLASSES)


def test_the_list_of_a_large_archive_is_kept(archives, own_cache, monkeypatch):
    path = archives / "ILSVRC2012_img_train.tar"
    members = tars.open_tar(path)
    assert not own_cache.exists()
    monkeypatch.setattr(tars, "_REMEMBERED", 1)
    tars.open_tar(path)
    monkeypatch.setattr(tars, "members", lambda *_, **__: pytest.fail("it was listed again"))
    assert tars.open_tar(path) == members
    path.write_bytes(path.read_bytes() + b"\0" * 512)
    with pytest.raises(BaseException, match="listed again"):
        tars.open_tar(path)


@pytest.mark.parametrize("cut", [0.95, 0.6, 0.3])
def test_an_archive_that_is_cut_short(archives, cut):
    path = archives / "ILSVRC2012_img_train.tar"
    full = path.read_bytes()
    end = full.rstrip(b"\0")
    path.write_bytes(end[: int(len(end) * cut)])
    with pytest.raises(UserError, match=r"ILSVRC2012_img_train\.tar cannot be used: .*cut short"):
        open_source(f"imagenet:{archives}")


def test_a_class_whose_own_archive_is_cut_short(archives, tmp_path, write_tar):
    inner = (tmp_path / "inner.tar").read_bytes().rstrip(b"\0")
    write_tar(archives / "ILSVRC2012_img_train.tar", {"n01484850.tar": inner[:-20], "n01491361.tar": inner})
    with pytest.raises(UserError, match=r"_3\.JPEG: the tar file is cut off within it"):
        open_source(f"imagenet:{archives}")


@pytest.mark.parametrize("name", ["ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"])
def test_archives_of_other_things(archives, write_tar, name):
    (archives / name).write_bytes(gzip.compress((archives / name).read_bytes()))
    with pytest.raises(UserError, match=f"{name} cannot be used"):
        open_source(f"imagenet:{archives}")
    write_tar(archives / name, {"cat.jpg": b"x"})
    with pytest.raises(UserError, match=f"{name}.*(is not ILSVRC 2012's|does not hold ILSVRC2012_val)"):
        open_source(f"imagenet:{archives}")


def test_damage_inside_an_archive_is_reported(archives):
    path = archives / "ILSVRC2012_img_val.tar"
    second = tars.open_tar(path)[1].offset
    content = bytearray(path.read_bytes())
    content[second - 512 : second] = b"x" * 512
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"the header at byte {second - 512:,} is damaged; .*, after 1 members"):
        open_source(f"imagenet:{archives}")


def test_folders_go_before_the_archives_beside_them(archives, train, val, expected, write_files):
    in_folders(archives, train, val, write_files)
    (archives / "ILSVRC2012_img_train.tar").write_bytes(b"not looked at")
    source = open_source(f"imagenet:{archives}")
    assert content(source) == expected
    assert any("ILSVRC2012_img_train.tar was not used" in text for text in source.warnings)


def test_parquet_goes_to_hugging_faces_reader(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00000-of-00294.parquet").write_bytes(b"")
    none = Records((), np.zeros(0, np.int64), (), lambda key: b"", np.zeros(0, np.int64))
    seen = []

    def fake(name, options):
        seen.append(name)
        return Source("x", tuple(map(str, range(1000))), {"train": none, "val": none, "test": none})

    monkeypatch.setattr(module, "hf_set", fake)
    source = open_source(f"imagenet:{tmp_path}")
    assert seen == [str(tmp_path)]
    assert (list(source.splits), source.classes[0]) == (["train", "val"], "tench")


def test_parquet_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "validation-00000-of-00014.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"pip install .vitmods\[hf\]"):
        open_source(f"imagenet:{tmp_path}")


def test_minival(tmp_path, val, write_files):
    train = {f"{wnids()[c]}/{wnids()[c]}_{i}.JPEG": b"" for c in CLASSES for i in range(100)}
    in_folders(tmp_path, train, val, write_files)
    source = open_source(f"imagenet:{tmp_path}?minival=1")
    assert {name: len(records) for name, records in source.splits.items()} == {"train": 297, "val": 3, "test": 6}
    assert not set(source.splits["train"].ids) & set(source.splits["val"].ids)
    in_folders(tmp_path / "moved" / "Data" / "CLS-LOC", train, val, write_files)
    moved = open_source(f"imagenet:{tmp_path / 'moved'}?minival=1").splits["val"].ids
    assert [name.split("/")[-1] for name in moved] == [name.split("/")[-1] for name in source.splits["val"].ids]
    assert [w for w in source.warnings if "as published" in w] == [
        "train has 300 images; ImageNet-1k as published has 1,281,167.",
        "val has 6 images; ImageNet-1k as published has 50,000.",
    ]
    assert source.warnings[-1] == "minival: val is 1% of train, and test is the published val."
    in_folders(tmp_path / "val-alone", {}, val, write_files)
    with pytest.raises(UserError, match="out of ImageNet's train, which is not there"):
        open_source(f"imagenet:{tmp_path / 'val-alone'}?minival=1")
    assert list(open_source(f"imagenet:{tmp_path}?minival=0").splits) == ["train", "val"]
    with pytest.raises(UserError, match="minival is 1 or 0"):
        open_source(f"imagenet:{tmp_path}?minival=yes")


def test_val_alone_is_an_evaluation_set(tmp_path, train, val, write_files):
    in_folders(tmp_path, {}, val, write_files)
    dataset = data.load(f"imagenet:{tmp_path}", img_size=8, augment=AUGMENT)
    assert (list(dataset.splits), dataset.eval_split) == (["val"], "val")
    assert len(dataset.samples(2)) == 2
    assert "Without a train split this set is for evaluation only." in dataset.summary()["warnings"]
    with pytest.raises(UserError, match="ImageNet-1k is an evaluation set"):
        dataset.steps_per_epoch(2)
    with pytest.raises(UserError, match="ImageNet-1k is an evaluation set"):
        dataset.train_batches(seed=0, epoch=0, batch_size=2)
    assert data.check(f"imagenet:{tmp_path}").fit


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "it holds nothing"),
        ({"notes.txt": b""}, "it holds notes.txt"),
        ({"n01484850/a.JPEG": b""}, "give the folder above, which holds train and val"),
        ({"train/n01484850/a.JPEG": b""}, "there is train, but not val"),
        ({"train/n01484850/a.JPEG": b"", f"val/{val_name(1)}": b""}, "neither class folders nor a list of labels"),
    ],
)
def test_what_is_missing_is_reported_with_all_layouts(tmp_path, write_files, files, reason):
    write_files(tmp_path, files)
    with pytest.raises(UserError) as caught:
        open_source(f"imagenet:{tmp_path}")
    text = str(caught.value)
    assert reason in text
    for layout in ("train/n01440764/*.JPEG", "ILSVRC2012_img_train.tar", "LOC_val_solution.csv", "parquet", "devkit"):
        assert layout in text
    assert "image-net.org" in text
    assert "Nothing is downloaded" in text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({f"val/{val_name(1)}": b"", "val/n01484850/b.JPEG": b""}, "two layouts are mixed"),
        ({"val/n01484850/b.JPEG": b"", "val/cats/b.JPEG": b""}, "are not classes of this set: cats"),
        ({"val/n01484850/readme": b""}, "No images in class folders under"),
        ({f"val/{val_name(1)}": b"", "val.txt": b"1\n"}, "Numbers do not suffice"),
        ({f"val/{val_name(1)}": b"", "val.txt": b"a.jpg 7\n"}, "without an image and class of ImageNet: 'a.jpg 7'"),
        ({f"val/{val_name(2)}": b"", "val.txt": f"{val_name(1)} 7\n".encode()}, "lacks 1 of the 1 validation"),
        ({f"val/{val_name(1)}": b"", "val.txt": b"n00000000\n"}, "Line 1 of the labels in .* is not a class"),
        ({f"val/{val_name(1)}": b"", "ILSVRC2012_devkit_t12.tar.gz": b"x"}, "devkit .* cannot be read"),
        ({f"val/{val_name(1)}": b"", "?labels=nowhere": b""}, "The list of labels nowhere does not exist"),
    ],
)
def test_layouts_that_cannot_be_understood(tmp_path, write_files, files, message):
    query = next((name for name in files if name.startswith("?")), "")
    write_files(tmp_path, {name: raw for name, raw in files.items() if name != query})
    with pytest.raises(UserError, match=message):
        open_source(f"imagenet:{tmp_path}{query}")
