"""Images in uncompressed tar files, each read at its place in its file.

A shard has WebDataset's layout: members that share a name up to the first dot belong together, KEY.jpg (or another
image) and KEY.cls, the number of its class. A folder that `vitmods data pack` wrote also has an index beside each shard
and a manifest. It gives the same source as the folder that was packed: same names, order, splits and fingerprint.
Every image's checksum is compared whenever it is read.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitmods.data.read import Unreadable, digest, reading
from vitmods.data.records import Records, Source, printable
from vitmods.data.store import file_key, remembered
from vitmods.data.threads import cores
from vitmods.util.errors import UserError
from vitmods.util.limits import parse_json, read_bytes, read_json, read_npz

MANIFEST, MANIFEST_FORMAT = "manifest.json", "vitmods shards 1"
FORMAT = "vitmods shard 1"
_REMEMBERED = 1 << 28  # bytes: a larger file takes long enough to list for the list to be kept
_AGAIN = "Copy it again, or write it again with vitmods data pack."


class Member(NamedTuple):
    """A file in a tar file, and where its bytes are."""

    name: str
    offset: int
    size: int


class Damaged(tarfile.ReadError):
    """A tar file ends or breaks off at `where`. lost: whether members behind it cannot be read."""

    def __init__(self, where: str, reason: str, lost: bool = True) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason, self.lost = where, reason, lost


def members(file: BinaryIO, start: int = 0, end: int | None = None) -> Iterator[Member]:
    """The files in the tar at start:end of a file, from their headers alone.

    Raises Damaged after the last that is whole, and tarfile.TarError where there is no tar.
    """
    end, last = os.fstat(file.fileno()).st_size if end is None else end, ""
    file.seek(start)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        before = start - 1
        while True:
            where = f"after {printable(last)}" if last else "at its start"
            try:
                member = tar.next()
            except (OSError, tarfile.TarError):
                raise
            except Exception as error:  # ValueError, OverflowError, RecursionError of headers that follow headers, ...
                raise Damaged(where, f"a header is damaged: {error}") from error
            if member is None or member.offset >= end:
                break
            if member.size < 0 or member.offset <= before:  # tarfile would read the same headers for ever
                raise Damaged(printable(last), f"a header behind it, at byte {member.offset:,}, is damaged")
            last, before = member.name, member.offset
            if member.offset_data + member.size > end:
                raise Damaged(printable(last), "the tar file is cut off within it; what follows is lost")
            if member.isfile():
                yield Member(last.removeprefix("./"), member.offset_data, member.size)
        # tarfile takes a damaged header for the end of the file.
        file.seek(tar.offset)
        after = file.read(tarfile.BLOCKSIZE) if tar.offset < end else b""
        if member is not None or after == bytes(tarfile.BLOCKSIZE):
            return
    if after:
        raise Damaged(where, f"the header at byte {tar.offset:,} is damaged; what follows is lost")
    raise Damaged(where, "the tar file lacks the end mark: it is cut off", lost=False)


def _read_at(path: Path, offset: int, size: int) -> bytes:
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
    """A file and where its members are: names "inner/member" for tars within it, offsets and sizes in bytes."""

    path: Path
    names: tuple[str, ...]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def read(self, member: int) -> bytes:
        """The member's bytes. Raises Unreadable."""
        return _read_at(self.path, int(self.offsets[member]), int(self.sizes[member]))


def open_tar(path: Path) -> Tar:
    """List the members of a tar. Raises UserError where it is cut short, damaged, compressed or cannot be read.

    The list of a large file is kept in the user's cache folder, since making it reads every header.
    """

    def read(kept: Path) -> Tar:
        arrays = read_npz(kept, ["names", "offsets", "sizes"])
        names = arrays["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")
        return Tar(path, tuple(names), arrays["offsets"], arrays["sizes"])

    def write(file: IO[bytes], tar: Tar) -> None:
        names = np.frombuffer("\0".join(tar.names).encode("utf-8", "surrogateescape"), dtype=np.uint8)
        np.savez(file, names=names, offsets=tar.offsets, sizes=tar.sizes)

    status = path.stat()
    if status.st_size < _REMEMBERED:
        return _scanned(path)
    return remembered(None, f"tars/{file_key(path, status)}.npz", read, lambda: _scanned(path), write)


def _scanned(path: Path) -> Tar:
    @contextmanager
    def unless_lost() -> Iterator[None]:
        """A tar that lacks its end mark alone is as good as another."""
        try:
            yield
        except Damaged as damage:
            if damage.lost:
                raise

    rows: list[Member] = []
    try:
        with open(path, "rb", buffering=0) as outer, open(path, "rb", buffering=0) as inner, unless_lost():
            for name, start, size in members(outer):
                if not name.endswith(".tar"):
                    rows.append(Member(name, start, size))
                    continue
                folder = name.removesuffix(".tar")
                with unless_lost():
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


class Row(NamedTuple):
    """An image in a shard. id: its name for people; label: number or name of its class; member: its name in the tar
    file; offset, size: of its bytes; height, width: 0 if unknown; digest: `read.digest` in hex, "" if unknown.
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
    """rows: in the order of the tar file; broken: (member, reason) of each that is not an image with a label."""

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


def index_path(shard: Path) -> Path:
    """The index of a packed shard."""
    return shard.with_suffix(".json")


def is_packed(path: Path) -> bool:
    """Whether `vitmods data pack` wrote this folder to its end."""
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `vitmods data pack` wrote last. Raises UserError if it cannot be read."""
    path = printable(str(folder / MANIFEST))
    try:
        manifest: dict[str, Any] = read_json(folder / MANIFEST, "JSON")
        version = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}). {_AGAIN}") from error
    if version != MANIFEST_FORMAT:
        raise UserError(
            f"{path} is of the format {version!r}; this version reads {MANIFEST_FORMAT!r}. Pack the images again, into "
            "another folder: vitmods data pack IMAGES FOLDER"
        )
    return manifest


def packed(folder: Path) -> Source:
    """The source in a folder that `vitmods data pack` wrote. Raises UserError where a shard is missing or another."""
    manifest, splits = read_manifest(folder), {}
    shards: dict[Path, dict[str, Any]] = {}
    try:
        for split, facts in manifest["splits"].items():
            files = {folder / shard["file"]: shard for shard in facts["shards"]}
            splits[split] = records_of(list(files), [_packed_index(*file).rows for file in files.items()])
            shards |= files
        name, classes, left_out = manifest["name"], tuple(manifest["classes"]), len(manifest["unreadable"])
        if not all(isinstance(word, str) for word in (name, *classes)):
            raise TypeError("its name and classes are not words")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        path = printable(str(folder / MANIFEST))
        raise UserError(f"{path} does not list what was packed ({error!r}). {_AGAIN}") from error

    def verify() -> list[str]:
        with ThreadPoolExecutor(cores()) as pool:
            sums = pool.map(file_sha256, shards)
            damaged = [path for path, checksum in zip(shards, sums, strict=True) if checksum != shards[path]["sha256"]]
        text = "is not what was packed: its checksum differs."
        return [f"The shard {printable(path.name)} {text} {_AGAIN}" for path in damaged]

    warnings = [f"{left_out} images that cannot be used were left out when it was packed."] if left_out else []
    return Source(name, classes, splits, warnings, verify=verify)


def _packed_index(shard: Path, facts: dict[str, Any]) -> ShardIndex:
    """The index of a shard of the manifest; a UserError where the shard or its index is not what was packed."""
    index = index_path(shard)
    try:
        content, length = read_bytes(index, "JSON"), shard.stat().st_size
    except ValueError as error:
        raise UserError(f"{printable(str(index))} cannot be read: {error}. {_AGAIN}") from error
    except OSError as error:
        raise UserError(f"{printable(str(error.filename))} cannot be read: {error.strerror}. {_AGAIN}") from error
    if length != facts["bytes"]:
        raise UserError(f"The shard {printable(str(shard))} has {length:,} bytes, not {facts['bytes']:,}. {_AGAIN}")
    if hashlib.sha256(content).hexdigest() != facts["index_sha256"]:
        raise UserError(f"{printable(str(index))} is not what was packed: its checksum differs. {_AGAIN}")
    return ShardIndex.from_bytes(content)


def file_sha256(path: Path) -> str:
    """The checksum of the whole file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def records_of(files: Sequence[Path], rows: Sequence[Sequence[Row]], root: Path | None = None) -> Records:
    """Records sorted by name; their keys run through the shards. With `root`, ids name the shard too.

    What fetching needs is kept as arrays: a million rows would fill hundreds of megabytes in every process.
    """
    images = list(chain.from_iterable(rows))
    shard = np.repeat(np.arange(len(files)), [len(part) for part in rows])
    prefix = ["" if root is None else f"{file.relative_to(root).as_posix()}: " for file in files]
    ids = [prefix[s] + row.id for s, row in zip(shard.tolist(), images, strict=True)]
    order = np.array(sorted(range(len(ids)), key=ids.__getitem__), dtype=np.int64)
    stamps = [file_key(file, file.stat(), "shard")[:16] for file in files]
    places = np.array([(row.offset, row.size) for row in images], dtype=np.int64).reshape(-1, 2)
    native = np.array([(row.height, row.width) for row in images], dtype=np.int64).reshape(-1, 2)
    has_digests = all(row.digest for row in images)
    digests = np.frombuffer(bytes.fromhex("".join(row.digest for row in images)), dtype=np.uint8).reshape(-1, 16)

    def fetch(key: int) -> bytes:
        path, (offset, size) = files[shard[key]], places[key].tolist()
        raw = _read_at(path, offset, size)
        if has_digests and digest(raw) != digests[key].tobytes():
            raise Unreadable(f"damaged in the shard {printable(path.name)} at byte {offset:,}: the checksum differs")
        return raw

    return Records(
        ids=tuple(ids[i] for i in order),
        labels=np.array([images[i].label for i in order], dtype=np.int64),
        stamps=tuple(f"{stamps[s]}:{offset}" for s, offset in zip(shard[order].tolist(), places[order, 0].tolist())),
        fetch=fetch,
        keys=order,
        shards=shard[order],
        native=native[order] if has_digests else None,
        digests=digests[order] if has_digests else None,
    )
