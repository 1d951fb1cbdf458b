"""Sets too large to keep decoded: every image is read and decoded whenever it is needed.

All is as for a set that is kept, to the bit, but the order of training images: where they lie in shards, these are
read one after the other in a random order, and images change places only with others nearby (a shuffle buffer).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitmods.data.boxes import Ints
from vitmods.data.dataset import ImageDataset
from vitmods.data.geometry import Geometry
from vitmods.data.read import Unreadable, decode
from vitmods.data.records import Records, Streaming, printable
from vitmods.data.sampler import shard_order
from vitmods.data.store import Index, Store, estimate, open_store
from vitmods.data.threads import busy_with
from vitmods.util.errors import UserError

STREAM_ABOVE = 64 << 30  # bytes; a larger split, decoded, is not kept unless asked for


@dataclass(frozen=True)
class LazyStore(Store):
    """The readable images of one split, without their pixels. index.shapes are those before resizing."""

    records: Records
    geometry: Geometry
    channels: int

    def image(self, i: int) -> NDArray[np.uint8]:
        """Image i (C, H, W) as a store would have it. Raises UserError if it can no longer be read."""
        try:
            with busy_with(printable(self.records.ids[i])):
                return self.geometry.store(decode(self.records.fetch(int(self.records.keys[i])), self.channels))
        except Unreadable as error:
            name = printable(self.records.ids[i])
            raise UserError(f"{name} cannot be read any more: {error}. Repair it and go on.") from error

    def batch(self, index: Ints) -> None:
        """There is none: the images are not kept."""
        return None


@dataclass(frozen=True)
class StreamSet(ImageDataset):
    """A ImageDataset whose images are decoded when they are needed, shard by shard where they lie in shards."""

    buffer: int = Streaming.buffer

    def _order(self, seed: int, epoch: int) -> Ints:
        store = self.train.store
        assert isinstance(store, LazyStore)
        if store.records.shards is None:
            return super()._order(seed, epoch)
        return shard_order(seed, epoch, store.records.shards, store.records.keys, self.buffer)


def is_streamed(how: Streaming, splits: Mapping[str, tuple[Records, Geometry]], channels: int) -> bool:
    """What was asked for; or, if nothing was, whether a split is larger than STREAM_ABOVE, decoded."""
    if how.asked is not None:
        return how.asked
    return any(estimate(part, geometry, channels) > STREAM_ABOVE for part, geometry in splits.values())


def open_lazily(records: Records, geometry: Geometry, channels: int, cache_dir: Path | None) -> LazyStore:
    """The records' images, to be decoded when they are needed. Which can be read is known from the source, or found
    out now by decoding each once."""
    index = _known(records) or open_store(records, None, 3, cache_dir).index
    return LazyStore(np.empty(0, np.uint8), index, records.take(index.kept), geometry, channels)


def _known(records: Records) -> Index | None:
    if records.native is None or records.digests is None:
        return None
    n = len(records)
    return Index(
        kept=np.arange(n),
        shapes=np.concatenate([np.full((n, 1), 3), records.native], axis=1),
        offsets=np.zeros(n, dtype=np.int64),
        native=records.native[records.native.min(axis=1, initial=1) > 0],
        crc=np.zeros(n, dtype=np.int64),
        digests=records.digests,
        unreadable=(),
    )
