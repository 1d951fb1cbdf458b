"""Shards that `vitmods data pack` wrote, and images in tar files as records: each is read at its place in its file.

A shard is a tar file in WebDataset's layout: members that share a name up to the first dot belong together, KEY.jpg (or
another image) and KEY.cls, the number of its class. An index lies beside each packed shard, and a manifest in the
folder. They give the same source as the folder that was packed: names, order, splits and fingerprint are the same.
Every image's checksum is compared whenever it is read.

Uncompressed tar files, read in place: where each member lies, tars within a tar included.
"""

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitmods.data.read import Unreadable, digest, reading
from vitmods.data.records import Records, Source, printable
from vitmods.data.store import file_key, remembered
from vitmods.data.threads import cores
from vitmods.util.errors import UserError
from vitmods.util.limits import parse_json, read_bytes, read_json, read_npz

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
        return _scanned(path)
    name = f"tars/{file_key(path, status)}.npz"
    return remembered(None, name, lambda kept: _read(path, kept), lambda: _scanned(path), _write)


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


def _scanned(path: Path) -> Tar:
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


MANIFEST, MANIFEST_FORMAT = "manifest.json", "vitmods shards 1"
FORMAT = "vitmods shard 1"
EMPTY = 2 * tarfile.BLOCKSIZE  # the end mark of a tar file
_AGAIN = "Copy it anew, or write it again with vitmods data pack."


def is_packed(path: Path) -> bool:
    """Whether `vitmods data pack` wrote this folder to its end."""
    return (path / MANIFEST).is_file()


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
        values = parse_json(content)
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}, not {FORMAT!r}")
        return cls(tuple(Row(*row) for row in values["images"]), tuple((m, r) for m, r in values["broken"]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `vitmods data pack` wrote last. Raises UserError if it cannot be read."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = read_json(path, "JSON")
        found = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{printable(str(path))} cannot be read ({error}). {_AGAIN}") from error
    if found != MANIFEST_FORMAT:
        raise UserError(f"{printable(str(path))} is of the format {found!r}; this version reads {MANIFEST_FORMAT!r}.")
    return manifest


def index_path(shard: Path) -> Path:
    """Where the index of a packed shard lies."""
    return shard.with_suffix(".json")


def file_sha256(path: Path) -> str:
    """Of the whole file, in hex."""
    content = sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            content.update(chunk)
    return content.hexdigest()


def packed(folder: Path) -> Source:
    """The source in a folder that `vitmods data pack` wrote. Raises UserError where a shard is missing or another."""
    manifest = read_manifest(folder)
    try:
        return _listed(folder, manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        where = printable(str(folder / MANIFEST))
        raise UserError(f"{where} does not list what was packed ({error!r}). {_AGAIN}") from error


def _listed(folder: Path, manifest: dict[str, Any]) -> Source:
    splits = {}
    listed: dict[Path, dict[str, Any]] = {}
    for split, facts in manifest["splits"].items():
        files = {folder / shard["file"]: shard for shard in facts["shards"]}
        indexes = [_packed_index(path, shard) for path, shard in files.items()]
        listed |= files
        splits[split] = records_of(list(files), [index.rows for index in indexes])
    name, classes = manifest["name"], tuple(manifest["classes"])
    if not all(isinstance(word, str) for word in (name, *classes)):
        raise TypeError("its name and classes are no words")
    source = Source(name, classes, splits)
    left_out = manifest["unreadable"]
    if left_out:
        source.warnings.append(f"{len(left_out)} images that cannot be used were left out when it was packed.")
    source.verify = lambda: _verify(listed)
    return source


def _packed_index(path: Path, shard: dict[str, Any]) -> ShardIndex:
    """The index that belongs to a shard of the manifest, and with it a shard of the right length."""
    name = printable(str(path))
    try:
        content, length = read_bytes(index_path(path), "JSON"), path.stat().st_size
    except ValueError as error:
        raise UserError(f"{printable(str(index_path(path)))} cannot be read: {error}. {_AGAIN}") from error
    except OSError as error:
        raise UserError(f"{printable(str(error.filename))} cannot be read: {error.strerror}. {_AGAIN}") from error
    if length != shard["bytes"]:
        raise UserError(f"The shard {name} has {length:,} bytes, not {shard['bytes']:,}. {_AGAIN}")
    if sha256(content).hexdigest() != shard["index_sha256"]:
        raise UserError(f"{printable(str(index_path(path)))} is not what was packed: its checksum differs. {_AGAIN}")
    return ShardIndex.from_bytes(content)


def _verify(listed: dict[Path, dict[str, Any]]) -> list[str]:
    with ThreadPoolExecutor(cores()) as pool:
        same = pool.map(lambda path: file_sha256(path) == listed[path]["sha256"], listed)
        damaged = [path for path, equal in zip(listed, same, strict=True) if not equal]
    return [
        f"The shard {printable(path.name)} is not what was packed: its checksum differs. {_AGAIN}" for path in damaged
    ]


def records_of(files: Sequence[Path], rows: Sequence[Sequence[Row]], root: Path | None = None) -> Records:
    """Records sorted by name; their keys run through the shards. With `root`, ids name the shard too.

    What fetching needs is kept as arrays: a million rows would fill hundreds of megabytes in every process.
    """
    everything = list(chain.from_iterable(rows))
    shard = np.repeat(np.arange(len(files)), [len(part) for part in rows])
    prefix = ["" if root is None else f"{file.relative_to(root).as_posix()}: " for file in files]
    ids = [prefix[s] + row.id for s, row in zip(shard.tolist(), everything, strict=True)]
    order = np.array(sorted(range(len(ids)), key=ids.__getitem__), dtype=np.int64)
    stamps = [_stamp(file) for file in files]
    places = np.array([(row.offset, row.size) for row in everything], dtype=np.int64).reshape(-1, 2)
    native = np.array([(row.height, row.width) for row in everything], dtype=np.int64).reshape(-1, 2)
    known = all(row.digest for row in everything)
    digests = np.frombuffer(bytes.fromhex("".join(row.digest for row in everything)), dtype=np.uint8).reshape(-1, 16)

    def fetch(key: int) -> bytes:
        path, (offset, size) = files[shard[key]], places[key].tolist()
        raw = read_at(path, offset, size)
        if known and digest(raw) != digests[key].tobytes():
            raise Unreadable(f"damaged in the shard {printable(path.name)} at byte {offset:,}: the checksum differs")
        return raw

    return Records(
        ids=tuple(ids[i] for i in order),
        labels=np.array([everything[i].label for i in order], dtype=np.int64),
        stamps=tuple(f"{stamps[s]}:{offset}" for s, offset in zip(shard[order].tolist(), places[order, 0].tolist())),
        fetch=fetch,
        keys=order,
        shards=shard[order],
        native=native[order] if known else None,
        digests=digests[order] if known else None,
    )


def _stamp(shard: Path) -> str:
    status = shard.stat()
    record = f"{shard.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    return sha256(record.encode("utf-8", "surrogateescape")).hexdigest()[:16]


class Item(NamedTuple):
    """An image that can be read: its row (with the offset still open) and its bytes."""

    row: Row
    raw: bytes


def taken(size: int) -> int:
    """Bytes that an image of this size takes in a shard, with its label and both headers."""
    return padded(size) + 3 * tarfile.BLOCKSIZE


def tar_parts(items: Sequence[Item]) -> tuple[list[bytes], list[Row]]:
    """The parts of a tar file, and rows with offsets. No times or owners: the same images give the same bytes."""
    parts: list[bytes] = []
    rows: list[Row] = []
    offset = 0
    for row, raw in items:
        rows.append(row._replace(offset=offset + tarfile.BLOCKSIZE))
        label = PurePosixPath(row.member).with_suffix(".cls").name
        for name, content in ((row.member, raw), (label, str(row.label).encode())):
            padding = bytes(padded(len(content)) - len(content))
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            parts += [member.tobuf(tarfile.USTAR_FORMAT), content, padding]
            offset += tarfile.BLOCKSIZE + padded(len(content))
    return [*parts, bytes(EMPTY)], rows


def padded(length: int) -> int:
    return -(-length // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
