"""Images inside uncompressed tar files, tars within a tar included, read in place: only their places are listed."""

import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from vitmods.data.read import Unreadable, reading
from vitmods.data.records import printable
from vitmods.util.cache import user_cache
from vitmods.util.errors import UserError

_REMEMBERED = 1 << 28  # bytes: a larger file takes long enough to list for the list to be kept


@dataclass(frozen=True)
class Tar:
    """A file and where its members lie: names "inner/member" for tars within it, offsets and sizes in bytes."""

    path: Path
    names: tuple[str, ...]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def read(self, member: int) -> bytes:
        """The member's bytes. Raises Unreadable."""
        with reading(), open(self.path, "rb") as file:
            file.seek(self.offsets[member])
            content = file.read(self.sizes[member])
            if len(content) < self.sizes[member]:
                raise Unreadable(f"{printable(self.path.name)} ends within it")
            return content


def open_tar(path: Path) -> Tar:
    """List the members of a tar. Raises UserError where it is cut short, damaged, compressed or cannot be read.

    The list of a large file is kept in the user's cache folder, since making it reads every header.
    """
    status = path.stat()
    stamp = sha256(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    kept = user_cache() / "tars" / f"{stamp.hexdigest()[:32]}.npz"
    with suppress(OSError, ValueError, KeyError, EOFError, BadZipFile), np.load(kept, allow_pickle=False) as arrays:
        names = arrays["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")
        return Tar(path, tuple(names), arrays["offsets"], arrays["sizes"])
    tar = _listed(path)
    if status.st_size >= _REMEMBERED:
        _keep(tar, kept)
    return tar


def _keep(tar: Tar, kept: Path) -> None:
    names = np.frombuffer("\0".join(tar.names).encode("utf-8", "surrogateescape"), dtype=np.uint8)
    building = kept.with_suffix(".building.npz")
    with suppress(OSError):  # it is listed again next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(building, names=names, offsets=tar.offsets, sizes=tar.sizes)
        building.replace(kept)


def _listed(path: Path) -> Tar:
    rows: list[tuple[str, int, int]] = []
    try:
        with open(path, "rb", buffering=0) as outer, open(path, "rb", buffering=0) as inner:
            for name, start, size in _members(outer, 0, path.stat().st_size):
                if not name.endswith(".tar"):
                    rows.append((name, start, size))
                    continue
                folder = name.removesuffix(".tar")
                rows += [(f"{folder}/{child}", at, n) for child, at, n in _members(inner, start, start + size)]
    except tarfile.TarError as error:
        raise UserError(
            f"The tar file {printable(str(path))} cannot be used: {error}, after {len(rows):,} members. It is cut "
            "short, damaged or compressed: fetch it again, and do not compress it."
        ) from error
    except OSError as error:
        raise UserError(f"The tar file {printable(str(path))} cannot be read: {error.strerror}.") from error
    names, offsets, sizes = zip(*rows, strict=True) if rows else ((), (), ())
    return Tar(path, names, np.array(offsets, dtype=np.int64), np.array(sizes, dtype=np.int64))


def _members(file: IO[bytes], start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each regular member of the tar that lies at start:end of the file."""
    file.seek(start)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None and member.offset < end:
            if member.offset_data + member.size > end:
                raise tarfile.ReadError(f"{printable(member.name)} is not whole")
            if member.isfile():
                yield member.name.removeprefix("./"), member.offset_data, member.size
        file.seek(tar.offset)
        if member is None and tar.offset < end and any(file.read(tarfile.BLOCKSIZE)):  # it ends in zeros
            raise tarfile.ReadError(f"no header at byte {tar.offset:,}")
