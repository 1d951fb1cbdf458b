"""The bytes of a shard: a tar file in WebDataset's layout that is a pure function of its images and labels."""

import tarfile
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from vitmods.data.shard_index import BLOCK, Row

EMPTY = 2 * BLOCK  # the end mark


class Item(NamedTuple):
    """An image that can be read: its row (with the offset still open) and its bytes."""

    row: Row
    raw: bytes


def taken(size: int) -> int:
    """Bytes that an image of this size takes in a shard, with its label and both headers."""
    return padded(size) + 3 * BLOCK


def tar_parts(items: Sequence[Item]) -> tuple[list[bytes], list[Row]]:
    """The parts of a tar file, and rows with offsets. No times or owners: the same images give the same bytes."""
    parts: list[bytes] = []
    rows: list[Row] = []
    offset = 0
    for row, raw in items:
        rows.append(row._replace(offset=offset + BLOCK))
        label = PurePosixPath(row.member).with_suffix(".cls").name
        for name, content in ((row.member, raw), (label, str(row.label).encode())):
            padding = bytes(padded(len(content)) - len(content))
            parts += [_header(name, len(content)), content, padding]
            offset += BLOCK + padded(len(content))
    return [*parts, bytes(EMPTY)], rows


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.USTAR_FORMAT)


def padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK
