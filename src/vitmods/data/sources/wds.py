"""WebDataset shards: images in uncompressed tar files, each read at its place in its file.

Members that share a name up to the first dot belong together: KEY.jpg (or another image) and KEY.cls, the number of its
class. `vitmods data pack` adds one index of all images and a manifest, which give the same source as the packed folder:
same names, order, splits and fingerprint. Each read compares the checksum. Shards from elsewhere are without an index:
one pass over the headers of their members makes it.

The package webdataset reads a shard from front to back, unpickles members called .pkl, and takes a damaged header for
the end; arrow and parquet files of `datasets` depend on the version that wrote them. So tar files are read here.
"""

import hashlib
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
from braceexpand import UnbalancedBracesError, braceexpand  # type: ignore[attr-defined]
from numpy.typing import NDArray

from vitmods.data.read import Unreadable, digest, reading
from vitmods.data.records import ENDINGS, Broken, Records, Source, printable, split_named
from vitmods.data.sources import Spec, data_source
from vitmods.data.store import file_key, remembered
from vitmods.data.threads import cores
from vitmods.util.errors import UserError
from vitmods.util.limits import MOST_NAMES, check_bytes, parse_json, read_json, read_npz, read_text
from vitmods.util.tables import whole_number

MANIFEST, MANIFEST_FORMAT = "manifest.json", "vitmods shards 2"
INDEX = "index.npz"
ROW = np.dtype(
    [
        ("shard", "<i4"),
        ("label", "<i8"),
        ("offset", "<i8"),
        ("size", "<i8"),
        ("native", "<i8", (2,)),
        ("digest", "u1", (16,)),
    ]
)
"""An image: number of its shard, number of its class, place and length of its bytes there, height and width,
`read.digest`; the last two are 0 where they are unknown."""
_REMEMBERED = 1 << 28  # bytes: listing a larger file takes so long that the list is kept
_AGAIN = "Copy it again, or write it again with vitmods data pack."


class Member(NamedTuple):
    """A file in a tar file, and where its bytes are."""

    name: str
    offset: int
    size: int


class Damaged(tarfile.ReadError):
    """A tar file ends or breaks off at `where`."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


def members(file: BinaryIO, start: int = 0, end: int | None = None, needs_end_mark: bool = True) -> Iterator[Member]:
    """The files in the tar at start:end of a file, read from their headers.

    Raises Damaged after the last that is whole, and tarfile.TarError if the file is not a tar.
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
    if needs_end_mark:
        raise Damaged(where, "the tar file lacks the end mark: it is cut off")


def read_at(path: Path, offset: int, size: int) -> bytes:
    """So many bytes of a file from an offset on. Raises Unreadable."""
    with reading():
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            raw = file.read(size)
        if len(raw) < size:
            raise Unreadable(f"{printable(path.name)} is cut off within it")
        return raw


def open_tar(path: Path) -> list[Member]:
    """List the files in a tar, those of tars within it as "inner/file". Raises UserError where it is cut short,
    damaged, compressed or cannot be read.

    The list of a large file is kept in the user's cache folder, since making it reads every header.
    """

    def scan_tar() -> list[Member]:
        listed: list[Member] = []
        try:
            with open(path, "rb", buffering=0) as outer, open(path, "rb", buffering=0) as inner:
                for name, start, size in members(outer, needs_end_mark=False):
                    if name.endswith(".tar"):
                        parts = members(inner, start, start + size, needs_end_mark=False)
                        listed.extend(part._replace(name=f"{name.removesuffix('.tar')}/{part.name}") for part in parts)
                    else:
                        listed.append(Member(name, start, size))
        except tarfile.TarError as error:
            raise UserError(
                f"The tar file {printable(str(path))} cannot be used: {error}, after {len(listed):,} members. It is "
                "cut short, damaged or compressed: fetch it again, and do not compress it."
            ) from error
        except OSError as error:
            raise UserError(f"The tar file {printable(str(path))} cannot be read: {error.strerror}.") from error
        return listed

    status = path.stat()
    if status.st_size < _REMEMBERED:
        return scan_tar()
    return [Member(*row) for row in remembered(f"tars/{file_key(path, status)}.json", scan_tar)]


def write_index(file: IO[bytes], names: Sequence[str], rows: NDArray[Any]) -> None:
    """Write names (n,) and rows (n,) of all packed images; the same give the same bytes."""
    np.savez(file, names=np.frombuffer("\0".join(names).encode("utf-8", "surrogateescape"), np.uint8), rows=rows)


def is_packed(path: Path) -> bool:
    """Whether `vitmods data pack` wrote this folder to its end."""
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a packed folder. Raises UserError if it cannot be read."""
    path = printable(str(folder / MANIFEST))
    try:
        manifest: dict[str, Any] = read_json(folder / MANIFEST, "JSON")
        if manifest["format"] != MANIFEST_FORMAT:
            raise ValueError(f"it is of the format {manifest['format']!r}, not {MANIFEST_FORMAT!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}). {_AGAIN}") from error
    return manifest


def packed(folder: Path) -> Source:
    """The source in a folder that `vitmods data pack` wrote. Raises UserError where a file is missing or altered."""
    manifest, splits, index = read_manifest(folder), {}, folder / INDEX
    try:
        name, classes, left_out = manifest["name"], tuple(manifest["classes"]), len(manifest["unreadable"])
        if not all(isinstance(word, str) for word in (name, *classes)):
            raise TypeError("its name and classes are not words")
        shards = {folder / s["file"]: s for facts in manifest["splits"].values() for s in facts["shards"]}
        if file_sha256(index) != manifest["index_sha256"]:
            raise UserError(f"{printable(str(index))} is not what was packed: its checksum differs. {_AGAIN}")
        columns = read_npz(index, ["names", "rows"])
        names, rows = (
            columns["names"].tobytes().decode("utf-8", "surrogateescape").split("\0"),
            columns["rows"].astype(ROW),
        )
        for path, facts in shards.items():
            if (length := path.stat().st_size) != facts["bytes"]:
                text = f"has {length:,} bytes, not {facts['bytes']:,}"
                raise UserError(f"The shard {printable(str(path))} {text}. {_AGAIN}")
        first = 0
        for split, facts in manifest["splits"].items():
            files = [folder / shard["file"] for shard in facts["shards"]]
            chosen = np.flatnonzero((rows["shard"] >= first) & (rows["shard"] < first + len(files)))
            numbered = rows[chosen]
            numbered["shard"] -= first
            splits[split] = shard_records(files, [names[i] for i in chosen], numbered)
            first += len(files)
    except OSError as error:
        raise UserError(f"{printable(str(error.filename))} cannot be read: {error.strerror}. {_AGAIN}") from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
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


def file_sha256(path: Path) -> str:
    """The checksum of the whole file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shard_records(files: Sequence[Path], names: Sequence[str], rows: NDArray[Any]) -> Records:
    """Records sorted by name, of the images called `names` (n,), with a ROW each; keys run through the shards."""
    order = np.array(sorted(range(len(names)), key=names.__getitem__), dtype=np.int64)
    stamps = [file_key(file, file.stat(), "shard")[:16] for file in files]
    has_digests = bool(rows["digest"].any(axis=1).all())

    def fetch(key: int) -> bytes:
        row = rows[key]
        path, offset = files[row["shard"]], int(row["offset"])
        raw = read_at(path, offset, int(row["size"]))
        if has_digests and digest(raw) != row["digest"].tobytes():
            raise Unreadable(f"damaged in the shard {printable(path.name)} at byte {offset:,}: the checksum differs")
        return raw

    ordered = rows[order]
    places = zip(ordered["shard"].tolist(), ordered["offset"].tolist(), strict=True)
    return Records(
        ids=tuple(names[i] for i in order),
        labels=ordered["label"],
        stamps=tuple(f"{stamps[shard]}:{offset}" for shard, offset in places),
        fetch=fetch,
        keys=order,
        shards=ordered["shard"].astype(np.int64),
        native=ordered["native"] if has_digests else None,
        digests=ordered["digest"] if has_digests else None,
    )


CLASS_FILES = ("classes.json", "classes.txt")
_MOST_CLASSES = 1_000_000  # without a list of them
_MOST_BRACES, _LONGEST = 20, 1000  # of a pattern
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?\d+)?\}")


@data_source(
    "wds",
    "wds:path/to/shards",
    "tar files in WebDataset's layout; the output of `vitmods data pack` needs only its folder",
    options=("stream", "buffer"),
    claims=is_packed,
)
def shards(spec: Spec) -> Source:
    """The source in a folder of shards, or in the tar files of a pattern such as train-{0000..0009}.tar.

    Raises UserError where shards are missing or are not tar files.
    """
    source = packed(spec.folder) if is_packed(spec.folder) else _from_elsewhere(spec.folder)
    source.streaming = spec.streaming()
    return source


def shards_of(path: Path) -> tuple[Path, dict[str, list[Path]], list[str]]:
    """The shards in a folder, or those of a pattern such as train-{0000..0009}.tar, by the split that a word of their
    path names. Returns their folder, the shards of each split, and warnings.

    Raises UserError where shards are missing.
    """
    if path.is_dir():
        root, files = path, sorted(file for file in path.rglob("*.tar") if not file.name.startswith("."))
        if not files:
            compressed = any(path.rglob("*.tar.gz")) or any(path.rglob("*.tgz"))
            hint = " Compressed ones (.tar.gz) have to be unpacked with gunzip first." if compressed else ""
            hint += " A file, such as pairs.jsonl or shard.tar, is named itself."
            raise UserError(f"{printable(str(path))} does not hold shards (.tar files).{hint}")
    else:
        files = [Path(name) for name in expand(str(path))]
        root = files[0].parent
        if missing := [file for file in files if not file.is_file()]:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise UserError(
                f"The shard {printable(str(missing[0]))}{more} does not exist. Give wds:FOLDER, or the files as in "
                "wds:FOLDER/train-{0000..0009}.tar"
            )
    by_split, unused = dict[str, list[Path]](), []
    for file in files:  # a word of its path names the split
        words = re.split(r"[^a-z]+", file.relative_to(root).as_posix().lower())
        if split := next(filter(None, map(split_named, reversed(words))), None):
            by_split.setdefault(split, []).append(file)
        else:
            unused.append(printable(file.name))
    if not by_split:
        by_split, unused = {"train": files}, []
    if "train" not in by_split:
        raise UserError(f"{printable(str(root))} has shards of {' and '.join(by_split)}, but none of train.")
    return root, by_split, [f"These shards do not name a split and were not used: {', '.join(unused)}."] * bool(unused)


def _from_elsewhere(path: Path) -> Source:
    root, by_split, warnings = shards_of(path)
    names = _class_names(root)
    numbers, most = {name: number for number, name in enumerate(names)}, len(names) or _MOST_CLASSES
    unnamed = "" if names else f", and {' or '.join(CLASS_FILES)}, which would name the classes, is missing"
    splits, broken = dict[str, Records](), list[Broken]()
    for split, paths in by_split.items():
        ids, rows = [], []
        for number, file in enumerate(paths):
            shard, scanned = file.relative_to(root).as_posix(), index_of(file)
            wrong = list(scanned.broken)
            for name, label, offset, size in scanned.rows:
                label = numbers.get(label, label)
                if isinstance(label, str):
                    wrong.append((name, f"its label {printable(label)!r} is not a number{unnamed}"))
                elif label < 0:
                    wrong.append((name, f"its label {label} is below 0"))
                elif label >= most:
                    wrong.append((name, f"its label {label} is not one of the {most:,} classes, which count from 0"))
                else:
                    rows.append((number, label, offset, size, 0, 0))
                    ids.append(f"{shard}: {name}")
            broken += [Broken(split, f"{printable(shard)}: {member}", reason) for member, reason in wrong]
        splits[split] = shard_records(paths, ids, np.array(rows, ROW))
    highest = max((int(part.labels.max(initial=-1)) for part in splits.values()), default=-1)
    classes = names or tuple(str(number) for number in range(highest + 1))
    return Source(printable(root.resolve().name), classes, splits, warnings, broken)


def expand(pattern: str) -> list[str]:
    """Names for a pattern such as {train,val}-{0000..0009}.tar, both ends included, as WebDataset and shells do.

    Raises UserError where a brace is not closed or there are too many names.
    """
    advice = "Give the numbers of the first and the last shard, as in train-{0000..0009}.tar"
    for text in _RANGE.findall(pattern):  # a range that is too long has too many names before they are combined
        first, last = (int(end[:10]) for end in text)
        if abs(last - first) >= MOST_NAMES or max(map(len, text)) > 10:
            raise UserError(
                f"{printable(f'{{{text[0][:20]}..{text[1][:20]}}}')} names more than {MOST_NAMES:,} files. {advice}"
            )
    if pattern.count("{") > _MOST_BRACES or len(pattern) > _LONGEST:
        raise UserError(f"{printable(pattern[:60])}... has too many braces, or is too long. {advice}")
    try:
        names = list(islice(braceexpand(pattern, escape=False), MOST_NAMES + 1))
    except UnbalancedBracesError:
        raise UserError(f"A brace of {printable(pattern)} is not closed: write train-{{0000..0009}}.tar") from None
    if len(names) > MOST_NAMES:
        raise UserError(f"{printable(pattern)} names more than {MOST_NAMES:,} files. {advice}")
    return names


def _class_names(root: Path) -> tuple[str, ...]:
    """From classes.json (a list, or names by number) or classes.txt (a name on each line); () without these files."""
    path = next((root / name for name in CLASS_FILES if (root / name).is_file()), None)
    if path is None:
        return ()
    try:
        text = read_text(path)
        values = parse_json(text) if path.suffix == ".json" else text.splitlines()
        if isinstance(values, dict):
            values = [values[str(number)] for number in range(len(values))]
        names = tuple(str(value).strip() for value in values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{printable(str(path))} does not list the classes ({type(error).__name__}: {error})."
        ) from error
    if len(set(names)) < len(names):
        raise UserError(f"{printable(str(path))} has a class twice.")
    return names


class Scanned(NamedTuple):
    """Images with a label, each [name, label, place, length] in the shard; and [member, reason] of the others."""

    rows: list[Any]
    broken: list[Any]


class ImageFact(NamedTuple):
    """A fact of an image that shards contain. name: in the cache, with the reader's version. title: as in "its label".
    endings: of the members that may have it. read: gets the members of an image by ending, and the file; returns a
    JSON-able value, or raises ValueError with the reason why the image cannot be used."""

    name: str
    title: str
    endings: tuple[str, ...]
    read: Callable[[dict[str, Member], BinaryIO], Any]


def content_of(member: Member, file: BinaryIO) -> bytes:
    """The bytes of a small member. Raises ValueError for a large one."""
    check_bytes(member.size, "label")
    file.seek(member.offset)
    return file.read(member.size)


def _label(parts: dict[str, Member], file: BinaryIO) -> int | str:
    """A class's number, or the text that should be one or a class's name. Raises ValueError."""
    kind = "cls" if "cls" in parts else "json"
    if kind not in parts:
        raise ValueError('its label is missing: KEY.cls, or KEY.json with "label"')
    try:
        content = content_of(parts[kind], file)
        label = content.decode().strip() if kind == "cls" else parse_json(content)["label"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{printable(parts[kind].name)} does not hold a label") from None
    try:
        return whole_number(label)
    except ValueError:
        return str(label)


LABELS = ImageFact("vitmods scan 1", "label", ("cls", "json"), _label)


def index_of(shard: Path, facts: ImageFact = LABELS) -> Scanned:
    """The images of a shard: from the user's cache, or listed now. Raises UserError."""
    try:
        key = file_key(shard, shard.stat(), facts.name)
    except OSError as error:
        raise UserError(f"The shard {printable(str(shard))} cannot be read: {error.strerror}.") from error
    return Scanned(*remembered(f"shards/{key}.json", lambda: scan(shard, facts)))


def scan(shard: Path, facts: ImageFact = LABELS) -> Scanned:
    """Read the headers of a tar file and the facts; images are not opened. Raises UserError for other files."""
    files, damage, scanned = list[Member](), list[Any](), Scanned([], [])
    seen: set[str] = set()

    def key_of(member: Member) -> str:
        path = PurePosixPath(member.name)
        return str(path.parent / path.name.partition(".")[0])

    try:
        with open(shard, "rb") as file:
            try:
                files.extend(member for member in members(file) if not PurePosixPath(member.name).name.startswith("."))
            except Damaged as error:
                damage.append([error.where, error.reason])
            for key, group in groupby(files, key_of):
                pairs = [(PurePosixPath(member.name).name.partition(".")[2].lower(), member) for member in group]
                parts = dict(pairs)
                images = [ending for ending in parts if f".{ending}" in ENDINGS]
                if not images and not parts.keys() & set(facts.endings):
                    continue  # neither an image nor its facts, such as a list of files
                name = printable(parts[images[0]].name if images else key)
                try:
                    if len(images) != 1:
                        alone = f"it is a {facts.title} without an image"
                        raise ValueError("two images share this key" if images else alone)
                    if key in seen or len(parts) < len(pairs):
                        raise ValueError("its key comes twice in this shard")
                    seen.add(key)
                    image = parts[images[0]]
                    scanned.rows.append([name, facts.read(parts, file), image.offset, image.size])
                except ValueError as error:
                    scanned.broken.append([name, str(error)])
    except tarfile.TarError as error:
        raise UserError(
            f"{printable(str(shard))} is not a plain tar file ({error}). Shards are read at random places, so "
            "compressed ones (.tar.gz) have to be unpacked with gunzip first; copy or make a damaged one again."
        ) from error
    except OSError as error:
        raise UserError(f"The shard {printable(str(shard))} cannot be read: {error.strerror}.") from error
    return scanned._replace(broken=[*scanned.broken, *damage])
