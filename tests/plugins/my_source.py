"""A source of data: black and white stripes, down or across."""

import numpy as np

from vitmods.data.records import Records, Source
from vitmods.data.sources import Spec, data_source


@data_source("stripes", "stripes:NUMBER", "black and white stripes", options=("gray",))
def stripes(spec: Spec) -> Source:
    n, gray = int(spec.rest), int(spec.options.get("gray", 200))
    rows = np.arange(8)[:, None] % 2 * gray + np.zeros((8, 8), dtype=int)
    ids = tuple(f"{i:03d}" for i in range(n))
    stamps = tuple(f"{gray} {name}" for name in ids)

    def fetch(i: int) -> np.ndarray:
        noise = np.random.default_rng(i).integers(0, 50, (8, 8))
        return ((rows if i % 2 else rows.T) + noise).astype(np.uint8)

    return Source("stripes", ("down", "across"), {"train": Records(ids, np.arange(n) % 2, stamps, fetch, np.arange(n))})
