"""Repeated augmentation: the same images as DeiT's sampler in an epoch, other draws for each copy."""

import numpy as np
import pytest
from timm.data.distributed_sampler import RepeatAugSampler

from vitmods.data.sampler import apart, positions, repeated


@pytest.mark.parametrize("n", [1, 2, 7, 256, 600])
@pytest.mark.parametrize("repeats", [1, 2, 3, 5])
def test_an_epoch_has_n_views_in_the_order_of_timms_sampler(n: int, repeats: int) -> None:
    sampler = RepeatAugSampler(range(n), 1, 0, shuffle=False, num_repeats=repeats)
    theirs = list(sampler)  # of which a last part of 256 is dropped
    order = np.random.default_rng(0).permutation(n)
    views = repeated(order, repeats)
    assert len(views) == n
    assert positions(views)[: len(theirs)].tolist() == order[theirs].tolist()
    assert len(np.unique(views)) == n


def test_one_copy_is_the_order_itself() -> None:
    order = np.array([3, 1, 2, 0])
    assert repeated(order, 1).tolist() == order.tolist()
    assert apart(order).tolist() == order.tolist()


@pytest.mark.parametrize("processes", [1, 3])
def test_no_neighbors_in_a_batch_are_copies_of_one_image(processes: int) -> None:
    views = repeated(np.arange(60), 3)[12:42]
    for rank in range(processes):
        batch = positions(apart(views[rank::processes]))
        assert (batch != np.roll(batch, 1)).all()
    assert sorted(apart(views).tolist()) == sorted(views.tolist())
