"""Images with any number of labels: a CSV file beside them, or class folders whose names are joined by +.

    file,labels[,split]
    cats/1.jpg,cat;indoor,train
    2.jpg,,                       an image with none of the labels

Files are named from the folder of the CSV on; labels are separated by ; or |. classes.txt beside it, one label a line,
says in which order they come and that there are no others.
"""

import csv
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from unicodedata import normalize

import numpy as np

from vitmods.data.multilabel import with_rarest
from vitmods.data.records import Source, printable, split_named
from vitmods.data.sources import Spec, data_source
from vitmods.data.sources.folder import CLASSES, class_names, file_records
from vitmods.util.errors import UserError, nearest
from vitmods.util.limits import open_table, table

CSV = "labels.csv"
LAYOUT = 'Its first line is "file,labels" or "file,labels,split", with labels separated by ; or |.'
_SHOWN = 5


@dataclass
class _Rows:
    """Paths below the CSV's folder with their labels, split by split; what is wrong with others, with line numbers."""

    splits: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@data_source(
    "labels",
    "path/to/labels.csv",
    "a CSV file with any number of labels per image, or the folder of a `labels.csv`",
    claims=lambda path: path.suffix == ".csv" or os.path.isfile(path / CSV),
)
def labels_csv(spec: Spec) -> Source:
    """The images that a CSV file names. Raises UserError with all that is wrong with it, counted and with examples."""
    path = spec.folder if spec.folder.suffix == ".csv" else spec.folder / CSV
    listed = class_names(path.parent / CLASSES)
    rows = _read(path, listed)
    if rows.wrong:
        more = f"\n  and {len(rows.wrong) - _SHOWN} more" if len(rows.wrong) > _SHOWN else ""
        lines = "".join(f"\n  {text}" for text in rows.wrong[:_SHOWN])
        raise UserError(f"{spec} cannot be used as it is ({len(rows.wrong)} lines):{lines}{more}")
    labels = listed or sorted({label for images in rows.splits.values() for some in images.values() for label in some})
    if not labels:
        raise UserError(f"{spec} gives no image a label. {LAYOUT}")
    number = {label: i for i, label in enumerate(labels)}
    splits = {}
    for name, images in rows.splits.items():
        ids = tuple(sorted(images))
        sets = tuple(tuple(sorted(number[label] for label in images[one])) for one in ids)
        plain = file_records(ids, np.zeros(len(ids), np.int64), [path.parent / one for one in ids])
        splits[name] = replace(plain, label_sets=sets)
    name = printable(path.resolve().parent.name if path.name == CSV else path.stem)
    return with_rarest(Source(name, tuple(map(printable, labels)), splits, target="labels"))


def _read(path: Path, known: list[str]) -> _Rows:
    try:
        with open_table(path) as file:
            reader = table(file, skipinitialspace=True)
            columns = [name.strip().lower() for name in reader.fieldnames or ()]
            if not {"file", "labels"} <= set(columns):
                raise UserError(f"{printable(str(path))} has the columns {', '.join(columns) or '(none)'}. {LAYOUT}")
            reader.fieldnames = columns
            rows = _Rows()
            for row in reader:
                _add(rows, row, reader.line_num, path.parent, known)
    except UserError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{printable(str(path))} cannot be read as a CSV file in UTF-8: {error}.") from error
    if not rows.splits and not rows.wrong:
        raise UserError(f"{printable(str(path))} names no images. {LAYOUT}")
    if len(rows.splits) > 1 and "train" not in rows.splits:
        raise UserError(f"{printable(str(path))} has no images with split train: name some, or leave the column out.")
    return rows


def _add(rows: _Rows, row: dict[str, str | None], line: int, folder: Path, known: list[str]) -> None:
    name = normalize("NFC", (row["file"] or "").strip())
    labels = {label.strip() for label in (row["labels"] or "").replace("|", ";").split(";")} - {""}
    split = split_named((row.get("split") or "train").strip())
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
