"""Images decoded once: uint8, in memory when the set is small, otherwise a memory-mapped file that all processes share.

A cache is a folder named by a hash of everything that decides its content. It is written under a temporary name and
renamed when complete, so a reader never sees half of one; of two processes that build the same, the first wins and the
second uses its. Sizes and checksums are verified when it is opened, and a damaged one is built again.
"""

import io
import json
import os
import shutil
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from vitmods.data.geometry import Geometry
from vitmods.data.read import Unreadable, decode, digest
from vitmods.data.records import Records, printable
from vitmods.data.threads import cores
from vitmods.util.cache import user_cache
from vitmods.util.errors import UserError
from vitmods.util.files import progress_console

SMALL = 1 << 24  # bytes: a split of so few is decoded in each process; of others all processes map one file
MEMORY_LIMIT = 1 << 30  # bytes: a split of more is not kept in memory where no file can be written
VERIFIED_BYTES = 1 << 30  # when a cache is opened: all of most caches, evenly spread images of larger ones
SAMPLED = 16  # images that are read to estimate what all will take, and to know them again
ABANDONED_AFTER = 7 * 24 * 3600  # seconds
_FORMAT = "vitmods images 2"
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
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> "Index":
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


def _progress(chunks: range, images: int) -> "Iterator[int]":
    if images < _SHOW_PROGRESS:
        yield from chunks
        return
    from rich.progress import track

    console = progress_console()
    yield from track(chunks, f"Reading {images:,} images", console=console, disable=not console.is_terminal)


@dataclass(frozen=True)
class Store:
    """The readable images of one split: i is pixels[offsets[i]:offsets[i + 1]], of shape shapes[i] (C, H, W)."""

    pixels: NDArray[np.uint8]
    index: Index

    def __len__(self) -> int:
        return len(self.index.kept)

    def image(self, i: int) -> NDArray[np.uint8]:
        """Image i (C, H, W), a view of the store."""
        start, end = self.index.offsets[i : i + 2]
        return self.pixels[start:end].reshape(self.index.shapes[i])

    @cached_property
    def stack(self) -> NDArray[np.uint8] | None:
        """All images (n, C, H, W) as a view if they share one shape, otherwise None."""
        shapes = self.index.shapes
        if not len(self) or (shapes != shapes[0]).any():
            return None
        return self.pixels.reshape(len(self), *shapes[0])


def open_store(records: Records, geometry: Geometry, channels: int, cache_dir: Path | None) -> Store:
    """The records' images, read now or taken from a cache.

    With cache_dir they are kept there for later runs and other processes. Without, they go to the user's cache folder;
    but those that take no more than SMALL stay in memory, and so do those that take no more than MEMORY_LIMIT where
    nothing can be written there. Raises UserError if a cache cannot be written.
    """
    size = estimate(records, geometry, channels) if cache_dir is None else 0
    if cache_dir is None and size <= SMALL:
        return _in_memory(records, geometry, channels)
    try:
        folder = (cache_dir or user_cache()) / cache_key(records, geometry, channels)
        if (store := read_cache(folder)) is not None:
            return store
        _write_cache(folder, records, geometry, channels)
    except (OSError, UserError) as error:
        if cache_dir is None and size <= MEMORY_LIMIT:
            return _in_memory(records, geometry, channels)
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"The image cache {printable(str(folder))} cannot be written: {error.strerror}. "
            "Free some space or give another folder as cache_dir."
        ) from error
    store = read_cache(folder)
    assert store is not None, f"the cache {folder} was written and cannot be read back"
    return store


def _in_memory(records: Records, geometry: Geometry, channels: int) -> Store:
    memory = io.BytesIO()
    index = build(records, geometry, channels, memory)
    return Store(np.frombuffer(memory.getbuffer(), dtype=np.uint8), index)


def cache_key(records: Records, geometry: Geometry, channels: int) -> str:
    """A name for the cache of these images at this geometry: of their stamps, and of the bytes of some, since two
    sources may have the same stamps."""
    content = [_FORMAT, repr(geometry), str(channels), *records.stamps]
    for key in records.some(SAMPLED).keys:
        with suppress(Unreadable):
            content.append(digest(records.fetch(int(key))).hex())
    return sha256("\0".join(content).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def read_cache(folder: Path) -> Store | None:
    """The cache in this folder, or None where there is none that is whole."""
    try:
        with np.load(folder / "index.npz", allow_pickle=False) as arrays:
            index = Index.from_arrays(dict(arrays))
        size = int(index.offsets[-1])
        if os.path.getsize(folder / "pixels.bin") != size:
            return None
        pixels = np.memmap(folder / "pixels.bin", np.uint8, "r") if size else np.empty(0, np.uint8)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zlib.error, BadZipFile):
        return None
    store = Store(pixels, index)
    return store if _intact(store) else None


def estimate(records: Records, geometry: Geometry, channels: int) -> int:
    """Bytes: images kept whole are taken to be 3:2, and originals as large as some of them are on average."""
    if geometry.whole and not geometry.shrink:
        return int(len(records) * _mean_size(records, channels))
    height, width = geometry.cover if geometry.whole else geometry.size
    return int(len(records) * channels * height * width * (1.5 if geometry.whole else 1))


def _mean_size(records: Records, channels: int) -> float:
    sizes = []
    for key in records.some(SAMPLED).keys:
        with suppress(Unreadable):
            sizes.append(decode(records.fetch(int(key)), channels).size)
    return float(np.mean(sizes)) if sizes else 0.0


def _intact(store: Store) -> bool:
    step = 1 + store.pixels.size // VERIFIED_BYTES
    checked = range(0, len(store), step)
    return all(zlib.crc32(store.image(i).data) == store.index.crc[i] for i in checked)


def _write_cache(folder: Path, records: Records, geometry: Geometry, channels: int) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_remains(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.", ignore_cleanup_errors=True) as name:
        building = Path(name) / "cache"
        building.mkdir()
        with open(building / "pixels.bin", "wb") as pixels:
            index = build(records, geometry, channels, pixels)
            _sync(pixels.fileno())
        with open(building / "index.npz", "wb") as file:
            np.savez(file, **index.to_arrays())  # type: ignore[arg-type]
            _sync(file.fileno())
        _publish(building, folder, Path(name) / "damaged")


def _remove_remains(folder: Path) -> None:
    """Unfinished builds of this cache whose process was killed; younger ones may still be at work."""
    for remains in folder.parent.glob(f"{folder.name}.*"):
        if time.time() - remains.stat().st_mtime > ABANDONED_AFTER:
            shutil.rmtree(remains, ignore_errors=True)


def _publish(building: Path, folder: Path, damaged: Path) -> None:
    """Give the finished cache its name, unless another process was faster; a damaged one of that name is removed."""
    try:
        os.rename(building, folder)
    except OSError:
        if read_cache(folder) is not None:
            return
        os.rename(folder, damaged)
        os.rename(building, folder)
        shutil.rmtree(damaged, ignore_errors=True)


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)
