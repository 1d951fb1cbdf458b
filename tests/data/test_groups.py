"""Images that belong together are never torn apart by a split that is made."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import vitmods as vm
from vitmods import data
from vitmods.cli import main as shell
from vitmods.cli.data import main
from vitmods.data import store as hashes
from vitmods.data.pack import pack
from vitmods.data.splits import group_keys, groups_of, read_columns, suggest_grouping
from vitmods.recipes import plain
from vitmods.study.trial import load_images
from vitmods.util.errors import UserError

from .support import counts, load


def parts_of(dataset):
    return {name: split for split, part in dataset.splits.items() for name in part.ids}


@pytest.fixture
def twins(make_folder):
    """Every tenth image is there twice, under another name."""
    root = make_folder({"cat": 60, "dog": 60})
    for label in ("cat", "dog"):
        for i in range(0, 60, 10):
            shutil.copy(root / label / f"{i:03d}.png", root / label / f"copy{i:03d}.png")
    return root


def together(dataset):
    """Split of each image, of which copies are in the split of what they copy."""
    where = parts_of(dataset)
    assert all(where[name] == where[name.replace("copy", "")] for name in where)
    return where


def test_equal_images_come_into_one_split(twins):
    for seed in range(2):
        dataset = load(twins, split_seed=seed)
        assert len(together(dataset)) == 132
        assert counts(dataset) == {"train": 92, "val": 14, "test": 26}
    assert any("24 images have exact copies" in text for text in dataset.summary()["warnings"])
    checked = data.check(twins, split_seed=seed)
    assert checked.fit
    assert {key: checked.summary[key] for key in dataset.summary()} == dataset.summary()


def test_each_image_is_in_one_fold_with_its_equals(twins):
    settings = vm.Study(arms=["dpn"], data=twins, img_size=8, recipe=plain()).settings.fixed
    assert parts_of(load_images({**settings, "fold": [1, 5]}, plain())) == parts_of(load(twins, fold=(1, 5)))
    tests: list[str] = []
    for i in range(5):
        dataset = load(twins, fold=(i, 5))
        assert dataset.summary()["split_origin"] == f"made, fold {i} of 5, seed 0"
        assert sorted(map(len, dataset.splits.values())) == pytest.approx([13, 26, 92], abs=2)
        together(dataset)
        tests += dataset.splits["test"].ids
    assert len(tests) == len(set(tests)) == 132


def test_equal_images_and_groups_that_the_user_has_split_stop_a_run(make_folder, tmp_path):
    root = make_folder({"train/cat/p1": 9, "train/dog/p2": 9, "test/cat/p1": 3, "test/dog/p3": 3})
    rule = r"/(p\d)/"
    with pytest.raises(UserError, match=r"1 groups of test are also in train \(p1\)"):
        load(root, group_by=rule)
    load(f"{root}?allow=overlap", group_by=rule)
    shutil.copy(root / "train/cat/p1/001.png", root / "test/cat/p1/again.png")
    assert "overlap" not in load(f"{root}?allow=overlap").summary()["warnings"][0]
    pack(root, tmp_path / "shards")
    for spec in (root, tmp_path / "shards"):
        with pytest.raises(UserError, match="1 images of test are also in train, byte for byte"):
            load(spec)


def test_packed_and_streamed_sets_split_alike_and_a_val_of_a_number_of_images_keeps_copies(twins, tmp_path):
    pack(twins, tmp_path / "shards")
    for spec in (tmp_path / "shards", f"{tmp_path / 'shards'}?stream=1"):
        assert parts_of(load(spec)) == parts_of(load(twins))
    dataset = load(twins, limit_val=20)
    together(dataset)
    assert 18 <= len(dataset.splits["val"]) <= 20


@pytest.mark.parametrize("group_by", [r"/(p\d+)/", "{root}.csv"])
def test_groups_are_not_torn_apart(make_folder, group_by):
    sizes = {
        f"{label}/p{number}{i:02d}": 1 + i % 4 for number, label in enumerate(("cat", "dog"), 1) for i in range(30)
    }
    root = make_folder(sizes)
    groups = [f"{path.parent.name},{path.relative_to(root).as_posix()}" for path in root.rglob("*.png")]
    root.with_suffix(".csv").write_text("\n".join(["Group,image", *groups]))
    group_by = group_by.replace("{root}", str(root))
    dataset = load(root, group_by=group_by)
    patients = {split: {Path(name).parent.name for name in part.ids} for split, part in dataset.splits.items()}
    assert sum(map(len, patients.values())) == 60
    sizes = counts(dataset)
    assert sizes["test"] == pytest.approx(0.2 * 146, abs=5)
    assert sizes["val"] == pytest.approx(0.1 * 146, abs=5)
    assert data.check(root, group_by=group_by).fit
    for split in dataset.splits.values():
        assert split.groups is not None
        together = {(group, Path(name).parent) for group, name in zip(split.groups, split.ids, strict=True)}
        assert len(together) == len(set(split.groups)) == len({folder for _, folder in together})


def test_names_that_suggest_groups_are_told(make_folder, tmp_path, capsys):
    root = make_folder({"cat": 40, "dog": 40})
    assert main([str(root)]) == 0
    assert "belong together" not in capsys.readouterr().out
    for path in root.rglob("*.png"):
        path.rename(path.with_stem(f"{path.parent.name}-video{int(path.stem) // 4}_{path.stem}"))
    assert main([str(root)]) == 0
    warning = " ".join(capsys.readouterr().out.split()).partition("belong together in ")[2]
    assert warning.startswith("20 groups")
    group_by = warning.partition("--group-by '")[2].partition("'")[0]
    assert main([str(root), "--group-by", group_by]) == 0
    printed = capsys.readouterr().out
    assert "belong together" not in printed
    assert printed.split("all ")[1].split()[:3] == ["56", "8", "16"]
    videos = [
        {name.rpartition("_")[0] for name in split.ids} for split in load(root, group_by=group_by).splits.values()
    ]
    assert sum(map(len, videos)) == len(set().union(*videos)) == 20


@pytest.mark.parametrize(("name", "groups"), [
    *((f"{{label}}/{name}", 25) for name in ("patient{i4}-{i}.png", "x_P{i4}.{i}.png", "{i}-p{i4}-left.png")),
    ("{label}/clip_{i4}.frame_{i}.jpg", 25),
    ("{label}/scan{i4}/{i}.png", 50),
    *((f"{{label}}/{name}", None) for name in ("{label}_{i}.png", "{i:04d}.png", "IMG_{i:04d}.png", "{i}_{i}.png")),
    ("{label}/{i4}{i:04d}.png", None),
    ("train/{label}/{i}.png", None),
])  # fmt: skip
def test_which_names_suggest_groups(name, groups):
    ids = [name.format(label=label, i=i, i4=i // 4) for label in ("cat", "dog") for i in range(100)]
    suggestion = suggest_grouping(ids, 2)
    assert (suggestion and suggestion[1]) == groups
    assert suggestion is None or len(set(group_keys(suggestion[0], ids))) == groups


def test_a_group_and_equal_bytes_join(tmp_path):
    ids = ("d", "c", "b", "a", "e", "f")
    digests = np.array([[1], [1], [2], [2], [0], [0]], dtype=np.uint8) * np.ones(16, dtype=np.uint8)
    assert groups_of(ids, None, digests) == ("c", "c", "a", "a", "e", "f")
    names = tmp_path / "groups.csv"
    names.write_text("image,group\nd,x\nc,y\nb,x\na,z\ne,q\nf,q\n")
    assert groups_of(ids, names, digests) == ("z", "z", "z", "z", "q", "q")
    assert groups_of(ids, ".", np.zeros((6, 16), np.uint8)) is None
    assert groups_of((), None, np.zeros((0, 16), np.uint8)) is None


def test_hashes_are_kept_until_a_file_changes(twins, tmp_path, monkeypatch):
    monkeypatch.setattr(hashes, "REMEMBERED", 10)
    before = load(twins, cache_dir=tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("*.digests.npy"))) == 1
    monkeypatch.setattr(hashes, "in_order", None)
    assert parts_of(load(twins, cache_dir=tmp_path / "cache")) == parts_of(before)
    monkeypatch.undo()
    monkeypatch.setattr(hashes, "REMEMBERED", 10)
    (twins / "cat" / "copy000.png").write_bytes((twins / "cat" / "001.png").read_bytes())
    assert load(twins, cache_dir=tmp_path / "cache").summary()["fingerprint"] != before.summary()["fingerprint"]


def test_shell_and_python_split_alike(twins, tmp_path, capsys):
    options = ["--data", str(twins), "--img-size", "8", "--base", "mu/4", "--recipe", "plain", "--epochs", "1"]
    assert shell(["train", *options, "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    rows = read_columns(tmp_path / "out" / "split.csv", ("image", "split", "label", "group"))
    actual = parts_of(load(twins))
    assert {row["image"]: row["split"] for row in rows} == actual
    assert {(row["image"], row["group"]) for row in rows if "copy" in row["image"]} == {
        (name, name.replace("copy", "")) for name in actual if "copy" in name
    }
    assert parts_of(load(twins, split_file=tmp_path / "out" / "split.csv")) == actual


@pytest.mark.parametrize("option", [
    {"fold": (5, 5)}, {"val_fraction": 1.5}, {"limit_train": 1.5}, {"limit_val": 0}, {"group_by": "("},
    {"group_by": "group_by.csv"}, {"split_file": "split_file.csv"},
], ids=str)  # fmt: skip
def test_impossible_options_cost_no_scan(option, monkeypatch):
    for where in ("data.loading.open_source", "study.fixed.defaults_for"):
        monkeypatch.setattr(f"vitmods.{where}", lambda spec: pytest.fail("images were listed"))
    for use in (load, data.check, lambda spec, **options: vm.Study("mu3/8", ["rms"], spec, **options)):
        with pytest.raises(UserError, match=next(iter(option))):
            use("folder", **option)


@pytest.mark.parametrize(("group_by", "text", "message"), [
    ("x*", None, "2 of 2 images without a group"),
    ("nowhere.csv", None, "cannot be read"),
    ("t.csv", "image,patient\ncat/a.png,1\n", 't.csv does not have the column group: .* "image,patient"'),
    ("t.csv", "image,group\ncat/a.png,1\ncat/a.png,2\ndog/b.png,3\n", "names cat/a.png 2 times"),
    ("t.csv", "image,group\ncat/a.png,1\ndog/b.png,\n", "1 of 2 images without a group, such as dog/b.png"),
    ("t.csv", "image,group\ncat/a.png,1,2\n", "Line 2 of .* has more columns"),
    ("t.csv", "", "t.csv cannot be read as a table: it is empty"),
])  # fmt: skip
def test_what_cannot_be_grouped_by(group_by, text, message, tmp_path):
    if text is not None:
        group_by = tmp_path / group_by
        group_by.write_text(text)
    with pytest.raises(UserError, match=message):
        group_keys(str(group_by), ["cat/a.png", "dog/b.png"])
