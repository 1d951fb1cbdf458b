"""Images with masks, for segmentation."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

from vitmods.data.multilabel import TARGETS, Target, with_rarest
from vitmods.data.records import Broken, Source, printable
from vitmods.data.sources import Spec, data_source
from vitmods.data.sources.files import CLASSES, class_names, folders_of_splits, images_below, loose_images
from vitmods.data.sources.layout import base_of
from vitmods.tasks.segmentation.masks import IGNORE, Coding, ImageAndMask, masked_records
from vitmods.util.errors import UserError, nearest
from vitmods.util.tables import read_table

PALETTE = "palette.csv"
LAYOUT = (
    f"Expected images/ and masks/ with files of the same names, here or below train, val and test, and next to them "
    f"{CLASSES} (one class a line: pixels have its number, from 0, or the value after a comma, as in cell,255) or "
    f"{PALETTE} (columns name, r, g and b)."
)
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
    """A user's folder. Raises UserError without these folders or a list of classes."""
    root = spec.folder
    if not root.is_dir():
        raise UserError(f"The folder {printable(str(root))} does not exist. {LAYOUT}")
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
    source = source_of_masks(printable(root.resolve().name), classes, coding, folders)
    if images.is_dir() and all(images != used for used, _ in folders.values()) and (loose := loose_images(images)):
        source.warnings.append(f"{len(loose)} images directly in {printable(str(images))} are in no split: not used.")
    return source


def source_of_masks(
    name: str, classes: Sequence[str], coding: Coding, folders: Folders, spec: Spec | None = None
) -> Source:
    """The images of these folders with their masks. spec: of a published set, which says where its folders belong."""
    lost = [folder for pair in folders.values() for folder in pair if not folder.is_dir()]
    if spec and lost:
        raise spec.kind.missing(spec.folder, f"the folder {printable(str(lost[0]))} does not exist")
    splits, broken, held = {}, [], set[int]()
    for split, (images, annotated) in folders.items():
        pairs, alone = _pairs(split, images, annotated)
        splits[split], unusable, values = masked_records(split, pairs, coding)
        broken += [*alone, *unusable]
        held |= values
    if not broken and not any(map(len, splits.values())):
        where = " and ".join(printable(str(images)) for images, _ in folders.values())
        raise UserError(f"{where} lack images. {LAYOUT}")
    source = Source(name, tuple(map(printable, classes)), splits, broken=broken, target="mask")
    return with_rarest(replace(source, unseen=_unseen(source, coding, held)))


def _unseen(source: Source, coding: Coding, held: set[int]) -> str:
    """Name the classes that no mask shows, with their values, and the values that the masks hold; "" where every class
    is shown, or no mask can be read."""
    seen = {label for part in source.splits.values() for some in part.label_sets or () for label in some}
    missing, values = [], []
    for value, label in coding.meanings:
        if label not in {*seen, IGNORE}:
            missing.append(f"{source.classes[label]} ({coding.named(value)})")
        if value in held:
            values.append(coding.named(value) + " (ignored)" * (label == IGNORE))
    if not missing or not seen:
        return ""
    return f"No mask shows {', '.join(missing)}; masks hold {('; ' if coding.colored else ', ').join(values)}."


def _pairs(split: str, images: Path, annotated: Path) -> tuple[list[ImageAndMask], list[Broken]]:
    """Files of the same path below the two folders, whatever their ending, and those without a partner."""
    images_of, masks_of = _by_stem(images), dict[str, list[Path]]()
    for stem, paths in _by_stem(annotated).items():  # 1_mask belongs to 1
        masks_of.setdefault(base_of(stem, images_of) or stem, []).extend(paths)
    pairs, broken = [], []
    for stem, paths in images_of.items():
        names = [normalize("NFC", path.relative_to(images.parent).as_posix()) for path in paths]
        partners = masks_of.pop(stem, [])
        if len(paths) == len(partners) == 1:
            pairs.append(ImageAndMask(names[0], paths[0], partners[0]))
        elif not partners:
            broken += [Broken(split, name, f"lacks a mask in {printable(str(annotated))}") for name in names]
        else:
            what = "other images" if len(paths) > 1 else "several masks"
            broken += [Broken(split, name, f"{what} have that name with other endings") for name in names]
    unpaired = [path for paths in masks_of.values() for path in paths]
    where = printable(str(images))
    broken += [
        Broken(split, str(path.relative_to(annotated.parent)), f"lacks an image in {where}") for path in unpaired
    ]
    return sorted(pairs), broken


def _by_stem(folder: Path) -> dict[str, list[Path]]:
    """Path below the folder without its ending -> the files."""
    paths: dict[str, list[Path]] = {}
    for path in images_below(folder):
        paths.setdefault(normalize("NFC", os.path.splitext(path.relative_to(folder).as_posix())[0]), []).append(path)
    return paths


def _folders(root: Path) -> Folders:
    """root/images/train with root/masks/train, root/train/images with root/train/masks, or without splits."""
    below = folders_of_splits(root)
    has_both = (root / "images").is_dir() and (root / "masks").is_dir()
    if has_both or ((root / "images").is_dir() and not below):
        named = folders_of_splits(root / "images")
        pairs = {name: (path, root / "masks" / path.name) for name, path in named.items()}
        folders = pairs or {"train": (root / "images", root / "masks")}
    else:
        folders = {name: (path / "images", path / "masks") for name, path in below.items()}
    missing = [printable(str(folder)) for pair in folders.values() for folder in pair if not folder.is_dir()]
    if missing or not folders:
        lost = missing[0] if missing else printable(str(root / "images"))
        raise UserError(f"The folder {lost} does not exist. {LAYOUT}")
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
    listed = read_table(path, ("name", *"rgb"))
    rows = [(row["name"].strip(), [row[channel].strip() for channel in "rgb"]) for _, row in listed]
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
        raise UserError(f'Unknown class "{printable(name)}" to ignore. {nearest(name, names)}')
    return list(names).index(name)


def _check_classes(path: Path, classes: Sequence[str]) -> None:
    if twice := next((name for name in classes if list(classes).count(name) > 1), None):
        raise UserError(f"{printable(str(path))} names {printable(twice)} twice: leave one out.")
    if not 2 <= len(classes) <= IGNORE:
        raise UserError(f"{printable(str(path))} names {len(classes)} classes: between 2 and {IGNORE} can be learned.")
