"""Boxes as a table: `boxes.csv`, a line an object, beside the images or a folder `images`.

    image,split,width,height,label,xmin,ymin,xmax,ymax
    1.jpg,train,640,480,cat,10,20,110,220

In pixels, the right and lower ends excluded. The column `split` may be left out. `images.csv` (image, split, width,
height) names images without a box too; `classes.txt`, one a line, sets the order of the classes and refuses others.
"""

import csv
from pathlib import Path

from vitmods.data.records import Broken, Source, printable, split_named
from vitmods.data.sources import Spec, data_source
from vitmods.data.sources.imagenet import CLASSES, class_names
from vitmods.data.sources.objects import OPTIONS, Found, source_of_boxes
from vitmods.util.errors import UserError
from vitmods.util.limits import open_table, table

BOXES, IMAGES = "boxes.csv", "images.csv"
CORNERS = ("xmin", "ymin", "xmax", "ymax")
_SAME = {"filename": "image", "file": "image", "class": "label"}
LAYOUT = f"The first line of {BOXES} is image,width,height,label,{','.join(CORNERS)}, perhaps with split."


@data_source(
    "boxes",
    "boxes:FOLDER",
    "boxes in a CSV file beside the images",
    options=OPTIONS,
    claims=lambda path: (path / BOXES).is_file(),
)
def boxes(spec: Spec) -> Source:
    """Images with boxes, as `boxes.csv` says."""
    root = spec.folder
    rows = _rows(root / BOXES, {"image", "label", "width", "height", *CORNERS})
    listed = _rows(root / IMAGES, {"image"}) if (root / IMAGES).is_file() else []
    classes = class_names(root / CLASSES) or sorted({row["label"] for _, row in rows if row["label"]})
    images: dict[str, tuple[str, Found]] = {}
    broken: list[Broken] = []
    folder = root / "images" if (root / "images").is_dir() else root
    for line, row in rows:
        name = row["image"]
        try:
            split = _split(row)
            size = int(row["height"]), int(row["width"])
            corners = [float(row[corner]) for corner in CORNERS]
        except ValueError as error:
            image = images.setdefault(name, (_said(row) or "train", Found(folder / name, None)))[1]
            image.wrong = image.wrong or f"line {line} of {BOXES}: {error}"
            continue
        before, image = images.setdefault(name, (split, Found(folder / name, size)))
        if before != split or image.size != size:
            image.wrong = image.wrong or f"line {line} gives it another split or size than a line before"
        elif row["label"] not in classes:
            image.wrong = image.wrong or f"line {line} has the label {row['label']!r}, which is no class"
        else:
            image.add(corners, row["label"])
    for line, row in listed:
        if row["image"] in images:
            continue
        try:
            known = (int(row["height"]), int(row["width"])) if row.get("width") else None
            images[row["image"]] = _split(row), Found(folder / row["image"], known)
        except ValueError as error:
            broken.append(Broken("train", f"{IMAGES}, line {line}", str(error)))
    splits: dict[str, list[Found]] = {}
    for split, image in images.values():
        splits.setdefault(split, []).append(image)
    if splits and "train" not in splits:
        raise UserError(f"{printable(str(root / BOXES))} has no images with split train: name some, or leave it out.")
    return source_of_boxes(spec, printable(root.resolve().name), classes, splits, broken)


def _rows(path: Path, needed: set[str]) -> list[tuple[int, dict[str, str]]]:
    """Number and content of each line."""
    try:
        with open_table(path) as file:
            reader = table(file, skipinitialspace=True, restval="")
            names = [name.strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = [_SAME.get(name, name) for name in names]
            if missing := sorted(needed - set(reader.fieldnames)):
                raise UserError(f"{printable(str(path))} has no column {missing[0]}. {LAYOUT}")
            return [(reader.line_num, {k: (v or "").strip() for k, v in row.items() if k}) for row in reader]
    except UserError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{printable(str(path))} cannot be read as a CSV file in UTF-8: {error}. {LAYOUT}") from error


def _split(row: dict[str, str]) -> str:
    if (found := _said(row)) is None:
        raise ValueError(f"the split {row['split']!r} is none of train, val and test")
    return found


def _said(row: dict[str, str]) -> str | None:
    return split_named(row.get("split", "train"))
