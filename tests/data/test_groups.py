"""Images that belong together are never torn apart by a split that is made."""

import shutil
from inspect import signature
from pathlib import Path

import pytest

import vitmods as vm
from vitmods import data
from vitmods.cli.data import Data, main
from vitmods.cli.options import DataOptions
from vitmods.data.groups import keys_by
from vitmods.data.pack import pack
from vitmods.recipes import plain
from vitmods.study.defaults import ORDINARY, defaults_for
from vitmods.util.errors import UserError


def load(root: Path | str, **options) -> data.ImageDataset:
    return data.load(root, img_size=8, augment=plain().augment, **options)


def parts_of(dataset: data.ImageDataset) -> dict[str, str]:
    return {name: split for split, found in dataset.splits.items() for name in found.ids}


@pytest.fixture
def twins(make_folder) -> Path:
    """Every tenth image is there twice, under another name."""
    root = make_folder({"cat": 60, "dog": 60})
    for label in ("cat", "dog"):
        for i in range(0, 60, 10):
            shutil.copy(root / label / f"{i:03d}.png", root / label / f"copy{i:03d}.png")
    return root


def test_equal_images_come_into_one_split(twins: Path) -> None:
    for seed in range(3):
        dataset = load(twins, split_seed=seed)
        where = parts_of(dataset)
        assert len(where) == 132
        for label in ("cat", "dog"):
            assert all(where[f"{label}/{i:03d}.png"] == where[f"{label}/copy{i:03d}.png"] for i in range(0, 60, 10))
        assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 92, "val": 14, "test": 26}
        assert any("24 images have equals" in text for text in dataset.summary()["warnings"])
        checked = data.check(twins, split_seed=seed)
        assert checked.fit
        assert {key: checked.summary[key] for key in dataset.summary()} == dataset.summary()


def test_equal_images_that_the_user_has_split_stop_a_run(make_folder) -> None:
    root = make_folder({"train/cat": 9, "train/dog": 9, "test/cat": 3, "test/dog": 3})
    shutil.copy(root / "train" / "cat" / "000.png", root / "test" / "cat" / "again.png")
    with pytest.raises(UserError, match="1 images of test are also in train, byte for byte"):
        load(root)
    assert "overlap" not in load(f"{root}?allow=overlap").summary()["warnings"][0]


def test_val_of_a_number_of_images_does_not_tear_equal_ones_apart(twins: Path) -> None:
    dataset = load(twins, limit_val=20)
    where = parts_of(dataset)
    assert all(where[f"cat/{i:03d}.png"] == where[f"cat/copy{i:03d}.png"] for i in range(0, 60, 10))
    assert 18 <= len(dataset.splits["val"]) <= 20


def test_packed_and_streamed_sets_split_alike(twins: Path, tmp_path: Path) -> None:
    packed = pack(twins, tmp_path / "shards")
    assert len(packed.equal) == 12
    assert "cat/000.png = cat/copy000.png" in packed.equal
    assert "Warning: these images are equal, byte for byte:\n  cat/000.png = cat/copy000.png" in str(packed)
    assert parts_of(load(tmp_path / "shards")) == parts_of(load(twins))
    assert parts_of(load(f"{tmp_path / 'shards'}?stream=1")) == parts_of(load(twins))


@pytest.mark.parametrize("rule", ["folder", "folder:2", r"name:/(p\d+)/", "file:{root}.csv"])
def test_groups_are_not_torn_apart(make_folder, rule: str) -> None:
    sizes = {
        f"{label}/p{label[0]}{patient:02d}".replace("pc", "p1").replace("pd", "p2"): 1 + patient % 4
        for label in ("cat", "dog")
        for patient in range(30)
    }
    root = make_folder(sizes)
    groups = [f"{path.relative_to(root).as_posix()},{path.parent.name}" for path in root.rglob("*.png")]
    root.with_suffix(".csv").write_text("\n".join(groups))
    dataset = load(root, groups=rule.replace("{root}", str(root)))
    patients = {split: {Path(name).parent.name for name in found.ids} for split, found in dataset.splits.items()}
    assert sum(map(len, patients.values())) == 60
    counts = {name: len(split) for name, split in dataset.splits.items()}
    assert counts["test"] == pytest.approx(0.2 * 146, abs=5)
    assert counts["val"] == pytest.approx(0.1 * 146, abs=5)
    assert data.check(root, groups=rule.replace("{root}", str(root))).fit


def test_groups_that_the_user_has_split_stop_a_run(make_folder) -> None:
    root = make_folder({"train/cat/p1": 9, "train/dog/p2": 9, "test/cat/p1": 3, "test/dog/p3": 3})
    rule = r"name:/(p\d)/"
    with pytest.raises(UserError, match=r"1 groups of test are also in train \(p1\)"):
        load(root, groups=rule)
    load(f"{root}?allow=overlap", groups=rule)


def test_the_shell_takes_groups(make_folder, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_folder({f"{label}/p{i}": 3 for label in ("cat", "dog") for i in range(10)})
    assert main([str(root), "--groups", "folder:2"]) == 0
    assert capsys.readouterr().out.split("all ")[1].split()[:3] == ["42", "6", "12"]
    study = vm.Study(arms=["dpn"], data=root, groups="folder:2")
    assert study.settings.fixed["groups"] == "folder:2"
    assert "groups" not in vm.Study(arms=["dpn"], data=root).settings.fixed


def test_all_ways_split_by_the_same_fractions() -> None:
    found = [signature(function).parameters for function in (data.load, data.check)]
    fractions = {(p["val_fraction"].default, p["test_fraction"].default) for p in found}
    given = [Data("digits"), DataOptions(), defaults_for("digits"), ORDINARY]
    assert fractions | {(one.val_fraction, one.test_fraction) for one in given} == {(0.1, 0.2)}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("patient", 'groups is "folder"'),
        ("name:", 'groups is "folder"'),
        ("folder:0", "whole number from 1"),
        ("folder:3", "2 of 2 images belong to no group, such as cat/a.png"),
        ("name:(", "no regular expression"),
        ("name:^dog", "1 of 2 images belong to no group"),
        ("file:nowhere.csv", "cannot be read"),
    ],
)
def test_rules_that_cannot_be_used(rule: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        keys_by(rule, ["cat/a.png", "dog/b.png"])
