"""YOLO's format: a text file an image, a line an object: class, center x, center y, width, height, as fractions of the
sides; or class and the corners of a polygon.

    FOLDER/data.yaml                                   names: [cat, dog], train: images/train, val: images/val
    FOLDER/images/train/1.jpg, FOLDER/labels/train/1.txt

Without data.yaml the classes are the lines of classes.txt. An image without a text file has no objects.
"""

import os
from pathlib import Path
from typing import Any

from vitmods.data.records import SPLIT_NAMES, SPLITS, Broken, Source, printable
from vitmods.data.sources import Spec, data_source
from vitmods.data.sources.folder import images_below
from vitmods.data.sources.imagenet import CLASSES, class_names
from vitmods.data.sources.objects import OPTIONS, Found, source_of_boxes
from vitmods.util.errors import UserError
from vitmods.util.limits import lines_of, read_text

YAML = "data.yaml"
LAYOUT = f"Expected {YAML}, or {CLASSES} with images/train and labels/train (or images and labels, not split)."


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
    about = _yaml(root / YAML) if (root / YAML).is_file() else {}
    classes = _classes(root, about)
    places = _from_yaml(root, about) or _from_folders(root)
    if "train" not in places:
        raise UserError(f"{spec} has no images of train. {LAYOUT}")
    broken: list[Broken] = []
    splits = {split: _images(split, paths, classes, broken) for split, paths in places.items()}
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
        found = yaml.load(read_text(path, "YAML"), Plain)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{printable(str(path))} cannot be read as YAML: {error}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{printable(str(path))} has no names and folders. {LAYOUT}")
    return found


def _classes(root: Path, about: dict[str, Any]) -> list[str]:
    names = about.get("names")
    if isinstance(names, dict):
        if set(names) != set(range(len(names))):
            raise UserError(f"{printable(str(root / YAML))}: names are numbered from 0 on, without gaps.")
        names = [names[i] for i in range(len(names))]
    if names is None and (root / CLASSES).is_file():
        names = class_names(root / CLASSES)
    words = isinstance(names, list) and all(isinstance(name, str | int | float) for name in names)
    if not words or not names or len(set(map(str, names))) < len(names):
        raise UserError(f"{printable(str(root))} does not name its classes, each once. {LAYOUT}")
    if about.get("nc", len(names)) != len(names):
        raise UserError(f"{printable(str(root / YAML))}: nc is {about['nc']}, and there are {len(names)} names.")
    return [str(name) for name in names]


def _from_yaml(root: Path, about: dict[str, Any]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for split in SPLITS:
        given = next((about[word] for word in SPLIT_NAMES[split] if about.get(word)), None)
        if given is not None:
            parts = given if isinstance(given, list) else [given]
            base = about.get("path") or ""
            if not all(isinstance(part, str) for part in (base, *parts)):
                raise UserError(f"{printable(str(root / YAML))}: path and {split} are folders, in words.")
            found[split] = [image for part in parts for image in _listed(root, base, part)]
    return found


def _listed(root: Path, base: str, part: str) -> list[Path]:
    """The images of a folder, or those that a text file names."""
    tries = [root / base / part, root / part, root / part.removeprefix("../")]
    try:
        place = next((one for one in tries if one.exists()), None)
    except (OSError, ValueError):  # a name that no file can have
        place = None
    if place is None:
        raise UserError(f"{printable(str(root / YAML))} names {printable(part)}, which is not there.")
    if place.is_dir():
        return images_below(place)
    return [place.parent / line for line in lines_of(place)]


def _from_folders(root: Path) -> dict[str, list[Path]]:
    images = root / "images"
    if not images.is_dir():
        raise UserError(f"There are no images in {printable(str(root))}. {LAYOUT}")
    found: dict[str, list[Path]] = {}
    for split in SPLITS:
        place = next((images / word for word in SPLIT_NAMES[split] if (images / word).is_dir()), None)
        found |= {split: images_below(place)} if place else {}
    return found or {"train": images_below(images)}


def _images(split: str, paths: list[Path], classes: list[str], broken: list[Broken]) -> list[Found]:
    found: list[Found] = []
    folders: dict[Path, set[str]] = {}
    for path in paths:
        text = _labels_of(path)
        folders.setdefault(text.parent, set()).add(text.name)
        found.append(_image(path, text, classes))
    for folder, known in folders.items():
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        alone = [name for name in names if name.endswith(".txt") and name not in known and name != CLASSES]
        broken += [Broken(split, f"{folder.name}/{name}", "has no image") for name in alone]
    return found


def _labels_of(image: Path) -> Path:
    """The last folder called images becomes labels; where there is none the text lies beside the image."""
    parts = list(image.parts)
    places = [i for i, part in enumerate(parts[:-1]) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    return Path(*parts).with_suffix(".txt")


def _image(path: Path, text: Path, classes: list[str]) -> Found:
    found = Found(path, None)
    if not os.path.isfile(text):
        return found
    try:
        lines = read_text(text).splitlines()
    except (OSError, ValueError) as error:
        found.wrong = f"{text.name} cannot be read: {error}"
        return found
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            word, *values = line.split()
            numbers, label = list(map(float, values)), int(word)
            if len(numbers) != 4 and (len(numbers) < 6 or len(numbers) % 2):
                raise ValueError("neither four numbers nor a polygon")
        except ValueError as error:
            found.wrong = f"line {number} of {text.name} is no object: {error}"
            break
        if not 0 <= label < len(classes):
            found.wrong = f"line {number} of {text.name} is of class {label}, and there are {len(classes)}"
            break
        if len(numbers) == 4:
            x, y, width, height = numbers
            found.add((x - width / 2, y - height / 2, x + width / 2, y + height / 2), classes[label])
        else:
            xs, ys = numbers[0::2], numbers[1::2]
            found.add((min(xs), min(ys), max(xs), max(ys)), classes[label], segment=[numbers])
    return found
