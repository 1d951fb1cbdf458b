"""What a copy of an address knows of its files: which are sent, in which order, and which version both sides have."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitmods.util.errors import UserError
from vitmods.util.files import write_atomically, write_json
from vitmods.util.lease import LEASE
from vitmods.util.limits import read_bytes, read_json

NOTES = ".sent.json"
COPY = ".copy"  # holds what tells a copy from others at the same path of other disks
_SEED = re.compile(r"/(.*/)?seed\d+(/|$)")
_FIRST_SENT, _LAST_SENT = ("metrics.jsonl",), ("checkpoint.previous.pt", "checkpoint.pt", "index.json", "result.json")


class Sent(NamedTuple):
    """A file as both sides have it: size and time here, and what tells its version there."""

    size: int
    time_ns: int
    version: str


def version_of(info: Mapping[str, Any]) -> str:
    """Size and what tells a file from another one of that size."""
    tells = next((info[name] for name in ("ETag", "etag", "md5Hash", "content_md5") if info.get(name)), None)
    when = next(
        (info[name] for name in ("mtime", "LastModified", "last_modified", "updated", "created") if name in info), ""
    )
    return f"{info['size']} {tells or when}"


def folders(root: Path) -> list[Path]:
    """A folder and those below it, but for links and for what is set aside or damaged."""
    if not root.is_dir():
        return []
    below = (path for path in sorted(root.rglob("*")) if path.is_dir() and not path.is_symlink())
    return [root, *(path for path in below if not _stays(path.relative_to(root)))]


def _stays(path: Path) -> bool:
    return any(part == ".aside" or part.endswith(".damaged") for part in path.parts)


def is_sent(path: Path) -> bool:
    """Locks, unfinished files and notes of this side stay here; the lease is a matter of its own.

    path: within the copy
    """
    return (
        path.name not in ("", LEASE, NOTES, COPY)
        and path.suffix not in (".tmp", ".lock")
        and path.name != ".lock"
        and not _stays(path)
    )


def identity(root: Path) -> str:
    """What tells a copy from others, also from those of containers that share the machine's name and paths."""
    path = root / COPY
    try:
        return read_bytes(path, "lease").decode()
    except (OSError, ValueError):
        made = uuid.uuid4().hex
        write_atomically(path, lambda file: file.write(made.encode()))
        return made


def is_large(path: Path) -> bool:
    return path.parts[0] == "trials" and (path.suffix in (".safetensors", ".pt") or "checkpoint" in path.parts)


def grows(folder: Path) -> bool:
    """Folders that are sent when a run ends: an arm may have the name of one, but then seeds lie in it."""
    logs = folder.name == "tb" or folder.parts[:1] == ("logs",)
    return logs or ("wandb" in folder.parts and not _SEED.match(folder.as_posix().rpartition("wandb")[2]))


def order(name: str) -> tuple[int, str]:
    if name in _FIRST_SENT:
        return -1, name
    return (_LAST_SENT.index(name) + 1 if name in _LAST_SENT else 0), name


def stamp_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


def sent_of(folder: Path) -> dict[str, Sent]:
    try:
        noted = read_json(folder / NOTES, "JSON")
        return {name: Sent(*one) for name, one in noted.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # then files are compared
        return {}


def note(folder: Path, changes: Mapping[str, Sent | None]) -> None:
    if not changes or not folder.is_dir():
        return
    noted = {**sent_of(folder), **changes}
    try:
        write_json(folder / NOTES, {name: list(one) for name, one in noted.items() if one is not None})
    except UserError:
        if folder.is_dir():  # and was not removed meanwhile
            raise
