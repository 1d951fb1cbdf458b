"""RandAugment (Cubuk et al., NeurIPS 2020): each image takes a few operations at random, all of one magnitude.

The papers mean different things by it, so there are three spaces of operations, each in a file of its own. Libraries
take one image at a time and draw from global generators, which training (dropout) uses too. Here every draw is by
counter, and images of a batch that drew the same operation are changed together.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitmods.data.boxes import Floats, Ints
from vitmods.data.rng import Stream, uniform
from vitmods.recipes import Augment

Pixels = NDArray[np.uint8]
Draw = Callable[[Stream], Floats]
"""A number in [0, 1) for each image that an operation is given."""
Change = Callable[[Pixels, str, float, Draw], Pixels]
"""Images (B, C, H, W), the name of an operation and its magnitude -> the changed images."""


def randaugment(images: Tensor, seed: int, epoch: int, index: Ints, augment: Augment) -> Tensor:
    """The augment's RandAugment of uint8 (B, C, H, W), in place. index (B,) counts the draws."""
    assert augment.randaugment is not None
    count, magnitude = augment.randaugment
    pixels = images.numpy()  # numpy gathers whole images, torch single bytes
    if augment.randaugment_space == "timm":
        from vitmods.data.randaugment_timm import change_all

        change_all(pixels, seed, epoch, index, augment)
        return images
    names, signed, change = _space(augment.randaugment_space)
    for turn in range(count):
        drawn, minus = operations_and_signs(seed, epoch, index, turn, len(names))
        minus &= np.isin(drawn, [names.index(name) for name in signed])
        for group in np.unique(2 * drawn + minus):
            chosen = np.flatnonzero(2 * drawn + minus == group)

            def draw(stream: Stream, chosen: Ints = chosen, turn: int = turn) -> Floats:
                return uniform(seed, stream, epoch, index[chosen], turn)

            signed_magnitude = -magnitude if group % 2 else magnitude
            pixels[chosen] = change(pixels[chosen], names[group // 2], signed_magnitude, draw)
    return images


def operations_and_signs(seed: int, epoch: int, index: Ints, turn: int, count: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Which of `count` operations each image takes in this turn, and whether it goes the other way; both (B,)."""
    drawn = (uniform(seed, Stream.RANDAUGMENT_OP, epoch, index, turn) * count).astype(np.int64)
    return drawn, uniform(seed, Stream.RANDAUGMENT_SIGN, epoch, index, turn) < 0.5


def _space(name: str) -> tuple[tuple[str, ...], tuple[str, ...], Change]:
    """The names of a space's operations, of those with a sign, and the function that does them."""
    if name == "big_vision":
        from vitmods.data import randaugment_big_vision as big_vision

        return tuple(big_vision.OPERATIONS), big_vision.SIGNED, big_vision.change
    from vitmods.data import randaugment_torchvision as torchvision

    return tuple(torchvision.OPERATIONS), torchvision.SIGNED, torchvision.change
