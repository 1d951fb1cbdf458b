"""Images decoded once: uint8, in memory where a split is small, otherwise in a mapped file that all processes share.

A cache is a folder for one part of a source, as it was found, at one geometry: its name is a hash of the two. Splits
that are made of the part, its folds and limits share it. What it lacks is decoded by one process at a time and
appended, and the table of what it has is replaced when the pixels are on the disk. So readers, which need no lock, see
whole images only, and a process that is killed loses no more than it has appended.

Also kept in the user's cache: hashes of all images' bytes, by which equal ones are known before the images are split,
and lists of the members of large files.
"""

import io
import json
import os
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from os import stat_result
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar
from zipfile import BadZipFile

import numpy as np
from filelock import FileLock, Timeout
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from vitmods.data.copies import SIDE, look_of
from vitmods.data.geometry import Geometry
from vitmods.data.read import Unreadable, decode, digest, has_more, pixel_digest, reading
from vitmods.data.records import Raw, Records, printable
from vitmods.data.threads import AHEAD, busy_with, cores, in_order
from vitmods.util.cache import user_cache
from vitmods.util.errors import UserError
from vitmods.util.files import progress_console, tracked, write_atomically
from vitmods.util.limits import parse_json, read_json, read_npz

SMALL = 1 << 20  # bytes: a split of so few is decoded in each process; of others all processes map one file
FEW = 1000  # images that are looked through in each process, where their pixels are not kept
MEMORY_LIMIT = 1 << 30  # bytes: a split of more is not kept in memory where no file can be written
VERIFIED_BYTES = 1 << 28  # when a cache is opened: all of most caches, evenly spread images of larger ones
SAMPLED = 16  # images that are read to estimate what all will take, and to see that a cache is of these images
UNUSED_AFTER = 30 * 24 * 3600  # seconds, after which a cache in the user's folder makes room for others
_FORMAT = "vitmods images 5"
_SHOW_PROGRESS = 5000  # images; fewer are read before a progress bar could be seen
_NOTICE_S = 3.0  # who waits for another process for longer gets a notice
_UNKNOWN, _READABLE, _UNREADABLE = range(3)
_ROW = np.dtype(
    [
        ("state", "i1"),
        ("offset", "<i8"),
        ("shape", "<i8", (3,)),
        ("native", "<i8", (2,)),
        ("crc", "<i8"),
        ("digest", "u1", (16,)),
        ("several", "?"),
        ("pixels", "u1", (16,)),
        ("look", "i1", (SIDE * SIDE,)),
    ]
)


@dataclass(frozen=True)
class Index:
    """The facts of the m readable images of n records, and the places of those that are stored.

    kept (m,): positions in the records; digests (m, 16): hash of the source's bytes; unreadable: (position, reason) of
    the others. Empty if unknown: native (m, 2), height and width before resizing; pixels (m, 16), hash of the decoded
    pixels; several (m,), whether there are more pages or frames; looks (m, 256): see copies.py. Stored: shapes (m, 3):
    C, H, W; offsets (m,): bytes; crc (m,): checksum of the pixels.
    """

    kept: NDArray[np.int64]
    digests: NDArray[np.uint8]
    native: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    unreadable: tuple[tuple[int, str], ...] = ()
    pixels: NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 16), np.uint8))
    several: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    looks: NDArray[np.int8] = field(default_factory=lambda: np.empty((0, SIDE * SIDE), np.int8))
    shapes: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 3), np.int64))
    offsets: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    crc: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass
class _Table:
    """The known images of a part: a _ROW each, and by position why some are unreadable. end: bytes."""

    rows: NDArray[Any]
    reasons: dict[int, str]
    end: int = 0

    def lacks(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these (n,) are unknown."""
        return self.rows["state"][rows] == _UNKNOWN

    def index(self, rows: NDArray[np.int64]) -> Index:
        """Index of the images in these rows (n,)."""
        chosen = self.rows[rows]
        kept = np.flatnonzero(chosen["state"] == _READABLE)
        digests, native, pixels, several, looks, shapes, offsets, crc = (
            np.ascontiguousarray(chosen[name][kept])
            for name in ("digest", "native", "pixels", "several", "look", "shape", "offset", "crc")
        )
        bad = np.flatnonzero(chosen["state"] == _UNREADABLE).tolist()
        unreadable = tuple((i, self.reasons[int(rows[i])]) for i in bad)
        return Index(kept, digests, native, unreadable, pixels, several, looks, shapes, offsets, crc)

    def add(self, records: Records, geometry: Geometry | None, channels: int, out: BinaryIO) -> None:
        """Decode those of the records that are unknown, and append their pixels to `out`; without geometry only their
        facts are kept."""
        lacking = records.take(np.flatnonzero(self.lacks(records.rows)))

        def read(position: int) -> "tuple[memoryview, tuple[Any, ...]] | str":
            try:
                with busy_with(printable(lacking.ids[position])):
                    raw = lacking.fetch(int(lacking.keys[position]))
                    image = decode(raw, channels)
            except Unreadable as error:
                return str(error)
            stored = image if geometry is None else np.ascontiguousarray(geometry.store(image))
            content = (_NO_PIXELS if geometry is None else stored.reshape(-1)).data
            by_bytes, by_pixels = (np.frombuffer(made, np.uint8) for made in (digest(raw), pixel_digest(image)))
            facts = stored.shape, image.shape[1:], zlib.crc32(content), by_bytes, has_more(raw), by_pixels
            return content, (*facts, look_of(image))

        # PIL warns of large images and odd metadata; what matters is reported as a reason.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            images: Iterable[Any] = in_order(read, range(len(lacking)), cores(), ahead=AHEAD)
            if len(lacking) >= _SHOW_PROGRESS:
                images = tracked(images, len(lacking), f"Reading {len(lacking):,} images")
            for row, image in zip(lacking.rows.tolist(), images, strict=True):
                if isinstance(image, str):
                    self.rows[row]["state"], self.reasons[row] = _UNREADABLE, image
                    continue
                content, facts = image
                out.write(content)
                self.rows[row] = (_READABLE, self.end, *facts)
                self.end += len(content)


_NO_PIXELS = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Store:
    """The readable images of one split: i begins at pixels[offsets[i]] and has the shape shapes[i] (C, H, W)."""

    pixels: NDArray[np.uint8]
    index: Index

    def __len__(self) -> int:
        return len(self.index.kept)

    def image(self, i: int) -> NDArray[np.uint8]:
        """Image i (C, H, W), a view of the store."""
        start, shape = int(self.index.offsets[i]), self.index.shapes[i]
        return self.pixels[start : start + int(shape.prod())].reshape(shape)

    def batch(self, index: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        """Copies (B, C, H, W) of these images if all of the split share one shape, otherwise None."""
        if self._windows is None:
            return None
        return self._windows[self.index.offsets[index]].reshape(-1, *self.index.shapes[0])

    @cached_property
    def _windows(self) -> NDArray[np.uint8] | None:
        """At each byte of the pixels the image that would begin there, a view; None where images differ in shape."""
        shapes = self.index.shapes
        if not len(self) or (shapes != shapes[0]).any():
            return None
        return sliding_window_view(self.pixels, int(shapes[0].prod()))


def open_store(records: Records, geometry: Geometry | None, channels: int, cache_dir: Path | None) -> Store:
    """The records' images, read now or taken from a cache. Without geometry only their facts are kept, not the pixels.

    With cache_dir they are kept there for later runs and other processes. Without, they go to the user's cache folder,
    from which caches unused for UNUSED_AFTER are removed; those of at most SMALL bytes stay in memory, and those of at
    most MEMORY_LIMIT if that folder cannot be written. Raises UserError if a cache cannot be written.
    """
    size = estimate(records, geometry, channels) if geometry is not None and cache_dir is None else 0
    if cache_dir is None and (size <= SMALL if geometry is not None else len(records) <= FEW):
        return _in_memory(records, geometry, channels)
    try:
        folder = (cache_dir or user_cache() / "images") / cache_key(records, geometry, channels)
        return read_cache(folder, records) or _completed(folder, records, geometry, channels, cache_dir is None)
    except (OSError, UserError, NotImplementedError) as error:  # the last: a file system without locks
        if geometry is None or (cache_dir is None and size <= MEMORY_LIMIT):
            return _in_memory(records, geometry, channels)
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"The image cache {printable(str(folder.parent))} cannot be written: {reason.rstrip('.')}. Free some space "
            "(caches may be deleted at any time), or give another folder as cache_dir (--cache-dir)."
        ) from error


def _in_memory(records: Records, geometry: Geometry | None, channels: int) -> Store:
    memory, table = io.BytesIO(), _Table(np.zeros(len(records.stamps), _ROW), {})
    table.add(records, geometry, channels, memory)
    return Store(np.frombuffer(memory.getbuffer(), dtype=np.uint8), table.index(records.rows))


def cache_key(records: Records, geometry: Geometry | None, channels: int) -> str:
    """Name the cache of the part of a source that the records were taken from."""
    content = [_FORMAT, repr(geometry), str(channels), *records.stamps]
    return sha256("\0".join(content).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def read_cache(folder: Path, records: Records) -> Store | None:
    """The records' images from the cache in this folder, or None where some are missing or damaged."""
    table = _read_table(folder)
    if table is None or table.lacks(records.rows).any():
        return None
    try:
        pixels = np.memmap(folder / "pixels.bin", np.uint8, "r", shape=(table.end,)) if table.end else _NO_PIXELS
    except (OSError, ValueError):
        return None
    store = Store(pixels, table.index(records.rows))
    # Two sources may have the same stamps: are the bytes of some images what they were?
    rows, digests = records.rows[store.index.kept], store.index.digests
    for row, raw in _some(records):
        if any(digest(raw) != digests[place].tobytes() for place in np.flatnonzero(rows == row)):
            return None
    sizes = store.index.shapes.prod(axis=1)
    step = 1 + int(sizes.sum()) // VERIFIED_BYTES
    checks = zip(*(a[::step].tolist() for a in (store.index.offsets, sizes, store.index.crc)), strict=True)
    content = pixels.data  # slices of a memoryview cost a tenth of an array's
    if table.end and any(zlib.crc32(content[start : start + size]) != crc for start, size, crc in checks):
        return None
    with suppress(OSError):  # when it was used last
        os.utime(folder)
    return store


def estimate(records: Records, geometry: Geometry, channels: int) -> int:
    """Estimate the bytes of the store: whole images count as 3:2, originals as the mean of a few that are read."""
    if geometry.whole and not geometry.shrink:
        sizes = []
        for _, raw in _some(records):
            with suppress(Unreadable):
                sizes.append(decode(raw, channels).size)
        return int(len(records) * np.mean(sizes)) if sizes else 0
    height, width = geometry.cover if geometry.whole else geometry.size
    return int(len(records) * channels * height * width * (1.5 if geometry.whole else 1))


def _some(records: Records) -> Iterator[tuple[int, Raw]]:
    """Yield the row and content of a few images that can be fetched."""
    sample = records.some(SAMPLED)
    for row, key in zip(sample.rows.tolist(), sample.keys.tolist(), strict=True):
        with suppress(Unreadable):
            yield row, records.fetch(key)


def _read_table(folder: Path) -> _Table | None:
    """Read the table of a cache; None if it is missing, or if it or the pixels are truncated."""
    try:
        arrays = read_npz(folder / "index.npz", ["rows", "reasons", "end"])
        reasons = {int(row): reason for row, reason in parse_json(arrays["reasons"].tobytes()).items()}
        table = _Table(arrays["rows"], reasons, int(arrays["end"]))
        complete = table.rows.dtype == _ROW and os.path.getsize(folder / "pixels.bin") >= table.end
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return table if complete else None


def _completed(folder: Path, records: Records, geometry: Geometry | None, channels: int, clean_up: bool) -> Store:
    """The records' images once the cache has all of them. clean_up: remove unused caches of the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=_NOTICE_S)
    except Timeout:
        progress_console().print("Waiting for another process that is reading these images.")
        lock.acquire()
    try:
        for other in folder.parent.iterdir() if clean_up else ():
            with suppress(OSError):
                if time.time() - other.stat().st_mtime > UNUSED_AFTER and other != folder:
                    shutil.rmtree(other)
        for _ in range(3):  # a cache that lacks some, then shows damage, then is made anew
            if (store := read_cache(folder, records)) is not None:
                return store
            table = _read_table(folder)
            if table is None or not table.lacks(records.rows).any():
                table = _Table(np.zeros(len(records.stamps), _ROW), {})
                for name in ("index.npz", "pixels.bin"):  # a new file: other processes may have mapped the old one
                    (folder / name).unlink(missing_ok=True)
            _append(folder, table, records, geometry, channels)
    finally:
        lock.release()
    raise UserError(f"{printable(str(folder))} does not return what was written to it: check the disk")


def _append(folder: Path, table: _Table, records: Records, geometry: Geometry | None, channels: int) -> None:
    end = table.end
    try:
        with open(folder / "pixels.bin", "ab") as pixels:
            pixels.truncate(end)  # the remains of a killed process
            table.add(records, geometry, channels, pixels)
            pixels.flush()
            os.fsync(pixels.fileno())
        reasons = np.frombuffer(json.dumps(table.reasons).encode(), np.uint8)
        columns = {"rows": table.rows, "end": np.array(table.end), "reasons": reasons}
        write_atomically(folder / "index.npz", lambda file: np.savez(file, **columns))  # type: ignore[arg-type]
    except BaseException:
        with suppress(OSError):
            os.truncate(folder / "pixels.bin", end)  # make room again
        raise


REMEMBERED = 2000  # images; hashes of fewer are made in no time and not kept
T = TypeVar("T")


def remembered(
    name: str,
    make: Callable[[], T],
    read: Callable[[Path], T] = lambda path: read_json(path, "JSON"),
    write: Callable[[IO[bytes], T], Any] = lambda file, value: file.write(json.dumps(value).encode()),
    folder: Path | None = None,
) -> T:
    """Read the file of that name, by default a list in JSON; make and write it first if it is missing or damaged.

    Values that cannot be kept are made each time. folder: None: the user's cache.
    """
    try:
        kept = (folder or user_cache()) / name
    except UserError:  # without a place for caches
        return make()
    with suppress(OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile):
        return read(kept)
    made = make()
    with suppress(OSError, UserError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, lambda file: write(file, made))
    return made


def file_key(path: Path, status: stat_result, kind: str = "") -> str:
    """Name the facts that are remembered of a file; the name changes with the file."""
    text = f"{kind}{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def digests_of(records: Records, cache_dir: Path | None = None) -> NDArray[np.uint8]:
    """(n, 16), as the index of a store has them; zeros where an image cannot be read or its file is empty.

    Those of many images are kept in `cache_dir`, or in the user's cache folder, until a file changes.
    """
    if records.digests is not None:
        return records.digests

    def digest_of(position: int) -> bytes:
        with suppress(Unreadable), reading(), busy_with(printable(records.ids[position])):
            raw = records.fetch(int(records.keys[position]))
            if not isinstance(raw, bytes) or raw:
                return digest(raw)
        return bytes(16)

    def make() -> NDArray[np.uint8]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            digests = b"".join(in_order(digest_of, range(len(records)), cores(), ahead=AHEAD))
        return np.frombuffer(digests, dtype=np.uint8).reshape(-1, 16)

    def read(path: Path) -> NDArray[np.uint8]:
        digests: NDArray[np.uint8] = np.load(path, allow_pickle=False)
        if digests.shape != (len(records), 16) or digests.dtype != np.uint8:
            raise ValueError("digests of other images")
        return digests

    if len(records) < REMEMBERED:
        return make()
    name = f"{cache_key(records, Geometry((1, 1)), 0)}.digests.npy"
    return remembered(name, make, read, np.save, cache_dir)
