"""Splits that are made: stratified, disjoint, and the same whatever the order of files."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitmods.data.records import Records, Source
from vitmods.data.splits import cut, limit, make_splits, take_out
from vitmods.util.errors import UserError


def records(labels: list[int], order: list[int] | None = None) -> Records:
    order = list(range(len(labels))) if order is None else order
    ids = tuple(f"class{labels[i]}/{i}.png" for i in order)
    return Records(ids, np.array([labels[i] for i in order]), ids, lambda key: b"", np.arange(len(ids)))


def source(*splits: str, n: int = 100) -> Source:
    return Source("set", ("a", "b"), {split: records([0, 1] * (n // 2)) for split in splits})


label_lists = st.lists(st.integers(0, 4), min_size=1, max_size=120)
fractions = st.floats(0, 0.49)


@given(label_lists, st.integers(0, 100), fractions, fractions, st.randoms(use_true_random=False))
def test_a_split_does_not_depend_on_the_order_of_files(labels, seed, val, test, random) -> None:
    shuffled = list(range(len(labels)))
    random.shuffle(shuffled)
    parts = []
    for order in (None, shuffled):
        table = records(labels, order)
        cuts = cut(table, seed, {"test": test, "val": val})
        parts.append({name: {table.ids[i] for i in part} for name, part in cuts.items()})
    assert parts[0] == parts[1]


@given(label_lists, st.integers(0, 100), fractions, fractions)
def test_parts_are_disjoint_complete_and_stratified(labels, seed, val, test) -> None:
    table = records(labels)
    parts = cut(table, seed, {"test": test, "val": val})
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(labels)))
    for label in set(labels):
        n = labels.count(label)
        counts = {name: int((table.labels[part] == label).sum()) for name, part in parts.items()}
        assert counts["train"] >= 1
        for name, fraction in (("test", test), ("val", val)):
            assert abs(counts[name] - n * fraction) <= 0.5 or counts[name] == 1 or counts["train"] == 1
        assert n < 5 or (test == 0) == (counts["test"] == 0)


def test_another_seed_is_another_split() -> None:
    table = records([0, 1] * 50)
    assert cut(table, 0, {"val": 0.2})["val"].tolist() != cut(table, 1, {"val": 0.2})["val"].tolist()


def test_a_class_with_one_image_stays_in_train() -> None:
    parts = cut(records([0, 0, 0, 0, 1]), 0, {"test": 0.4, "val": 0.4})
    assert 4 in parts["train"]


@pytest.mark.parametrize(
    ("found", "val", "result", "origin"),
    [
        (("train",), 0.1, {"train": 80, "val": 10, "test": 10}, "made, seed 3"),
        (("train",), 0.0, {"train": 90, "test": 10}, "made, seed 3"),
        (("train", "test"), 0.1, {"train": 90, "val": 10, "test": 100}, "found; val made from train, seed 3"),
        (("train", "test"), 0.0, {"train": 100, "test": 100}, "found"),
        (("train", "val"), 0.1, {"train": 100, "val": 100}, "found"),
        (("train", "val", "test"), 0.1, {"train": 100, "val": 100, "test": 100}, "found"),
    ],
)
def test_only_what_is_lacking_is_made(found, val, result, origin) -> None:
    splits, words = make_splits(source(*found), 3, val, 0.1)
    assert {name: len(part) for name, part in splits.items()} == result
    assert list(splits) == [name for name in ("train", "val", "test") if name in result]
    assert words == origin


@pytest.mark.parametrize(
    ("val", "test", "message"), [(0.5, 0.5, "nothing to train"), (-0.1, 0, "val_f"), (0, 1, "test_f")]
)
def test_impossible_fractions(val: float, test: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_splits(source("train"), 0, val, test)


@given(label_lists, st.integers(1, 130), st.integers(0, 50))
def test_limit_keeps_the_proportions(labels, count, seed) -> None:
    table = records(labels)
    kept = limit(table, count, seed)
    assert len(kept) == min(count, len(labels))
    fractions = {label: len(kept) * labels.count(label) / len(labels) for label in set(labels)}
    for label, fraction in fractions.items():
        found = int((kept.labels == label).sum())
        assert found - fraction < 1
        assert fraction - found < 1 or min(fractions.values()) < 1  # it gave one to a class that would have none
        assert found >= 1 or count < len(fractions)


@given(label_lists, st.integers(1, 130), st.integers(0, 50))
def test_what_is_taken_out_leaves_one_of_every_class(labels, count, seed) -> None:
    table = records(labels)
    if count > len(labels) - len(set(labels)):
        with pytest.raises(UserError, match="limit_val to at most"):
            take_out(table, count, seed)
        return
    rest, taken = take_out(table, count, seed)
    assert len(taken) == count
    assert set(rest.labels) == set(labels)
    assert sorted([*rest.ids, *taken.ids]) == sorted(table.ids)
    for label in set(labels):
        assert (taken.labels == label).sum() < labels.count(label)


def test_val_of_a_number_of_images() -> None:
    vtab = source("train", "test", n=1200)
    splits, words = make_splits(vtab, 0, 0.1, 0.1, limit_val=200)
    assert {name: len(part) for name, part in splits.items()} == {"train": 1000, "val": 200, "test": 1200}
    assert np.bincount(splits["val"].labels).tolist() == [100, 100]
    assert not set(splits["val"].ids) & set(splits["train"].ids)
    assert words == "found; val made from train, seed 0"
    alone, _ = make_splits(source("train", n=1200), 0, 0.1, 0.5, limit_val=200)
    assert {name: len(part) for name, part in alone.items()} == {"train": 400, "val": 200, "test": 600}
    own, words = make_splits(source("train", "val", "test"), 0, 0.1, 0.1, limit_val=20)
    assert ({name: len(part) for name, part in own.items()}, words) == ({"train": 100, "val": 20, "test": 100}, "found")
    with pytest.raises(UserError, match="limit_val must be at least 1"):
        make_splits(vtab, 0, 0.1, 0.1, limit_val=0)


def test_an_evaluation_set_is_left_as_it_is() -> None:
    splits, words = make_splits(source("test"), 0, 0.1, 0.1)
    assert (list(splits), words) == (["test"], "found")


def test_limit_does_not_depend_on_the_order_of_files() -> None:
    labels = [0, 1, 2] * 20
    assert set(limit(records(labels), 17, 5).ids) == set(limit(records(labels, list(range(60))[::-1]), 17, 5).ids)


def test_limit_of_nothing() -> None:
    table = records([0, 1])
    assert limit(table, None, 0) is table
    with pytest.raises(UserError, match="at least 1"):
        limit(table, 0, 0)


def grouped(sizes: list[int], label: int = 0) -> tuple[list[int], list[int]]:
    return [label] * sum(sizes), [g for g, size in enumerate(sizes) for _ in range(size)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=40), st.integers(0, 50), fractions, fractions)
def test_groups_stay_together(sizes, seed, val, test) -> None:
    labels, groups = grouped(sizes)
    parts = cut(records(labels), seed, {"test": test, "val": val}, np.array(groups))
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(labels)))
    homes = [{groups[i] for i in part} for part in parts.values()]
    assert sum(map(len, homes)) == len(sizes)
    assert len(parts["train"])
    for name, fraction in (("test", test), ("val", val)):
        assert abs(len(parts[name]) - len(labels) * fraction) <= 6


@given(label_lists, st.integers(0, 100), fractions, fractions)
def test_groups_of_one_are_no_groups(labels, seed, val, test) -> None:
    table, fractions = records(labels), {"test": test, "val": val}
    alone = np.arange(len(labels))[::-1].copy()
    ours, theirs = cut(table, seed, fractions, alone), cut(table, seed, fractions)
    assert {name: part.tolist() for name, part in ours.items()} == {n: p.tolist() for n, p in theirs.items()}


def test_what_is_taken_out_are_whole_groups() -> None:
    labels, groups = grouped([3] * 30)
    rest, taken = take_out(records(labels), 20, 0, np.array(groups))
    assert (len(rest), len(taken)) == (72, 18)
    number = {name: groups[i] for i, name in enumerate(records(labels).ids)}
    assert not {number[name] for name in rest.ids} & {number[name] for name in taken.ids}
