"""Streamed sets: the images of a set that is kept, in an order that follows the shards; none twice, none lost."""

import dataclasses
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitmods import data
from vitmods.data import ImageDataset, dataset, loading
from vitmods.data.dataset import LazyStore
from vitmods.data.geometry import Geometry
from vitmods.data.pack import pack
from vitmods.data.read import Unreadable
from vitmods.data.records import Records
from vitmods.data.sampler import shard_order
from vitmods.data.sources.hf import Forward
from vitmods.recipes import Augment
from vitmods.util.errors import UserError

from . import support
from .support import by_sample

BUSY = Augment(crop="random_resized", flip=0.5, randaugment=(2, 9), erasing=0.5)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder, "pets", and its shards, "shards": some of its images are smaller than the view."""
    root, rng = tmp_path_factory.mktemp("streamed"), np.random.default_rng(0)
    files = {f"class{i % 3}/{i}.png": support.encoded(support.noise(i, rng.integers(9, 40, 2))) for i in range(60)}
    support.write_files(root / "pets", files)
    pack(root / "pets", root / "shards", shard_mb=0.03)
    assert len(list(root.glob("shards/*.tar"))) > 3
    return root


def load(spec, **options):
    return support.load(spec, **{"img_size": 16, "augment": BUSY, **options})


def is_streamed(images):
    return isinstance(images.train.store, LazyStore)


def indices(batches):
    return [batch.index.tolist() for batch in batches]


@pytest.mark.parametrize(("which", "crop", "channels"), [
    ("pets", "none", 1), ("pets", "random_resized", 3), ("shards", "pad", 3), ("shards", "random_resized", 1),
])  # fmt: skip
def test_streamed_images_are_those_of_a_set_that_is_kept(root, which, crop, channels):
    augment = dataclasses.replace(BUSY, crop=crop)
    kept = load(root / "pets", augment=augment, in_chans=channels)
    streamed = load(f"{root / which}?stream=1", augment=augment, in_chans=channels)
    assert (is_streamed(kept), is_streamed(streamed)) == (False, True)
    assert streamed.summary() == kept.summary() | {"spec": f"{root / which}?stream=1"}
    everything = {"seed": 4, "epoch": 2, "batch_size": len(kept.splits["train"])}
    assert by_sample(streamed.train_batches(**everything)) == by_sample(kept.train_batches(**everything))
    for split in kept.splits:
        pairs = zip(kept.eval_batches(split, 7), streamed.eval_batches(split, 7), strict=True)
        assert all(torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) for a, b in pairs)
    pairs = zip(kept.samples(5), streamed.samples(5), strict=True)
    assert all(a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in pairs)


counts = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


@settings(deadline=None, max_examples=15)
@given(counts, st.integers(1, 200), st.integers(-3, 2**64), st.integers(0, 9), st.randoms(use_true_random=False))
def test_an_order_visits_all_once_near_to_their_shards(sizes, buffer, seed, epoch, random):
    shards, keys = np.repeat(np.arange(len(sizes)), sizes), np.arange(sum(sizes))
    mixed = np.array(random.sample(range(len(keys)), len(keys)))  # records are sorted by name, not by place
    order = shard_order(seed, epoch, shards[mixed], keys[mixed], buffer)
    assert sorted(order.tolist()) == keys.tolist()
    one_by_one = shard_order(seed, epoch, shards[mixed], keys[mixed], 1)
    place = {img: number for number, img in enumerate(one_by_one.tolist())}
    assert all(abs(place[img] - number) < buffer for number, img in enumerate(order.tolist()))
    in_turn = shards[mixed][one_by_one]
    assert (np.diff(in_turn) != 0).sum() == len(set(in_turn.tolist())) - 1
    assert all((np.diff(keys[mixed][one_by_one][in_turn == shard]) > 0).all() for shard in set(in_turn.tolist()))


def test_orders_differ_by_seed_and_epoch_and_shards_keep_it(root):
    shards, keys = np.repeat(np.arange(9), 30), np.arange(270)
    orders = {tuple(shard_order(*which, shards, keys, 50).tolist()) for which in ((0, 0), (0, 1), (1, 0))}
    first_shards = {tuple(shards[shard_order(0, epoch, shards, keys, 1)[::30]].tolist()) for epoch in range(5)}
    assert (len(orders), len(first_shards)) == (3, 5)
    arguments = {"seed": 4, "epoch": 2, "batch_size": 8}
    kept, streamed = load(root / "pets"), load(f"{root / 'pets'}?stream=1")
    assert indices(streamed.train_batches(**arguments)) == indices(kept.train_batches(**arguments))
    dataset = load(f"wds:{root / 'shards'}?stream=1&buffer=3")
    assert dataset.buffer == 3
    order = dataset.order(0, 0)
    records = dataset.splits["train"].store.records
    assert np.array_equal(order, shard_order(0, 0, records.shards, records.keys, 3))
    augment = dataclasses.replace(dataset.augment, sampler="balanced")
    uneven = dataclasses.replace(dataset, augment=augment)
    with pytest.raises(UserError, match="streamed shard by shard, which balanced classes would undo"):
        uneven.views(0, 0)


@settings(deadline=None, max_examples=8)
@given(st.data())
def test_processes_workers_and_resuming_never_repeat_or_drop(root, data):
    dataset = numbers_set(data.draw(counts), data.draw(st.integers(1, 100)))
    n = len(dataset.splits["train"])
    world = data.draw(st.integers(1, min(5, n)))
    batch = data.draw(st.integers(world, n + 5))
    seed, epoch = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 9))
    alone = indices(dataset.train_batches(seed=seed, epoch=epoch, batch_size=batch))
    assert len(alone) == dataset.steps_per_epoch(batch)
    seen = list(chain(*alone))
    assert len(set(seen)) == len(seen) == (n if n < batch else n // batch * batch)
    start = data.draw(st.integers(0, len(alone)))
    parts = []
    for rank in range(world):
        actual = dataset.for_process(rank, world)
        object.__setattr__(actual, "workers", data.draw(st.integers(0, 3)))
        parts.append(indices(actual.train_batches(seed=seed, epoch=epoch, batch_size=batch, start=start)))
    dealt = [sorted(chain(*fractions)) for fractions in zip(*parts, strict=True)]
    assert dealt == [sorted(full) for full in alone[start:]]
    size = data.draw(st.integers(1, n + 3))
    views = [indices(dataset.for_process(rank, world).eval_batches("train", size)) for rank in range(world)]
    assert sorted(chain(*chain(*views))) == list(range(n))


def numbers_set(sizes, buffer):
    """A streamed set of so many shards with so many images each, of one pixel."""
    n = sum(sizes)
    names = tuple(f"{i:03d}" for i in range(n))
    fields = {"native": np.ones((n, 2), dtype=np.int64), "digests": np.zeros((n, 16), dtype=np.uint8)}
    shards = np.repeat(np.arange(len(sizes)), sizes)

    def fetch(key):
        return np.full((1, 1), key % 256, dtype=np.uint8)

    records = Records(names, np.zeros(n, dtype=np.int64), names, fetch, np.arange(n), shards, **fields)
    store = dataset.open_lazily(records, Geometry((1, 1)), 1, None)
    split = data.Split("train", names, records.labels, store, store.geometry)
    augment = Augment(crop="none", flip=0.0)
    return ImageDataset("numbers", ("one",), {"train": split}, (1, 1), 1, augment, {}, buffer=buffer)


def test_processes_see_the_same_images_as_one(root):
    dataset = load(f"{root / 'shards'}?stream=1&buffer=9")
    arguments = {"seed": 1, "epoch": 3, "batch_size": 10}
    full = by_sample(dataset.train_batches(**arguments))
    parts = [by_sample(dataset.for_process(rank, 3).train_batches(**arguments)) for rank in range(3)]
    assert {i: image for part in parts for i, image in part.items()} == full
    assert sum(map(len, parts)) == len(full)
    dataset = load(root / "pets")
    with pytest.raises(UserError, match="rank must be between 0"):
        dataset.for_process(2, 2)
    with pytest.raises(UserError, match="A batch of 2 images is too small for 3 processes"):
        dataset.for_process(0, 3).train_batches(seed=0, epoch=0, batch_size=2)


def test_large_sets_are_streamed_unasked(root, monkeypatch):
    assert not is_streamed(load(root / "shards"))
    monkeypatch.setattr(loading, "STREAM_ABOVE", 1000)
    assert is_streamed(load(root / "shards"))
    assert is_streamed(load(root / "pets"))
    assert not is_streamed(load(f"{root / 'shards'}?stream=0"))


def test_unreadable_images_of_a_streamed_folder(make_folder):
    pets = make_folder({"cat": 9, "dog": 9})
    (pets / "cat" / "bad.png").write_bytes(b"x")
    with pytest.raises(UserError, match=r"cat/bad\.png: not an image"):
        load(f"{pets}?stream=1")
    dataset = load(f"{pets}?stream=1", unreadable="skip")
    assert dataset.summary()["left_out"] == 1
    ids = dataset.splits["train"].ids
    (pets / ids[0]).write_bytes(b"x")
    with pytest.raises(UserError, match=f"{ids[0]} cannot be read any more: not an image"):
        list(dataset.train_batches(seed=0, epoch=0, batch_size=len(ids)))


def forward(sizes, limit):
    """Rows that say their number; and the shards that were opened, in order."""
    starts, opened = np.cumsum([0, *sizes]), []

    def read(shard):
        opened.append(shard)
        yield from (str(row).encode() for row in range(starts[shard], starts[shard + 1]))

    return Forward(read, sizes, limit), opened


@settings(deadline=None, max_examples=25)
@given(counts, st.integers(1, 50), st.integers(0, 99), st.integers(0, 400))
def test_an_epoch_opens_every_shard_once(sizes, buffer, seed, start):
    order = shard_order(seed, 0, np.repeat(np.arange(len(sizes)), sizes), np.arange(sum(sizes)), buffer)
    rows, opened = forward(sizes, limit=4 * buffer)
    assert [int(rows(int(row))) for row in order] == order.tolist()
    assert len(opened) == len(set(opened))
    assert len(rows._held) <= 4 * buffer
    assert [int(rows(row)) for row in order[::-7].tolist()] == order[::-7].tolist()  # and backwards
    resumed, _ = forward(sizes, limit=4 * buffer)
    assert [int(resumed(int(row))) for row in order[start:]] == order[start:].tolist()


def test_a_stream_that_is_shorter_than_it_was():
    rows = Forward(lambda shard: iter([b"0"]), [2], 9)
    with pytest.raises(Unreadable, match="ends before this row"):
        rows(1)
