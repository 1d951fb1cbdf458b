"""Hashes of all images' bytes, so that equal ones are known before the images are split."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitmods.data.geometry import Geometry
from vitmods.data.read import Unreadable, digest, reading
from vitmods.data.records import Records
from vitmods.data.store import cache_key
from vitmods.data.threads import cores
from vitmods.util.cache import user_cache
from vitmods.util.errors import UserError
from vitmods.util.files import write_atomically

REMEMBERED = 2000  # images; of fewer the hashes are made in no time and not kept
UNKNOWN = bytes(16)


def digests_of(records: Records, cache_dir: Path | None = None) -> NDArray[np.uint8]:
    """(n, 16), as the index of a store has them; zeros where an image cannot be read or its file is empty.

    Those of many images are kept in `cache_dir`, or in the user's cache folder, until a file changes.
    """
    if records.digests is not None:
        return records.digests
    if len(records) < REMEMBERED:
        return _hashed(records)
    try:
        kept = (cache_dir or user_cache()) / f"{cache_key(records, Geometry((1, 1)), 0)}.digests.npy"
        with suppress(OSError, ValueError, EOFError):
            found: NDArray[np.uint8] = np.load(kept, allow_pickle=False)
            if found.shape == (len(records), 16) and found.dtype == np.uint8:
                return found
    except UserError:  # there is no place for caches
        return _hashed(records)
    found = _hashed(records)
    with suppress(OSError, UserError):  # what cannot be kept is made again
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, lambda file: np.save(file, found))
    return found


def _hashed(records: Records) -> NDArray[np.uint8]:
    def one(key: int) -> bytes:
        try:
            with reading():
                raw = records.fetch(key)
                return digest(raw) if not isinstance(raw, bytes) or raw else UNKNOWN
        except Unreadable:
            return UNKNOWN

    with warnings.catch_warnings(), ThreadPoolExecutor(cores()) as pool:
        warnings.simplefilter("ignore")
        return np.frombuffer(b"".join(pool.map(one, records.keys.tolist())), dtype=np.uint8).reshape(-1, 16)
