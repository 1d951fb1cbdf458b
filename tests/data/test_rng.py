"""Counter-based random numbers: pure, uniform, different for every counter; and the order of repeated augmentation."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from timm.data.distributed_sampler import RepeatAugSampler

from vitmods.data.rng import Stream, bits, permutation, text_bits, text_order, uniform
from vitmods.data.sampler import COPY, apart, balanced, positions, repeated

seeds = st.integers(-(2**63), 2**64)


@given(seeds, st.integers(0, 10_000), st.integers(0, 10**9))
def test_a_draw_for_one_sample_is_the_draw_in_any_batch(seed, epoch, sample):
    batch = np.array([5, sample, 7])
    assert uniform(seed, Stream.FLIP, epoch, batch)[1] == uniform(seed, Stream.FLIP, epoch, sample)


def test_draws_do_not_change_between_versions():
    """A changed number would silently change every trial that is resumed or compared with an older one."""
    assert int(bits(0, Stream.FLIP, 0, 0)) == 0xD2207D237D6092FE
    assert permutation(0, 0, 8).tolist() == [2, 5, 7, 4, 6, 0, 1, 3]
    assert text_bits(0, "split", ["cat/1.png"]).tolist() == [17390288959559953563]


@pytest.mark.parametrize("vary", ["seed", "stream", "epoch", "sample"])
def test_numbers_are_uniform_and_independent_along_every_counter(vary):
    n = np.arange(2000)

    def draws(seed):
        if vary == "seed":
            return np.array([float(uniform(s, Stream.FLIP, 0, seed)) for s in range(200)])
        if vary == "stream":
            return np.concatenate([uniform(seed, stream, 0, n[:50]) for stream in Stream])
        return uniform(seed, Stream.FLIP, n, 3) if vary == "epoch" else uniform(seed, Stream.FLIP, 3, n)

    rows = [draws(seed) for seed in range(40)]
    assert all(len(np.unique(row)) == len(row) for row in rows)
    assert stats.kstest([stats.kstest(row, "uniform").pvalue for row in rows], "uniform").pvalue > 1e-3
    assert stats.kstest([stats.pearsonr(row[:-1], row[1:]).pvalue for row in rows], "uniform").pvalue > 1e-3


def test_swapped_counters_and_odd_file_names_give_other_numbers():
    assert uniform(0, Stream.FLIP, 1, 2) != uniform(0, Stream.FLIP, 2, 1)
    assert uniform(1, Stream.FLIP, 0, 2) != uniform(0, Stream.FLIP, 1, 2)
    undecodable, other = text_bits(0, "split", ["caf\udce9.jpg", "café.jpg"])
    assert undecodable != other
    drawn = {int(text_bits(seed, purpose, ["a"])[0]) for seed in (0, 1) for purpose in ("split", "limit")}
    assert len(drawn) == 4
    assert text_order(0, "split", ["b", "a", "b"]).tolist() in ([0, 2, 1], [1, 0, 2])


def test_an_epoch_has_n_views_in_the_order_of_timms_sampler():
    for n, repeats in product((1, 2, 7, 256, 600), (1, 2, 3, 5)):
        sampler = RepeatAugSampler(range(n), 1, 0, shuffle=False, num_repeats=repeats)
        reference = list(sampler)  # of which a last part of 256 is dropped
        order = np.random.default_rng(0).permutation(n)
        views = repeated(order, repeats)
        assert len(np.unique(views)) == len(views) == n
        assert positions(views)[: len(reference)].tolist() == order[reference].tolist()
        assert repeats > 1 or views.tolist() == apart(order).tolist() == order.tolist()


def test_no_neighbors_in_a_batch_are_copies_of_one_image():
    views = repeated(np.arange(60), 3)[12:42]
    for rank, processes in ((0, 1), (0, 3), (1, 3), (2, 3)):
        batch = positions(apart(views[rank::processes]))
        assert (batch != np.roll(batch, 1)).all()
    assert sorted(apart(views).tolist()) == sorted(views.tolist())


@given(seeds, st.integers(0, 50), st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_balanced_classes_come_equally_often_and_each_view_once(seed, epoch, labels):
    labels, n = np.array(labels), len(labels)
    views = balanced(permutation(seed, epoch, n), labels, seed, epoch)
    classes, drawn = np.unique(labels), labels[positions(views)]
    counts = [int((drawn == label).sum()) for label in classes]
    assert sum(counts) == n == len(np.unique(views))
    assert max(counts) - min(counts) <= 1
    for label, count in zip(classes, counts, strict=True):  # no image comes again before all of its class have come
        own = int((labels == label).sum())
        per_image = np.bincount(positions(views[drawn == label]), minlength=n)[labels == label]
        assert {*per_image.tolist()} <= {count // own, -(-count // own)}
        assert views[drawn == label].max() // COPY == -(-count // own) - 1
    again = balanced(permutation(seed, epoch, n), labels, seed, epoch)
    assert np.array_equal(views, again)


def test_balanced_epochs_differ_and_mix_the_classes():
    labels = np.repeat([0, 1, 2], [200, 20, 2])
    epochs = [balanced(permutation(0, epoch, 222), labels, 0, epoch) for epoch in range(6)]
    assert len({tuple(views.tolist()) for views in epochs}) == 6
    assert len(np.unique(np.concatenate([positions(v) for v in epochs]))) > 200, "of a large class others each time"
    halves = [np.bincount(labels[positions(views[:111])], minlength=3) for views in epochs]
    assert 20 < np.min(halves) < np.max(halves) < 54
