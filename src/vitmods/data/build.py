"""Read every image of a split once, on all cores, and write the pixels one after the other."""

import json
import os
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitmods.data.geometry import Geometry
from vitmods.data.read import Unreadable, decode
from vitmods.data.records import Records
from vitmods.util.files import progress_console

_CHUNK = 512  # images in flight: bounds the memory of decoded images that wait to be written
_SHOW_PROGRESS = 5000  # images; fewer are read before a progress bar could be seen


@dataclass(frozen=True)
class Index:
    """Where the m readable images of n records lie, and what they are.

    kept (m,): positions in the records; shapes (m, 3): C, H, W as stored; offsets (m + 1,): bytes; native (m, 2):
    height and width before resizing; crc (m,): checksum of the stored pixels; digests (m, 16): hash of the source's
    bytes; unreadable: (position, reason) of the others.
    """

    kept: NDArray[np.int64]
    shapes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    native: NDArray[np.int64]
    crc: NDArray[np.int64]
    digests: NDArray[np.uint8]
    unreadable: tuple[tuple[int, str], ...]

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """Plain arrays, for np.savez."""
        reasons = np.frombuffer(json.dumps(self.unreadable).encode(), dtype=np.uint8)
        return {**vars(self), "unreadable": reasons}

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray]) -> "Index":
        """Inverse of to_arrays. Raises KeyError or ValueError on others."""
        reasons = json.loads(arrays["unreadable"].tobytes())
        columns = {field.name: arrays[field.name] for field in fields(cls) if field.name != "unreadable"}
        return cls(**columns, unreadable=tuple((position, reason) for position, reason in reasons))


def build(records: Records, geometry: Geometry, channels: int, out: BinaryIO) -> Index:
    """Write the stored form of all readable images to `out`, in the records' order."""
    rows: list[_Row] = []
    kept: list[int] = []
    unreadable: list[tuple[int, str]] = []
    for position, result in enumerate(_decoded(records, geometry, channels)):
        if isinstance(result, str):
            unreadable.append((position, result))
            continue
        row, pixels = result
        out.write(pixels.data)
        rows.append(row)
        kept.append(position)
    shapes = np.array([row.shape for row in rows], dtype=np.int64).reshape(-1, 3)
    return Index(
        kept=np.array(kept, dtype=np.int64),
        shapes=shapes,
        offsets=np.concatenate([[0], np.cumsum(shapes.prod(axis=1))]).astype(np.int64),
        native=np.array([row.native for row in rows], dtype=np.int64).reshape(-1, 2),
        crc=np.array([row.crc for row in rows], dtype=np.int64),
        digests=np.frombuffer(b"".join(row.digest for row in rows), dtype=np.uint8).reshape(-1, 16),
        unreadable=tuple(unreadable),
    )


class _Row(NamedTuple):
    shape: tuple[int, ...]
    native: tuple[int, int]
    crc: int
    digest: bytes


_Result = tuple[_Row, NDArray[np.uint8]] | str


def _decoded(records: Records, geometry: Geometry, channels: int) -> Iterator[_Result]:
    """Each record's row and pixels, or the reason why it cannot be read, in order."""

    def one(position: int) -> _Result:
        try:
            raw = records.fetch(int(records.keys[position]))
            image = decode(raw, channels)
        except Unreadable as error:
            return str(error)
        stored = np.ascontiguousarray(geometry.store(image))
        native = (image.shape[1], image.shape[2])
        return _Row(stored.shape, native, zlib.crc32(stored.data), digest(raw)), stored

    # PIL warns of large images and odd metadata; what matters is reported as a reason.
    with warnings.catch_warnings(), ThreadPoolExecutor(cores()) as pool:
        warnings.simplefilter("ignore")
        for start in _progress(range(0, len(records), _CHUNK), len(records)):
            yield from pool.map(one, range(start, min(start + _CHUNK, len(records))))


def cores() -> int:
    """Cores this process may use; not every system can tell that."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def digest(raw: "bytes | Image.Image | NDArray[np.generic]") -> bytes:
    """16 bytes that tell the source's bytes of an image from all others."""
    content = raw if isinstance(raw, bytes) else np.ascontiguousarray(np.asarray(raw)).tobytes()
    return blake2b(content, digest_size=16).digest()


def _progress(chunks: range, images: int) -> "Iterator[int]":
    if images < _SHOW_PROGRESS:
        yield from chunks
        return
    from rich.progress import track

    console = progress_console()
    yield from track(chunks, f"Reading {images:,} images", console=console, disable=not console.is_terminal)
