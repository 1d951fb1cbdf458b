"""Uncompressed tar files, read in place: where each member lies, tars within a tar included."""

import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitmods.data.digests import file_key, remembered
from vitmods.data.read import Unreadable, reading
from vitmods.data.records import printable
from vitmods.util.errors import UserError
from vitmods.util.limits import read_npz

_REMEMBERED = 1 << 28  # bytes: a larger file takes long enough to list for the list to be kept


class Member(NamedTuple):
    """A file in a tar file, and where its bytes lie."""

    name: str
    offset: int
    size: int


class Damaged(tarfile.ReadError):
    """A tar file ends or breaks off at `where`. lost: whether there is something behind it that cannot be read."""

    def __init__(self, where: str, reason: str, lost: bool = True) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason, self.lost = where, reason, lost


def members(file: BinaryIO, start: int = 0, end: int | None = None) -> Iterator[Member]:
    """The files in the tar that lies at start:end of a file, from their headers alone.

    Raises Damaged after the last that is whole, and tarfile.TarError where there is no tar.
    """
    end, last = os.fstat(file.fileno()).st_size if end is None else end, ""
    file.seek(start)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        before = start - 1
        while (member := _next(tar, last)) is not None and member.offset < end:
            if member.size < 0 or member.offset <= before:  # tarfile would read the same headers for ever
                raise Damaged(printable(last), f"a header behind it, at byte {member.offset:,}, is damaged")
            last, before = member.name, member.offset
            if member.offset_data + member.size > end:
                raise Damaged(printable(last), "the tar file is cut off within it; what follows is lost")
            if member.isfile():
                yield Member(last.removeprefix("./"), member.offset_data, member.size)
        file.seek(tar.offset)
        after = file.read(tarfile.BLOCKSIZE) if tar.offset < end else b""
        if member is not None or after == bytes(tarfile.BLOCKSIZE):
            return
    where = f"after {printable(last)}" if last else "at its start"
    if after:
        raise Damaged(where, f"the header at byte {tar.offset:,} is damaged; what follows is lost")
    raise Damaged(where, "the tar file lacks the end mark: it is cut off", lost=False)


def _next(tar: tarfile.TarFile, last: str) -> tarfile.TarInfo | None:
    """The next member; whatever tarfile makes of a header that is none becomes Damaged."""
    try:
        return tar.next()
    except (OSError, tarfile.TarError):
        raise
    except Exception as error:  # ValueError, OverflowError, RecursionError of headers that follow headers, ...
        raise Damaged(
            f"after {printable(last)}" if last else "at its start", f"a header is damaged: {error}"
        ) from error


def read_at(path: Path, offset: int, size: int) -> bytes:
    """So many bytes of a file from an offset on. Raises Unreadable."""
    with reading():
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            raw = file.read(size)
        if len(raw) < size:
            raise Unreadable(f"{printable(path.name)} is cut off within it")
        return raw


@dataclass(frozen=True)
class Tar:
    """A file and where its members lie: names "inner/member" for tars within it, offsets and sizes in bytes."""

    path: Path
    names: tuple[str, ...]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def read(self, member: int) -> bytes:
        """The member's bytes. Raises Unreadable."""
        return read_at(self.path, int(self.offsets[member]), int(self.sizes[member]))


def open_tar(path: Path) -> Tar:
    """List the members of a tar. Raises UserError where it is cut short, damaged, compressed or cannot be read.

    The list of a large file is kept in the user's cache folder, since making it reads every header.
    """
    status = path.stat()
    if status.st_size < _REMEMBERED:
        return _listed(path)
    name = f"tars/{file_key(path, status)}.npz"
    return remembered(None, name, lambda kept: _read(path, kept), lambda: _listed(path), _write)


def _read(path: Path, kept: Path) -> Tar:
    arrays = read_npz(kept, ["names", "offsets", "sizes"])
    names = arrays["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")
    return Tar(path, tuple(names), arrays["offsets"], arrays["sizes"])


def _write(file: IO[bytes], tar: Tar) -> None:
    names = np.frombuffer("\0".join(tar.names).encode("utf-8", "surrogateescape"), dtype=np.uint8)
    np.savez(file, names=names, offsets=tar.offsets, sizes=tar.sizes)


@contextmanager
def _unless_lost() -> Iterator[None]:
    """A tar that lacks its end mark alone is as good as another."""
    try:
        yield
    except Damaged as damage:
        if damage.lost:
            raise


def _listed(path: Path) -> Tar:
    rows: list[Member] = []
    try:
        with open(path, "rb", buffering=0) as outer, open(path, "rb", buffering=0) as inner, _unless_lost():
            for name, start, size in members(outer):
                if not name.endswith(".tar"):
                    rows.append(Member(name, start, size))
                    continue
                folder = name.removesuffix(".tar")
                with _unless_lost():
                    rows.extend(m._replace(name=f"{folder}/{m.name}") for m in members(inner, start, start + size))
    except tarfile.TarError as error:
        raise UserError(
            f"The tar file {printable(str(path))} cannot be used: {error}, after {len(rows):,} members. It is cut "
            "short, damaged or compressed: fetch it again, and do not compress it."
        ) from error
    except OSError as error:
        raise UserError(f"The tar file {printable(str(path))} cannot be read: {error.strerror}.") from error
    names, offsets, sizes = zip(*rows, strict=True) if rows else ((), (), ())
    return Tar(path, names, np.array(offsets, dtype=np.int64), np.array(sizes, dtype=np.int64))
