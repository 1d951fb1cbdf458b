"""What one shard holds: where each image lies in the tar file, and its label.

A shard is a tar file in WebDataset's layout: members that share a name up to the first dot belong together, KEY.jpg (or
another image) and KEY.cls, the number of its class. `vitmods data pack` writes the index beside each shard; for
shards from elsewhere it is made by one pass over the members' headers.
"""

import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from vitmods.data.folder import ENDINGS
from vitmods.data.records import printable
from vitmods.util.cache import user_cache
from vitmods.util.errors import UserError
from vitmods.util.files import write_atomically

FORMAT = "vitmods shard 1"
BLOCK = tarfile.BLOCKSIZE
_LABELS = ("cls", "json")


class Row(NamedTuple):
    """An image in a shard. id: its name for people; label: number or name of its class; member: its name in the tar
    file; offset, size: of its bytes; height, width: 0 if unknown; digest: `build.digest` in hex, "" if unknown.
    """

    id: str
    label: int | str
    member: str
    offset: int
    size: int
    height: int = 0
    width: int = 0
    digest: str = ""


class ShardIndex(NamedTuple):
    """rows: in the order of the tar file; broken: (member, reason) of what is no image with a label."""

    rows: tuple[Row, ...]
    broken: tuple[tuple[str, str], ...] = ()

    def to_bytes(self, **facts: Any) -> bytes:
        """JSON with an image on each line; `facts` go before them."""
        head = json.dumps({"format": FORMAT, **facts, "broken": self.broken})[:-1]
        rows = ",\n".join(json.dumps(row) for row in self.rows)
        return f'{head}, "images": [\n{rows}\n]}}\n'.encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "ShardIndex":
        """Inverse of to_bytes. Raises ValueError, KeyError or TypeError on others."""
        values = json.loads(content)
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}, not {FORMAT!r}")
        return cls(tuple(Row(*row) for row in values["images"]), tuple((m, r) for m, r in values["broken"]))


def index_of(shard: Path) -> ShardIndex:
    """The index of a shard that has none beside it: from the user's cache, or made now. Raises UserError."""
    try:
        status = shard.stat()
    except OSError as error:
        raise UserError(f"The shard {printable(str(shard))} cannot be read: {error.strerror}.") from error
    key = f"{FORMAT}\0{shard.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    cached = user_cache() / "shards" / f"{sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return ShardIndex.from_bytes(cached.read_bytes())
    index = scan(shard)
    with suppress(OSError, UserError):  # an index that cannot be kept is made again
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cached, lambda file: file.write(index.to_bytes()))
    return index


def scan(shard: Path) -> ShardIndex:
    """Read the headers of a tar file and the labels; images are not opened. Raises UserError for other files."""
    try:
        with open(shard, "rb") as file:
            members, damage = _members(file)
            return _samples(members, damage, file)
    except tarfile.TarError as error:
        raise UserError(
            f"{printable(str(shard))} is no plain tar file ({error}). Shards are read at random places, so compressed "
            "ones (.tar.gz) have to be unpacked with gunzip first; copy or make a damaged one again."
        ) from error
    except OSError as error:
        raise UserError(f"The shard {printable(str(shard))} cannot be read: {error.strerror}.") from error


class _Member(NamedTuple):
    name: str
    offset: int
    size: int


def _members(file: BinaryIO) -> tuple[list[_Member], list[tuple[str, str]]]:
    """The whole members of a tar file, and where it is damaged or cut off, if it is."""
    length = os.fstat(file.fileno()).st_size
    members: list[_Member] = []
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            if member.offset_data + member.size > length:
                return members, [(printable(member.name), "the shard is cut off within it; what follows is lost")]
            if member.isfile():
                members.append(_Member(member.name.removeprefix("./"), member.offset_data, member.size))
        file.seek(tar.offset)
        after = file.read(BLOCK)
    if after == bytes(BLOCK):
        return members, []
    last = f"after {printable(members[-1].name)}" if members else "at its start"
    reason = "its header is damaged; what follows is lost" if after else "the shard lacks the end mark: it is cut off"
    return members, [(last, reason)]


def _samples(members: list[_Member], damage: list[tuple[str, str]], file: BinaryIO) -> ShardIndex:
    rows: list[Row] = []
    broken: list[tuple[str, str]] = []
    seen: set[str] = set()
    for key, parts in _by_key(members):
        images = [ending for ending in parts if f".{ending}" in ENDINGS]
        if not images and not any(ending in parts for ending in _LABELS):
            continue  # other members, such as a list of files, are nobody's images
        name = printable(parts[images[0]].name if images else key)
        try:
            if len(images) != 1:
                raise ValueError("two images share this key" if images else "there is a label, but no image")
            if key in seen:
                raise ValueError("its key comes twice in this shard")
            seen.add(key)
            image = parts[images[0]]
            rows.append(Row(name, _label(parts, file), image.name, image.offset, image.size))
        except ValueError as error:
            broken.append((name, str(error)))
    return ShardIndex(tuple(rows), (*broken, *damage))


def _by_key(members: list[_Member]) -> Iterator[tuple[str, dict[str, _Member]]]:
    """Neighbors whose names agree up to the first dot of the file name, by their endings; hidden files left out."""
    key, parts = "", dict[str, _Member]()
    for member in members:
        path = PurePosixPath(member.name)
        stem, _, ending = path.name.partition(".")
        if not stem:
            continue
        its_key = str(path.parent / stem)
        if parts and (its_key != key or ending.lower() in parts):
            yield key, parts
            parts = {}
        key = its_key
        parts[ending.lower()] = member
    if parts:
        yield key, parts


def _label(parts: dict[str, _Member], file: BinaryIO) -> int | str:
    """A class's number, or the text that should be one or a class's name. Raises ValueError."""
    kind = next((kind for kind in _LABELS if kind in parts), None)
    if kind is None:
        raise ValueError('it has no label: KEY.cls, or KEY.json with "label", is missing')
    file.seek(parts[kind].offset)
    content = file.read(parts[kind].size)
    try:
        label = content.decode().strip() if kind == "cls" else json.loads(content)["label"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{printable(parts[kind].name)} holds no label") from None
    try:
        return int(label)
    except (ValueError, TypeError):
        return str(label)
