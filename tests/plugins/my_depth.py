"""A source from outside the package whose images have targets of its own: how far away everything is."""

from dataclasses import dataclass

import numpy as np

from vitmods.data.records import Records, Source
from vitmods.data.sources import Spec, data_source


@dataclass(frozen=True)
class Depth:
    meters: float

    @property
    def stamp(self) -> str:
        return str(self.meters)


@data_source("walls", "walls:NUMBER", "gray walls, the darker the farther")
def walls(spec: Spec) -> Source:
    n = int(spec.rest)
    ids = tuple(f"{i:03d}" for i in range(n))
    depths = tuple(Depth(float(i)) for i in range(n))

    def fetch(i: int) -> np.ndarray:
        return np.full((8, 8), 255 - i, dtype=np.uint8)

    records = Records(ids, np.zeros(n, np.int64), ids, fetch, np.arange(n), annotations=depths)
    return Source("walls", ("wall",), {"train": records}, target="depth")
