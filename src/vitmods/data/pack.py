"""pack: from a folder of images to shards (tar files in WebDataset's layout) that hold the same bytes.

The output is a pure function of the images, their names and classes and the size of a shard, so packing again resumes:
a shard that is whole and equal stays, all else is written. A file gets its name only when it is whole, and the manifest
comes last; until then the folder has a file called UNFINISHED.
"""

import fcntl
import io
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitmods.data.loading import record, unreadable_text
from vitmods.data.multilabel import with_target
from vitmods.data.read import Unreadable, digest, shown_size
from vitmods.data.records import ENDINGS, Broken, Records, printable
from vitmods.data.rng import text_order
from vitmods.data.sources import open_source
from vitmods.data.sources.wds import (
    INDEX,
    MANIFEST,
    MANIFEST_FORMAT,
    ROW,
    file_sha256,
    is_packed,
    read_manifest,
    write_index,
)
from vitmods.data.threads import AHEAD, cores, in_order
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import expand_user, make_folder, tracked, write_atomically, write_json

MEGABYTE = 1_000_000
UNFINISHED = "unfinished"
_END = bytes(2 * tarfile.BLOCKSIZE)  # of a tar file


@dataclass(frozen=True)
class Packed:
    """The result of `pack`.

    manifest: as in manifest.json; kept: number of shards that were there already.
    """

    folder: Path
    manifest: dict[str, Any]
    kept: int

    @property
    def shards(self) -> int:
        """Number of shards."""
        return sum(len(facts["shards"]) for facts in self.manifest["splits"].values())

    def __str__(self) -> str:
        lines = [
            f"{split}: {facts['images']:,} images, {facts['bytes'] / MEGABYTE:,.1f} MB, shards: {len(facts['shards'])}"
            for split, facts in self.manifest["splits"].items()
        ]
        if self.manifest["unreadable"]:
            lines.append(f"Left out: {unreadable_text(self.manifest['unreadable'])}")
        kept = f" ({self.kept} of {self.shards} were there, and were compared)" if self.kept else ""
        lines.append(f"Packed in {printable(str(self.folder))}{kept}. Use it as --data {printable(str(self.folder))}")
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
    source = with_target(source, "class") if source.target == "none" else source
    if unknown := [split for split in splits if split not in source.splits]:
        raise UserError(
            f'{printable(source.spec)} does not have a split "{unknown[0]}". {nearest(unknown[0], source.splits)}'
        )
    if source.class_map is not None or any(part.label_sets is not None for part in source.splits.values()):
        raise UserError(
            f"{printable(source.spec)} maps its classes or has several labels an image: shards have neither."
        )
    chosen = {split: records for split, records in source.splits.items() if not splits or split in splits}
    folder = make_folder(expand_user(out))
    others = UserError(
        f"{printable(str(folder))} holds shards of other images or settings. Choose another folder, or remove it to "
        "pack them again."
    )
    with alone_in(folder):
        finished = read_manifest(folder) if is_packed(folder) else None
        if finished is None and not (folder / UNFINISHED).exists():
            if foreign := sorted(folder.glob("*.tar")):
                raise UserError(
                    f"{printable(str(foreign[0]))} was not written by vitmods data pack and could be overwritten: "
                    "choose another folder."
                )
            write_atomically(folder / UNFINISHED, lambda file: None)
        kept, bad = 0, [record(item) for item in source.broken if item.split in chosen]
        contents: dict[str, Any] = {}
        names: list[str] = []
        parts: list[Any] = []  # rows of each shard
        for split, records in chosen.items():
            shards, counts = [], Counter[int]()
            images_by_shard = _by_shard(records, split, int(shard_mb * MEGABYTE), bad, workers or cores(), progress)
            for number, images in enumerate(images_by_shard):
                content, rows = _shard(images, len(parts))
                path, checksum = folder / f"{split}-{number:06d}.tar", sha256(content).hexdigest()
                shards.append({"file": path.name, "bytes": len(content), "images": len(images), "sha256": checksum})
                if finished is not None and shards[-1] not in finished["splits"].get(split, {"shards": []})["shards"]:
                    raise others
                if path.is_file() and file_sha256(path) == checksum:
                    kept += 1
                else:
                    write_atomically(path, lambda file, content=content: file.write(content))  # type: ignore[misc]
                parts.append(rows)
                counts.update(image.label for image in images)
                names += [image.name for image in images]
            contents[split] = {
                "images": counts.total(),
                "bytes": sum(shard["bytes"] for shard in shards),
                "per_class": {name: counts[label] for label, name in enumerate(source.classes)},
                "shards": shards,
            }
        if bad and unreadable == "stop":
            raise UserError(
                f"{unreadable_text(bad)}\nRepair or remove them and pack again, which resumes from here; or leave them "
                'out with unreadable="skip" (--unreadable skip).'
            )
        index = io.BytesIO()
        write_index(index, names, np.concatenate([np.zeros(0, ROW), *parts]))
        manifest = {
            "format": MANIFEST_FORMAT,
            "name": source.name,
            "classes": list(source.classes),
            "splits": contents,
            "unreadable": bad,
            "index_sha256": sha256(index.getbuffer()).hexdigest(),
        }
        if finished is not None and finished != manifest:
            raise others
        write_atomically(folder / INDEX, lambda file: file.write(index.getbuffer()))
        if finished is None:
            # Shards of an unfinished call with other settings: other programs would read them too.
            files = {shard["file"] for facts in contents.values() for shard in facts["shards"]}
            for path in folder.iterdir():
                if re.fullmatch(r"(train|val|test)-\d{6}\.tar(\.tmp)?", path.name) and path.name not in files:
                    path.unlink()
            write_json(folder / MANIFEST, manifest)
        (folder / UNFINISHED).unlink(missing_ok=True)
    return Packed(folder, manifest, kept)


class _Image(NamedTuple):
    name: str
    label: int
    member: str
    raw: bytes
    native: tuple[int, int]
    digest: bytes


def _by_shard(
    records: Records, split: str, limit: int, bad: list[dict[str, str]], workers: int, progress: bool
) -> Iterator[list[_Image]]:
    """The images of one shard of at most `limit` bytes after the other; those that cannot be read are added to `bad`.
    The order is drawn from the names, so that a shard has some of every class."""
    order = text_order(0, "pack", records.ids).tolist()

    def read(number: int) -> _Image | str:
        name, key = records.ids[order[number]], int(records.keys[order[number]])
        try:
            raw = records.fetch(key)
            if not isinstance(raw, bytes):
                raise UserError("Only image files can be packed, since their bytes are kept; these images are decoded.")
            size = shown_size(raw)
        except Unreadable as error:
            return str(error)
        ending = PurePosixPath(name).suffix.lower()
        if ending not in ENDINGS:  # not a file of its own
            with Image.open(io.BytesIO(raw)) as image:
                ending = f".{(image.format or 'img').lower()}"
        return _Image(name, int(records.labels[order[number]]), f"{number:09d}{ending}", raw, size, digest(raw))

    images: Iterable[_Image | str] = in_order(read, range(len(order)), workers, ahead=AHEAD)
    shard: list[_Image] = []
    length = len(_END)
    for number, image in enumerate(tracked(images, len(order), f"Packing {split}") if progress else images):
        if isinstance(image, str):
            bad.append(record(Broken(split, records.ids[order[number]], image)))
            continue
        blocks = -(-len(image.raw) // tarfile.BLOCKSIZE) + 3  # label and two headers
        if shard and length + blocks * tarfile.BLOCKSIZE > limit:
            yield shard
            shard, length = [], len(_END)
        shard.append(image)
        length += blocks * tarfile.BLOCKSIZE
    if shard:
        yield shard


def _shard(images: list[_Image], number: int) -> tuple[bytes, Any]:
    """The bytes of a shard, and the rows (n,) of its images in the index."""
    buffer, rows = io.BytesIO(), np.zeros(len(images), ROW)
    tar = tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115, closing would pad it
    for i, image in enumerate(images):
        offset = buffer.tell() + tarfile.BLOCKSIZE
        rows[i] = (number, image.label, offset, len(image.raw), image.native, np.frombuffer(image.digest, np.uint8))
        label = PurePosixPath(image.member).with_suffix(".cls").name
        for name, content in ((image.member, image.raw), (label, str(image.label).encode())):
            member = tarfile.TarInfo(name)  # without times and owners: the same images give the same bytes
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    buffer.write(_END)
    return buffer.getvalue(), rows


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
