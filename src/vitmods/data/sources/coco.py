"""COCO's format (Lin et al., ECCV 2014, arXiv:1405.0312): a JSON file a split with images, annotations and categories.

    FOLDER/annotations/instances_train2017.json and FOLDER/train2017, as COCO itself comes;
    FOLDER/train.json, val.json, test.json, with the images in FOLDER/train ..., FOLDER/images or FOLDER;
    FOLDER/train/_annotations.coco.json beside the images, as some programs export it.

Boxes are left, top, width, height in pixels. Outlines are polygons or run lengths. `iscrowd` marks regions of many
objects, which are neither trained on nor counted as wrong.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitmods.data.objects import drawn
from vitmods.data.records import SPLIT_NAMES, SPLITS, Broken, Source, printable
from vitmods.data.sources import Spec, data_source
from vitmods.data.sources.objects import OPTIONS, Found, source_of_boxes
from vitmods.util.errors import UserError
from vitmods.util.limits import MOST_PIXELS, read_json

LAYOUT = "Expected annotations/instances_train2017.json with train2017/, or train.json with train/ or images/."
_USUAL = ("train.json", "annotations/*train*.json", "*/_annotations.coco.json")
_LOOKED_FOR = 100  # images, to find the folder that they are in
_LEAST_OVERLAP = (
    0.1  # of the extent of an outline and its box: an outline of another object, or in other units, has less
)


@dataclass(frozen=True)
class _File:
    path: Path
    images: list[dict[str, Any]]
    annotations: list[dict[str, Any]]
    classes: dict[int, str]


@data_source(
    "coco",
    "coco:FOLDER",
    "boxes and masks in COCO's format",
    options=(*OPTIONS, *SPLITS),
    claims=lambda path: (path / "annotations" / "instances_train2017.json").is_file(),
    looks_like=lambda path: any(next(path.glob(one), None) for one in _USUAL),
)
def coco(spec: Spec) -> Source:
    """Images with boxes, and masks where there are outlines. Options train, val and test name other JSON files."""
    root = spec.folder
    files = {split: _read(path) for split, path in _files(spec, root).items()}
    if "train" not in files:
        raise UserError(f"{spec} has no annotations of train: it has {', '.join(files) or 'none'}. {LAYOUT}")
    classes = files["train"].classes
    for split, file in files.items():
        if file.classes != classes:
            raise UserError(
                f"{printable(str(file.path))} has other categories than {printable(str(files['train'].path))}: "
                f"{split} needs the same ids and names."
            )
    broken: list[Broken] = []
    splits = {split: _images(split, root, file, broken) for split, file in files.items()}
    ordered = [name for _, name in sorted(classes.items())]
    return source_of_boxes(spec, printable(root.resolve().name), ordered, splits, broken)


def _files(spec: Spec, root: Path) -> dict[str, Path]:
    if not root.is_dir():
        raise UserError(f"There is no folder {printable(str(root))}. {LAYOUT}")
    named = {split: root / spec.options[split] for split in SPLITS if split in spec.options}
    if named:
        if lost := next((path for path in named.values() if not path.is_file()), None):
            raise UserError(f'"{spec}": there is no file {printable(str(lost))}.')
        return named
    found: dict[str, Path] = {}
    for split in SPLITS:
        places = [
            *sorted((root / "annotations").glob(f"instances_{split}[0-9]*.json")),
            *(root / f"{word}.json" for word in SPLIT_NAMES[split]),
            *(root / "annotations" / f"{word}.json" for word in SPLIT_NAMES[split]),
            *(root / word / "_annotations.coco.json" for word in SPLIT_NAMES[split]),
        ]
        present = [place for place in places if place.is_file()]
        if len(present) > 1:
            both = " and ".join(printable(str(place.relative_to(root))) for place in present[:2])
            raise UserError(f'{spec} has {both} for {split}: say which, as in "{spec}?{split}=...".')
        found |= {split: present[0]} if present else {}
    if not found:
        raise UserError(f"There are no annotations in {printable(str(root))}. {LAYOUT}")
    return found


def _read(path: Path) -> _File:
    shown = printable(str(path))
    try:
        content = read_json(path, "JSON")
    except (OSError, ValueError) as error:
        raise UserError(f"{shown} is not readable JSON; it may be cut off: {error}.") from error
    content = content if isinstance(content, dict) else {}
    parts: list[Any] = [content.get(key) for key in ("images", "annotations", "categories")]
    if not all(isinstance(part, list) and all(isinstance(one, dict) for one in part) for part in parts):
        raise UserError(f"{shown} is not in COCO's format: it needs the lists images, annotations and categories.")
    images, annotations, categories = parts
    try:
        classes = {int(one["id"]): str(one["name"]) for one in categories}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{shown}: each category needs an id, a number, and a name ({error!r}).") from error
    if len(set(classes.values())) < len(categories):
        raise UserError(f"{shown}: two categories have one id or one name. Give each its own.")
    return _File(path, images, annotations, classes)


def _images(split: str, root: Path, file: _File, broken: list[Broken]) -> list[Found]:
    shown = file.path.name
    folder = _folder(split, root, file)
    found: dict[Any, Found] = {}
    for i, image in enumerate(file.images):
        try:
            size = int(image["height"]), int(image["width"])
            path, key = folder / str(image["file_name"]), image["id"]
            hash(key)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            broken.append(Broken(split, shown, f"image number {i} lacks id, file_name, width or height ({error!r})"))
            continue
        if key in found:
            broken.append(Broken(split, shown, f"two images have the id {key}"))
            continue
        found[key] = Found(path, size)
    for annotation in file.annotations:
        image_id = annotation.get("image_id")
        if isinstance(image_id, list | dict) or image_id not in found:
            broken.append(Broken(split, shown, f"annotation {annotation.get('id')} is of image {image_id}, not listed"))
            continue
        _add(found[image_id], annotation, file.classes)
    return list(found.values())


def _folder(split: str, root: Path, file: _File) -> Path:
    """The folder that has the most of the first images; FOLDER where none has any."""
    words = SPLIT_NAMES[split]
    year = file.path.stem.rpartition("_")[2]  # instances_train2017
    places = [root / year, *(root / word for word in words), *(root / "images" / word for word in words)]
    places += [root / "images", file.path.parent, root]
    names = [str(image.get("file_name", "")) for image in file.images[:_LOOKED_FOR]]
    held = [sum(os.path.isfile(place / name) for name in names) for place in places]
    return places[held.index(max(held))] if any(held) else root


def _add(image: Found, annotation: Mapping[str, Any], classes: Mapping[int, str]) -> None:
    category, crowd, area = (annotation.get(key) for key in ("category_id", "iscrowd", "area"))
    try:
        if not isinstance(category, int) or category not in classes:
            raise ValueError(f"has the unknown category {category}")
        if crowd not in (None, 0, 1):
            raise ValueError(f"has iscrowd {crowd!r}, which is 0 or 1")
        if area is not None and not (isinstance(area, int | float) and 0 <= area <= math.prod(image.size or ())):
            raise ValueError(f"has the area {area!r}, in an image of {image.extent()}")
        try:
            left, top, width, height = map(float, annotation["bbox"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError("has no bbox of four numbers") from None
        box, segment = (left, top, left + width, top + height), annotation.get("segmentation") or None
        image.add(box, classes[category], crowd=bool(crowd), area=area, segment=segment)
        if segment is not None and not image.wrong:
            _check_outline(segment, box, image)
    except ValueError as error:
        image.wrong = image.wrong or f"annotation {annotation.get('id')} {error}"


def _check_outline(segment: Any, box: tuple[float, float, float, float], image: Found) -> None:
    """Raise ValueError where an outline is not one, or lies elsewhere than its box."""
    if isinstance(segment, dict):
        extent = _extent_of_runs(segment, image.size)
    elif isinstance(segment, list) and all(_is_polygon(one, image.size) for one in segment):
        xs, ys = ([value for one in segment for value in one[axis::2]] for axis in (0, 1))
        extent = (min(xs), min(ys), max(xs), max(ys))
    else:
        extent = None
    if extent is None:
        raise ValueError(f"has an invalid outline, or one for another image size than {image.extent()}")
    if _overlap(extent, box) < _LEAST_OVERLAP:
        shown, of_box = (", ".join(f"{value:g}" for value in one) for one in (extent, box))
        raise ValueError(f"has an outline from {shown} (left, top, right, bottom), and its box is {of_box}")


def _overlap(first: Sequence[float], second: Sequence[float]) -> float:
    """Intersection over union of two boxes, each made larger by a pixel on every side: thin ones may differ by
    rounding."""
    wide, high = (min(first[i + 2], second[i + 2]) - max(first[i], second[i]) + 2 for i in (0, 1))
    areas = sum((box[2] - box[0] + 2) * (box[3] - box[1] + 2) for box in (first, second))
    common = max(wide, 0) * max(high, 0)
    return common / (areas - common)


def _is_polygon(values: Any, size: tuple[int, int] | None) -> bool:
    """Whether they are corners in the image or near it: one that is far away takes as much memory as it is far."""
    if not isinstance(values, list) or len(values) < 6 or len(values) % 2:
        return False
    far = 2 * max(size or (1, 1))
    return all(isinstance(value, int | float) and -far <= value <= far for value in values)


def _extent_of_runs(runs: dict[str, Any], size: tuple[int, int] | None) -> tuple[float, float, float, float] | None:
    """Left, top, right and bottom of run lengths; None where they do not fill an image of this height and width, or
    show nothing."""
    counts = runs.get("counts")
    if size is None or runs.get("size") != list(size) or size[0] * size[1] > MOST_PIXELS:
        return None
    if isinstance(counts, list):
        if not all(isinstance(one, int) and one >= 0 for one in counts) or sum(counts) != size[0] * size[1]:
            return None
        mask = np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(size[::-1]).T
    else:
        try:
            mask = drawn(runs, size) if isinstance(counts, str) else np.zeros(size, np.bool_)
        except (ValueError, RuntimeError):  # the packed form is of other lengths, or cut off
            return None
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    return (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) if len(rows) else None
