"""Addresses that fsspec opens, such as s3://bucket/runs/x: the local copy of one, and access that retries."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from vitmods.util.cache import user_data
from vitmods.util.errors import UserError
from vitmods.util.text import printable

T = TypeVar("T")
EXCLUSIVE = {"s3", "s3a", "gs", "gcs", "memory"}
"""kinds of address where one of two runs that create a file at once fails"""
IN_ONE_STEP = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"}
"""kinds where a file appears when all of it is written"""
LOCAL = {"file", "local"}
_PROTOCOLS = IN_ONE_STEP | LOCAL | {"sftp", "ssh", "smb", "hdfs", "webhdfs"}
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/*)(.*)", re.DOTALL)  # a Path keeps one of its slashes
_NEARLY = re.compile(r"\s*([A-Za-z0-9]+)(?:\s*:\s*/|/(?=/))[\s/]*(.*)", re.DOTALL)
_PAUSES_S = (1.0, 2.0, 4.0, 8.0)


class Unreachable(UserError):
    """An address could not be read or written in several attempts."""


def check_spelling(text: str) -> None:
    """Raise UserError for an address with a slip, as s3 ://bucket/x or s3//bucket/x, which would be a folder here."""
    nearly = _NEARLY.fullmatch(text)
    if nearly and not text.startswith(f"{nearly[1]}:/") and nearly[1].lower() in _PROTOCOLS:
        right = f"{nearly[1].lower()}://{printable(nearly[2])}"
        raise UserError(f"{printable(text)} is not an address: write it as {right}, or a folder as ./{nearly[1]}/...")


def place(path: str | Path) -> Path:
    """Return the folder on this disk: the local copy of an address, or the path itself.

    Raises:
        UserError: an address that cannot hold a study, or one with keys in it.
    """
    text = str(path)
    check_spelling(text)
    match = _ADDRESS.fullmatch(text)
    protocol, slashes, location = match.groups() if match else ("", "", "")
    if "::" not in text and not slashes and protocol.lower() not in _PROTOCOLS:
        return Path(path)
    label = f"{protocol}://..." if "@" in text or "?" in text else printable(text)
    if "::" in text or protocol not in _PROTOCOLS:
        raise UserError(
            f"{label} cannot hold a study or a trial: name a folder, or an address such as s3://bucket/folder "
            f"(one of {', '.join(sorted(_PROTOCOLS))}, in lower case)."
        )
    user, at, _ = location.partition("/")[0].rpartition("@")
    if "?" in location or (at and (":" in user or protocol in EXCLUSIVE)):
        raise UserError(
            f"{label} contains keys or options, which would be stored with the study. Leave them out: the file "
            "system's package reads them from variables or files (for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)."
        )
    parts = PurePosixPath(location.strip("/")).parts
    if not (slashes and parts) or ".." in parts:
        raise UserError(f"{label} is not an address of a folder: write it as {protocol}://bucket/folder.")
    return _copies().joinpath(protocol, *parts)


def address_of(folder: Path) -> str | None:
    """Return the address of a local copy, None for any other folder."""
    try:
        protocol, *parts = folder.relative_to(_copies()).parts
    except ValueError:
        return None
    return f"{protocol}://{'/' if protocol in LOCAL else ''}{'/'.join(parts)}"


def named(folder: Path) -> str:
    """Return the address of a local copy, or the path of any other folder."""
    return address_of(folder) or str(folder)


def _copies() -> Path:
    """Return the folder of all local copies; not a cache, since it holds what could not be sent yet."""
    chosen = os.environ.get("VITMODS_COPIES", "")
    return Path(chosen) if os.path.isabs(chosen) else user_data() / "addresses"


def open_address(address: str) -> tuple[Any, str]:
    """Return the file system of an address or a path, and the path in it. Raises UserError if it cannot be opened."""
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


def retry(act: Callable[[], T], problem: str, remedy: str = "") -> T:
    """Call `act` until it succeeds, with growing pauses. Raises Unreachable after the last attempt."""
    for pause in (*_PAUSES_S, None):
        try:
            return act()
        except UserError:  # not from the file system
            raise
        except Exception as error:  # each file system has its own
            reason = " ".join(str(error).split()) or type(error).__name__
            if pause is None or isinstance(error, PermissionError | FileNotFoundError):
                raise Unreachable(f"{problem}: {reason}.{remedy}") from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def moved_onto(fs: Any, source: str, target: str) -> bool:
    """Move a file in place of another one; False if the file system cannot, which some do not report."""
    with suppress(Exception):  # each file system has its own
        fs.mv(source, target)
        return not fs.exists(source)
    return False
