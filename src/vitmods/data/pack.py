"""pack: from a folder of images to shards (tar files in WebDataset's layout) that hold the same bytes.

What is written is a pure function of the images, their names and classes and the size of a shard, so packing again
resumes where it was stopped: a shard that is whole and equal stays, all else is written. A file gets its name only when
it is whole; the index of a shard, with its checksum, comes before the shard, and the manifest comes last. So a shard
without an index is not ours, and a folder without a manifest is not finished.

Kept by hand since no library keeps all of this: parquet and arrow files of `datasets` depend on the version that wrote
them, and webdataset's writers neither resume nor keep the images' names.
"""

import fcntl
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from vitmods.data.multilabel import with_target
from vitmods.data.read import Unreadable, digest, shown_size
from vitmods.data.records import ENDINGS, Records, printable
from vitmods.data.rng import text_order
from vitmods.data.shards import (
    MANIFEST,
    MANIFEST_FORMAT,
    Row,
    ShardIndex,
    file_sha256,
    index_path,
    is_packed,
    read_manifest,
)
from vitmods.data.sources import open_source
from vitmods.data.summary import record, unreadable_text
from vitmods.data.threads import AHEAD, cores, in_order
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import expand_user, make_folder, tracked, write_atomically, write_json
from vitmods.util.limits import read_bytes

MEGABYTE = 1_000_000
_END = bytes(2 * tarfile.BLOCKSIZE)  # of a tar file
_REMEDY = (
    "Repair or remove them and pack again, which resumes from here; or leave them out with "
    'unreadable="skip" (--unreadable skip).'
)
_SHOWN = 20  # equal images


@dataclass(frozen=True)
class Packed:
    """What was done. manifest: as in manifest.json; kept: how many shards were there already; equal: the images that
    are equal byte for byte, those of one kind in one line; leaking: how many of the lines are in train and in another
    split."""

    folder: Path
    manifest: dict[str, Any]
    kept: int
    equal: tuple[str, ...]
    leaking: int

    @property
    def shards(self) -> int:
        """How many there are."""
        return sum(len(facts["shards"]) for facts in self.manifest["splits"].values())

    def __str__(self) -> str:
        lines = [
            f"{split}: {facts['images']:,} images, {facts['bytes'] / MEGABYTE:,.1f} MB, shards: {len(facts['shards'])}"
            for split, facts in self.manifest["splits"].items()
        ]
        if self.manifest["unreadable"]:
            lines.append(f"Left out: {unreadable_text(self.manifest['unreadable'])}")
        if self.equal:
            lines += ["Warning: these images are equal, byte for byte:", *(f"  {t}" for t in self.equal[:_SHOWN])]
            lines += [f"  and {len(self.equal) - _SHOWN} more"] if len(self.equal) > _SHOWN else []
        if self.leaking:
            lines.append(
                f"Warning: {self.leaking} of these lines are in train and in val or test, and studies refuse the pack: "
                "remove the images from one and pack again, or write ?allow=overlap behind it to use them as they are."
            )
        there = f" ({self.kept} of {self.shards} were there, and were compared)" if self.kept else ""
        lines.append(f"Packed in {printable(str(self.folder))}{there}. Use it as --data {printable(str(self.folder))}")
        return "\n".join(lines)


def pack(
    spec: str | Path,
    out: str | Path,
    *,
    shard_mb: float = 100,
    splits: Sequence[str] = (),
    unreadable: str = "stop",
    workers: int = 0,
    progress: bool = False,
) -> Packed:
    """Write the images of a folder as shards, or resume where an earlier call was stopped.

    Args:
        spec: a folder of class folders, with or without splits, or another source of image files.
        out: the folder for the shards.
        shard_mb: largest size of a shard, in 10**6 bytes; it is put together in memory.
        splits: which to pack; none: all.
        unreadable: "stop" names images that cannot be read and does not finish; "skip" leaves them out and lists
            them in the manifest.
        workers: threads that read and check images; 0: one a core.
        progress: show a bar on a terminal.

    Raises:
        UserError: images that cannot be read, other shards in `out`, a full disk.
    """
    if not shard_mb > 0:
        raise UserError(f"A shard must be larger than 0 megabytes, not {shard_mb:g}.")
    if unreadable not in ("stop", "skip"):
        raise UserError(f'unreadable must be "stop" or "skip", not "{unreadable}".')
    source = open_source(spec)
    source = with_target(source, "class") if source.target == "nothing" else source
    if unknown := [split for split in splits if split not in source.splits]:
        raise UserError(f'{printable(source.spec)} has no split "{unknown[0]}". {nearest(unknown[0], source.splits)}')
    chosen = {split: records for split, records in source.splits.items() if not splits or split in splits}
    if source.class_map is not None or any(part.label_sets is not None for part in source.splits.values()):
        raise UserError(
            f"{printable(source.spec)} maps its classes or has several labels an image: shards have neither."
        )
    folder = make_folder(expand_user(out))
    with alone_in(folder):
        _refuse_foreign(folder)
        finished = is_packed(folder)
        kept, bad = 0, [record(item) for item in source.broken if item.split in chosen]
        contents: dict[str, Any] = {}
        written: list[tuple[str, str, bytes]] = []  # of each image its split, name and digest
        for split, records in chosen.items():
            shards, counts = [], [0] * len(source.classes)
            images = _readable(records, split, bad, workers or cores(), progress)
            for number, group in enumerate(_groups(images, int(shard_mb * MEGABYTE))):
                facts, was_there = _write_shard(folder / f"{split}-{number:06d}.tar", group, finished)
                shards.append(facts)
                kept += was_there
                for row, _ in group:
                    counts[int(row.label)] += 1
                    written.append((split, row.id, bytes.fromhex(row.digest)))
            contents[split] = {
                "images": sum(counts),
                "bytes": sum(shard["bytes"] for shard in shards),
                "per_class": dict(zip(source.classes, counts, strict=True)),
                "shards": shards,
            }
        if bad and unreadable == "stop":
            raise UserError(f"{unreadable_text(bad)}\n{_REMEDY}")
        manifest = {
            "format": MANIFEST_FORMAT,
            "name": source.name,
            "classes": list(source.classes),
            "splits": contents,
            "unreadable": bad,
        }
        if finished and read_manifest(folder) != manifest:
            raise _other_shards(folder)
        files = {shard["file"] for facts in contents.values() for shard in facts["shards"]}
        for path in folder.iterdir():  # shards of an unfinished call with other settings; programs would read them too
            shard = re.fullmatch(r"((?:train|val|test)-\d{6})\.(?:tar|json)(?:\.tmp)?", path.name)
            if shard and f"{shard[1]}.tar" not in files:
                path.unlink()
        write_json(folder / MANIFEST, manifest)
        return Packed(folder, manifest, kept, *_equal(written))


def _readable(
    records: Records, split: str, bad: list[dict[str, str]], workers: int, progress: bool
) -> Iterator[tuple[Row, bytes]]:
    """Images that can be read, each with its row (the offset still open); the others are added to `bad`. The order is
    drawn from the names, so that a shard has some of every class."""
    order = text_order(0, "pack", records.ids).tolist()

    def read(number: int) -> tuple[Row, bytes] | Unreadable:
        name, key = records.ids[order[number]], int(records.keys[order[number]])
        try:
            raw = records.fetch(key)
            if not isinstance(raw, bytes):
                raise UserError("Only image files can be packed, since their bytes are kept; these images are decoded.")
            size = shown_size(raw)
        except Unreadable as error:
            return error
        ending = PurePosixPath(name).suffix.lower()
        if ending not in ENDINGS:  # not a file of its own
            with Image.open(io.BytesIO(raw)) as image:
                ending = f".{(image.format or 'img').lower()}"
        label = int(records.labels[order[number]])
        return Row(name, label, f"{number:09d}{ending}", 0, len(raw), *size, digest(raw).hex()), raw

    images: Iterable[tuple[Row, bytes] | Unreadable] = in_order(read, range(len(order)), workers, ahead=AHEAD)
    for number, image in enumerate(tracked(images, len(order), f"Packing {split}") if progress else images):
        if isinstance(image, Unreadable):
            path = printable(records.ids[order[number]])
            bad.append({"split": split, "path": path, "reason": printable(str(image))})
        else:
            yield image


def _groups(images: Iterable[tuple[Row, bytes]], limit: int) -> Iterator[list[tuple[Row, bytes]]]:
    """The images of one shard of at most `limit` bytes after the other."""
    group: list[tuple[Row, bytes]] = []
    length = len(_END)
    for row, raw in images:
        needed = -(-len(raw) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE + 3 * tarfile.BLOCKSIZE  # label and two headers
        if group and length + needed > limit:
            yield group
            group, length = [], len(_END)
        group.append((row, raw))
        length += needed
    if group:
        yield group


def _write_shard(path: Path, images: list[tuple[Row, bytes]], finished: bool) -> tuple[dict[str, Any], bool]:
    """Write a shard and its index unless they are there and whole: the shard's part of the manifest, and whether it was
    there. finished: an earlier call came to its end, so what it wrote is never replaced by something else."""
    buffer, rows = io.BytesIO(), []
    tar = tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115, closing would pad it
    for row, raw in images:
        rows.append(row._replace(offset=buffer.tell() + tarfile.BLOCKSIZE))
        label = PurePosixPath(row.member).with_suffix(".cls").name
        for name, content in ((row.member, raw), (label, str(row.label).encode())):
            member = tarfile.TarInfo(name)  # without times and owners: the same images give the same bytes
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    buffer.write(_END)
    checksum = sha256(buffer.getbuffer()).hexdigest()
    facts = {"file": path.name, "bytes": buffer.tell(), "images": len(rows), "sha256": checksum}
    index = ShardIndex(tuple(rows)).to_bytes(**facts)
    facts["index_sha256"] = sha256(index).hexdigest()
    try:
        is_same = read_bytes(index_path(path), "JSON") == index
        if is_same and file_sha256(path) == checksum:
            return facts, True
    except (OSError, ValueError):
        is_same = False
    if finished and not is_same:
        raise _other_shards(path.parent)
    write_atomically(index_path(path), lambda file: file.write(index))
    write_atomically(path, lambda file: file.write(buffer.getbuffer()))
    return facts, False


def _equal(images: list[tuple[str, str, bytes]]) -> tuple[tuple[str, ...], int]:
    """Names of the images that are equal, a line for each kind, and how many kinds are in train and another split."""
    digests = np.array([digest for _, _, digest in images], dtype="S16")
    _, kind, count = np.unique(digests, return_inverse=True, return_counts=True)
    kinds: dict[int, list[int]] = {}
    for i in np.flatnonzero(count[kind] > 1).tolist():
        kinds.setdefault(int(kind[i]), []).append(i)
    lines = sorted(" = ".join(sorted(printable(images[i][1]) for i in same)) for same in kinds.values())
    return tuple(lines), sum({"train"} < {images[i][0] for i in same} for same in kinds.values())


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from packing into the folder, if its file system can. Raises UserError if one is at it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot lock a folder
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                where = printable(str(folder))
                raise UserError(f"Another process is packing into {where}. Wait for it or end it.") from None
        yield
    finally:
        os.close(descriptor)


def _refuse_foreign(folder: Path) -> None:
    for path in sorted(folder.glob("*.tar")):
        try:
            ShardIndex.from_bytes(read_bytes(index_path(path), "JSON"))
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{printable(str(path))} was not written by vitmods data pack and could be overwritten: choose another "
                "folder."
            ) from None


def _other_shards(folder: Path) -> UserError:
    return UserError(
        f"{printable(str(folder))} holds shards of other images or settings. Choose another folder, or remove it to "
        "pack them again."
    )
