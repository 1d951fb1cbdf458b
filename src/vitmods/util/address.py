"""Addresses that fsspec opens, such as s3://bucket/runs/x: the folder on this disk that stands for one, and access."""

from __future__ import annotations

import errno
import os
import re
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from vitmods.util.cache import user_data
from vitmods.util.errors import UserError
from vitmods.util.lease import SETTLE_S, no_lease
from vitmods.util.limits import check_bytes
from vitmods.util.text import printable

T = TypeVar("T")
_EXCLUSIVE = {"s3", "s3a", "gs", "gcs", "memory"}  # of two that create a file one fails
# A file is there when all of it is.
IN_ONE_STEP = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"}
_PROTOCOLS = IN_ONE_STEP | {"file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs"}
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/*)(.*)", re.DOTALL)  # as a Path it has one slash left
_TRIED_AFTER_S = (1.0, 2.0, 4.0, 8.0)


class Unreachable(UserError):
    """An address could not be read or written, though it was tried several times."""


def place(path: str | Path) -> Path:
    """Return the folder on this disk: of an address its local copy, else the path itself.

    Raises:
        UserError: an address of another kind than those that can hold a study, or one with keys in it.
    """
    text = str(path)
    match = _ADDRESS.fullmatch(text)
    protocol, slashes, rest = match.groups() if match else ("", "", "")
    if "::" not in text and not slashes and protocol.lower() not in _PROTOCOLS:
        return Path(path)
    shown = f"{protocol}://..." if "@" in text or "?" in text else printable(text)
    if "::" in text or protocol not in _PROTOCOLS:
        raise UserError(
            f"{shown} is not a place for a study or a trial: name a folder, or an address such as s3://bucket/folder "
            f"(one of {', '.join(sorted(_PROTOCOLS))}, in small letters)."
        )
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if "?" in rest or (at and (":" in user or protocol in _EXCLUSIVE)):
        raise UserError(
            f"{shown} has keys or options in it, which would be kept with the study. Leave them out: the file system's "
            "own package reads them from its variables or files (for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)."
        )
    parts = PurePosixPath(rest.strip("/")).parts
    if not (slashes and parts) or ".." in parts:
        raise UserError(f"{shown} is not an address of a folder: write it as {protocol}://bucket/folder.")
    return _copies().joinpath(protocol, *parts)


def address_of(folder: Path) -> str | None:
    """The inverse; None for a folder that is not a local copy."""
    try:
        protocol, *parts = folder.relative_to(_copies()).parts
    except ValueError:
        return None
    return f"{protocol}://{'/' if protocol in ('file', 'local') else ''}{'/'.join(parts)}"


def named(folder: Path) -> str:
    """The address, or the path of a folder that is not a local copy."""
    return address_of(folder) or str(folder)


def _copies() -> Path:
    """The folder of all local copies; not a cache, since it holds what could not be sent yet."""
    chosen = os.environ.get("VITMODS_COPIES", "")
    return Path(chosen) if os.path.isabs(chosen) else user_data() / "addresses"


class AddressPlace:
    """A lease's file at an address."""

    def __init__(self, address: str) -> None:
        self._fs, self._path = open_address(address)
        protocol = address.partition(":")[0]
        self._exclusive, self._in_one_step = protocol in _EXCLUSIVE, protocol in IN_ONE_STEP
        self._beside = f"{self._path}.{uuid.uuid4().hex[:8]}.tmp"

    def read(self) -> bytes | None:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._path)
            if info["type"] != "file":
                raise ValueError("it is no file")
            check_bytes(info["size"], "lease")
            content: bytes = self._fs.cat_file(self._path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise no_lease(self._path, error) from error
        return content

    def create(self, content: bytes) -> bool:
        def act() -> bool:
            if self._exclusive:
                try:
                    self._fs.pipe_file(self._path, content, mode="create")
                    return True
                except FileExistsError:
                    return self.read() == content  # a first attempt, of which the answer was lost
                except OSError as error:
                    if error.errno != errno.ENOSYS:
                        raise
                    self._exclusive = False  # some stores with S3's interface do not know If-None-Match
            if (there := self.read()) is not None:
                return there == content
            if not self._in_one_step:
                self._fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(self._path, content)
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


def open_address(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
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
