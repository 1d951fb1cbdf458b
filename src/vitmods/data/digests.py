"""What takes long to find out of files, kept in the user's cache: hashes of all images' bytes, so that equal ones are
known before the images are split, and lists of what lies in a file."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from os import stat_result
from pathlib import Path
from typing import IO, Any, TypeVar
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from vitmods.data.geometry import Geometry
from vitmods.data.read import Unreadable, digest, reading
from vitmods.data.records import Records, printable
from vitmods.data.store import cache_key
from vitmods.data.threads import AHEAD, busy_with, cores, in_order
from vitmods.util.cache import user_cache
from vitmods.util.errors import UserError
from vitmods.util.files import write_atomically

REMEMBERED = 2000  # images; of fewer the hashes are made in no time and not kept
UNKNOWN = bytes(16)
T = TypeVar("T")


def remembered(
    folder: Path | None,
    name: str,
    read: Callable[[Path], T],
    make: Callable[[], T],
    write: Callable[[IO[bytes], T], Any],
) -> T:
    """What the file of that name holds, made and written now where it is not there or not whole.

    What cannot be kept is made each time. folder: None: the user's cache.
    """
    try:
        kept = (folder or user_cache()) / name
    except UserError:  # there is no place for caches
        return make()
    with suppress(OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile):
        return read(kept)
    made = make()
    with suppress(OSError, UserError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, lambda file: write(file, made))
    return made


def file_key(path: Path, status: stat_result, kind: str = "") -> str:
    """A name for what is known of a file; another once the file changes."""
    record = f"{kind}{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return sha256(record.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def digests_of(records: Records, cache_dir: Path | None = None) -> NDArray[np.uint8]:
    """(n, 16), as the index of a store has them; zeros where an image cannot be read or its file is empty.

    Those of many images are kept in `cache_dir`, or in the user's cache folder, until a file changes.
    """
    if records.digests is not None:
        return records.digests
    if len(records) < REMEMBERED:
        return _hashed(records)

    def read(path: Path) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = np.load(path, allow_pickle=False)
        if found.shape != (len(records), 16) or found.dtype != np.uint8:
            raise ValueError("these are digests of others")
        return found

    name = f"{cache_key(records, Geometry((1, 1)), 0)}.digests.npy"
    return remembered(cache_dir, name, read, lambda: _hashed(records), np.save)


def _hashed(records: Records) -> NDArray[np.uint8]:
    def one(position: int) -> bytes:
        try:
            with reading(), busy_with(printable(records.ids[position])):
                raw = records.fetch(int(records.keys[position]))
                return digest(raw) if not isinstance(raw, bytes) or raw else UNKNOWN
        except Unreadable:
            return UNKNOWN

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = b"".join(in_order(one, range(len(records)), cores(), ahead=AHEAD))
    return np.frombuffer(found, dtype=np.uint8).reshape(-1, 16)
