"""Images with any number of labels: a CSV file next to them, or class folders whose names are joined by +.

    file,labels[,split]
    cats/1.jpg,cat;indoor,train
    2.jpg,,                       an image with none of the labels

Files are named from the folder of the CSV on; labels are separated by ; or |. classes.txt next to it, one label a line,
sets their order and refuses others.
"""

import os
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

import numpy as np

from vitmods.data.multilabel import with_rarest
from vitmods.data.records import Source, printable, split_named
from vitmods.data.sources import Spec, data_source
from vitmods.data.sources.folder import CLASSES, class_names, file_records
from vitmods.util.errors import UserError, nearest
from vitmods.util.limits import read_table

CSV = "labels.csv"
LAYOUT = 'Its first line is "file,labels" or "file,labels,split", with labels separated by ; or |.'
_SHOWN = 5


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
    images, wrong = _read(path, listed)
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        lines = "".join(f"\n  {text}" for text in wrong[:_SHOWN])
        raise UserError(f"{spec} cannot be used as it is ({len(wrong)} lines):{lines}{more}")
    labels = listed or sorted(set().union(*(names for _, names in images.values())))
    if not labels:
        raise UserError(f"{spec} does not label any image. {LAYOUT}")
    number = {label: i for i, label in enumerate(labels)}
    splits = {}
    for split in dict.fromkeys(split for split, _ in images.values()):
        ids = tuple(sorted(name for name, (home, _) in images.items() if home == split))
        sets = tuple(tuple(sorted(number[label] for label in images[name][1])) for name in ids)
        records = file_records(ids, np.zeros(len(ids), np.int64), [path.parent / name for name in ids])
        splits[split] = replace(records, label_sets=sets)
    name = printable(path.resolve().parent.name if path.name == CSV else path.stem)
    return with_rarest(Source(name, tuple(map(printable, labels)), splits, target="labels"))


def _read(path: Path, listed: list[str]) -> tuple[dict[str, tuple[str, set[str]]], list[str]]:
    """Split and labels of each image, by its path below the CSV's folder; what is wrong with others, by line."""
    images: dict[str, tuple[str, set[str]]] = {}
    wrong = []
    for line, row in read_table(path, ("file", "labels"), LAYOUT, skipinitialspace=True):
        name = normalize("NFC", row["file"].strip())
        labels = {label.strip() for label in row["labels"].replace("|", ";").split(";")} - {""}
        split = split_named(row.get("split", "").strip() or "train")
        strange = sorted(labels.difference(listed)) if listed else []
        reason = ""
        if split is None:
            reason = f"has the split {printable(row['split'])}, which is not train, val or test"
        elif not name or not os.path.isfile(path.parent / name):
            reason = "is missing"
        elif name in images:
            reason = "is named a second time"
        elif strange:
            reason = f"has the label {printable(strange[0])}. {nearest(strange[0], listed)} ({CLASSES})"
        else:
            images[name] = split, labels
        if reason:
            wrong.append(f"line {line}: {printable(name) or '(no file)'} {reason}")
    splits = {split for split, _ in images.values()}
    if not images and not wrong:
        raise UserError(f"{printable(str(path))} does not name any image. {LAYOUT}")
    if len(splits) > 1 and "train" not in splits:
        raise UserError(f"{printable(str(path))} lacks images with split train: name some, or leave the column out.")
    return images, wrong
