"""Images with any number of labels: a CSV file beside them, or class folders whose names are joined by +.

    file,labels[,split]
    cats/1.jpg,cat;indoor,train
    2.jpg,,                       an image with none of the labels

Files are named from the folder of the CSV on; labels are separated by ; or |. classes.txt beside it, one label a line,
says in which order they come and that there are no others.
"""

import csv
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from unicodedata import normalize

import numpy as np

from vitmods.data.folder import SPLIT_NAMES, file_records
from vitmods.data.records import Records, Source, printable
from vitmods.util.errors import UserError, nearest

CSV, CLASSES = "labels.csv", "classes.txt"
LAYOUT = 'Its first line is "file,labels" or "file,labels,split", with labels separated by ; or |.'
_SHOWN = 5
Sets = tuple[tuple[int, ...], ...]


@dataclass
class _Rows:
    """Paths below the CSV's folder with their labels, split by split; what is wrong with others, with line numbers."""

    splits: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def labels_csv(spec: str) -> Source:
    """The images that a CSV file names. Raises UserError with all that is wrong with it, counted and with examples."""
    path = Path(spec).expanduser()
    listed = _names(path.parent / CLASSES)
    rows = _read(path, listed)
    if rows.wrong:
        more = f"\n  and {len(rows.wrong) - _SHOWN} more" if len(rows.wrong) > _SHOWN else ""
        lines = "".join(f"\n  {text}" for text in rows.wrong[:_SHOWN])
        raise UserError(f"{printable(spec)} cannot be used as it is ({len(rows.wrong)} lines):{lines}{more}")
    labels = listed or sorted({label for images in rows.splits.values() for some in images.values() for label in some})
    if not labels:
        raise UserError(f"{printable(spec)} gives no image a label. {LAYOUT}")
    number = {label: i for i, label in enumerate(labels)}
    splits = {}
    for name, images in rows.splits.items():
        ids = tuple(sorted(images))
        sets = tuple(tuple(sorted(number[label] for label in images[one])) for one in ids)
        plain = file_records(ids, np.zeros(len(ids), np.int64), [path.parent / one for one in ids])
        splits[name] = replace(plain, label_sets=sets)
    name = printable(path.resolve().parent.name if path.name == CSV else path.stem)
    return _with_rarest(Source(name, spec, tuple(map(printable, labels)), splits, target="labels"))


def with_target(source: Source, target: str) -> Source:
    """The source with what a task asks of it: "class", or "labels", which a source of classes can give too.

    Classes called as several joined by + are several labels. Raises UserError where it has not what is asked.
    """
    if source.target == target:
        return source
    if target != "labels" or source.target != "class":
        remedy = "Train it with --task multilabel." if source.target == "labels" else "Choose another task or data set."
        raise UserError(f"{printable(source.spec)} gives {source.target} of each image, not a {target}. {remedy}")
    if source.class_map is not None:
        raise UserError(f"{printable(source.spec)} evaluates models of other classes; it has no labels to train on.")
    parts = [frozenset(part.strip() for part in name.split("+") if part.strip()) for name in source.classes]
    labels = sorted(frozenset[str]().union(*parts)) if any(len(part) > 1 for part in parts) else list(source.classes)
    number = {label: i for i, label in enumerate(labels)}
    of_class = [tuple(sorted(number[label] for label in part)) for part in parts]
    if labels == list(source.classes):
        of_class = [(i,) for i in range(len(labels))]
    splits = {
        name: replace(part, label_sets=part.label_sets or tuple(of_class[int(label)] for label in part.labels))
        for name, part in source.splits.items()
    }
    return _with_rarest(replace(source, classes=tuple(labels), splits=splits, target="labels"))


def label_counts(sets: Iterable[tuple[int, ...]], labels: int) -> list[int]:
    """How many images have each label."""
    found = Counter(label for some in sets for label in some)
    return [found[label] for label in range(labels)]


def label_problems(sets: Sets, labels: tuple[str, ...]) -> list[str]:
    """What makes training images unfit to learn labels from."""
    counts = label_counts(sets, len(labels))
    if any(0 < count < len(sets) for count in counts):
        return []
    return [
        f"No label tells training images apart: all {len(sets)} have the same ({', '.join(labels[:_SHOWN])}). Give "
        "some that other images lack; an image may also have none."
    ]


def _with_rarest(source: Source) -> Source:
    """Labels are split and limited in proportion by the rarest that each image has; those without any by themselves."""
    every = [some for part in source.splits.values() for some in part.label_sets or ()]
    counts = label_counts(every, len(source.classes))

    def rarest(part: Records) -> Records:
        none = len(source.classes)
        keys = [min(some, key=lambda label: (counts[label], label), default=none) for some in part.label_sets or ()]
        return replace(part, labels=np.array(keys, dtype=np.int64))

    return replace(source, splits={name: rarest(part) for name, part in source.splits.items()})


def _names(path: Path) -> list[str]:
    """The lines of classes.txt; none where there is no such file."""
    if not path.is_file():
        return []
    names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{printable(str(path))} names {twice[0]} twice: leave one out.")
    return names


def _read(path: Path, known: list[str]) -> _Rows:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            columns = [name.strip().lower() for name in reader.fieldnames or ()]
            if not {"file", "labels"} <= set(columns):
                raise UserError(f"{printable(str(path))} has the columns {', '.join(columns) or '(none)'}. {LAYOUT}")
            reader.fieldnames = columns
            rows = _Rows()
            for row in reader:
                _add(rows, row, reader.line_num, path.parent, known)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{printable(str(path))} cannot be read as a CSV file in UTF-8: {error}.") from error
    if not rows.splits and not rows.wrong:
        raise UserError(f"{printable(str(path))} names no images. {LAYOUT}")
    if len(rows.splits) > 1 and "train" not in rows.splits:
        raise UserError(f"{printable(str(path))} has no images with split train: name some, or leave the column out.")
    return rows


def _add(rows: _Rows, row: dict[str, str | None], line: int, folder: Path, known: list[str]) -> None:
    name = normalize("NFC", (row["file"] or "").strip())
    labels = {label.strip() for label in (row["labels"] or "").replace("|", ";").split(";")} - {""}
    split = _split_of((row.get("split") or "train").strip().lower())
    where = f"line {line}: {printable(name) or '(no file)'}"
    if None in row:
        rows.wrong.append(f"{where} has more columns than the first line; labels are separated by ; and not by a comma")
    elif split is None:
        rows.wrong.append(f"{where} has the split {printable(str(row['split']))}, which is none of train, val and test")
    elif not name or not os.path.isfile(folder / name):
        rows.wrong.append(f"{where} is not there")
    elif any(name in images for images in rows.splits.values()):
        rows.wrong.append(f"{where} is named a second time")
    elif known and (strange := sorted(labels.difference(known))):
        rows.wrong.append(f"{where} has the label {printable(strange[0])}. {nearest(strange[0], known)} ({CLASSES})")
    else:
        rows.splits.setdefault(split, {})[name] = frozenset(labels)


def _split_of(word: str) -> str | None:
    return next((split for split, words in SPLIT_NAMES.items() if word in words), None)
