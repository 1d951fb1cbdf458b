"""Block-wise masks of an image's patches (Bao et al., 2022, arXiv:2106.08254, section 2.3)."""

import math
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._compile import _disable_dynamo

from vitmods.data.augment import crop_boxes, flip, resized_crops
from vitmods.data.dataset import Draw
from vitmods.data.geometry import Geometry
from vitmods.data.rng import Stream, bits, uniform
from vitmods.tasks.beit.recipes import BeitPart

_ATTEMPTS = 10  # blocks drawn before a mask stays smaller than it should be
_LOG_ASPECT = math.log(0.3), math.log(1 / 0.3)  # of height over width

Seeds = NDArray[np.uint64]


class Masks(NamedTuple):
    """The masks of B images of T patches.

    mask: bool (B, T), True for masked patches. masked: int64 (M,), their positions among all B T patches. visible:
    int64 (B, K), patches of each image that include all that are not masked; K is the same for all images.
    """

    mask: Tensor
    masked: Tensor
    visible: Tensor


def block_mask(grid: tuple[int, int], count: int, least: float, numbers: Random) -> NDArray[np.bool_]:
    """Mask up to `count` patches of a grid (rows, columns) by rectangles, each of `least` patches or more while so many
    are left to mask. A mask stays smaller if ten rectangles in a row do not fit.

    numbers: with Python's generator at seed 0, the masks of the official code.
    """
    rows, columns = grid
    masked, remaining = 0, count  # patch i is bit i of an integer: far faster than an array of this size
    while remaining > 0:
        for _ in range(_ATTEMPTS):
            area, aspect = numbers.uniform(least, remaining), math.exp(numbers.uniform(*_LOG_ASPECT))
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if height >= rows or width >= columns:
                continue
            start = numbers.randint(0, rows - height) * columns + numbers.randint(0, columns - width)
            row = (1 << width) - 1 << start
            block = sum(row << i * columns for i in range(height))
            added = (block & ~masked).bit_count()
            if 0 < added <= remaining:
                masked, remaining = masked | block, remaining - added
                break
        else:
            break
    masked = masked or 1 << numbers.randrange(rows * columns)  # of tiny grids; a loss needs a masked patch
    packed = np.frombuffer(masked.to_bytes(-(-rows * columns // 8), "little"), np.uint8)
    return np.unpackbits(packed, count=rows * columns, bitorder="little").astype(bool).reshape(grid)


# As torch.compiler.disable, which would import the compiler for every study: seconds.
@_disable_dynamo
def draw_masks(part: BeitPart, grid: tuple[int, int], seeds: Iterable[Any], device: torch.device) -> Masks:
    """Draw a mask for each seed, of the size that the recipe's part asks for.

    With a decoder all masks have that size, so that an image's tokens do not depend on the batch: single patches fill
    up masks that blocks leave smaller.
    """
    patches = grid[0] * grid[1]
    count, least = max(1, round(patches * part.masked)), patches * part.least_block
    if part.decoder_depth:
        count = min(count, patches - 1)
    masks = []
    for numbers in (Random(int(seed)) for seed in seeds):
        drawn = block_mask(grid, count, least, numbers).ravel()
        if part.decoder_depth:
            drawn[numbers.sample(np.flatnonzero(~drawn).tolist(), count - int(drawn.sum()))] = True
        masks.append(drawn)
    mask = np.array(masks)
    visible = mask.argsort(axis=1, kind="stable")[:, : max(1, int((~mask).sum(axis=1).max()))]
    arrays = mask, np.flatnonzero(mask), visible
    return Masks(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays))


def evaluation_seeds(index: NDArray[np.int64]) -> Seeds:
    """Return seeds (B,) of the masks that images at these positions of a split always have in evaluation."""
    return bits(0, Stream.PATCH_MASK, index)


def masked_view(
    stored: Sequence[NDArray[np.uint8]], targets: Any, draw: Draw
) -> tuple[tuple[Tensor, ...], tuple[Any, Seeds]]:
    """Cut a random resized crop, flip it, and draw the seed of its mask. The seeds go with the targets: how many
    patches there are depends on the model."""
    augment, sizes = draw.augment, np.array([image.shape[1:] for image in stored])
    boxes = crop_boxes(draw.seed, draw.epoch, draw.views, sizes, augment.crop_scale, augment.crop_ratio)
    pixels = resized_crops(stored, boxes, draw.img_size, Geometry(draw.img_size, resample=augment.resample).crop_method)
    pixels = flip(pixels, uniform(draw.seed, Stream.FLIP, draw.epoch, draw.views) < augment.flip)
    return (pixels,), (targets, bits(draw.seed, Stream.PATCH_MASK, draw.epoch, draw.views))
