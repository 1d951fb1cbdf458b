"""WebDataset shards: which tar files there are, what split each belongs to, what lies where, and what the classes are.

Those from elsewhere have no index beside them: it is made by one pass over the members' headers.
"""

import re
import tarfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from braceexpand import UnbalancedBracesError, braceexpand  # type: ignore[attr-defined]

from vitmods.data.records import ENDINGS, Broken, Records, Source, printable, split_named
from vitmods.data.shards import FORMAT, Damaged, Member, Row, ShardIndex, is_packed, members, packed, records_of
from vitmods.data.sources import Spec, data_source
from vitmods.data.store import file_key, remembered
from vitmods.util.errors import UserError
from vitmods.util.limits import MOST_NAMES, check_bytes, parse_json, read_bytes, read_text

CLASS_FILES = ("classes.json", "classes.txt")
_LABELS = ("cls", "json")
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

    Raises UserError where there is no shard, or one is missing or not a tar file.
    """
    source = packed(spec.folder) if is_packed(spec.folder) else _foreign(spec.folder)
    source.streaming = spec.streaming()
    return source


def _foreign(path: Path) -> Source:
    """Shards from elsewhere; what is broken in them is kept apart."""
    root, files = _find(path)
    by_split, unused = _by_split(root, files)
    names = _class_names(root)
    splits: dict[str, Records] = {}
    broken: list[Broken] = []
    for split, paths in by_split.items():
        rows = []
        for file in paths:
            index = index_of(file)
            kept, refused = _numbered(index.rows, names)
            rows.append(kept)
            name = printable(file.relative_to(root).as_posix())
            broken += [Broken(split, f"{name}: {member}", reason) for member, reason in (*index.broken, *refused)]
        splits[split] = records_of(paths, rows, root)
    highest = max((int(part.labels.max(initial=-1)) for part in splits.values()), default=-1)
    classes = names or tuple(str(number) for number in range(highest + 1))
    warnings = [f"These shards do not name a split and were not used: {', '.join(unused)}."] if unused else []
    return Source(printable(root.resolve().name), classes, splits, warnings, broken)


def _find(path: Path) -> tuple[Path, list[Path]]:
    """The folder and the tar files that a folder or a pattern means. Raises UserError where there are none."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.tar") if not file.name.startswith("."))
        if files:
            return path, files
        compressed = any(path.rglob("*.tar.gz")) or any(path.rglob("*.tgz"))
        hint = " Compressed ones (.tar.gz) have to be unpacked with gunzip first." if compressed else ""
        raise UserError(f"There are no shards (.tar files) in {printable(str(path))}.{hint}")
    files = [Path(name) for name in expand(str(path))]
    missing = [file for file in files if not file.is_file()]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(
            f"There is no shard {printable(str(missing[0]))}{more}. Give wds:FOLDER, or the files as in "
            "wds:FOLDER/train-{0000..0009}.tar"
        )
    return files[0].parent, files


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


def _by_split(root: Path, files: list[Path]) -> tuple[dict[str, list[Path]], list[str]]:
    """Shards by the split that a word of their path names (all are train if none does), and the names of the others."""
    by_split: dict[str, list[Path]] = {}
    unused = []
    for file in files:
        words = re.split(r"[^a-z]+", file.relative_to(root).as_posix().lower())
        if split := next(filter(None, map(split_named, reversed(words))), None):
            by_split.setdefault(split, []).append(file)
        else:
            unused.append(printable(file.name))
    if not by_split:
        return {"train": files}, []
    if "train" not in by_split:
        raise UserError(f"{printable(str(root))} has shards of {' and '.join(by_split)}, but none of train.")
    return by_split, unused


def _class_names(root: Path) -> tuple[str, ...]:
    """From classes.json (a list, or names by number) or classes.txt (a name on each line); () if there is neither."""
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


def _numbered(rows: Sequence[Row], names: tuple[str, ...]) -> tuple[list[Row], list[tuple[str, str]]]:
    """Rows with the numbers of their classes, and (member, reason) of those with an invalid label."""
    number = {name: i for i, name in enumerate(names)}
    kept, refused = [], []
    for row in rows:
        label = number.get(row.label, row.label) if isinstance(row.label, str) else row.label
        if isinstance(label, str):
            hint = "" if names else f", and there is no {' or '.join(CLASS_FILES)} to name the classes"
            refused.append((row.id, f"its label {printable(label)!r} is not a number{hint}"))
        elif label < 0:
            refused.append((row.id, f"its label {label} is below 0"))
        elif names and label >= len(names):
            refused.append((row.id, f"its label {label} is not one of the {len(names)} classes, which count from 0"))
        else:
            kept.append(row._replace(label=label))
    return kept, refused


def index_of(shard: Path) -> ShardIndex:
    """The index of a shard that has none beside it: from the user's cache, or made now. Raises UserError."""
    try:
        status = shard.stat()
    except OSError as error:
        raise UserError(f"The shard {printable(str(shard))} cannot be read: {error.strerror}.") from error
    return remembered(
        None,
        f"shards/{file_key(shard, status, FORMAT)}.json",
        lambda kept: ShardIndex.from_bytes(read_bytes(kept, "JSON")),
        lambda: scan(shard),
        lambda file, index: file.write(index.to_bytes()),
    )


def scan(shard: Path) -> ShardIndex:
    """Read the headers of a tar file and the labels; images are not opened. Raises UserError for other files."""
    files: list[Member] = []
    damage: list[tuple[str, str]] = []
    try:
        with open(shard, "rb") as file:
            try:
                files.extend(members(file))
            except Damaged as error:
                damage.append((error.where, error.reason))
            rows, broken = _samples(files, file)
    except tarfile.TarError as error:
        raise UserError(
            f"{printable(str(shard))} is not a plain tar file ({error}). Shards are read at random places, so "
            "compressed ones (.tar.gz) have to be unpacked with gunzip first; copy or make a damaged one again."
        ) from error
    except OSError as error:
        raise UserError(f"The shard {printable(str(shard))} cannot be read: {error.strerror}.") from error
    return ShardIndex(tuple(rows), (*broken, *damage))


def _samples(files: list[Member], file: BinaryIO) -> tuple[list[Row], list[tuple[str, str]]]:
    """Images with a label, and (member, reason) of the others."""
    rows: list[Row] = []
    broken: list[tuple[str, str]] = []
    seen: set[str] = set()
    for key, parts in _by_key(files):
        images = [ending for ending in parts if f".{ending}" in ENDINGS]
        if not images and not any(ending in parts for ending in _LABELS):
            continue  # neither an image nor a label, such as a list of files
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
    return rows, broken


def _by_key(files: list[Member]) -> Iterator[tuple[str, dict[str, Member]]]:
    """Neighbors whose names agree up to the first dot of the file name, by their endings; hidden files left out."""
    key, parts = "", dict[str, Member]()
    for member in files:
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


def _label(parts: dict[str, Member], file: BinaryIO) -> int | str:
    """A class's number, or the text that should be one or a class's name. Raises ValueError."""
    kind = next((kind for kind in _LABELS if kind in parts), None)
    if kind is None:
        raise ValueError('it has no label: KEY.cls, or KEY.json with "label", is missing')
    file.seek(parts[kind].offset)
    try:
        check_bytes(parts[kind].size, "label")
        content = file.read(parts[kind].size)
        label = content.decode().strip() if kind == "cls" else parse_json(content)["label"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{printable(parts[kind].name)} holds no label") from None
    try:
        return int(label)
    except (ValueError, TypeError):
        return str(label)
