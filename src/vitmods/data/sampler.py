"""The order in which images are visited: a permutation or shard by shard, and each once or, with repeated augmentation,
several times in a row (Hoffer et al., "Augment your batch", CVPR 2020; Berman et al., arXiv:1902.05509).

A view is an image together with the number of its copy, in one int64: the position of the image plus COPY times the
copy. Draws for a view are counted by that number, so copies differ, and copy 0 is the image as it is without repeats.
"""

import numpy as np

from vitmods.data.augment import Ints
from vitmods.data.rng import Stream, bits, uniform

COPY = 1 << 40  # more than any set has images


def shard_order(seed: int, epoch: int, shards: Ints, keys: Ints, buffer: int) -> Ints:
    """The order (n,) of n images that lie in `shards` (n,), inside of them by `keys` (n,).

    Shards follow each other at random; then every image moves by fewer than `buffer` places.
    """
    shard_turns = bits(seed, Stream.ORDER, epoch, shards, 1)
    in_turn = np.lexsort((keys, shards, shard_turns))
    moved = np.arange(len(keys)) + buffer * uniform(seed, Stream.ORDER, epoch, np.arange(len(keys)), 2)
    return in_turn[np.argsort(moved, kind="stable")]


def repeated(order: Ints, repeats: int) -> Ints:
    """The views (n,) of an epoch that visits the images in `order` (n,): each `repeats` times in a row, n in all.

    So an epoch costs the same and has n / repeats of the images, as with DeiT's sampler.
    """
    images = order[: -(-len(order) // repeats)]
    return (images[:, None] + COPY * np.arange(repeats)).ravel()[: len(order)]


def balanced(order: Ints, labels: Ints, seed: int, epoch: int) -> Ints:
    """The views (n,) of an epoch that visits every class of `labels` (n,) equally often, at random.

    Images of a class come in `order` (n,): of a small one again and again, as further copies; of a large one some.
    """
    classes, by_class = np.unique(labels), labels[order]
    views = []
    for number, label in enumerate(classes):
        images = order[by_class == label]
        turns = np.arange(len(order) // len(classes) + (number < len(order) % len(classes)))
        views.append(images[turns % len(images)] + COPY * (turns // len(images)))
    drawn = np.concatenate(views)
    return drawn[np.argsort(uniform(seed, Stream.ORDER, epoch, drawn, 3), kind="stable")]


def apart(views: Ints) -> Ints:
    """The views of a batch with all first copies in front, then all second ones and so on.

    Mixing takes neighbors. DeiT's sampler deals the copies of an image out to different processes, so that there too
    an image is not mixed with itself.
    """
    if views.max() < COPY:
        return views
    return views[np.argsort(views // COPY, kind="stable")]


def positions(views: Ints) -> Ints:
    """The images' positions in the split (B,)."""
    return views % COPY
