"""A user's source of images, in one file: stripes across or down, drawn as they are asked for."""

import numpy as np

from vitmods.data.records import Records, Source
from vitmods.data.sources import Spec, data_source


@data_source("stripes", "stripes:NUMBER", "stripes across or down, as many as asked for")
def stripes(spec: Spec) -> Source:
    count = int(spec.rest)
    labels = np.arange(count) % 2

    def draw(index: int) -> np.ndarray:
        image = np.random.default_rng(index).integers(0, 64, (8, 8), dtype=np.uint8)
        (image if labels[index] else image.T)[::2] += 128
        return image

    names = tuple(f"{index:04d}" for index in range(count))
    records = Records(names, labels, names, draw, np.arange(count))
    return Source("stripes", ("across", "down"), {"train": records})
