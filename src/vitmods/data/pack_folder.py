"""The folder that shards are packed into: whose it is, what may be replaced, and what has to go."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitmods.data.records import printable
from vitmods.data.shard_index import ShardIndex
from vitmods.data.shards import index_path
from vitmods.util.errors import UserError


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from packing into the folder, if its file system can. Raises UserError if one is at it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"Another process is packing into {printable(str(folder))}. Wait for it or end it.") from None
    except OSError:
        return  # some network file systems cannot lock a folder


def refuse_foreign(folder: Path) -> None:
    for path in sorted(folder.glob("*.tar")):
        try:
            ShardIndex.from_bytes(index_path(path).read_bytes())
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{printable(str(path))} was not written by vitmods data pack and could be overwritten: choose another "
                "folder."
            ) from None


def remove_leftovers(folder: Path, facts: dict[str, Any]) -> None:
    """What an unfinished call with other settings has left: other programs would take it for a part of the set."""
    mine = {shard["file"] for split in facts.values() for shard in split["shards"]}
    for path in folder.iterdir():
        shard = re.fullmatch(r"((?:train|val|test)-\d{6})\.(?:tar|json)(?:\.tmp)?", path.name)
        if shard and f"{shard[1]}.tar" not in mine:
            path.unlink()


def other_shards(folder: Path) -> UserError:
    return UserError(
        f"{printable(str(folder))} holds shards of other images or settings. Choose another folder, or remove it to "
        "pack anew."
    )
