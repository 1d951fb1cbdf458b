"""WebDataset shards from elsewhere: which tar files there are, what split each belongs to, and what the classes are."""

import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from vitmods.data.folder import SPLIT_NAMES
from vitmods.data.records import Broken, Source, printable
from vitmods.data.shard_index import Row, index_of
from vitmods.data.shard_records import records_of
from vitmods.util.errors import UserError

CLASS_FILES = ("classes.json", "classes.txt")
MOST_SHARDS = 100_000  # that one pattern may name; ImageNet-21k has about 2,000
_RANGE = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")


def foreign_shards(spec: str, path: Path) -> Source:
    """The source in a folder of tar files, or in those that a pattern names; what is broken in them is kept apart.

    Raises UserError where there is no shard, or one is missing or no tar file.
    """
    root, files = _find(path)
    by_split, unused = _by_split(root, files)
    indexes = {split: [index_of(file) for file in paths] for split, paths in by_split.items()}
    names = _class_names(root)
    rows: dict[str, list[list[Row]]] = {}
    broken: list[Broken] = []
    for split, found in indexes.items():
        rows[split] = []
        for file, index in zip(by_split[split], found, strict=True):
            kept, refused = _numbered(index.rows, names)
            rows[split].append(kept)
            shown = printable(file.relative_to(root).as_posix())
            broken += [Broken(split, f"{shown}: {member}", reason) for member, reason in (*index.broken, *refused)]
    everything = chain.from_iterable(chain.from_iterable(rows.values()))
    highest = max((int(row.label) for row in everything), default=-1)
    classes = names or tuple(str(number) for number in range(highest + 1))
    splits = {split: records_of(by_split[split], found, root) for split, found in rows.items()}
    warnings = [f"These shards name no split and were not used: {', '.join(unused)}."] if unused else []
    name = printable(root.resolve().name)
    return Source(name, spec, classes, splits, warnings, broken)


def _find(path: Path) -> tuple[Path, list[Path]]:
    """The folder and the tar files that a folder or a pattern means. Raises UserError where there are none."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.tar") if not file.name.startswith("."))
        if files:
            return path, files
        packed = next(path.rglob("*.tar.gz"), None) or next(path.rglob("*.tgz"), None)
        why = " Compressed ones (.tar.gz) have to be unpacked with gunzip first." if packed else ""
        raise UserError(f"There are no shards (.tar files) in {printable(str(path))}.{why}")
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
    """Names for a pattern with ranges {0000..0009}, both ends included, as WebDataset and the shell read them.

    Raises UserError where a range is empty or there are too many names.
    """
    names = 1
    for first, last in _RANGE.findall(pattern):
        names *= max(0, int(last) - int(first) + 1)
        if not 0 < names <= MOST_SHARDS:
            why = f"names more than {MOST_SHARDS:,} files" if names else "is empty: it counts from the first number up"
            raise UserError(
                f"The range {printable(f'{{{first}..{last}}}')} {why}. Give the numbers of the first and the last "
                "shard, as in train-{0000..0009}.tar"
            )
    return _expand(pattern)


def _expand(pattern: str) -> list[str]:
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    numbers = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    return [name for number in numbers for name in _expand(pattern[: match.start()] + number + pattern[match.end() :])]


def _by_split(root: Path, files: list[Path]) -> tuple[dict[str, list[Path]], list[str]]:
    """Shards by the split that a word of their path names; all are train where none does. And those left over."""
    words = {name: split for split, names in SPLIT_NAMES.items() for name in names}
    found: dict[str, list[Path]] = {}
    unused = []
    for file in files:
        record = [words[w] for w in re.split(r"[^a-z]+", file.relative_to(root).as_posix().lower()) if w in words]
        if record:
            found.setdefault(record[-1], []).append(file)
        else:
            unused.append(printable(file.name))
    if not found:
        return {"train": files}, []
    if "train" not in found:
        raise UserError(f"{printable(str(root))} has shards of {' and '.join(found)}, but none of train.")
    return found, unused


def _class_names(root: Path) -> tuple[str, ...]:
    """From classes.json (a list, or names by number) or classes.txt (a name on each line); () if there is neither."""
    path = next((root / name for name in CLASS_FILES if (root / name).is_file()), None)
    if path is None:
        return ()
    try:
        text = path.read_text("utf-8")
        values = json.loads(text) if path.suffix == ".json" else text.splitlines()
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
    """Rows with the numbers of their classes, and (member, reason) of those whose label is none."""
    number = {name: i for i, name in enumerate(names)}
    kept, refused = [], []
    for row in rows:
        label = number.get(row.label, row.label) if isinstance(row.label, str) else row.label
        if isinstance(label, str):
            known = "" if names else f", and there is no {' or '.join(CLASS_FILES)} to name the classes"
            refused.append((row.id, f"its label {printable(label)!r} is no number{known}"))
        elif label < 0:
            refused.append((row.id, f"its label {label} is below 0"))
        elif names and label >= len(names):
            refused.append((row.id, f"its label {label} is none of the {len(names)} classes, which count from 0"))
        else:
            kept.append(row._replace(label=label))
    return kept, refused
