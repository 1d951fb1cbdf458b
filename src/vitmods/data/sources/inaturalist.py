"""iNaturalist 2018 and 2019 (Van Horn et al., CVPR 2018): images in folders, splits and labels in JSON tables."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from vitmods.data.records import Records, Source, printable
from vitmods.data.sources import Spec, data_source
from vitmods.data.sources.folder import file_records
from vitmods.util.errors import UserError
from vitmods.util.limits import read_json

_COLUMNS = (
    ("images", "id"),
    ("images", "file_name"),
    ("annotations", "image_id"),
    ("annotations", "category_id"),
    ("categories", "id"),
    ("categories", "name"),
)


def _open(spec: Spec) -> Source:
    """The year that the spec names; the published val, on which papers report, is test."""
    root, year = spec.folder, spec.kind.name.removeprefix("inat")
    tables = {split: root / f"{part}{year}.json" for split, part in (("train", "train"), ("test", "val"))}
    for path in (*tables.values(), root / f"train_val{year}"):
        if not path.exists():
            raise spec.kind.missing(root, f"there is no {path.name}")
    loaded = {split: _load(path) for split, path in tables.items()}
    number = {c["id"]: i for i, c in enumerate(sorted(loaded["train"]["categories"], key=lambda c: c["id"]))}
    names = [str(c["name"]) for c in sorted(loaded["train"]["categories"], key=lambda c: c["id"])]
    count = Counter(names)
    classes = tuple(name if count[name] == 1 else f"{name} ({i})" for i, name in enumerate(names))
    source = Source(spec.kind.title, classes, {})
    for split, table in loaded.items():
        source.splits[split] = _records(root, table, number, tables[split])
    return source


def _load(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = read_json(path, "JSON")
        for part, column in _COLUMNS:
            table[part][0][column]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{printable(str(path))} is not iNaturalist's table of images, annotations and categories "
            f"({type(error).__name__}: {error}). Fetch it again."
        ) from error
    return table


def _records(root: Path, table: dict[str, Any], number: dict[int, int], path: Path) -> Records:
    files = {image["id"]: image["file_name"] for image in table["images"]}
    rows = sorted((files.get(a["image_id"], ""), number.get(a["category_id"], -1)) for a in table["annotations"])
    if rows[0][0] == "" or min(label for _, label in rows) < 0:
        raise UserError(f"{printable(str(path))} labels images or classes that are not listed. Fetch it again.")
    ids = tuple(name for name, _ in rows)
    return file_records(ids, np.array([label for _, label in rows], dtype=np.int64), [root / name for name in ids])


for _year, _classes, _train, _test in ((2018, 8_142, 437_513, 24_426), (2019, 1_010, 265_213, 3_030)):
    data_source(
        f"inat{_year}",
        f"inat{_year}:FOLDER",
        f"iNaturalist {_year}",
        layout=(f"train_val{_year}/*/*/*.jpg, train{_year}.json and val{_year}.json",),
        origin="github.com/visipedia/inat_comp",
        classes=_classes,
        counts={"train": _train, "test": _test},
        used_in="Three Things, Table 6",
        terms="non-commercial research and education",
        notes=("test is the published val, on which the papers report; the published test has no labels",),
    )(_open)
