"""split.csv: each image with its split, label and group; written with every study, and read to split as it did."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitmods.data.groups import cell, read_columns
from vitmods.data.records import SPLITS, Records, Source, joined, printable
from vitmods.util.errors import UserError
from vitmods.util.files import write_atomically

if TYPE_CHECKING:
    from vitmods.data.dataset import ImageDataset, Split

SPLIT_FILE = "split.csv"


def write_split(path: Path, dataset: "ImageDataset", folds: "Sequence[ImageDataset]" = ()) -> None:
    """Write which images are in which split; several labels of an image are joined by ; and an image in no group has
    one of its own name. With folds, a column more has the number of the one that tests an image, if one does."""
    homes = {name: str(fold) for fold, one in enumerate(folds) for name in one.splits["test"].ids}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("image", "split", "label", "group", *(["fold"] if folds else [])))
    for name, split in dataset.splits.items():
        labels = _labels(split, dataset.classes, dataset.target)
        columns = [split.ids, [name] * len(split), labels, split.groups or split.ids]
        columns += [[homes.get(image, "") for image in split.ids]] if folds else []
        writer.writerows(map(cell, row) for row in zip(*columns, strict=True))
    write_atomically(path, lambda file: file.write(text.getvalue().encode("utf-8", "surrogateescape")))


def read_split(path: str | Path, source: Source) -> dict[str, Records]:
    """The source's images, in the splits that the file names. Images that it does not name are left out, which the
    source's warnings count. UserError where it names others, other labels, or no training images."""
    shown = printable(str(path))
    rows = {row["image"]: row for row in read_columns(path, ("image", "split"))}
    parts: dict[str, list[Records]] = {name: [] for name in SPLITS}
    left_out = 0
    for records in (source.splits[name] for name in SPLITS if name in source.splits):
        found = [rows.pop(cell(name), None) or rows.pop(name, None) for name in records.ids]
        left_out += found.count(None)
        _check_labels(shown, source, records, found)
        for name, into in parts.items():
            chosen = np.flatnonzero([row is not None and row["split"].strip().lower() == name for row in found])
            into += [records.take(chosen)] if len(chosen) else []
        if strange := [row for row in found if row is not None and row["split"].strip().lower() not in SPLITS]:
            split, image = (printable(strange[0][column]) for column in ("split", "image"))
            raise UserError(f'{shown} puts {image} into the split "{split}"; there are {", ".join(SPLITS)}.')
    if rows:
        raise UserError(
            f"{shown} names {len(rows)} images that {printable(source.spec)} does not have, such as "
            f"{printable(next(iter(rows)))}. Give the images that it was written for."
        )
    if not parts["train"]:
        raise UserError(f"{shown} names no training images.")
    if left_out:
        source.warnings.append(f"{left_out} images that {shown} does not name were left out.")
    return {name: some[0] if len(some) == 1 else joined(*some) for name, some in parts.items() if some}


def groups_in(path: str | Path | None) -> str | Path | None:
    """The file again, if it says which images belong together: it is then one to group by."""
    return path if path is not None and all("group" in row for row in read_columns(path, ("image", "split"))) else None


def _labels(split: "Split | Records", classes: Sequence[str], target: str) -> list[str]:
    if target != "class" and split.label_sets is not None:
        return [";".join(classes[label] for label in some) for some in split.label_sets]
    return [classes[label] for label in split.labels]


def _check_labels(shown: str, source: Source, records: Records, rows: Sequence[Mapping[str, str] | None]) -> None:
    """The column of labels is for people; where it is there it must be right."""
    found = _labels(records, source.classes, source.target)
    pairs = zip(records.ids, found, rows, strict=True)
    other = [
        (i, label, row["label"]) for i, label, row in pairs if row and row.get("label", cell(label)) != cell(label)
    ]
    if other:
        image, label, wrong = map(printable, other[0])
        raise UserError(
            f"{shown} gives {len(other)} images other labels than they have: {image} is {label}, not {wrong}."
        )
