"""Limits on the size and depth of files from outside, and the readers that enforce them.

The limits are far above real files. They stop files that were made to fill the memory, or to keep a process busy
forever. Every error is a ValueError that names the limit.
"""

import json
import os
import stat
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vitmods.util.errors import explaining
from vitmods.util.text import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_BYTES = {
    "JSON": 2 << 30,  # of a data set; LVIS has 1.1 GB
    "settings": 64 << 20,
    "text": 1 << 30,  # tables and lists
    "XML": 16 << 20,  # of one image
    "YAML": 1 << 20,
    "archive": 256 << 20,  # unpacked: ImageNet's devkit has 3 MB
    "label": 1 << 20,  # of one image in a shard
    "image": 1 << 30,
    "weights": 1 << 40,
    "lease": 64 << 10,  # and a lock with its process
    "record": 8 << 20,  # of a trial in another study, as its config.json
    "scores": 64 << 20,  # likewise its scores of images, or its curves
}
"""kind of file -> bytes"""
MOST_TIMES = 100  # that arrays may be larger than their file; zeros pack to a thousandth
SMALL = 256 << 20  # bytes: to so many anything may unpack
MOST_COLUMNS = 10_000  # of a table
MOST_LEVELS = 500  # of JSON
MOST_PIXELS = 1 << 28  # of an image, by what a file says of it; an image itself may have 89 million
MOST_NAMES = 100_000  # that a pattern of braces may expand to; ImageNet-21k has about 2,000 shards


def read_bytes(path: Path, kind: str) -> bytes:
    """Read a plain file. Raises OSError, and ValueError if it is larger than its kind may be."""
    with open_file(path, kind) as file:
        size = max(os.fstat(file.fileno()).st_size, 1 << 20)  # so many bytes are taken from memory at once
        content = file.read(min(size, MOST_BYTES[kind]) + 1)
    check_bytes(len(content), kind)
    return content


def open_file(path: str | Path, kind: str, owner: int | None = None, links: bool = True) -> IO[bytes]:
    """Open a plain file for reading, without waiting for anybody. Raises OSError and ValueError as `check_file` does.

    owner: the user whose file it has to be. links: whether its name may be a link.
    """
    check_file(path, kind, owner, links)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | (0 if links else getattr(os, "O_NOFOLLOW", 0))
    file = open(path, "rb", opener=lambda name, _: os.open(name, flags))  # noqa: SIM115 - the caller's
    try:
        _check_status(os.fstat(file.fileno()), kind, owner)  # another file may have come in between
    except BaseException:
        file.close()
        raise
    return file


def check_file(path: str | Path, kind: str, owner: int | None = None, links: bool = True) -> None:
    """Raise ValueError for pipes and devices, which may never end, and for files that are too large, for links where
    they are not allowed, and for files of another user than `owner`."""
    _check_status(os.stat(path, follow_symlinks=links), kind, owner)


def is_plain(path: Path, owner: int | None) -> bool:
    """Whether weights can be read from a path, which is no link; owner: the user whose file it has to be."""
    try:
        check_file(path, "weights", owner, links=False)
    except (OSError, ValueError):
        return False
    return True


def _check_status(status: os.stat_result, kind: str, owner: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(21, "it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is a link" if stat.S_ISLNK(status.st_mode) else "it is not a file")
    if owner is not None and status.st_uid != owner:
        raise ValueError("it is another user's file")
    check_bytes(status.st_size, kind)


def check_bytes(count: int, kind: str) -> None:
    """Raise ValueError if a file of this kind may not be so large."""
    if count > MOST_BYTES[kind]:
        raise ValueError(f"it has more than {MOST_BYTES[kind] >> 20:,} MiB, the limit for this kind of file ({kind})")


def read_text(path: Path, kind: str = "text") -> str:
    """Read a file like `read_bytes`, as UTF-8 text with or without a byte order mark."""
    return read_bytes(path, kind).decode("utf-8-sig")


def lines_of(path: Path) -> list[str]:
    """Read the lines of a text file that are not blank, stripped. Raises UserError."""
    name = printable(str(path))
    with explaining(lambda error: f"{name} cannot be read as text in UTF-8: {error}.", OSError, ValueError):
        return [line for raw in read_text(path).splitlines() if (line := raw.strip())]


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if it is invalid or nested too deeply."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    inside: Iterable[Any] = [value]
    for _ in range(MOST_LEVELS):  # from Python 3.14 on, json reads more levels than other functions can
        level = [item for item in inside if isinstance(item, dict | list)]
        if not level:
            return value
        inside = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
    raise ValueError("it is nested too deeply")


def read_json(path: Path, kind: str = "settings") -> Any:
    """Parse a JSON file. Raises OSError and ValueError."""
    return parse_json(read_bytes(path, kind))


def check_zip(path: Path, small: int = SMALL) -> None:
    """Raise ValueError where the members of a ZIP file would unpack to much more than it has. Up to `small` bytes
    anything goes."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > max(small, MOST_TIMES * path.stat().st_size):
        raise ValueError(f"it would unpack to {unpacked / 2**30:.1f} GiB, more than its arrays can be packed")


def read_npz(path: Path, names: Sequence[str] | None = None, small: int = SMALL) -> dict[str, "NDArray[Any]"]:
    """Read the named arrays of a .npz, or all; nothing is unpickled.

    Raises OSError, and ValueError for anything else, such as a missing name.
    """
    import numpy as np

    try:
        check_file(path, "weights")  # a pipe would never end
        check_zip(path, small)
        with np.load(path, allow_pickle=False) as arrays:
            contents = {name: arrays[name] for name in (arrays.files if names is None else names)}
    except (OSError, ValueError):
        raise
    except Exception as error:  # zipfile, zlib and numpy raise what they like; MemoryError for a wrong size
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if odd := [name for name, array in contents.items() if not isinstance(array, np.ndarray)]:
        raise ValueError(f"its part {odd[0]} is not an array")
    return contents


_NETWORK = threading.local()  # is_off: whether the thread may not use it


@contextmanager
def offline() -> Iterator[None]:
    """Refuse connections of this thread with a ConnectionError, whatever a library looks up. Other
    threads, which may be uploading results, keep theirs."""
    _watch_sockets()
    before, _NETWORK.is_off = getattr(_NETWORK, "is_off", False), True
    try:
        yield
    finally:
        _NETWORK.is_off = before


@cache  # Python's audit hooks cannot be removed
def _watch_sockets() -> None:
    events = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg"}

    def watch(event: str, _: object) -> None:
        if event in events and getattr(_NETWORK, "is_off", False):
            raise ConnectionError("it tried to use the network: nothing is downloaded to open a file")

    sys.addaudithook(watch)
