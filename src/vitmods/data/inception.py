"""Boxes of the crop that Inception was trained with (Szegedy et al., CVPR 2015), drawn as TensorFlow draws them.

Unlike torchvision's random resized crop the aspect is uniform itself, not in its logarithm, and then the height is
uniform among those that keep the area in its range; so large boxes are rarer. The last row and column are never reached
unless the box spans the image.
"""

import numpy as np

from vitmods.data.boxes import Bools, Floats, Ints
from vitmods.data.rng import Stream, uniform

TRIES = 100  # boxes drawn before the whole image is taken


def inception_boxes(
    seed: int, epoch: int, index: Ints, sizes: Ints, scale: tuple[float, float], ratio: tuple[float, float]
) -> Ints:
    """Boxes (B, 4): top, left, height, width in pixels, of images whose heights and widths are sizes (B, 2).

    A box covers a part in `scale` of the image's area and has width / height in `ratio`.
    """
    boxes = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
    left = np.arange(len(index))
    for attempt in range(TRIES):
        draws = [
            uniform(seed, stream, epoch, index[left], attempt)
            for stream in (Stream.CROP_SHAPE, Stream.CROP_SIZE, Stream.CROP_TOP, Stream.CROP_LEFT)
        ]
        drawn, fits = _boxes(sizes[left], scale, ratio[0] + draws[0] * (ratio[1] - ratio[0]), draws[1:])
        boxes[left[fits]] = drawn[fits]
        left = left[~fits]
        if not len(left):
            break
    return boxes


def _boxes(sizes: Ints, scale: tuple[float, float], aspect: Floats, draws: list[Floats]) -> tuple[Ints, Bools]:
    """A box for each image, and whether it is one: inside, and of an area in the range."""
    image_h, image_w = sizes.T
    least, most = (part * image_h * image_w for part in scale)
    shortest, tallest = (np.rint(np.sqrt(area / aspect)).astype(np.int64) for area in (least, most))
    widest = _height(image_w + 0.5 - 1e-7, aspect)
    widest -= _width(widest, aspect) > image_w
    tallest = np.minimum(np.where(_width(tallest, aspect) > image_w, widest, tallest), image_h)
    shortest = np.minimum(shortest, tallest)
    height = shortest + (draws[0] * (tallest - shortest + 1)).astype(np.int64)
    height += _width(height, aspect) * height < least  # rounding alone shall not make it fail
    height -= _width(height, aspect) * height > most
    width = _width(height, aspect)
    area = width * height
    fits = (least <= area) & (area <= most) & (width <= image_w) & (height <= image_h) & (area > 0)
    top = (draws[1] * np.maximum(image_h - height, 1)).astype(np.int64)
    left = (draws[2] * np.maximum(image_w - width, 1)).astype(np.int64)
    return np.stack([top, left, height, width], axis=1), fits


def _width(height: Ints, aspect: Floats) -> Ints:
    return np.rint(height * aspect).astype(np.int64)


def _height(width: Floats, aspect: Floats) -> Ints:
    return (width / aspect).astype(np.int64)
