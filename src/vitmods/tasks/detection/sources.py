"""What sources of boxes have in common: from what a file says of each image to records, with all that is wrong.

COCO's format (Lin et al., ECCV 2014, arXiv:1405.0312): a JSON file a split with images, annotations and categories.

    FOLDER/annotations/instances_train2017.json and FOLDER/train2017, as COCO itself comes;
    FOLDER/train.json, val.json, test.json, with the images in FOLDER/train ..., FOLDER/images or FOLDER;
    FOLDER/train/_annotations.coco.json beside the images, as some programs export it.

Boxes are left, top, width, height in pixels. Outlines are polygons or run lengths. `iscrowd` marks regions of many
objects, which are neither trained on nor counted as wrong.

YOLO's format: a text file an image, a line an object: class, center x, center y, width, height, as fractions of the
sides; or class and the corners of a polygon.

    FOLDER/data.yaml                                   names: [cat, dog], train: images/train, val: images/val
    FOLDER/images/train/1.jpg, FOLDER/labels/train/1.txt

Without data.yaml the classes are the lines of classes.txt. An image without a text file has no objects.

Pascal VOC's format (Everingham et al., IJCV 2010): an XML file an image.

    FOLDER/Annotations/0001.xml, FOLDER/JPEGImages/0001.jpg, FOLDER/ImageSets/Main/train.txt, val.txt, test.txt

Corners are pixels counted from 1, both inside of the box. Objects that are marked difficult are taken as COCO's crowds:
they are not trained on, and what is found in their boxes is neither right nor wrong.

Boxes as a table: `boxes.csv`, a line an object, beside the images or a folder `images`.

    image,split,width,height,label,xmin,ymin,xmax,ymax
    1.jpg,train,640,480,cat,10,20,110,220

In pixels, the right and lower ends excluded. The column `split` may be left out. `images.csv` (image, split, width,
height) names images without a box too; `classes.txt`, one a line, sets the order of the classes and refuses others.
"""

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unicodedata import normalize
from xml.etree import ElementTree

import numpy as np

from vitmods.data.dataset import AnySplit
from vitmods.data.geometry import LONGEST
from vitmods.data.multilabel import TARGETS, Target, with_rarest
from vitmods.data.read import Unreadable, size_in_header
from vitmods.data.records import SPLIT_NAMES, SPLITS, Broken, Raw, Records, Source, printable, split_named
from vitmods.data.sources import Spec, data_source
from vitmods.data.sources.folder import CLASSES, class_names, file_records, images_below, loose_images
from vitmods.tasks.detection.objects import Objects, Segment, drawn, outline_area, with_instances
from vitmods.util.errors import UserError, nearest
from vitmods.util.limits import MOST_PIXELS, lines_of, open_table, read_bytes, read_json, read_text, table

OPTIONS = ("classes", "agnostic")
OVERHANG = 1.0  # pixels that a box may stand out by: rounding, or pixels counted from 1
THINNEST = 1e-3  # pixels that a box has at least: float32 loses less where it is scaled and mirrored
FRACTION_OVERHANG = 0.01  # the same of a box in fractions of the sides


@dataclass
class Found:
    """An image as a source lists it: its file, its boxes left, top, right, bottom and what belongs to each.

    size: height and width; None: not said, and boxes are fractions of the sides. wrong: why it cannot be used.
    """

    path: Path
    size: tuple[int, int] | None
    boxes: list[tuple[float, float, float, float]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    crowd: list[bool] = field(default_factory=list)
    area: list[float | None] = field(default_factory=list)
    segments: list[Segment | None] = field(default_factory=list)
    wrong: str = ""

    def add(
        self,
        box: Sequence[float],
        label: str,
        *,
        crowd: bool = False,
        area: float | None = None,
        segment: Segment | None = None,
    ) -> None:
        """One more object. A box that cannot be one makes the image unfit."""
        left, top, right, bottom = map(float, box)
        height, width = self.size or (1, 1)
        if not 0 < height * width <= MOST_PIXELS or min(height, width) < 1:
            self.wrong = self.wrong or f"is said to have {self.extent()}"
        most = OVERHANG if self.size else FRACTION_OVERHANG
        cut = (max(left, 0.0), max(top, 0.0), min(right, width), min(bottom, height))
        if not np.isfinite([left, top, right, bottom]).all() or right <= left or bottom <= top:
            self.wrong = self.wrong or f"a box of {label} is empty: {_shown_box(box)}"
        elif left < -most or top < -most or right > width + most or bottom > height + most:
            self.wrong = self.wrong or f"a box of {label} is outside of {self.extent()}: {_shown_box(box)}"
        elif min(cut[2] - cut[0], cut[3] - cut[1]) < (THINNEST if self.size else THINNEST / 1000):
            self.wrong = self.wrong or f"a box of {label} is empty in {self.extent()}: {_shown_box(box)}"
        self.boxes.append(cut)
        self.labels.append(label)
        self.crowd.append(crowd)
        self.area.append(area)
        self.segments.append(segment)

    def extent(self) -> str:
        """Width and height in words."""
        return "its image" if self.size is None else f"{self.size[1]} x {self.size[0]} pixels"


def _shown_box(box: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in box)


def source_of_boxes(
    spec: Spec, name: str, classes: Sequence[str], splits: Mapping[str, Sequence[Found]], broken: Iterable[Broken] = ()
) -> Source:
    """The source of what was found, with the classes that the spec's options `classes` and `agnostic` leave.

    Images that cannot be used are in `broken`; those that only their pixels show (other sizes than the source says,
    files that are missing) are found when they are read.

    Raises:
        UserError: the options name no class that there is, or there are no images.
    """
    kept = _chosen(spec, classes)
    agnostic = spec.options.get("agnostic", "0")
    if agnostic not in ("0", "1"):
        raise UserError(f'"{spec}": agnostic is 0 or 1, not {agnostic}.')
    number = {title: 0 if agnostic == "1" else i for i, title in enumerate(kept)}
    root = spec.folder if spec.folder.is_dir() else spec.folder.parent
    lacking, records, repeated = list(broken), {}, list[str]()
    for split, images in ((name, splits[name]) for name in SPLITS if name in splits):
        seen: set[Path] = set()
        for image in images:
            if image.path in seen:
                image.wrong = image.wrong or "is listed a second time: put all its objects into one entry"
            seen.add(image.path)
        fit = [image for image in images if not image.wrong]
        ends = [max(box[2:]) for image in fit if image.size is not None for box in image.boxes]
        if ends and max(ends) <= 1:
            raise UserError(
                f"{spec}: all boxes of {split} lie in the first pixel, so they look like fractions of the images' "
                "sides. Multiply them by width and height."
            )
        repeated += [
            _id(image.path, root) for image in fit if len(set(zip(image.boxes, image.labels))) < len(image.boxes)
        ]
        lacking += [Broken(split, _id(image.path, root), image.wrong) for image in images if image.wrong]
        records[split] = _records(root, fit, number)
    if not any(map(len, records.values())) and not lacking:
        raise UserError(f"{spec} lists no images.")
    named = ("object",) if agnostic == "1" else kept
    warnings = [
        f"{len(repeated)} {'image has' if len(repeated) == 1 else 'images have'} the same box of the same class twice "
        f"({', '.join(map(printable, repeated[:3]))}): each counts as an object of its own. Remove the copies."
    ]
    source = Source(name, tuple(map(printable, named)), records, warnings * bool(repeated), lacking, target="boxes")
    return with_rarest(source)


def check_objects(splits: Mapping[str, AnySplit]) -> list[str]:
    """Name the splits without an object."""
    crowds = {name: [objects.crowd.all() for objects in split.annotations or ()] for name, split in splits.items()}
    bare = [name for name, no_objects in crowds.items() if no_objects and all(no_objects)]
    return [f"No image of {name} has an object, crowds aside: annotate some." for name in bare]


REMEDY = "Train it with --task detection, or multilabel."
TARGETS.add("boxes", Target("boxes", REMEDY, check=check_objects))
TARGETS.add("instances", Target("a mask of each object", conversions={"boxes": with_instances}, check=check_objects))


def _chosen(spec: Spec, classes: Sequence[str]) -> tuple[str, ...]:
    asked = [name.strip() for name in spec.options.get("classes", "").split(",") if name.strip()]
    if "classes" in spec.options and not asked:
        raise UserError(f'"{spec}": classes is empty. Write classes=person, or several with commas.')
    for name in asked:
        if name not in classes:
            raise UserError(f'"{spec}": there is no class {name!r}. {nearest(name, classes)}')
    return tuple(name for name in classes if not asked or name in asked)


def _id(path: Path, root: Path) -> str:
    try:
        return normalize("NFC", path.relative_to(root).as_posix())
    except ValueError:  # the source names a file elsewhere
        return normalize("NFC", path.as_posix())


def _records(root: Path, images: Sequence[Found], number: Mapping[str, int]) -> Records:
    images = sorted(images, key=lambda image: _id(image.path, root))
    annotations = tuple(_objects(image, number) for image in images)
    ids = tuple(_id(image.path, root) for image in images)
    files = file_records(ids, np.zeros(len(ids), np.int64), [image.path for image in images])

    def fetch(key: int) -> Raw:
        raw = files.fetch(key)
        assert isinstance(raw, bytes)
        _check_size(raw, annotations[key].size)
        return raw

    return replace(
        files,
        fetch=fetch,
        stamps=tuple(f"{stamp}:{objects.size}" for stamp, objects in zip(files.stamps, annotations, strict=True)),
        label_sets=tuple(tuple(sorted(set(objects.labels.tolist()))) for objects in annotations),
        annotations=annotations,
    )


def _objects(image: Found, number: Mapping[str, int]) -> Objects:
    kept = [i for i, label in enumerate(image.labels) if label in number]
    boxes = np.array([image.boxes[i] for i in kept], dtype=np.float32).reshape(-1, 4)
    sides = boxes[:, 2:] - boxes[:, :2]
    area = sides.prod(axis=1)
    for row, i in enumerate(kept):
        if (listed := image.area[i]) is not None:
            area[row] = listed
        elif segment := image.segments[i]:
            area[row] = outline_area(segment, image.size)
    segments = tuple(outline for i in kept if (outline := image.segments[i]))
    return Objects(
        boxes,
        np.array([number[image.labels[i]] for i in kept], dtype=np.int64),
        np.array([image.crowd[i] for i in kept], dtype=np.bool_),
        area,
        image.size,
        segments if len(segments) == len(kept) else None,
    )


def _check_size(raw: bytes, annotated: tuple[int, int] | None) -> None:
    """Raise Unreadable where boxes would not lie on what they are of. Reads the head of the file alone."""
    try:
        size = size_in_header(raw)
    except Unreadable:  # decoding says what is wrong with it
        return
    if max(size) > LONGEST * min(size):
        raise Unreadable(f"longer than {LONGEST}:1 ({size[1]} x {size[0]} pixels): boxes need the whole image")
    if annotated is None or annotated == size:
        return
    reason = f"is {size[1]} x {size[0]} pixels, and its boxes are for {annotated[1]} x {annotated[0]}"
    raise Unreadable(
        f"{reason}, as it is without the turn that its EXIF asks for" if annotated == size[::-1] else reason
    )


COCO_LAYOUT = "Expected annotations/instances_train2017.json with train2017/, or train.json with train/ or images/."
_USUAL = ("train.json", "annotations/*train*.json", "*/_annotations.coco.json")
_LOOKED_FOR = 100  # images, to find the folder that they are in
_LEAST_OVERLAP = (
    0.1  # of the extent of an outline and its box: an outline of another object, or in other units, has less
)


@dataclass(frozen=True)
class _CocoFile:
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
    files = {split: _read_coco(path) for split, path in _coco_files(spec, root).items()}
    if "train" not in files:
        raise UserError(f"{spec} has no annotations of train: it has {', '.join(files) or 'none'}. {COCO_LAYOUT}")
    classes = files["train"].classes
    for split, file in files.items():
        if file.classes != classes:
            raise UserError(
                f"{printable(str(file.path))} has other categories than {printable(str(files['train'].path))}: "
                f"{split} needs the same ids and names."
            )
    broken: list[Broken] = []
    splits = {split: _coco_images(split, root, file, broken) for split, file in files.items()}
    ordered = [name for _, name in sorted(classes.items())]
    return source_of_boxes(spec, printable(root.resolve().name), ordered, splits, broken)


def _coco_files(spec: Spec, root: Path) -> dict[str, Path]:
    if not root.is_dir():
        raise UserError(f"There is no folder {printable(str(root))}. {COCO_LAYOUT}")
    named = {split: root / spec.options[split] for split in SPLITS if split in spec.options}
    if named:
        if lost := next((path for path in named.values() if not path.is_file()), None):
            raise UserError(f'"{spec}": there is no file {printable(str(lost))}.')
        return named
    files: dict[str, Path] = {}
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
        files |= {split: present[0]} if present else {}
    if not files:
        raise UserError(f"There are no annotations in {printable(str(root))}. {COCO_LAYOUT}")
    return files


def _read_coco(path: Path) -> _CocoFile:
    name = printable(str(path))
    try:
        content = read_json(path, "JSON")
    except (OSError, ValueError) as error:
        raise UserError(f"{name} is not readable JSON; it may be cut off: {error}.") from error
    content = content if isinstance(content, dict) else {}
    parts: list[Any] = [content.get(key) for key in ("images", "annotations", "categories")]
    if not all(isinstance(part, list) and all(isinstance(row, dict) for row in part) for part in parts):
        raise UserError(f"{name} is not in COCO's format: it needs the lists images, annotations and categories.")
    images, annotations, categories = parts
    try:
        classes = {int(row["id"]): str(row["name"]) for row in categories}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{name}: each category needs an id, a number, and a name ({error!r}).") from error
    if len(set(classes.values())) < len(categories):
        raise UserError(f"{name}: two categories have one id or one name. Give each its own.")
    return _CocoFile(path, images, annotations, classes)


def _coco_images(split: str, root: Path, file: _CocoFile, broken: list[Broken]) -> list[Found]:
    name = file.path.name
    folder = _coco_folder(split, root, file)
    images: dict[Any, Found] = {}
    for i, image in enumerate(file.images):
        try:
            size = int(image["height"]), int(image["width"])
            path, key = folder / str(image["file_name"]), image["id"]
            hash(key)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            broken.append(Broken(split, name, f"image number {i} lacks id, file_name, width or height ({error!r})"))
            continue
        if key in images:
            broken.append(Broken(split, name, f"two images have the id {key}"))
            continue
        images[key] = Found(path, size)
    for annotation in file.annotations:
        image_id = annotation.get("image_id")
        if isinstance(image_id, list | dict) or image_id not in images:
            broken.append(Broken(split, name, f"annotation {annotation.get('id')} is of image {image_id}, not listed"))
            continue
        _add_coco(images[image_id], annotation, file.classes)
    return list(images.values())


def _coco_folder(split: str, root: Path, file: _CocoFile) -> Path:
    """The folder that has the most of the first images; FOLDER where none has any."""
    words = SPLIT_NAMES[split]
    year = file.path.stem.rpartition("_")[2]  # instances_train2017
    places = [root / year, *(root / word for word in words), *(root / "images" / word for word in words)]
    places += [root / "images", file.path.parent, root]
    names = [str(image.get("file_name", "")) for image in file.images[:_LOOKED_FOR]]
    held = [sum(os.path.isfile(place / name) for name in names) for place in places]
    return places[held.index(max(held))] if any(held) else root


def _add_coco(image: Found, annotation: Mapping[str, Any], classes: Mapping[int, str]) -> None:
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
    elif isinstance(segment, list) and all(_is_polygon(part, image.size) for part in segment):
        xs, ys = ([value for part in segment for value in part[axis::2]] for axis in (0, 1))
        extent = (min(xs), min(ys), max(xs), max(ys))
    else:
        extent = None
    if extent is None:
        raise ValueError(f"has an invalid outline, or one for another image size than {image.extent()}")
    if _overlap(extent, box) < _LEAST_OVERLAP:
        of_outline, of_box = (", ".join(f"{value:g}" for value in part) for part in (extent, box))
        raise ValueError(f"has an outline from {of_outline} (left, top, right, bottom), and its box is {of_box}")


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
        if not all(isinstance(count, int) and count >= 0 for count in counts) or sum(counts) != size[0] * size[1]:
            return None
        mask = np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(size[::-1]).T
    else:
        try:
            mask = drawn(runs, size) if isinstance(counts, str) else np.zeros(size, np.bool_)
        except (ValueError, RuntimeError):  # the packed form is of other lengths, or cut off
            return None
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    return (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) if len(rows) else None


YAML = "data.yaml"
YOLO_LAYOUT = f"Expected {YAML}, or {CLASSES} with images/train and labels/train (or images and labels, not split)."


@data_source(
    "yolo",
    "yolo:FOLDER",
    "boxes or polygons in YOLO's format",
    options=OPTIONS,
    claims=lambda path: (path / YAML).is_file(),
)
def yolo(spec: Spec) -> Source:
    """Images with boxes; with masks where all objects are polygons."""
    root = spec.folder
    settings = _yaml(root / YAML) if (root / YAML).is_file() else {}
    classes = _yolo_classes(root, settings)
    places = _yaml_splits(root, settings) or _yolo_folders(root)
    if "train" not in places:
        raise UserError(f"{spec} has no images of train. {YOLO_LAYOUT}")
    broken: list[Broken] = []
    splits = {split: _yolo_images(split, paths, classes, broken) for split, paths in places.items()}
    return source_of_boxes(spec, printable(root.resolve().name), classes, splits, broken)


def _yaml(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    class Plain(yaml.SafeLoader):  # type: ignore[misc]
        """Without aliases, by which ten lines can stand for a billion names."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("an alias (*name) is not read: write out what it stands for")
            return super().compose_node(parent, index)

    try:
        content = yaml.load(read_text(path, "YAML"), Plain)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{printable(str(path))} cannot be read as YAML: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{printable(str(path))} has no names and folders. {YOLO_LAYOUT}")
    return content


def _yolo_classes(root: Path, settings: dict[str, Any]) -> list[str]:
    names = settings.get("names")
    if isinstance(names, dict):
        if set(names) != set(range(len(names))):
            raise UserError(f"{printable(str(root / YAML))}: names are numbered from 0 on, without gaps.")
        names = [names[i] for i in range(len(names))]
    if names is None and (root / CLASSES).is_file():
        names = class_names(root / CLASSES)
    words = isinstance(names, list) and all(isinstance(name, str | int | float) for name in names)
    if not words or not names or len(set(map(str, names))) < len(names):
        raise UserError(f"{printable(str(root))} does not name its classes, each once. {YOLO_LAYOUT}")
    if settings.get("nc", len(names)) != len(names):
        raise UserError(f"{printable(str(root / YAML))}: nc is {settings['nc']}, and there are {len(names)} names.")
    return [str(name) for name in names]


def _yaml_splits(root: Path, settings: dict[str, Any]) -> dict[str, list[Path]]:
    images: dict[str, list[Path]] = {}
    for split in SPLITS:
        entry = next((settings[word] for word in SPLIT_NAMES[split] if settings.get(word)), None)
        if entry is not None:
            parts = entry if isinstance(entry, list) else [entry]
            base = settings.get("path") or ""
            if not all(isinstance(part, str) for part in (base, *parts)):
                raise UserError(f"{printable(str(root / YAML))}: path and {split} are folders, in words.")
            images[split] = [image for part in parts for image in _yaml_images(root, base, part)]
    return images


def _yaml_images(root: Path, base: str, part: str) -> list[Path]:
    """The images of a folder, or those that a text file names."""
    tries = [root / base / part, root / part, root / part.removeprefix("../")]
    try:
        place = next((path for path in tries if path.exists()), None)
    except (OSError, ValueError):  # a name that no file can have
        place = None
    if place is None:
        raise UserError(f"{printable(str(root / YAML))} names {printable(part)}, which is not there.")
    if place.is_dir():
        return images_below(place)
    return [place.parent / line for line in lines_of(place)]


def _yolo_folders(root: Path) -> dict[str, list[Path]]:
    images = root / "images"
    if not images.is_dir():
        raise UserError(f"There are no images in {printable(str(root))}. {YOLO_LAYOUT}")
    splits: dict[str, list[Path]] = {}
    for split in SPLITS:
        place = next((images / word for word in SPLIT_NAMES[split] if (images / word).is_dir()), None)
        splits |= {split: images_below(place)} if place else {}
    return splits or {"train": images_below(images)}


def _yolo_images(split: str, paths: list[Path], classes: list[str], broken: list[Broken]) -> list[Found]:
    images: list[Found] = []
    folders: dict[Path, set[str]] = {}
    for path in paths:
        text = _labels_of(path)
        folders.setdefault(text.parent, set()).add(text.name)
        images.append(_yolo_image(path, text, classes))
    for folder, stems in folders.items():
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        alone = [name for name in names if name.endswith(".txt") and name not in stems and name != CLASSES]
        broken += [Broken(split, f"{folder.name}/{name}", "has no image") for name in alone]
    return images


def _labels_of(image: Path) -> Path:
    """The last folder called images becomes labels; where there is none the text lies beside the image."""
    parts = list(image.parts)
    places = [i for i, part in enumerate(parts[:-1]) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    return Path(*parts).with_suffix(".txt")


def _yolo_image(path: Path, text: Path, classes: list[str]) -> Found:
    image = Found(path, None)
    if not os.path.isfile(text):
        return image
    try:
        lines = read_text(text).splitlines()
    except (OSError, ValueError) as error:
        image.wrong = f"{text.name} cannot be read: {error}"
        return image
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            word, *values = line.split()
            numbers, label = list(map(float, values)), int(word)
            if len(numbers) != 4 and (len(numbers) < 6 or len(numbers) % 2):
                raise ValueError("neither four numbers nor a polygon")
        except ValueError as error:
            image.wrong = f"line {number} of {text.name} is not an object: {error}"
            break
        if not 0 <= label < len(classes):
            image.wrong = f"line {number} of {text.name} is of class {label}, and there are {len(classes)}"
            break
        if len(numbers) == 4:
            x, y, width, height = numbers
            image.add((x - width / 2, y - height / 2, x + width / 2, y + height / 2), classes[label])
        else:
            xs, ys = numbers[0::2], numbers[1::2]
            image.add((min(xs), min(ys), max(xs), max(ys)), classes[label], segment=[numbers])
    return image


VOC_LAYOUT = "Expected Annotations/NAME.xml, JPEGImages/NAME.jpg and, where it is split, ImageSets/Main/train.txt."


@data_source(
    "voc",
    "voc:FOLDER",
    "boxes in Pascal VOC's format; `?images=` and `?annotations=` name other folders than JPEGImages and Annotations",
    options=(*OPTIONS, "images", "annotations"),
    claims=lambda path: (path / "Annotations").is_dir() and (path / "JPEGImages").is_dir(),
)
def voc(spec: Spec) -> Source:
    """Images with boxes. Classes are the names that occur, sorted."""
    root = spec.folder
    images, annotated = (
        root / spec.options.get(option, usual)
        for option, usual in (("images", "JPEGImages"), ("annotations", "Annotations"))
    )
    if not annotated.is_dir() or not images.is_dir():
        missing = printable(str(images if annotated.is_dir() else annotated))
        raise UserError(
            f"{spec} is not in Pascal VOC's format: there is no folder {missing}. {VOC_LAYOUT} For other names write "
            "?images=FOLDER&annotations=FOLDER."
        )
    files = {Path(name).stem: name for name in loose_images(images) if not name.startswith(".")}
    broken: list[Broken] = []
    splits = {
        split: [_voc_image(images / files.get(name, f"{name}.jpg"), annotated / f"{name}.xml") for name in names]
        for split, names in _voc_splits(root, images, annotated, files, broken).items()
    }
    classes = sorted({label for listed in splits.values() for image in listed for label in image.labels})
    return source_of_boxes(spec, printable(root.resolve().name), classes, splits, broken)


def _voc_splits(
    root: Path, images: Path, annotated: Path, files: dict[str, str], broken: list[Broken]
) -> dict[str, list[str]]:
    """Names by split; all that have an XML file where nothing is split."""
    lists = root / "ImageSets" / "Main"
    listed = {}
    for split in SPLITS:
        if (path := lists / f"{split}.txt").is_file():
            listed[split] = list(dict.fromkeys(line.split()[0] for line in lines_of(path)))
    if "train" not in listed and (path := lists / "trainval.txt").is_file():
        listed["train"] = list(dict.fromkeys(word for line in lines_of(path) for word in line.split()))
    if listed and "train" not in listed:
        raise UserError(f"{printable(str(lists))} has {', '.join(listed)} and no train.txt. {VOC_LAYOUT}")
    if listed:
        return listed
    names = sorted(path.stem for path in annotated.glob("*.xml"))
    broken += [
        Broken("train", f"{images.name}/{files[stem]}", "has no XML file") for stem in sorted({*files} - {*names})
    ]
    return {"train": names}


def _voc_image(path: Path, annotation: Path) -> Found:
    image = Found(path, (1, 1))
    try:
        raw = read_bytes(annotation, "XML")
        tree = ElementTree.fromstring(raw, ElementTree.XMLParser(target=_Builder()))
        image.size = int(_text(tree, "size/height")), int(_text(tree, "size/width"))
        for element in tree.iter("object"):
            left, top, right, bottom = (float(_text(element, f"bndbox/{k}")) for k in ("xmin", "ymin", "xmax", "ymax"))
            difficult = (element.findtext("difficult") or "0").strip() == "1"
            image.add((left - 1, top - 1, right, bottom), _text(element, "name"), crowd=difficult)
    except FileNotFoundError:
        image.wrong = "has no XML file"
    except (OSError, ValueError, LookupError, OverflowError, ElementTree.ParseError) as error:
        image.wrong = f"its XML file cannot be read: {error}"
    return image


class _Builder(ElementTree.TreeBuilder):
    """Without a document type: its entities can make a terabyte of a kilobyte, or read other files."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("it has a document type (<!DOCTYPE>), which is not read: leave it out")


def _text(element: ElementTree.Element, path: str) -> str:
    text = (element.findtext(path) or "").strip()
    if not text:
        raise ValueError(f"{path} is missing")
    return text


BOXES, IMAGES = "boxes.csv", "images.csv"
CORNERS = ("xmin", "ymin", "xmax", "ymax")
_SAME = {"filename": "image", "file": "image", "class": "label"}
TABLE_LAYOUT = f"The first line of {BOXES} is image,width,height,label,{','.join(CORNERS)}, perhaps with split."


@data_source(
    "boxes",
    "boxes:FOLDER",
    "boxes in a CSV file next to the images",
    options=OPTIONS,
    claims=lambda path: (path / BOXES).is_file(),
)
def boxes(spec: Spec) -> Source:
    """Images with boxes, as `boxes.csv` says."""
    root = spec.folder
    rows = _table_rows(root / BOXES, {"image", "label", "width", "height", *CORNERS})
    listed = _table_rows(root / IMAGES, {"image"}) if (root / IMAGES).is_file() else []
    classes = class_names(root / CLASSES) or sorted({row["label"] for _, row in rows if row["label"]})
    images: dict[str, tuple[str, Found]] = {}
    broken: list[Broken] = []
    folder = root / "images" if (root / "images").is_dir() else root
    for line, row in rows:
        name = row["image"]
        try:
            split = _split_of_row(row)
            size = int(row["height"]), int(row["width"])
            corners = [float(row[corner]) for corner in CORNERS]
        except ValueError as error:
            image = images.setdefault(name, (_split_said(row) or "train", Found(folder / name, None)))[1]
            image.wrong = image.wrong or f"line {line} of {BOXES}: {error}"
            continue
        before, image = images.setdefault(name, (split, Found(folder / name, size)))
        if before != split or image.size != size:
            image.wrong = image.wrong or f"line {line} gives it another split or size than a line before"
        elif row["label"] not in classes:
            image.wrong = image.wrong or f"line {line} has the label {row['label']!r}, which is not a class"
        else:
            image.add(corners, row["label"])
    for line, row in listed:
        if row["image"] in images:
            continue
        try:
            native = (int(row["height"]), int(row["width"])) if row.get("width") else None
            images[row["image"]] = _split_of_row(row), Found(folder / row["image"], native)
        except ValueError as error:
            broken.append(Broken("train", f"{IMAGES}, line {line}", str(error)))
    splits: dict[str, list[Found]] = {}
    for split, image in images.values():
        splits.setdefault(split, []).append(image)
    if splits and "train" not in splits:
        raise UserError(f"{printable(str(root / BOXES))} has no images with split train: name some, or leave it out.")
    return source_of_boxes(spec, printable(root.resolve().name), classes, splits, broken)


def _table_rows(path: Path, needed: set[str]) -> list[tuple[int, dict[str, str]]]:
    """Number and content of each line."""
    try:
        with open_table(path) as file:
            reader = table(file, skipinitialspace=True, restval="")
            names = [name.strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = [_SAME.get(name, name) for name in names]
            if missing := sorted(needed - set(reader.fieldnames)):
                raise UserError(f"{printable(str(path))} has no column {missing[0]}. {TABLE_LAYOUT}")
            return [(reader.line_num, {k: (v or "").strip() for k, v in row.items() if k}) for row in reader]
    except UserError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(
            f"{printable(str(path))} cannot be read as a CSV file in UTF-8: {error}. {TABLE_LAYOUT}"
        ) from error


def _split_of_row(row: dict[str, str]) -> str:
    if (split := _split_said(row)) is None:
        raise ValueError(f"the split {row['split']!r} is not one of train, val and test")
    return split


def _split_said(row: dict[str, str]) -> str | None:
    return split_named(row.get("split", "train"))
