"""Splits that are made: stratified, disjoint, and the same whatever the order of files."""

import csv
from hashlib import sha256

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitmods import data
from vitmods.data.records import Records, Source
from vitmods.data.sources import open_source
from vitmods.data.splits import SplitOptions, count_training, cut, limit, make_splits, take_out, write_split
from vitmods.util.errors import UserError

from .support import load


def records(labels, order=None):
    order = range(len(labels)) if order is None else order
    ids = tuple(f"class{labels[i]}/{i}.png" for i in order)
    return Records(ids, np.array([labels[i] for i in order]), ids, lambda key: ids[key].encode(), np.arange(len(ids)))


def source(*splits, n=100):
    return Source("set", ("a", "b"), {split: records([0, 1] * (n // 2)) for split in splits})


label_lists = st.lists(st.integers(0, 4), min_size=1, max_size=120)
fractions = st.floats(0, 0.49)


@given(label_lists, st.integers(0, 100), fractions, fractions, st.randoms(use_true_random=False))
def test_parts_are_disjoint_complete_stratified_and_of_any_order_of_files(labels, seed, val, test, random):
    table, shuffled = records(labels), records(labels, random.sample(range(len(labels)), len(labels)))
    parts, others = (cut(one, seed, {"test": test, "val": val}) for one in (table, shuffled))
    for name in parts:
        assert {table.ids[i] for i in parts[name]} == {shuffled.ids[i] for i in others[name]}
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(labels)))
    for label in set(labels):
        n = labels.count(label)
        counts = {name: int((table.labels[part] == label).sum()) for name, part in parts.items()}
        assert counts["train"] >= 1
        for name, fraction in (("test", test), ("val", val)):
            assert abs(counts[name] - n * fraction) <= 0.5 or counts[name] == 1 or counts["train"] == 1
        assert n < 5 or (test == 0) == (counts["test"] == 0)


def test_another_seed_is_another_split_and_a_class_of_one_image_stays_in_train():
    table = records([0, 1] * 50)
    assert cut(table, 0, {"val": 0.2})["val"].tolist() != cut(table, 1, {"val": 0.2})["val"].tolist()
    parts = cut(records([0, 0, 0, 0, 1]), 0, {"test": 0.4, "val": 0.4})
    assert 4 in parts["train"]


@pytest.mark.parametrize(("found", "n", "options", "sizes", "origin"), [
    (("train",), 100, {"val_fraction": 0.1, "test_fraction": 0.1}, (80, 10, 10), "made, seed 3"),
    (("train",), 100, {"val_fraction": 0.0, "test_fraction": 0.1}, (90, 0, 10), "made, seed 3"),
    (("train", "test"), 100, {"val_fraction": 0.1}, (90, 10, 100), "found; val made from train, seed 3"),
    (("train", "test"), 100, {"val_fraction": 0.0}, (100, 0, 100), "found"),
    (("train", "val"), 100, {}, (100, 100, 0), "found"),
    (("train", "val", "test"), 100, {}, (100, 100, 100), "found"),
    (("train", "test"), 1200, {"limit_val": 200}, (1000, 200, 1200), "found; val made from train, seed 3"),
    (("train",), 1200, {"limit_val": 200, "test_fraction": 0.5}, (400, 200, 600), "made, seed 3"),
    (("train", "val", "test"), 100, {"limit_val": 20}, (100, 20, 100), "found"),
    (("test",), 100, {}, (0, 0, 100), "found"),
])  # fmt: skip
def test_only_what_is_lacking_is_made(found, n, options, sizes, origin):
    splits, words = make_splits(source(*found, n=n), SplitOptions(split_seed=3, **options))
    expected = {name: size for name, size in zip(("train", "val", "test"), sizes) if size}
    assert (list(counts(splits).items()), words) == (list(expected.items()), origin)
    assert count_training(source(*found, n=n), SplitOptions(split_seed=3, **options)) == sizes[0]
    if "val" in splits:
        assert len(set(np.bincount(splits["val"].labels))) == 1
        assert "val" in found or not set(splits["val"].ids) & set(splits["train"].ids)


@pytest.mark.parametrize(("found", "options", "count"), [
    (("train",), {}, 70), (("train",), {"fold": (1, 4)}, 65), (("train", "test"), {"limit_val": 100}, 0),
    (("train",), {"val_fraction": 0.5, "test_fraction": 0.4}, 10), (("train",), {"limit_train": 0.5}, 35),
    (("train", "val"), {"limit_train": 1}, 1),
])  # fmt: skip
def test_training_images_are_counted_without_drawing_them(found, options, count):
    assert count_training(source(*found), SplitOptions(**options)) == count


def test_training_images_of_a_split_file_are_counted(tmp_path):
    path = tmp_path / "split.csv"
    path.write_text("image,split\na.png,train\nb.png,test\nc.png,train\n")
    assert count_training(source("train"), SplitOptions(split_file=path)) == 2


@given(label_lists, st.integers(1, 130), st.integers(0, 50))
def test_limit_keeps_the_proportions_in_any_order_of_files(labels, count, seed):
    table = records(labels)
    kept = limit(table, count, seed)
    assert len(kept) == min(count, len(labels))
    assert set(kept.ids) == set(limit(records(labels, range(len(labels))[::-1]), count, seed).ids)
    fractions = {label: len(kept) * labels.count(label) / len(labels) for label in set(labels)}
    for label, fraction in fractions.items():
        actual = int((kept.labels == label).sum())
        assert actual - fraction < 1
        assert fraction - actual < 1 or min(fractions.values()) < 1  # it gave one to a class that would have none
        assert actual >= 1 or count < len(fractions)
    assert limit(table, None, 0) is table
    with pytest.raises(UserError, match="at least 1"):
        limit(table, 0, 0)


@given(label_lists, st.integers(1, 130), st.integers(0, 50))
def test_what_is_taken_out_leaves_one_of_every_class(labels, count, seed):
    table = records(labels)
    if count > len(labels) - len(set(labels)):
        with pytest.raises(UserError, match="limit_val to at most"):
            take_out(table, count, seed)
        return
    remaining, taken = take_out(table, count, seed)
    assert len(taken) == count
    assert set(remaining.labels) == set(labels)
    assert sorted([*remaining.ids, *taken.ids]) == sorted(table.ids)
    for label in set(labels):
        assert (taken.labels == label).sum() < labels.count(label)


def grouped(sizes, label=0):
    return [label] * sum(sizes), [str(g) for g, size in enumerate(sizes) for _ in range(size)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=40), st.integers(0, 50), fractions, fractions)
def test_groups_stay_together(sizes, seed, val, test):
    labels, groups = grouped(sizes)
    parts = cut(records(labels), seed, {"test": test, "val": val}, groups)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(labels)))
    homes = [{groups[i] for i in part} for part in parts.values()]
    assert sum(map(len, homes)) == len(sizes)
    assert len(parts["train"])
    for name, fraction in (("test", test), ("val", val)):
        assert abs(len(parts[name]) - len(labels) * fraction) <= 6


@given(label_lists, st.integers(0, 100), fractions, fractions)
def test_groups_of_one_are_no_groups(labels, seed, val, test):
    table, fractions = records(labels), {"test": test, "val": val}
    alone = [str(i) for i in reversed(range(len(labels)))]
    actual, reference = cut(table, seed, fractions, alone), cut(table, seed, fractions)
    assert {name: part.tolist() for name, part in actual.items()} == {n: p.tolist() for n, p in reference.items()}


def test_groups_that_are_taken_out_are_whole():
    labels, groups = grouped([3] * 30)
    remaining, taken = take_out(records(labels), 20, 0, groups)
    assert (len(remaining), len(taken)) == (72, 18)
    number = {name: groups[i] for i, name in enumerate(records(labels).ids)}
    assert not {number[name] for name in remaining.ids} & {number[name] for name in taken.ids}


@pytest.mark.parametrize(("found", "option", "message"), [
    (("train", "val"), {"val_fraction": 0.0}, r"val_fraction=0 cannot apply.*\(train, val\).*Leave --val-fraction"),
    (("train", "val"), {"val_fraction": 0.1}, "val_fraction=0.1 cannot apply"),
    (("train", "test"), {"test_fraction": 0.2}, "test_fraction=0.2 cannot apply"),
    (("train", "test"), {"fold": (0, 5)}, r"fold=\(0, 5\) cannot apply"),
    (("test",), {"val_fraction": 0.1}, "val_fraction=0.1 cannot apply"),
    (("train",), {"val_fraction": 0.1, "limit_val": 5}, "limit_val says how many"),
    (("train",), {"test_fraction": 0.1, "fold": (0, 5)}, "number of folds says"),
    (("train",), {"val_fraction": 0.5, "test_fraction": 0.5}, "nothing to train"),
    (("train",), {"val_fraction": -0.1, "test_fraction": 0}, "val_f"),
    (("train",), {"val_fraction": 0, "test_fraction": 1}, "test_f"),
    (("train", "test"), {"limit_val": 0}, "limit_val must be at least 1"),
    (("train",), {"fold": (5, 5)}, "i from 0 to k - 1"),
    (("train",), {"fold": (0, 1)}, "k at least 2"),
    (("train",), {"fold": (0, 5), "val_fraction": 0.8}, "nothing to train on"),
    (("train",), {"fold": (60, 101)}, "Too few images, or groups of them, for 101 folds"),
    (("train",), {"val_fraction": 0.1, "split_file": "split.csv"}, "the split file says"),
])  # fmt: skip
def test_what_cannot_apply_is_refused(found, option, message):
    with pytest.raises(UserError, match=message):
        make_splits(source(*found), SplitOptions(**option))


@given(st.integers(0, 10_000), st.integers(40, 80), st.integers(1, 4), st.integers(20, 100), st.integers(2, 4))
def test_folds_are_a_partition_that_keeps_groups(seed, n, classes, groups, count):
    """Groups may have images of several classes."""
    draw = np.random.default_rng(seed)
    labels, keys = draw.integers(0, classes, n).tolist(), [f"g{g}" for g in draw.integers(0, groups, n)]
    table, backwards = records(labels), list(range(n))[::-1]
    turned, tests = records(labels, backwards), []
    for i in range(count):
        parts = cut(table, seed, {"test": 1 / count, "val": 0.1}, keys, (i, count))
        assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(n))
        homes = [{keys[j] for j in part} for part in parts.values()]
        assert sum(map(len, homes)) == len(set(keys))
        other = cut(turned, seed, {"test": 1 / count, "val": 0.1}, [keys[j] for j in backwards], (i, count))
        assert {table.ids[j] for j in parts["test"]} == {turned.ids[j] for j in other["test"]}
        tests.append(set(parts["test"].tolist()))
    assert sum(map(len, tests)) == len(set().union(*tests))
    untested = set(range(n)) - set().union(*tests)
    assert len({keys[j] for j in untested}) <= classes  # the only group of a class is always trained on


@given(label_lists, st.integers(0, 100), st.integers(2, 6))
def test_folds_of_single_images_are_stratified(labels, seed, count):
    table, totals = records(labels), np.bincount(labels, minlength=5)
    if sum(n for n in totals if n > 1) < count:
        with pytest.raises(UserError, match="Too few images"):
            cut(table, seed, {"test": 1 / count}, None, (0, count))
        return
    tests = [cut(table, seed, {"test": 1 / count}, None, (i, count))["test"] for i in range(count)]
    sizes = np.array([np.bincount(table.labels[test], minlength=5) for test in tests])
    assert (sizes.max(0) - sizes.min(0) <= 1).all()
    assert sizes.sum(1).max() - sizes.sum(1).min() <= 1
    assert sizes.sum(0).tolist() == np.where(totals == 1, 0, totals).tolist()


GIVEN = {  # of digits: split seed, fractions, limits -> what each split holds
    (0, None, None, None): {"train": "77f8ef665944", "val": "a69c934a0ec1", "test": "896bbed95e92"},
    (3, 0.02, 0.1, 160): {"train": "de92c1d54743", "val": "43b4d8f81ce0", "test": "74e3069c7443"},
}


def test_splits_never_change():
    """Results that are kept are of these splits."""
    for (seed, val, test, limit_train), expected in GIVEN.items():
        fields = {"split_seed": seed, "val_fraction": val, "test_fraction": test, "limit_train": limit_train}
        splits, _ = make_splits(open_source("digits"), SplitOptions(**fields))
        assert {name: sha256(repr(part.ids).encode()).hexdigest()[:12] for name, part in splits.items()} == expected


def counts(splits):
    return {name: len(part) for name, part in splits.items()}


def contents(dataset):
    return {name: (split.ids, split.labels.tolist(), split.groups) for name, split in dataset.splits.items()}


def test_a_set_splits_again_as_it_did_and_no_cell_is_a_formula(make_folder, tmp_path):
    root, path = make_folder({"cat": 40, "=dog": 40}), tmp_path / "split.csv"
    Image.new("RGB", (12, 12)).save(root / "cat" / ' a, "b"\n.png')
    dataset = load(root, split_seed=5, val_fraction=0.3, group_by=r"/(\s?.{2})")
    write_split(path, dataset)
    again = load(root, split_file=path)
    assert contents(again) == contents(dataset)
    assert again.summary()["fingerprint"] == dataset.summary()["fingerprint"]
    assert again.summary()["split_origin"] == "from split.csv"
    assert data.check(root, split_file=path).summary["splits"] == dataset.summary()["splits"]
    assert len(load(root, split_file=path, limit_train=7).train) == 7
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["image", "split", "label", "group"]
    assert not [text for row in rows for text in row if text.startswith("=")]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("cat/00")))
    fewer = load(root, split_file=path)
    assert sum(map(len, fewer.splits.values())) == sum(map(len, dataset.splits.values())) - 10
    assert f"10 images that {path} does not name were left out." in fewer.summary()["warnings"]


def test_a_file_takes_the_place_of_own_splits(make_folder, tmp_path):
    make_folder({"train/a": 9, "train/b": 9})
    root, path = make_folder({"test/a": 4, "test/b": 4}, seed=5000), tmp_path / "split.csv"
    found = load(root)
    write_split(path, found)
    assert contents(load(root, split_file=path)) == contents(found)
    path.write_text(path.read_text().replace("test/a/000.png,test", "test/a/000.png,train"))
    moved = load(root, split_file=path)
    assert counts(moved.splits) == {**counts(found.splits), "train": len(found.train) + 1, "test": 7}
    assert (moved.train.store.index.digests[-1] == found.splits["test"].store.index.digests[0]).all()
    images = next(iter(moved.eval_batches("test", 100))).inputs
    assert torch.equal(images, next(iter(found.eval_batches("test", 100))).inputs[1:])


def test_labels_of_several_classes_are_kept(make_folder, tmp_path):
    make_folder({"train/a": 9, "train/b": 9})
    root, path = make_folder({"test/a+b": 4, "test/b": 4}, seed=5000), tmp_path / "split.csv"
    found = load(root, target="labels")
    write_split(path, found)
    again = load(root, target="labels", split_file=path)
    assert [split.label_sets for split in again.splits.values()] == [s.label_sets for s in found.splits.values()]
    assert "test/a+b/000.png,test,a;b," in path.read_text()
