"""Sources of boxes: from the entries of their files to records, with all that is wrong.

COCO's format (Lin et al., ECCV 2014, arXiv:1405.0312): a JSON file a split with images, annotations and categories, in
annotations/instances_train2017.json with train2017/; in train.json, val.json, test.json, with the images in train/,
images/ or the folder itself; or in train/_annotations.coco.json next to the images. Boxes are left, top, width, height
in pixels. Outlines are polygons or run lengths. `iscrowd` marks regions of many objects, which are neither trained on
nor counted as wrong.

YOLO's format: a text file an image, a line an object: class, center x, center y, width, height, as fractions of the
sides; or class and the corners of a polygon. images/train/1.jpg has labels/train/1.txt; an image without a text file
is one without objects. data.yaml lists names and folders; without it the classes are the lines of classes.txt.

Pascal VOC's format (Everingham et al., IJCV 2010): Annotations/0001.xml for JPEGImages/0001.jpg, and lists of names in
ImageSets/Main/train.txt, val.txt and test.txt. Corners are pixels counted from 1, both inside of the box. Objects
marked difficult are treated as COCO's crowds.

A table: `boxes.csv`, a line an object, next to the images or a folder `images`.

    image,split,width,height,label,xmin,ymin,xmax,ymax
    1.jpg,train,640,480,cat,10,20,110,220

In pixels, the right and lower ends excluded. The column `split` may be left out. `images.csv` (image, split, width,
height) names images without a box too; `classes.txt`, one a line, sets the order of the classes and refuses others.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize
from xml.etree import ElementTree

import numpy as np

from vitmods.data.dataset import Split
from vitmods.data.geometry import LONGEST
from vitmods.data.multilabel import TARGETS, Target, with_rarest
from vitmods.data.read import Unreadable, size_in_header
from vitmods.data.records import SPLIT_NAMES, SPLITS, Broken, Raw, Records, Source, printable, split_named
from vitmods.data.sources import Spec, data_source
from vitmods.data.sources.files import CLASSES, class_names, file_records, images_below, loose_images
from vitmods.data.sources.labels import Paths
from vitmods.tasks.detection.objects import Objects, Segment, drawn, outline_area, with_instances
from vitmods.util.errors import UserError, nearest
from vitmods.util.limits import MOST_PIXELS, lines_of, read_bytes, read_json, read_text
from vitmods.util.tables import IMAGE_NAMES, read_table, whole_number

OPTIONS = ("classes", "agnostic")
OVERHANG, FRACTION_OVERHANG = 1.0, 0.01  # by which a box may exceed its image (rounding): pixels, fractions of a side
THINNEST = 1e-3  # pixels that a box has at least: float32 loses less where it is scaled and mirrored
_LEAST_OVERLAP = 0.1  # of the extent of an outline and its box; less: another object's outline, or other units
Box = tuple[float, float, float, float]
"""left, top, right, bottom"""


class _Object(NamedTuple):
    box: Box
    label: str
    crowd: bool
    area: float | None
    segment: Segment | None


@dataclass
class ListedImage:
    """An image as a source lists it: its file and its objects.

    size: height and width; None: unknown, and boxes are fractions of the sides. wrong: why it cannot be used.
    """

    path: Path
    size: tuple[int, int] | None
    objects: list[_Object] = field(default_factory=list)
    wrong: str = ""

    def add(
        self, box: Box, label: str, crowd: bool = False, area: float | None = None, segment: Segment | None = None
    ) -> None:
        """Add an object. An invalid box makes the image unfit."""
        x0, y0, x1, y1 = map(float, box)
        height, width = self.size or (1, 1)
        text = ", ".join(f"{value:g}" for value in box)
        if not 0 < height * width <= MOST_PIXELS or min(height, width) < 1:
            self.refuse(f"its size cannot be {self.extent()}")
        most = OVERHANG if self.size else FRACTION_OVERHANG
        cut = (max(x0, 0.0), max(y0, 0.0), min(x1, width), min(y1, height))
        if not np.isfinite([x0, y0, x1, y1]).all() or x1 <= x0 or y1 <= y0:
            self.refuse(f"a box of {label} is empty: {text}")
        elif x0 < -most or y0 < -most or x1 > width + most or y1 > height + most:
            self.refuse(f"a box of {label} is outside of {self.extent()}: {text}")
        elif min(cut[2] - cut[0], cut[3] - cut[1]) < (THINNEST if self.size else THINNEST / 1000):
            self.refuse(f"a box of {label} is empty in {self.extent()}: {text}")
        self.objects.append(_Object(cut, label, crowd, area, segment))

    def refuse(self, reason: str) -> None:
        """Mark the image as unfit; the first reason is reported."""
        self.wrong = self.wrong or reason

    def extent(self) -> str:
        """Describe the image's size in a message: `640 x 480 pixels`, or `its image` if it is unknown."""
        return "its image" if self.size is None else f"{self.size[1]} x {self.size[0]} pixels"


def source_of_boxes(
    spec: Spec, classes: Sequence[str], splits: Mapping[str, Sequence[ListedImage]], broken: Iterable[Broken] = ()
) -> Source:
    """The source of the listed images, with the classes that the spec's options `classes` and `agnostic` select.

    Images that cannot be used are in `broken`. Wrong sizes and missing files are found when the images are read.

    Raises:
        UserError: an unknown class or option, no images, or boxes in fractions instead of pixels.
    """
    asked = [name.strip() for name in spec.options.get("classes", "").split(",") if name.strip()]
    if "classes" in spec.options and not asked:
        raise UserError(f'"{spec}": classes is empty. Write classes=person, or several with commas.')
    if unknown := [name for name in asked if name not in classes]:
        raise UserError(f'"{spec}": unknown class {unknown[0]!r}. {nearest(unknown[0], classes)}')
    if (agnostic := spec.options.get("agnostic", "0")) not in ("0", "1"):
        raise UserError(f'"{spec}": agnostic is 0 or 1, not {agnostic}.')
    kept = tuple(name for name in classes if not asked or name in asked)
    number = {title: 0 if agnostic == "1" else i for i, title in enumerate(kept)}
    root = spec.folder if spec.folder.is_dir() else spec.folder.parent
    broken, records, repeated = list(broken), {}, list[str]()

    def name_of(image: ListedImage) -> str:
        inside = image.path.is_relative_to(root)  # a source may list a file elsewhere
        return normalize("NFC", (image.path.relative_to(root) if inside else image.path).as_posix())

    for split, images in ((name, splits[name]) for name in SPLITS if name in splits):
        seen: set[Path] = set()
        for image in images:
            if image.path in seen:
                image.refuse("is listed a second time: put all its objects into one entry")
            seen.add(image.path)
        fit = sorted((image for image in images if not image.wrong), key=name_of)
        ends = [max(o.box[2:]) for image in fit if image.size is not None for o in image.objects]
        if ends and max(ends) <= 1:
            raise UserError(
                f"{spec}: all boxes of {split} lie in the first pixel, so they look like fractions of the images' "
                "sides. Multiply them by width and height."
            )
        repeated += [name_of(image) for image in fit if len({o[:2] for o in image.objects}) < len(image.objects)]
        broken += [Broken(split, name_of(image), image.wrong) for image in images if image.wrong]
        records[split] = _records(fit, tuple(map(name_of, fit)), number)
    if not any(map(len, records.values())) and not broken:
        raise UserError(f"{spec} lists no images.")
    warnings = [
        f"{len(repeated)} {'image has' if len(repeated) == 1 else 'images have'} the same box of the same class twice "
        f"({', '.join(map(printable, repeated[:3]))}): each counts as a separate object. Remove the copies."
    ]
    titles = ("object",) if agnostic == "1" else tuple(map(printable, kept))
    name = printable(root.resolve().name)
    return with_rarest(Source(name, titles, records, warnings * bool(repeated), broken, target="boxes"))


def check_objects(splits: Mapping[str, Split]) -> list[str]:
    """Name the splits without an object."""
    crowds = {name: [objects.crowd.all() for objects in split.annotations or ()] for name, split in splits.items()}
    bare = [name for name, no_objects in crowds.items() if no_objects and all(no_objects)]
    return [f"No image of {name} has an object, crowds aside: annotate some." for name in bare]


REMEDY = "Train it with --task detection, or multilabel."
TARGETS.add("boxes", Target("boxes", REMEDY, check=check_objects))
TARGETS.add("instances", Target("a mask of each object", conversions={"boxes": with_instances}, check=check_objects))


def _records(images: Sequence[ListedImage], ids: tuple[str, ...], number: Mapping[str, int]) -> Records:
    annotations = tuple(_annotation(image, number) for image in images)
    files = file_records(ids, np.zeros(len(ids), np.int64), [image.path for image in images])

    def fetch(key: int) -> Raw:
        """Raises Unreadable where boxes would not lie on their objects; reads only the head of the file."""
        raw, annotated = files.fetch(key), annotations[key].size
        assert isinstance(raw, bytes)
        try:
            size = size_in_header(raw)
        except Unreadable:  # decoding says what is wrong with it
            return raw
        if max(size) > LONGEST * min(size):
            raise Unreadable(f"longer than {LONGEST}:1 ({size[1]} x {size[0]} pixels): boxes need the whole image")
        if annotated not in (None, size):
            turned = ", its sides in the other order (or before a rotation in its EXIF data)"
            turned = turned if annotated == size[::-1] else ""
            boxes = f"its boxes are for {annotated[1]} x {annotated[0]}"
            raise Unreadable(f"is {size[1]} x {size[0]} pixels, and {boxes}{turned}")
        return raw

    return replace(
        files,
        fetch=fetch,
        stamps=tuple(f"{stamp}:{objects.size}" for stamp, objects in zip(files.stamps, annotations, strict=True)),
        label_sets=tuple(tuple(sorted(set(objects.labels.tolist()))) for objects in annotations),
        annotations=annotations,
    )


def _annotation(image: ListedImage, number: Mapping[str, int]) -> Objects:
    kept = [item for item in image.objects if item.label in number]
    boxes = np.array([item.box for item in kept], dtype=np.float32).reshape(-1, 4)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    for row, item in enumerate(kept):
        if item.area is not None:
            area[row] = item.area
        elif item.segment:
            area[row] = outline_area(item.segment, image.size)
    segments = tuple(item.segment for item in kept if item.segment)
    return Objects(
        boxes,
        np.array([number[item.label] for item in kept], dtype=np.int64),
        np.array([item.crowd for item in kept], dtype=np.bool_),
        area,
        image.size,
        segments if len(segments) == len(kept) else None,
    )


COCO_LAYOUT = "Expected annotations/instances_train2017.json with train2017/, or train.json with train/ or images/."
_USUAL = ("train.json", "annotations/*train*.json", "*/_annotations.coco.json")
_LOOKED_FOR = 100  # images, to find the folder that they are in


@data_source(
    "coco",
    "coco:FOLDER",
    "boxes and masks in COCO's format",
    options=(*OPTIONS, *SPLITS),
    claims=lambda path: (path / "annotations" / "instances_train2017.json").is_file(),
    looks_like=lambda path: any(next(path.glob(pattern), None) for pattern in _USUAL),
)
def coco(spec: Spec) -> Source:
    """Images with boxes, and masks where there are outlines. Options train, val and test name other JSON files."""
    paths, broken, splits = _coco_files(spec), list[Broken](), {}
    if "train" not in paths:
        raise UserError(f"{spec} lacks annotations of train: it has {', '.join(paths)}. {COCO_LAYOUT}")
    classes: dict[int, str] = {}
    for split, path in paths.items():
        images, annotations, categories = _read_coco(path)
        if split == "train":
            classes = categories
        elif other := next((name for key, name in categories.items() if classes.get(key) != name), None):
            raise UserError(
                f"{printable(str(path))} has other categories than {printable(str(paths['train']))}, such as "
                f"{printable(other)}: {split} needs the same ids and names, or some of them."
            )
        folder, listed = _coco_folder(split, spec.folder, path, images), dict[Any, ListedImage]()
        for i, image in enumerate(images):
            try:
                file, key = folder / str(image["file_name"]), _key(image["id"])
                sides = [image.get("height"), image.get("width")]
                height, width = size_in_header(read_bytes(file, "image")) if None in sides else map(whole_number, sides)
            except (OSError, Unreadable) as error:
                broken.append(
                    Broken(split, str(image["file_name"]), f"its size is not listed, and it cannot be read: {error}")
                )
                continue
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                reason = f"image number {i} lacks id, file_name, width or height ({error!r})"
                broken.append(Broken(split, path.name, reason))
                continue
            if key in listed:
                broken.append(Broken(split, path.name, f"two images have the id {key}"))
            else:
                listed[key] = ListedImage(file, (height, width))
        for annotation in annotations:
            of = annotation.get("image_id")
            if isinstance(of, list | dict) or (key := _key(of)) not in listed:
                reason = f"annotation {annotation.get('id')} is of image {of}, not listed"
                broken.append(Broken(split, path.name, reason))
            else:
                _add_coco(listed[key], annotation, classes)
        splits[split] = list(listed.values())
    return source_of_boxes(spec, [name for _, name in sorted(classes.items())], splits, broken)


def _key(value: Any) -> Any:
    """An id by its value: 1.0 is 1. Raises TypeError for lists and objects."""
    hash(value)
    return whole_number(value) if isinstance(value, float) and value.is_integer() else value


def _coco_files(spec: Spec) -> dict[str, Path]:
    """The file of each split, train first."""
    root = spec.folder
    if root.is_file():
        place, name = printable(str(root.parent)), printable(root.name)
        raise UserError(f'{printable(str(root))} is a file: give its folder and name it, "coco:{place}?train={name}".')
    if not root.is_dir():
        raise UserError(f"The folder {printable(str(root))} does not exist. {COCO_LAYOUT}")
    if named := {split: root / spec.options[split] for split in SPLITS if split in spec.options}:
        if lost := next((path for path in named.values() if not path.is_file()), None):
            raise UserError(f'"{spec}": the file {printable(str(lost))} does not exist.')
        return named
    files: dict[str, Path] = {}
    for split in SPLITS:
        places = [
            *sorted((root / "annotations").glob(f"instances_{split}[0-9]*.json")),
            *(root / f"{word}.json" for word in SPLIT_NAMES[split]),
            *(root / "annotations" / f"{word}.json" for word in SPLIT_NAMES[split]),
            *(root / "annotations" / f"instances_{word}.json" for word in SPLIT_NAMES[split]),
            *(root / word / "_annotations.coco.json" for word in SPLIT_NAMES[split]),
        ]
        present = [place for place in places if place.is_file()]
        if len(present) > 1:
            both = " and ".join(printable(str(place.relative_to(root))) for place in present[:2])
            raise UserError(f'{spec} has {both} for {split}: say which, as in "{spec}?{split}=...".')
        files |= {split: present[0]} if present else {}
    if not files:  # exports without splits, of CVAT and Roboflow
        whole = [root / "annotations" / "instances_default.json", root / "_annotations.coco.json"]
        files = dict([("train", path) for path in whole if path.is_file()][:1])
    if not files:
        raise UserError(f"{printable(str(root))} lacks annotations. {COCO_LAYOUT} Or name a file: ?train=FILE.json.")
    return files


def _read_coco(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[int, str]]:
    """Images, annotations, and the names of the categories by their ids."""
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
        classes = {whole_number(row["id"]): str(row["name"]) for row in categories}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{name}: each category needs an id, a number, and a name ({error!r}).") from error
    if len(set(classes.values())) < len(categories):
        raise UserError(f"{name}: two categories have one id or one name. Make both unique.")
    return images, annotations, classes


def _coco_folder(split: str, root: Path, path: Path, images: list[dict[str, Any]]) -> Path:
    """The folder that has the most of the first images; FOLDER where none has any."""
    words = SPLIT_NAMES[split]
    year = path.stem.rpartition("_")[2]  # instances_train2017
    places = [root / year, root / "images" / year, *(root / word for word in words)]
    places += [root / "images" / word for word in words]
    places += [root / "images", path.parent, root]
    names = [str(image.get("file_name", "")) for image in images[:_LOOKED_FOR]]
    held = [sum(os.path.isfile(place / name) for name in names) for place in places]
    return places[held.index(max(held))] if any(held) else root


def _add_coco(image: ListedImage, annotation: Mapping[str, Any], classes: Mapping[int, str]) -> None:
    category, crowd, area = (annotation.get(key) for key in ("category_id", "iscrowd", "area"))
    try:
        if isinstance(category, bool | list | dict) or _key(category) not in classes:
            raise ValueError(f"has the unknown category {category}")
        if crowd not in (None, 0, 1):
            raise ValueError(f"has iscrowd {crowd!r}, which is 0 or 1")
        if area is not None and not (isinstance(area, int | float) and 0 <= area <= math.prod(image.size or ())):
            raise ValueError(f"has the area {area!r}, in an image of {image.extent()}")
        try:
            x, y, width, height = map(float, annotation["bbox"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError("lacks a bbox of four numbers") from None
        box, segment = (x, y, x + width, y + height), annotation.get("segmentation") or None
        image.add(box, classes[_key(category)], bool(crowd), area, segment)
        if segment is None or image.wrong:
            return
        extent = _extent(segment, image.size or (1, 1))
        if extent is None:
            raise ValueError(f"has an invalid outline, or one for another image size than {image.extent()}")
        # Intersection over union, both made larger by a pixel on every side: thin ones may differ by rounding.
        wide, high = (min(extent[i + 2], box[i + 2]) - max(extent[i], box[i]) + 2 for i in (0, 1))
        areas = sum((x1 - x0 + 2) * (y1 - y0 + 2) for x0, y0, x1, y1 in (extent, box))
        common = max(wide, 0) * max(high, 0)
        if common / (areas - common) < _LEAST_OVERLAP:
            of_outline, of_box = (", ".join(f"{value:g}" for value in part) for part in (extent, box))
            raise ValueError(f"has an outline from {of_outline} (left, top, right, bottom), and its box is {of_box}")
    except ValueError as error:
        image.refuse(f"annotation {annotation.get('id')} {error}")


def _extent(segment: Any, size: tuple[int, int]) -> Box | None:
    """Left, top, right and bottom of an outline; None where it is invalid, or is not of an image of this size."""
    if isinstance(segment, dict):
        counts = segment.get("counts")
        if segment.get("size") != list(size) or math.prod(size) > MOST_PIXELS or not isinstance(counts, str | list):
            return None
        if isinstance(counts, list) and not (
            all(isinstance(count, int) and count >= 0 for count in counts) and sum(counts) == math.prod(size)
        ):
            return None
        try:
            mask = drawn(segment, size)
        except (ValueError, RuntimeError):  # the packed form is of other lengths, or cut off
            return None
        rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
        return (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) if len(rows) else None
    far = 2 * max(size)  # a corner that is far away takes as much memory as it is far
    for polygon in segment if isinstance(segment, list) else [None]:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            return None
        if not all(isinstance(value, int | float) and -far <= value <= far for value in polygon):
            return None
    xs, ys = ([value for polygon in segment for value in polygon[axis::2]] for axis in (0, 1))
    return min(xs), min(ys), max(xs), max(ys)


YAML = "data.yaml"
DEEPEST_YAML = 20
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
    if root.is_file():
        place = printable(str(root.parent))
        raise UserError(f'{printable(str(root))} is a file: give its folder, as in "yolo:{place}".')
    settings = _yaml(root / YAML) if (root / YAML).is_file() else {}
    classes = _yolo_classes(root, settings)
    warnings = ["The keypoints of objects (kpt_shape) are not read: boxes alone are."] * ("kpt_shape" in settings)
    paths = _yolo_images(root, settings, warnings)
    if "train" not in paths:
        raise UserError(f"{spec} lacks images of train. {YOLO_LAYOUT}")
    broken: list[Broken] = []
    splits: dict[str, list[ListedImage]] = {}
    for split, images in paths.items():
        splits[split], used = [], dict[Path, set[str]]()
        for path in images:
            # The last folder called images becomes labels; without one the text lies next to the image.
            parts = list(path.parent.parts)
            if "images" in parts:
                parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
            text = Path(*parts, path.name).with_suffix(".txt")
            used.setdefault(text.parent, set()).add(text.name)
            splits[split].append(_yolo_image(path, text, classes, has_keypoints="kpt_shape" in settings))
        for folder, stems in used.items():
            names = sorted(os.listdir(folder)) if folder.is_dir() else []
            alone = [name for name in names if name.endswith(".txt") and name not in stems and name != CLASSES]
            broken += [Broken(split, f"{folder.name}/{name}", "lacks an image") for name in alone]
    source = source_of_boxes(spec, classes, splits, broken)
    return replace(source, warnings=[*warnings, *source.warnings])


def _yaml(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        text = read_text(path, "YAML")
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):  # ten lines of them can stand for a billion names
                raise yaml.YAMLError("an alias (*name) is not read: write its value instead")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST_YAML:  # each level takes longer than the one before
                raise yaml.YAMLError(f"it is nested more than {DEEPEST_YAML} levels deep")
        content = yaml.load(text, yaml.SafeLoader)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{printable(str(path))} cannot be read as YAML: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{printable(str(path))} does not list names and folders. {YOLO_LAYOUT}")
    return content


def _yolo_classes(root: Path, settings: dict[str, Any]) -> list[str]:
    names = settings.get("names")
    if isinstance(names, dict):
        if set(names) != set(range(len(names))):
            raise UserError(f"{printable(str(root / YAML))}: names are numbered from 0 on, without gaps.")
        names = [names[i] for i in range(len(names))]
    if names is None and (root / CLASSES).is_file():
        names = class_names(root / CLASSES)
    if isinstance(names, list) and any(isinstance(name, bool) for name in names):
        raise UserError(f"{printable(str(root / YAML))}: YAML reads yes and no as true and false: put names in quotes.")
    words = isinstance(names, list) and all(isinstance(name, str | int | float) for name in names)
    if not words or not names or len(set(map(str, names))) < len(names):
        raise UserError(f"{printable(str(root))} does not name its classes, each once. {YOLO_LAYOUT}")
    if str(settings.get("nc", len(names))) != str(len(names)):
        raise UserError(f"{printable(str(root / YAML))}: nc is {settings['nc']}, and there are {len(names)} names.")
    return [str(name) for name in names]


def _yolo_images(root: Path, settings: dict[str, Any], warnings: list[str]) -> dict[str, list[Path]]:
    """The images of each split: as data.yaml lists them, or those in images/train and so on, or in images. A val or
    test folder that is not there is only a warning."""
    images: dict[str, list[Path]] = {}
    for split in SPLITS:
        entry = next((settings[word] for word in SPLIT_NAMES[split] if settings.get(word)), None)
        if entry is None:
            continue
        parts, base = entry if isinstance(entry, list) else [entry], settings.get("path") or ""
        if not all(isinstance(part, str) for part in (base, *parts)):
            raise UserError(f"{printable(str(root / YAML))}: path and {split} are folders, in words.")
        images[split] = []
        for part in parts:
            try:
                tries = [root / base / part, root / part, root / part.removeprefix("../")]
                place = next(path for path in tries if path.exists())
            except (OSError, ValueError, StopIteration):  # ValueError: of a name that no file can have
                if split != "train" and not images[split]:
                    warnings.append(f"{YAML} names {printable(part)} for {split}, which is missing: it was not used.")
                    continue
                raise UserError(f"{printable(str(root / YAML))} names {printable(part)}, which is missing.") from None
            images[split] += (
                images_below(place) if place.is_dir() else [place.parent / line for line in lines_of(place)]
            )
    if images:
        return {split: paths for split, paths in images.items() if paths or split == "train"}
    if not (folder := root / "images").is_dir():
        raise UserError(f"{printable(str(root))} lacks images. {YOLO_LAYOUT}")
    for split in SPLITS:
        if place := next((folder / word for word in SPLIT_NAMES[split] if (folder / word).is_dir()), None):
            images[split] = images_below(place)
    return images or {"train": images_below(folder)}


def _yolo_image(path: Path, text: Path, classes: list[str], has_keypoints: bool) -> ListedImage:
    image = ListedImage(path, None)
    if not os.path.isfile(text):
        return image
    try:
        lines = read_text(text).splitlines()
    except (OSError, ValueError) as error:
        image.refuse(f"{text.name} cannot be read: {error}")
        return image
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            word, *values = line.split()
            numbers, label = list(map(float, values[:4] if has_keypoints else values)), int(word)
            if len(numbers) != 4 and (len(numbers) < 6 or len(numbers) % 2):
                raise ValueError("neither four numbers nor a polygon")
        except ValueError as error:
            image.refuse(f"line {number} of {text.name} is not an object: {error}")
            break
        if not 0 <= label < len(classes):
            image.refuse(f"line {number} of {text.name} is of class {label}, and the classes are {len(classes)}")
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
    images = root / spec.options.get("images", "JPEGImages")
    annotated = root / spec.options.get("annotations", "Annotations")
    if missing := [printable(str(folder)) for folder in (annotated, images) if not folder.is_dir()]:
        raise UserError(
            f"{spec} is not in Pascal VOC's format: the folder {missing[0]} is missing. {VOC_LAYOUT} For other names "
            "write ?images=FOLDER&annotations=FOLDER."
        )
    files = {Path(name).stem: name for name in loose_images(images) if not name.startswith(".")}
    broken: list[Broken] = []
    lists, listed = root / "ImageSets" / "Main", dict[str, list[str]]()
    words = [(split, word) for split in SPLITS for word in SPLIT_NAMES[split]]
    for split, name in [*words, ("train", "trainval")]:
        if split not in listed and (path := lists / f"{name}.txt").is_file():
            listed[split] = list(dict.fromkeys(_name_in(line.split()[0], files) for line in lines_of(path)))
    if listed and "train" not in listed:
        raise UserError(f"{printable(str(lists))} has {', '.join(listed)} and lacks train.txt. {VOC_LAYOUT}")
    if not listed:
        names = sorted(path.stem for path in annotated.glob("*.xml"))
        alone = sorted({*files} - {*names})
        broken += [Broken("train", f"{images.name}/{files[name]}", "lacks an XML file") for name in alone]
        listed = {"train": names}
    splits = {
        split: [_voc_image(images / files.get(name, f"{name}.jpg"), annotated / f"{name}.xml") for name in names]
        for split, names in listed.items()
    }
    classes = sorted({item.label for part in splits.values() for image in part for item in image.objects})
    return source_of_boxes(spec, classes, splits, broken)


def _name_in(word: str, files: Mapping[str, str]) -> str:
    """The name that a line of a list has, which may be that of the file, with its folder."""
    file = Path(word.replace("\\", "/"))
    return file.stem if files.get(file.stem) == file.name else file.name


def _voc_image(path: Path, annotation: Path) -> ListedImage:
    image = ListedImage(path, (1, 1))

    def text(element: ElementTree.Element, name: str) -> str:
        if not (content := (element.findtext(name) or "").strip()):
            raise ValueError(f"{name} is missing")
        return content

    try:
        raw = read_bytes(annotation, "XML")
        tree = ElementTree.fromstring(raw, ElementTree.XMLParser(target=_Builder()))
        image.size = whole_number(text(tree, "size/height")), whole_number(text(tree, "size/width"))
        for element in tree.iter("object"):
            xmin, ymin, xmax, ymax = (float(text(element, f"bndbox/{corner}")) for corner in CORNERS)
            difficult = (element.findtext("difficult") or "0").strip() == "1"
            image.add((xmin - 1, ymin - 1, xmax, ymax), text(element, "name"), difficult)
    except FileNotFoundError:
        image.refuse("lacks an XML file")
    except (OSError, ValueError, LookupError, OverflowError, ElementTree.ParseError) as error:
        image.wrong = f"its XML file cannot be read: {error}"
    return image


class _Builder(ElementTree.TreeBuilder):
    """Without a document type: its entities can make a terabyte of a kilobyte, or read other files."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("it has a document type (<!DOCTYPE>), which is not read: leave it out")


BOXES, IMAGES = "boxes.csv", "images.csv"
CORNERS = ("xmin", "ymin", "xmax", "ymax")
_SAME = {**dict.fromkeys(IMAGE_NAMES, "image"), "class": "label"}
TABLE_LAYOUT = f"The first line of {BOXES} is image,width,height,label,{','.join(CORNERS)}, perhaps with split."


@data_source(
    "boxes",
    "boxes:FOLDER",
    "boxes in a CSV file next to the images",
    options=OPTIONS,
    claims=lambda path: (path / BOXES).is_file(),
)
def boxes(spec: Spec) -> Source:
    """Images with the boxes of `boxes.csv`."""
    root = spec.folder
    rows = _table_rows(root / BOXES, "image", "label", "width", "height", *CORNERS)
    listed = _table_rows(root / IMAGES, "image") if (root / IMAGES).is_file() else []
    classes = class_names(root / CLASSES) or sorted({row["label"] for _, row in rows if row["label"]})
    images: dict[str, tuple[str, ListedImage]] = {}
    broken: list[Broken] = []
    folder = root / "images" if (root / "images").is_dir() else root
    find = Paths(folder)
    find.above = os.path.relpath(root, folder)

    def split_of(row: dict[str, str]) -> str:
        if split := split_named(row.get("split", "train")):
            return split
        raise ValueError(f"the split {row['split']!r} is not one of train, val and test")

    for line, row in rows:
        name = row["image"]
        try:
            split = split_of(row)
            size = whole_number(row["height"]), whole_number(row["width"])
            name = find(name) or name
            xmin, ymin, xmax, ymax = (float(row[corner]) for corner in CORNERS)
        except ValueError as error:
            split = split_named(row.get("split", "train")) or "train"
            images.setdefault(name, (split, ListedImage(folder / name, None)))[1].refuse(
                f"line {line} of {BOXES}: {error}"
            )
            continue
        before, image = images.setdefault(name, (split, ListedImage(folder / name, size)))
        if before != split or image.size != size:
            image.refuse(f"line {line} gives it another split or size than a line before")
        elif row["label"] not in classes:
            image.refuse(f"line {line} has the label {row['label']!r}, which is not a class")
        else:
            image.add((xmin, ymin, xmax, ymax), row["label"])
    for line, row in listed:
        name = row["image"]
        with suppress(ValueError):
            name = find(name) or name
        if name not in images:
            try:
                native = (whole_number(row["height"]), whole_number(row["width"])) if row.get("width") else None
                images[name] = split_of(row), ListedImage(folder / name, native)
            except ValueError as error:
                broken.append(Broken("train", f"{IMAGES}, line {line}", str(error)))
    splits: dict[str, list[ListedImage]] = {}
    for split, image in images.values():
        splits.setdefault(split, []).append(image)
    if splits and "train" not in splits:
        raise UserError(f"{printable(str(root / BOXES))} lacks images with split train: name some, or leave it out.")
    return source_of_boxes(spec, classes, splits, broken)


def _table_rows(path: Path, *columns: str) -> list[tuple[int, dict[str, str]]]:
    rows = read_table(path, columns, TABLE_LAYOUT, same=_SAME)
    return [(line, {column: value.strip() for column, value in row.items()}) for line, row in rows]
