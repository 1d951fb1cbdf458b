"""Sources of image-text pairs, and the target "text": captions, or the names of a class.

A JSON Lines file has an object a line, next to the images:

    {"image": "cats/1.jpg", "captions": ["a cat", "a cat on a chair"], "split": "train", "group": "1"}

A CSV file has the columns image and caption, a line a caption, and perhaps split and group. Shards in WebDataset's
layout have KEY.jpg with KEY.txt, one caption, or KEY.json with "captions" or "caption" and perhaps "group"; the names
of shards name splits. Without splits they are made; images of one group stay in one.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from unicodedata import normalize

import numpy as np

from vitmods.data.multilabel import TARGETS, Target, with_target
from vitmods.data.records import SPLITS, Broken, Records, Source, printable, split_named
from vitmods.data.sources import Spec, data_source, open_source
from vitmods.data.sources.files import file_records
from vitmods.data.sources.labels import Paths
from vitmods.data.sources.wds import ROW, ImageFact, Member, content_of, index_of, shard_records, shards_of
from vitmods.util.errors import UserError
from vitmods.util.limits import parse_json
from vitmods.util.tables import IMAGE_NAMES, cell, read_rows

_SHOWN = 5
_CAPTIONS = ("captions", "caption", "text")
_LISTED = re.compile(r"\[\s*(['\"]).*['\"]\s*\]", re.DOTALL)
_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")


@dataclass(frozen=True)
class Captions:
    """The texts of an image: captions, each of which describes it, or all names of its class (`is_class`), which are
    embedded together. of_copies: captions of other images with the same bytes, which are correct too. classes: the
    names of all classes of the set, for images with classes."""

    texts: tuple[str, ...]
    is_class: bool = False
    of_copies: tuple[str, ...] = ()
    classes: tuple[tuple[str, ...], ...] = ()

    @property
    def stamp(self) -> str:
        return "\1".join((*self.texts, "class" * self.is_class))

    @property
    def candidates(self) -> tuple[tuple[str, ...], ...]:
        """The entries that retrieval ranks, each a tuple of texts whose embeddings are averaged."""
        return (self.texts,) if self.is_class else tuple((text,) for text in self.texts)

    @property
    def keys(self) -> tuple[tuple[str, ...], ...]:
        """The candidates by what makes them equal: captions without case and repeated white space."""
        return (self.texts,) if self.is_class else tuple(map(key_of, self.texts))


def key_of(caption: str) -> tuple[str, ...]:
    """Return what makes captions one text: their words, whatever the case and white space."""
    return (" ".join(caption.casefold().split()),)


def with_class_names(source: Source) -> Source:
    """Convert a source of classes to text: the words of each class's name, or several names separated by commas."""
    classes = []
    for name in source.classes:
        words = (" ".join(part.replace("_", " ").split()) for part in name.split(","))
        classes.append(tuple(dict.fromkeys(text for text in words if text)))
    every = tuple(classes)
    captions = [Captions(names, is_class=True, classes=every) for names in classes]
    splits = {
        name: replace(part, annotations=tuple(captions[label] for label in part.labels), label_sets=None)
        for name, part in source.splits.items()
    }
    return replace(source, splits=splits, target="text", class_map=None)


TARGETS.add(
    "text",
    Target("captions", "Train it with --task lit.", conversions={"class": with_class_names}, located=False),
)


class _Line(NamedTuple):
    number: int
    split: str
    image: str
    captions: list[Any]
    group: str


@data_source(
    "pairs",
    "pairs:FILE.jsonl",
    "images with captions, from a JSON Lines or CSV file, or from shards (a folder, or train-{0000..0009}.tar)",
    options=("image", "captions", *SPLITS, "zero_shot", "stream", "buffer"),
)
def pairs(spec: Spec) -> Source:
    """Images with captions. Options name other columns of the captions and of the image, in all splits or in one.

    `zero_shot` is a set of images with classes that replaces the test split; its texts are the names of the classes.
    Raises UserError with the lines that cannot be used.
    """
    is_sharded = spec.folder.is_dir() or spec.folder.suffix == ".tar"
    others = ("image", *SPLITS) if is_sharded else ("stream", "buffer")
    if unused := next((name for name in others if name in spec.options), None):
        kind, other = ("shards", "files of pairs") if is_sharded else ("files of pairs", "shards")
        raise UserError(f'"{spec}": {unused} is an option of {other}, not of {kind}. Leave it out.')
    source = _from_shards(spec) if is_sharded else _from_file(spec)
    return _with_classes(source, spec.options["zero_shot"]) if "zero_shot" in spec.options else source


def _from_shards(spec: Spec) -> Source:
    """Read the texts of shards. Raises UserError for a group in two splits."""
    name = spec.options.get("captions")
    facts = ImageFact(f"vitmods texts 1 {name}", "caption", ("txt", "json"), partial(_texts, name=name))
    root, by_split, warnings = shards_of(spec.folder)
    splits, broken = dict[str, Records](), list[Broken]()
    first_of_group: dict[str, tuple[str, str]] = {}
    for split, paths in by_split.items():
        rows, texts_of, group_of = [], dict[str, list[str]](), dict[str, str]()
        for number, file in enumerate(paths):
            shard, scanned = file.relative_to(root).as_posix(), index_of(file, facts)
            broken += [Broken(split, f"{printable(shard)}: {member}", reason) for member, reason in scanned.broken]
            for member, (texts, group), offset, size in scanned.rows:
                image = f"{shard}: {member}"
                other, where = first_of_group.setdefault(group, (split, image)) if group else (split, image)
                if other != split:
                    raise UserError(
                        f"The group {printable(group)} is in {other} by {printable(where)}, and in {split} by "
                        f"{printable(image)}: move its images to shards of one split, or give them different groups."
                    )
                rows.append((number, 0, offset, size, 0, 0))
                texts_of[image], group_of[image] = texts, group or image
        records = shard_records(paths, list(texts_of), np.array(rows, ROW))
        groups = tuple(group_of[image] for image in records.ids)
        splits[split] = replace(
            records,
            annotations=tuple(Captions(tuple(texts_of[image])) for image in records.ids),
            groups=groups if len(set(groups)) < len(groups) else None,
        )
    title = printable(root.resolve().name)
    return Source(title, ("image",), splits, warnings, broken, spec.streaming(), target="text")


def _texts(parts: dict[str, Member], file: BinaryIO, name: str | None) -> tuple[list[str], str]:
    """The captions of an image in a shard, and its group or "". name: where KEY.json has the captions, if another key.
    Raises ValueError."""
    keys, row = (name,) if name else ("captions", "caption"), dict[str, Any]()
    try:
        if "json" in parts:
            row = parse_json(content_of(parts["json"], file))
            if not isinstance(row, dict):
                raise ValueError("KEY.json is not an object")
        captions = next((row[key] for key in keys if row.get(key)), None)
        if captions is None and name is None and "txt" in parts:
            captions = content_of(parts["txt"], file).decode()
    except (ValueError, TypeError) as error:
        raise ValueError(f"its captions cannot be read: {error}") from None
    captions = captions if isinstance(captions, list) else [captions]
    if not all(isinstance(text, str) and text.strip() for text in captions):
        text = "" if name else "KEY.txt, or "
        raise ValueError(f"it has an empty caption, or none: write {text}KEY.json with " + " or ".join(map(repr, keys)))
    return list(dict.fromkeys(text.strip() for text in captions)), _group(row)


def _group(row: Mapping[str, Any]) -> str:
    return "" if row.get("group") is None else str(row["group"])  # 0 is one


def _from_file(spec: Spec) -> Source:
    path, wrong = spec.folder, list[str]()
    images: dict[str, list[_Line]] = {}
    first_of_group: dict[str, _Line] = {}
    for line in _lines(spec, path, wrong):
        images_of, group = images.setdefault(line.image, []), first_of_group.setdefault(line.group, line)
        if not line.image or not os.path.isfile(path.parent / line.image):
            reason = f"the image {printable(line.image) or '(without name)'} is missing"
        elif not line.captions or not all(isinstance(text, str) and text.strip() for text in line.captions):
            reason = f"{printable(line.image)} has an empty caption, or none"
        elif line.group and group.split != line.split:
            reason = (
                f"the group {printable(line.group)} is in {line.split}, and in {group.split} by line {group.number}"
            )
        elif images_of and images_of[0][1:3] + images_of[0][4:] != line[1:3] + line[4:]:
            reason = f"{printable(line.image)} has another split or group in line {images_of[0].number}"
        else:
            images_of.append(line)
            continue
        wrong.append(f"line {line.number}: {reason}")
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        reasons = "".join(f"\n  {text}" for text in wrong[:_SHOWN])
        raise UserError(f"{printable(str(path))} cannot be used as it is ({len(wrong)} lines):{reasons}{more}")
    splits = {}
    for split in SPLITS:
        names = sorted(name for name, lines in images.items() if lines[0].split == split)
        if names:
            ids = tuple(normalize("NFC", name) for name in names)
            captions = [
                dict.fromkeys(text.strip() for line in images[name] for text in line.captions) for name in names
            ]
            groups = tuple(images[name][0].group or name for name in names)
            splits[split] = replace(
                file_records(ids, np.zeros(len(ids), np.int64), [path.parent / name for name in names]),
                annotations=tuple(Captions(tuple(texts)) for texts in captions),
                groups=groups if len(set(groups)) < len(ids) else None,
            )
    if "train" not in splits:
        raise UserError(f"{printable(str(path))} does not name images of the split train.")
    return Source(printable(path.stem), ("image",), splits, target="text")


def _lines(spec: Spec, path: Path, wrong: list[str]) -> Iterator[_Line]:
    """Read the lines of the file; `wrong` gets those that are not objects or are of an unknown split."""
    header, rows = read_rows(path)
    column = spec.options.get("captions") or next((name for name in _CAPTIONS if name in header), _CAPTIONS[0])
    if column not in header and {*header} - {*IMAGE_NAMES, "split", "group"}:
        raise UserError(
            f"Which column of {printable(str(path))} has the captions? Add ?captions=COLUMN; it has "
            f"{printable(', '.join(header))}."
        )
    find = Paths(path.parent)
    usual = "image" if "image" in header else next((name for name in IMAGE_NAMES if name in header), "image")
    for number, row in rows:
        if row is None:
            wrong.append(f"line {number}: not a JSON object")
            continue
        split, captions = split_named(cell(row.get("split")) or "train"), row.get(column) or []
        if split is None:
            wrong.append(f"line {number}: the split {printable(cell(row['split']))} is not train, val or test")
            continue
        image = cell(row.get(spec.options.get(split, spec.options.get("image", usual))))
        try:
            found = find(image)
        except ValueError as error:
            wrong.append(f"line {number}: the image {printable(image)} {error}")
            continue
        if isinstance(captions, str) and _LISTED.fullmatch(captions.strip()):  # as Python and JSON write lists
            captions = [single or double for single, double in _QUOTED.findall(captions)]
        captions = captions if isinstance(captions, list) else [captions]
        yield _Line(number, split, found or image, captions, _group(row))


def _with_classes(source: Source, spec: str) -> Source:
    """Replace the test split by the images of a set with classes: its split test, val or, without both, train."""
    labeled = with_target(open_source(spec), "text")
    records = next(labeled.splits[name] for name in reversed(SPLITS) if name in labeled.splits)
    if not all(captions.is_class for captions in records.annotations or ()):  # type: ignore[attr-defined]
        raise UserError(f"zero_shot needs images with classes, and {printable(spec)} has captions.")
    splits = {**source.splits, "test": replace(records, labels=np.zeros_like(records.labels))}
    return replace(source, splits=splits, allow=labeled.allow)
