"""Addresses that fsspec opens, such as s3://bucket/runs/x: the folder on this disk that stands for one, and access."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from vitmods.util.cache import user_cache
from vitmods.util.errors import UserError
from vitmods.util.lease import SETTLE_S, no_lease
from vitmods.util.limits import check_bytes

T = TypeVar("T")
_ADDRESS = re.compile(r"([a-z][a-z0-9+-]+):(/{1,3})(.+)", re.DOTALL)  # as a Path it has one slash left
_EXCLUSIVE = {"s3", "s3a", "gs", "gcs", "memory"}  # of two that create a file one fails
# A file is there when all of it is.
IN_ONE_STEP = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"}
_TRIED_AFTER_S = (1.0, 2.0, 4.0, 8.0)


class Unreachable(UserError):
    """An address could not be read or written, though it was tried several times."""


def place(path: str | Path) -> Path:
    """The folder on this disk: of an address its copy, else the path itself. UserError for what can be no address."""
    found = _ADDRESS.fullmatch(str(path))
    if found is None:
        return Path(path)
    protocol, _, rest = found.groups()
    parts = PurePosixPath(rest.strip("/")).parts
    if not parts or ".." in parts or "::" in rest:
        raise UserError(f"{path} is no address of a folder: write it as s3://bucket/folder.")
    return _copies().joinpath(protocol, *parts)


def address_of(folder: Path) -> str | None:
    """The inverse; None for a folder that is no copy."""
    try:
        protocol, *parts = folder.relative_to(_copies()).parts
    except ValueError:
        return None
    return f"{protocol}://{'/' if protocol in ('file', 'local') else ''}{'/'.join(parts)}"


def named(folder: Path) -> str:
    """The address, or the path of a folder that is no copy."""
    return address_of(folder) or str(folder)


def _copies() -> Path:
    return user_cache() / "addresses"


class AddressPlace:
    """A lease's file at an address."""

    def __init__(self, address: str) -> None:
        self._fs, self._path = opened(address)
        protocol = address.partition(":")[0]
        self._exclusive, self._in_one_step = protocol in _EXCLUSIVE, protocol in IN_ONE_STEP
        self._beside = f"{self._path}.{uuid.uuid4().hex[:8]}.tmp"

    def read(self) -> bytes | None:
        self._fs.invalidate_cache()
        try:
            found = self._fs.info(self._path)
            if found["type"] != "file":
                raise ValueError("it is no file")
            check_bytes(found["size"], "lease")
            content: bytes = self._fs.cat_file(self._path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise no_lease(self._path, error) from error
        return content

    def create(self, content: bytes) -> bool:
        def act() -> bool:
            if not self._exclusive:
                self._fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
            try:
                self._fs.pipe_file(self._path, content, mode="create")
            except FileExistsError:
                return self.read() == content  # a first attempt, of which the answer was lost
            return True

        if not tried(act, f"{self._path} cannot be written"):
            return False
        if self._exclusive:
            return True
        time.sleep(SETTLE_S)
        return self.read() == content

    def write(self, content: bytes) -> None:
        if not self._in_one_step:
            self._fs.pipe_file(self._beside, content)
            if moved_onto(self._fs, self._beside, self._path):
                return
            self._fs.rm_file(self._beside)  # and not the lease: another run would take what is gone for given back
        self._fs.pipe_file(self._path, content)

    def remove(self) -> None:
        self._fs.rm_file(self._path)


def moved_onto(fs: Any, beside: str, path: str) -> bool:
    """Move a file in place of another one; False where the file system does not, of which some say nothing."""
    with suppress(Exception):  # each file system has its own
        fs.mv(beside, path)
        return not fs.exists(beside)
    return False


def opened(address: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(address, use_listings_cache=False)
    except ImportError as error:
        raise UserError(
            f"{address} needs a package that is not installed ({error}): pip install 'vitmods[remote]' for s3://, or "
            "the one that it names."
        ) from error
    except ValueError as error:
        raise UserError(f"{address} cannot be opened: {error}.") from error
    return fs, root.rstrip("/")


def tried(act: Callable[[], T], what: str, also: str = "") -> T:
    """Several times, with growing pauses; Unreachable at the end."""
    for pause in (*_TRIED_AFTER_S, None):
        try:
            return act()
        except UserError:  # of this side
            raise
        except Exception as error:  # each file system has its own
            reason = " ".join(str(error).split()) or type(error).__name__
            if pause is None or isinstance(error, PermissionError | FileNotFoundError):
                raise Unreachable(f"{what}: {reason}.{also}") from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")
