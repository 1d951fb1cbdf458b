"""pack: from a folder of images to shards (tar files in WebDataset's layout) that hold the same bytes.

What is written is a pure function of the images, their names and classes and the size of a shard, so packing again
goes on where it was stopped: a shard that is whole and equal stays, all else is written. A file gets its name only when
it is whole; the index of a shard, with its checksum, comes before the shard, and the manifest comes last. So a shard
without an index is not ours, and a folder without a manifest is not finished.
"""

import fcntl
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from vitmods.data.multilabel import with_target
from vitmods.data.read import Unreadable, digest, shown_size
from vitmods.data.records import ENDINGS, Records, printable
from vitmods.data.rng import text_order
from vitmods.data.shards import (
    EMPTY,
    MANIFEST,
    MANIFEST_FORMAT,
    Item,
    Row,
    ShardIndex,
    file_sha256,
    index_path,
    is_packed,
    read_manifest,
    taken,
    tar_parts,
)
from vitmods.data.sources import open_source
from vitmods.data.summary import record, unreadable_text
from vitmods.data.threads import cores, in_order
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import expand_user, make_folder, tracked, write_atomically, write_json
from vitmods.util.limits import read_bytes

MEGABYTE = 1_000_000
_REMEDY = (
    "Repair or remove them and pack again, which goes on from here; or leave them out with "
    'unreadable="skip" (--unreadable skip).'
)
_SHOWN = 20  # equal images
_TOGETHER = 16  # images that a thread reads at a time


@dataclass
class Packed:
    """What was done. manifest: as in manifest.json; shards, kept: how many, and how many were there already; equal: the
    images that are equal byte for byte, those that are in one line; torn: how many of the lines are in train and in
    another split."""

    folder: Path
    manifest: dict[str, Any]
    shards: int = 0
    kept: int = 0
    equal: tuple[str, ...] = ()
    torn: int = 0

    def __str__(self) -> str:
        lines = []
        for split, facts in self.manifest["splits"].items():
            megabytes, shards = facts["bytes"] / MEGABYTE, len(facts["shards"])
            lines.append(f"{split}: {facts['images']:,} images, {megabytes:,.1f} MB, shards: {shards}")
        if self.manifest["unreadable"]:
            lines.append(f"Left out: {unreadable_text(self.manifest['unreadable'])}")
        if self.equal:
            more = [f"  and {len(self.equal) - _SHOWN} more"] if len(self.equal) > _SHOWN else []
            lines += [
                "Warning: these images are equal, byte for byte:",
                *(f"  {t}" for t in self.equal[:_SHOWN]),
                *more,
            ]
        if self.torn:
            lines.append(
                f"Warning: {self.torn} of these lines are in train and in val or test, and studies refuse the pack: "
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
    """Write the images of a folder as shards, or go on where an earlier call was stopped.

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
        refuse_foreign(folder)
        packer = _Packer(folder, int(shard_mb * MEGABYTE), workers or cores(), is_packed(folder), progress)
        facts = {split: packer.split(split, records, source.classes) for split, records in chosen.items()}
        bad = [*(record(broken) for broken in source.broken if broken.split in chosen), *packer.unreadable]
        if bad and unreadable == "stop":
            raise UserError(f"{unreadable_text(bad)}\n{_REMEDY}")
        manifest = {
            "format": MANIFEST_FORMAT,
            "name": source.name,
            "classes": list(source.classes),
            "splits": facts,
            "unreadable": bad,
        }
        if packer.finished and read_manifest(folder) != manifest:
            raise other_shards(folder)
        remove_leftovers(folder, facts)
        write_json(folder / MANIFEST, manifest)
        return Packed(folder, manifest, packer.shards, packer.kept, packer.equal(), packer.torn())


@dataclass
class _Packer:
    folder: Path
    limit: int
    workers: int
    finished: bool
    """whether an earlier call came to its end: what it wrote is then never replaced by something else"""
    progress: bool
    shards: int = 0
    kept: int = 0
    unreadable: list[dict[str, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    homes: list[str] = field(default_factory=list)

    def equal(self) -> tuple[str, ...]:
        """Names of the images packed that are equal, a line for each kind."""
        _, kind, count = np.unique(np.array(self.digests, dtype="S16"), return_inverse=True, return_counts=True)
        found: dict[int, list[str]] = {}
        for i in np.flatnonzero(count[kind] > 1).tolist():
            found.setdefault(int(kind[i]), []).append(printable(self.names[i]))
        return tuple(sorted(" = ".join(sorted(names)) for names in found.values()))

    def torn(self) -> int:
        """How many kinds of equal images are in train and in another split."""
        trained = {one for one, home in zip(self.digests, self.homes, strict=True) if home == "train"}
        return len(trained & {one for one, home in zip(self.digests, self.homes, strict=True) if home != "train"})

    def split(self, split: str, records: Records, classes: Sequence[str]) -> dict[str, Any]:
        """Write the shards of one split; what the manifest says of it."""
        counts, shards = [0] * len(classes), []
        for number, items in enumerate(self._groups(split, records)):
            shards.append(self._shard(self.folder / f"{split}-{number:06d}.tar", items))
            for item in items:
                counts[int(item.row.label)] += 1
                self.names.append(item.row.id)
                self.digests.append(bytes.fromhex(item.row.digest))
                self.homes.append(split)
        return {
            "images": sum(counts),
            "bytes": sum(shard["bytes"] for shard in shards),
            "per_class": dict(zip(classes, counts, strict=True)),
            "shards": shards,
        }

    def _groups(self, split: str, records: Records) -> Iterator[list[Item]]:
        """The images of one shard after the other."""
        group: list[Item] = []
        length = EMPTY
        for item in self._items(split, records):
            needed = taken(len(item.raw))
            if group and length + needed > self.limit:
                yield group
                group, length = [], EMPTY
            group.append(item)
            length += needed
        if group:
            yield group

    def _items(self, split: str, records: Records) -> Iterator[Item]:
        """Images in an order drawn from their names, so that a shard has some of every class."""
        order = text_order(0, "pack", records.ids).tolist()
        known = self._known(split)

        def read(number: int) -> "Item | str":
            try:
                return _read(records, order[number], number, known)
            except Unreadable as error:
                return str(error)

        def some(start: int) -> "list[Item | str]":
            return [read(number) for number in range(start, min(start + _TOGETHER, len(order)))]

        found: Iterable[Item | str] = chain.from_iterable(in_order(some, range(0, len(order), _TOGETHER), self.workers))
        for number, item in enumerate(tracked(found, len(order), f"Packing {split}") if self.progress else found):
            if isinstance(item, Item):
                yield item
            else:
                path = printable(records.ids[order[number]])
                self.unreadable.append({"split": split, "path": path, "reason": printable(item)})

    def _known(self, split: str) -> dict[str, tuple[int, int]]:
        """Sizes of images that an earlier call has decoded, by the digests of their bytes."""
        found: dict[str, tuple[int, int]] = {}
        for path in self.folder.glob(f"{split}-*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                found |= {
                    row.digest: (row.height, row.width) for row in ShardIndex.from_bytes(read_bytes(path, "JSON")).rows
                }
        return found

    def _shard(self, path: Path, items: list[Item]) -> dict[str, Any]:
        """Write a shard and its index unless they are there and whole; what the manifest says of it."""
        tar, rows = tar_parts(items)
        length, content = sum(map(len, tar)), sha256()
        for part in tar:
            content.update(part)
        checksum = content.hexdigest()
        facts = {"file": path.name, "bytes": length, "images": len(rows), "sha256": checksum}
        index = ShardIndex(tuple(rows)).to_bytes(**facts)
        self.shards += 1
        if self._is_there(path, index, checksum):
            self.kept += 1
        else:
            write_atomically(index_path(path), lambda file: file.write(index))
            write_atomically(path, lambda file: file.writelines(tar))
        return {**facts, "index_sha256": sha256(index).hexdigest()}

    def _is_there(self, path: Path, index: bytes, checksum: str) -> bool:
        """Whether an earlier call has finished this very shard."""
        try:
            same = read_bytes(index_path(path), "JSON") == index
            whole = same and file_sha256(path) == checksum
        except (OSError, ValueError):
            same = whole = False
        if self.finished and not same:
            raise other_shards(self.folder)
        return whole


def _read(records: Records, i: int, number: int, known: dict[str, tuple[int, int]]) -> Item:
    """Image i, which is the `number`-th of its split. Raises Unreadable."""
    raw = records.fetch(int(records.keys[i]))
    if not isinstance(raw, bytes):
        raise UserError("Only image files can be packed, since their bytes are kept; these images are decoded.")
    its_digest = digest(raw).hex()
    height, width = known.get(its_digest) or shown_size(raw)
    member = f"{number:09d}{_ending(records.ids[i], raw)}"
    return Item(Row(records.ids[i], int(records.labels[i]), member, 0, len(raw), height, width, its_digest), raw)


def _ending(name: str, raw: bytes) -> str:
    """As the file had it, or by the format where an image was no file of its own."""
    found = PurePosixPath(name).suffix.lower()
    if found in ENDINGS:
        return found
    with Image.open(io.BytesIO(raw)) as image:
        return f".{(image.format or 'img').lower()}"


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


def refuse_foreign(folder: Path) -> None:
    for path in sorted(folder.glob("*.tar")):
        try:
            ShardIndex.from_bytes(read_bytes(index_path(path), "JSON"))
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
