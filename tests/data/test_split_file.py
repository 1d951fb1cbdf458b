"""split.csv: what is written is read again as it was, and what does not fit is refused."""

import csv
from pathlib import Path

import pytest
import torch
from PIL import Image

from vitmods import data
from vitmods.data.splits import write_split
from vitmods.recipes import plain
from vitmods.util.errors import UserError


def load(root: Path | str, **options) -> data.ImageDataset:
    return data.load(root, **{"img_size": 8, "augment": plain().augment, **options})


def contents(dataset: data.ImageDataset) -> dict:
    return {name: (split.ids, split.labels.tolist(), split.groups) for name, split in dataset.splits.items()}


@pytest.fixture
def written(make_folder, tmp_path: Path):
    """The folder, its split.csv, and the set that it was written of."""
    root = make_folder({"cat": 40, "=dog": 40})
    Image.new("RGB", (12, 12)).save(root / "cat" / ' a, "b"\n.png')
    dataset = load(root, split_seed=5, val_fraction=0.3, group_by=r"/(\s?.{2})")
    write_split(tmp_path / "split.csv", dataset)
    return root, tmp_path / "split.csv", dataset


def test_a_set_splits_again_as_it_did(written) -> None:
    root, path, dataset = written
    again = load(root, split_file=path)
    assert contents(again) == contents(dataset)
    assert again.summary()["fingerprint"] == dataset.summary()["fingerprint"]
    assert again.summary()["split_origin"] == "from split.csv"
    assert data.check(root, split_file=path).summary["splits"] == dataset.summary()["splits"]
    assert len(load(root, split_file=path, limit_train=7).train) == 7


def test_no_cell_is_a_formula(written) -> None:
    with open(written[1], newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["image", "split", "label", "group"]
    assert not [text for row in rows for text in row if text.startswith("=")]


def test_a_file_takes_the_place_of_own_splits(make_folder, tmp_path: Path) -> None:
    make_folder({"train/a": 9, "train/b": 9})
    root = make_folder({"test/a": 4, "test/b": 4}, seed=5000)
    own = load(root)
    write_split(tmp_path / "split.csv", own)
    assert contents(load(root, split_file=tmp_path / "split.csv")) == contents(own)
    text = (tmp_path / "split.csv").read_text()
    (tmp_path / "split.csv").write_text(text.replace("test/a/000.png,test", "test/a/000.png,train"))
    moved = load(root, split_file=tmp_path / "split.csv")
    assert {name: len(split) for name, split in moved.splits.items()} == {
        name: len(split) + {"train": 1, "val": 0, "test": -1}[name] for name, split in own.splits.items()
    }
    assert (moved.train.store.index.digests[-1] == own.splits["test"].store.index.digests[0]).all()
    images = next(iter(moved.eval_batches("test", 100))).inputs
    assert torch.equal(images, next(iter(own.eval_batches("test", 100))).inputs[1:])


def test_labels_of_several_classes_are_kept(make_folder, tmp_path: Path) -> None:
    make_folder({"train/a": 9, "train/b": 9})
    root = make_folder({"test/a+b": 4, "test/b": 4}, seed=5000)
    own = load(root, target="labels")
    write_split(tmp_path / "split.csv", own)
    again = load(root, target="labels", split_file=tmp_path / "split.csv")
    assert [split.label_sets for split in again.splits.values()] == [split.label_sets for split in own.splits.values()]
    with open(tmp_path / "split.csv") as file:
        assert {"a;b"} == {row["label"] for row in csv.DictReader(file) if "+" in row["image"]}


def test_images_that_are_not_named_are_counted(written) -> None:
    root, path, dataset = written
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("cat/00")))
    again = load(root, split_file=path)
    assert sum(map(len, again.splits.values())) == sum(map(len, dataset.splits.values())) - 10
    assert f"10 images that {path} does not name were left out." in again.summary()["warnings"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("cat/000.png,", "cat/x.png,"), "names 1 images that .* does not have, such as cat/x.png"),
        (
            ("cat/000.png,train", "cat/000.png,tset"),
            'puts cat/000.png into the split "tset"; there are train',
        ),
        ((",cat,", ",fox,"), "gives 41 images other labels than they have: .* is cat, not fox"),
        (("image,split", "image,part"), "has no column split"),
        ((",train,", ",test,"), "does not name any training image"),
        (("cat/000.png,", "cat/001.png,"), "names cat/001.png 2 times"),
    ],
)
def test_files_that_do_not_fit(written, change: tuple[str, str], message: str) -> None:
    root, path, dataset = written
    assert "cat/000.png" in dataset.train.ids
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(UserError, match=message):
        load(root, split_file=path)


def test_groups_that_a_file_tears_apart_stop_a_run(written) -> None:
    root, path, dataset = written
    groups = dict(zip(dataset.train.ids, dataset.train.groups or (), strict=True))
    path.write_text(path.read_text().replace("cat/000.png,train", "cat/000.png,test"))
    with pytest.raises(UserError, match=rf"1 groups of test are also in train \({groups['cat/000.png']}\)"):
        load(root, split_file=path)
