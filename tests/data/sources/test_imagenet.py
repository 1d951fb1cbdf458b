"""ImageNet-1k, of which every layout gives the same images with the same labels; and V2, R, C and ReaL: evaluation sets
whose labels are those of the 1,000 classes."""

import gzip
import io
import json
import pkgutil
from functools import cache

import numpy as np
import pytest
import scipy.io
from timm.data import RealLabelsImagenet

from vitmods import data
from vitmods.data.records import Records, Source
from vitmods.data.sources import open_source
from vitmods.data.sources import wds as tars
from vitmods.papers.sources import imagenet as module
from vitmods.papers.sources.imagenet import ARCHIVES, V2_VARIANTS, corruption_specs, titles, val_labels, wnids
from vitmods.util.errors import UserError

from ..support import counts, encoded, load, noise, write_files, write_tar

CLASSES = (2, 517, 999)  # of the 1,000: what the small layouts hold
VAL = (999, 2, 517, 2, 999, 517)  # validation image i + 1 is of this class
DEVKIT = "ILSVRC2012_devkit_t12"


def val_name(number):
    return f"ILSVRC2012_val_{number:08d}.JPEG"


TRAIN_FILES = {
    f"{wnids()[c]}/{wnids()[c]}_{i}.JPEG": encoded(noise(10 * c + i), "JPEG") for c in CLASSES for i in range(4)
}
VAL_FILES = {val_name(i): encoded(noise(50_000 + i), "JPEG") for i in range(1, len(VAL) + 1)}


def in_folders(root, train=TRAIN_FILES, val=VAL_FILES, flat=False):
    write_files(root / "train", train)
    names = {f"{wnids()[c]}/{name}": raw for c, (name, raw) in zip(VAL, val.items(), strict=True)}
    write_files(root / "val", val if flat else names)


@cache
def devkit(classes):
    """name -> content: which says that validation image i is of class classes[i - 1]; its own numbers count the classes
    backwards, and it lists groups of classes too."""
    fields = [("ILSVRC2012_ID", "f8"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "f8")]
    rows = [(1000 - i, wnid, f"name of {i}", "what it is", 0) for i, wnid in enumerate(wnids())]
    meta = io.BytesIO()
    scipy.io.savemat(meta, {"synsets": np.array([*rows, (1001, "n00001740", "entity", "anything", 3)], dtype=fields)})
    truth = "".join(f"{1000 - c}\n" for c in classes).encode()
    files = {"meta.mat": meta.getvalue(), "ILSVRC2012_validation_ground_truth.txt": truth}
    return {f"{DEVKIT}/data/{name}": raw for name, raw in files.items()}


def content(source):
    """For each split the title of every image's class, by its bytes."""
    return {
        split: {r.fetch(int(r.keys[i])): source.classes[r.labels[i]] for i in range(len(r))}
        for split, r in source.splits.items()
    }


BY_WNID = dict(zip(wnids(), titles(), strict=True))
EXPECTED = {
    "train": {raw: BY_WNID[name.split("/")[0]] for name, raw in TRAIN_FILES.items()},
    "val": {raw: titles()[c] for c, raw in zip(VAL, VAL_FILES.values(), strict=True)},
}


def test_names_of_classes_and_sets_of_all_of_them(tmp_path):
    assert wnids() == tuple(sorted(wnids()))
    assert len(set(titles())) == len(wnids()) == 1000
    assert titles()[0] == "tench"
    assert (titles()[134], titles()[517]) == ("crane (n02012849)", "crane (n03126707)")  # a bird and a machine
    write_files(tmp_path, [f"{split}/{wnid}/{split}.JPEG" for split in ("train", "val") for wnid in wnids()])
    source = open_source(f"imagenet:{tmp_path}")
    assert (source.class_map, source.classes) == (None, titles())
    assert source.splits["val"].labels.tolist() == list(range(1000))


def test_folders(tmp_path):
    in_folders(tmp_path)
    source = open_source(f"imagenet:{tmp_path}")
    assert content(source) == EXPECTED
    assert source.classes == tuple(titles()[c] for c in CLASSES)
    assert source.class_map == CLASSES
    assert source.splits["train"].ids[0] == "train/n01484850/n01484850_0.JPEG"
    assert [w for w in source.warnings if "ImageNet-1k as published" in w] == [
        "train has 12 images; ImageNet-1k as published has 1,281,167.",
        "val has 6 images; ImageNet-1k as published has 50,000.",
    ]


PAIRS = [(val_name(i), c) for i, c in enumerate(VAL, 1)]
SOLUTION = [f"{name[:-5]},{wnids()[c]} 1 2 3 4 {wnids()[c]} 5 6 7 8 " for name, c in PAIRS]
KAGGLE = {"LOC_val_solution.csv": "\n".join(["ImageId,PredictionString", *SOLUTION[::-1]])}
LISTS = {  # form: where the images lie, the list, and options
    "kaggle": ("ILSVRC/Data/CLS-LOC", KAGGLE, ""),
    "kaggle within": ("Data/CLS-LOC", KAGGLE, ""),
    "numbers": ("", {"val.txt": "".join(f"{name} {c}\n" for name, c in PAIRS[::-1])}, ""),
    "wnids": ("", {"val/val.txt": "".join(f"{name}\t{wnids()[c]}\n" for name, c in PAIRS)}, ""),
    "synsets": ("", {"imagenet_2012_validation_synset_labels.txt": "".join(f"{wnids()[c]}\n" for c in VAL)}, ""),
    "chosen": ("", {"mine": "".join(f"{name} {c}\n" for name, c in PAIRS)}, "?labels={root}/mine"),
    "devkit": ("", {}, ""),
    "devkit unpacked": ("", {}, ""),
}


@pytest.mark.parametrize("form", LISTS)
def test_flat_val_with_any_list(tmp_path, form):
    inner, files, options = LISTS[form]
    in_folders(tmp_path / inner, flat=True)
    write_files(tmp_path, files)
    if form == "devkit":
        write_tar(tmp_path / f"{DEVKIT}.tar.gz", devkit(VAL), "w:gz")
    if form == "devkit unpacked":
        write_files(tmp_path, devkit(VAL))
    assert content(open_source(f"imagenet:{tmp_path}{options.format(root=tmp_path)}")) == EXPECTED


def test_the_devkit_is_read_as_torchvision_reads_it(tmp_path, monkeypatch):
    import torch
    from torchvision.datasets import imagenet as theirs

    write_tar(tmp_path / f"{DEVKIT}.tar.gz", devkit((5, 999, 0, 321)), "w:gz")
    monkeypatch.setattr(theirs, "_verify_archive", lambda *arguments: None)
    theirs.parse_devkit_archive(tmp_path)
    _, val_wnids = torch.load(tmp_path / "meta.bin", weights_only=True)
    actual = val_labels([tmp_path], None)
    assert [wnids()[actual[i]] for i in range(1, 5)] == val_wnids


@pytest.fixture
def archives(tmp_path):
    """The official files: a tar of tars, a tar of images, the devkit."""
    root, inner = tmp_path / "archives", {}
    for wnid in (wnids()[c] for c in CLASSES):
        of_class = {name.split("/")[1]: raw for name, raw in TRAIN_FILES.items() if name.startswith(wnid)}
        inner[f"{wnid}.tar"] = write_tar(tmp_path / "inner.tar", of_class).read_bytes()
    write_tar(root / "ILSVRC2012_img_train.tar", inner)
    write_tar(root / "ILSVRC2012_img_val.tar", dict(reversed(VAL_FILES.items())))
    write_tar(root / f"{DEVKIT}.tar.gz", devkit(VAL), "w:gz")
    return root


def test_official_archives_are_read_in_place(archives):
    before = sorted(archives.iterdir())
    source = open_source(f"imagenet:{archives}")
    assert content(source) == EXPECTED
    assert source.splits["val"].ids[0] == f"ILSVRC2012_img_val.tar/{val_name(1)}"
    assert source.splits["train"].ids[0] == "ILSVRC2012_img_train.tar/n01484850/n01484850_0.JPEG"
    assert sorted(archives.iterdir()) == before
    dataset = load(f"imagenet:{archives}")
    assert next(iter(dataset.eval_batches("val", 6))).targets.tolist() == [CLASSES.index(c) for c in VAL]
    assert dataset.class_map == tuple(dataset.summary()["class_map"]) == CLASSES
    in_folders(archives)
    (archives / "ILSVRC2012_img_train.tar").write_bytes(b"not looked at")
    source = open_source(f"imagenet:{archives}")
    assert content(source) == EXPECTED
    assert any("ILSVRC2012_img_train.tar was not used" in text for text in source.warnings)


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


def cut(share):
    def spoil(path, inner):
        end = path.read_bytes().rstrip(b"\0")
        path.write_bytes(end[: int(len(end) * share)])

    return spoil


def cut_within(path, inner):
    inner = inner.rstrip(b"\0")
    write_tar(path, {"n01484850.tar": inner[:-20], "n01491361.tar": inner})


def spoil_second_header(path, inner):
    content = bytearray(path.read_bytes())
    second = tars.open_tar(path)[1].offset
    content[second - 512 : second] = b"x" * 512
    path.write_bytes(content)


@pytest.mark.parametrize(("name", "spoil", "message"), [
    *(("train", cut(share), r"img_train\.tar cannot be used: .*cut short") for share in (0.95, 0.6, 0.3)),
    ("train", cut_within, r"_3\.JPEG: the tar file is cut off within it"),
    ("val", spoil_second_header, r"the header at byte [\d,]+ is damaged; .*, after 1 members"),
    ("train", lambda path, _: write_tar(path, {"cat.jpg": b"x"}), "is not ILSVRC 2012's"),
    ("val", lambda path, _: write_tar(path, {"cat.jpg": b"x"}), "does not hold ILSVRC2012_val"),
    *((name, lambda path, _: path.write_bytes(gzip.compress(path.read_bytes())), f"{name}.tar cannot be used")
      for name in ("train", "val")),
])  # fmt: skip
def test_archives_that_are_damaged_or_of_other_things(archives, tmp_path, name, spoil, message):
    spoil(archives / f"ILSVRC2012_img_{name}.tar", (tmp_path / "inner.tar").read_bytes())
    with pytest.raises(UserError, match=message):
        open_source(f"imagenet:{archives}")


def test_parquet_goes_to_hugging_faces_reader(tmp_path, monkeypatch):
    write_files(tmp_path, "data/train-00000-of-00294.parquet")
    none = Records((), np.zeros(0, np.int64), (), lambda key: b"", np.zeros(0, np.int64))
    splits, seen = {"train": none, "val": none, "test": none}, []
    read = Source("x", tuple(map(str, range(1000))), splits)
    monkeypatch.setattr(module, "hf_set", lambda name, options: seen.append(name) or read)
    source = open_source(f"imagenet:{tmp_path}")
    assert seen == [str(tmp_path)]
    assert (list(source.splits), source.classes[0]) == (["train", "val"], "tench")


def test_minival(tmp_path):
    train = {f"{wnids()[c]}/{wnids()[c]}_{i}.JPEG": b"" for c in CLASSES for i in range(100)}
    in_folders(tmp_path, train)
    source = open_source(f"imagenet:{tmp_path}?minival=1")
    assert counts(source) == {"train": 297, "val": 3, "test": 6}
    assert not set(source.splits["train"].ids) & set(source.splits["val"].ids)
    in_folders(tmp_path / "moved" / "Data" / "CLS-LOC", train)
    moved = open_source(f"imagenet:{tmp_path / 'moved'}?minival=1").splits["val"].ids
    assert [name.split("/")[-1] for name in moved] == [name.split("/")[-1] for name in source.splits["val"].ids]
    assert [w for w in source.warnings if "as published" in w] == [
        "train has 300 images; ImageNet-1k as published has 1,281,167.",
        "val has 6 images; ImageNet-1k as published has 50,000.",
    ]
    assert source.warnings[-1] == "minival: val is 1% of train, and test is the published val."
    assert list(open_source(f"imagenet:{tmp_path}?minival=0").splits) == ["train", "val"]


def test_val_alone_is_an_evaluation_set(tmp_path):
    in_folders(tmp_path, {})
    dataset = load(f"imagenet:{tmp_path}")
    assert (list(dataset.splits), dataset.eval_split) == (["val"], "val")
    assert len(dataset.samples(2)) == 2
    assert "Without a train split this set is for evaluation only." in dataset.summary()["warnings"]
    for train in (dataset.steps_per_epoch, lambda size: dataset.train_batches(seed=0, epoch=0, batch_size=size)):
        with pytest.raises(UserError, match="ImageNet-1k is an evaluation set"):
            train(2)
    assert data.check(f"imagenet:{tmp_path}").fit


# Evaluation sets


def test_v2_goes_by_numbers_not_by_names_and_is_matched_frequency_unless_named(tmp_path):
    folders = {variant: tmp_path / f"imagenetv2-{variant}-format-val" for variant in V2_VARIANTS}
    write_files(folders["matched-frequency"], {f"{i}/{i:03d}.jpeg": b"" for i in range(1000)})
    for root in (tmp_path, folders["matched-frequency"]):
        source = open_source(f"imagenet-v2:{root}")
        records = source.splits["test"]
        assert [int(name.split("/")[-1][:3]) for name in records.ids] == records.labels.tolist()
        assert (list(source.splits), source.class_map, source.classes) == (["test"], None, titles())
        assert source.name == "ImageNet-V2 matched-frequency"
    assert source.warnings == ["test has 1,000 images; ImageNet-V2 as published has 10,000."]
    for i, variant in enumerate(V2_VARIANTS[1:], 1):
        write_files(folders[variant], [f"0/{n}.jpeg" for n in range(i)])
        for spec in (f"imagenet-v2:{tmp_path}?variant={variant}", f"imagenet-v2:{folders[variant]}"):
            source = open_source(spec)
            assert (source.name, len(source.splits["test"])) == (f"ImageNet-V2 {variant}", i)


@pytest.mark.parametrize("inner", ["", "imagenet-r"])
def test_r_maps_its_classes_to_the_thousand(tmp_path, inner):
    indices = pkgutil.get_data("timm.data", "_info/imagenet_r_indices.txt").decode().split()
    two_hundred = tuple(map(int, indices))
    write_files(tmp_path / inner, {f"{wnids()[c]}/art_{c}.jpg": encoded(noise(c), "JPEG") for c in two_hundred})
    write_files(tmp_path / inner, {"README.txt": b""})
    dataset = load(f"imagenet-r:{tmp_path}")
    assert dataset.class_map == two_hundred
    assert dataset.classes == tuple(titles()[c] for c in two_hundred)
    test = dataset.splits["test"]
    assert [f"art_{dataset.class_map[label]}.jpg" for label in test.labels] == [n.split("/")[-1] for n in test.ids]
    assert dataset.summary()["class_map"] == list(two_hundred)


@pytest.fixture
def corrupted(tmp_path):
    """ImageNet-C with one image a folder; half of its archives unpacked with their names, half without."""
    for archive, names in ARCHIVES.items():
        base = archive if archive in ("noise", "extra") else ""
        write_files(tmp_path / base, {f"{n}/{s}/{wnids()[7]}/{n}_{s}.JPEG": b"" for n in names for s in range(1, 6)})
    return tmp_path


def test_c_has_75_parts_and_20_more_and_must_be_whole(corrupted, tmp_path):
    specs = list(corruption_specs(corrupted))
    assert len({spec for _, _, spec in specs}) == 75
    assert len(list(corruption_specs(str(corrupted), extra=True))) == 95
    for name, severity, spec in specs[::7]:
        source = open_source(spec)
        assert source.splits["test"].ids[0].endswith(f"{name}/{severity}/{wnids()[7]}/{name}_{severity}.JPEG")
        assert source.class_map == (7,)
        assert source.name == f"ImageNet-C {name} {severity}"
    (corrupted / "fog" / "3").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"these folders are missing: fog/3\.") as caught:
        corruption_specs(corrupted)
    assert "weather/fog/3/n01440764" in str(caught.value)
    with pytest.raises(UserError, match="the folder fog/3 is missing"):
        open_source(f"imagenet-c:{corrupted}?corruption=fog&severity=3")


def test_the_corruptions_are_those_that_can_be_generated():
    corruptions = pytest.importorskip("vitmods.papers.corruptions")
    fifteen = [name for archive, group in ARCHIVES.items() if archive != "extra" for name in group]
    assert (tuple(fifteen), ARCHIVES["extra"]) == (corruptions.CORRUPTIONS, corruptions.EXTRA)


LABELS = [[3], [], [3, 8], [999], [8]]


@pytest.fixture
def real(tmp_path):
    """Five validation images, of which ImageNet says that they are of classes 3, 3, 3, 8, 8."""
    return write_files(
        tmp_path,
        {f"val/{wnids()[c]}/{val_name(i)}": encoded(noise(i), "JPEG") for i, c in enumerate((3, 3, 3, 8, 8), 1)},
    )


def test_real_labels_follow_the_numbers_of_the_files(real):
    (real / "real.json").write_text(json.dumps(LABELS))
    dataset = load(f"imagenet-real:{real}")
    test = dataset.splits["test"]
    assert [name.split("/")[-1] for name in test.ids] == [val_name(i) for i in (1, 3, 4, 5)]
    assert test.label_sets == ((3,), (3, 8), (999,), (8,))
    assert test.labels.tolist() == [3, 3, 8, 8]
    assert (dataset.class_map, dataset.num_classes) == (None, 1000)
    summary = dataset.summary()
    assert summary["label_sets"] == ["test"]
    assert any("1 images without a ReaL label are left out" in text for text in summary["warnings"])
    (real / "other.json").write_text(json.dumps([[3], [], [3], [999], [8]]))
    other = load(f"imagenet-real:{real}?labels={real / 'other.json'}")
    assert other.summary()["fingerprint"] != summary["fingerprint"]
    (real / "val" / wnids()[3] / val_name(1)).write_bytes(b"")
    dataset = load(f"imagenet-real:{real}", unreadable="skip")
    assert dataset.splits["test"].label_sets == ((3, 8), (999,), (8,))


def test_real_labels_come_with_timm_too(real):
    names = [val_name(i) for i in range(1, 50_001)]
    reference = RealLabelsImagenet(names).real_labels
    test = open_source(f"imagenet-real:{real}").splits["test"]
    assert [name.split("/")[-1] for name in test.ids] == [name for name in names[:5] if reference[name]]
    assert [list(labels) for labels in test.label_sets] == [reference[name] for name in names[:5] if reference[name]]
