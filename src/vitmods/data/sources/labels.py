"""Labels of images from a table.

    file,labels[,split,group]
    cats/1.jpg,cat;indoor,train,p1
    2.jpg,,,p2                    an image with none of the labels

Images are named by their paths from the folder of the table on, by the ends of these or by names alone, with or without
ending. Labels are in one column, separated by ; or |, or a column each has 0 and 1. Columns are found by what they hold
and by their names; options name others. An image with one label in every line is of that class.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize
from urllib.parse import quote

import numpy as np

from vitmods.data.multilabel import with_rarest
from vitmods.data.records import Source, printable, split_named
from vitmods.data.sources import Spec, data_source
from vitmods.data.sources.files import CLASSES, class_names, file_records, listing
from vitmods.data.sources.layout import (
    Reading,
    Tree,
    ending_of,
    in_words,
    list_tree,
    places_of,
    split_word,
    stem_of,
)
from vitmods.util.errors import UserError, nearest
from vitmods.util.tables import (
    IMAGE_NAMES,
    TABLES,
    Finder,
    Row,
    cell,
    cells_of,
    find_any,
    is_header,
    naming,
    read_rows,
)
from vitmods.util.text import first_of

CSV = "labels.csv"
LABEL_OPTIONS = ("labels", "file", "label", "separator", "group", "split", "root")
CSV_LAYOUT = 'Its first line is "file,labels" or "file,labels,split", with labels separated by ; or |, not by commas.'
_LABELS = (
    *("labels", "label", "class", "classes", "class_name", "label_name", "category", "categories", "target", "tags"),
    *("species", "breed", "diagnosis", "dx"),
)
_OF_GROUPS = re.compile("patient|subject|person|lesion|scene|video|burst", re.IGNORECASE)
_OF_NO_CLASS = re.compile(r"k?_?folds?|(column|unnamed:) ?\d+", re.IGNORECASE)  # of folds, and numbers of lines
_OF_IMAGES = {*IMAGE_NAMES} - {"id"}  # which may be of something else
_SPLITS, _GROUPS = ("split", "subset", "partition", "set"), ("group",)
_YES, _NO = {"1", "true", "yes", "x"}, {"0", "-1", "false", "no", ""}
_NUMBER = re.compile(r"[+-]?\d*\.\d+(e[+-]?\d+)?")
_BOXES = re.compile(r"([^\s\d]\S*( -?\d+(\.\d+)?){4} ?)+")  # a class, then its box, as contests write predictions
_SHOWN, _TRIED, _MOST_SPLITS, _LONGEST = 5, 100, 10, 200
_FROM_ROOT = re.compile(r"/|[A-Za-z]:/|\w+://")
_UNKNOWN = {"nan", "n/a", "na", "null", "none", "-1", "?"}
_NEARLY_ALL = 0.95


class _Columns(NamedTuple):
    """The columns of a table: of the image (folders first), of its labels (several: one each), of its split and its
    group, or ""; and what divides labels in one column."""

    file: list[str]
    labels: list[str]
    split: str
    group: str
    separator: str


@data_source(
    "labels",
    "path/to/labels.csv",
    "a table with the labels of each image, or the folder of a `labels.csv`",
    options=LABEL_OPTIONS[1:],
    claims=lambda path: path.suffix.lower() in {*TABLES, ".json"} - {".txt"} and not path.is_dir(),
)
def labels_csv(spec: Spec) -> Source:
    """The images that a table names, with any number of labels each. classes.txt next to it, one label a line, sets
    their order and refuses others. Raises UserError with all that is wrong, counted and with examples."""
    return labeled(spec, spec.folder.parent, [(spec.folder, "")], spec.options)


def from_option(spec: Spec, text: str) -> Source:
    """The images of a folder with the labels of tables in it: FILE, or FILE:SPLIT separated by commas."""
    parts = [(part, part.rpartition(":")) for part in text.split(",")]
    tables = [(name, split) if split_named(split) else (part, "") for part, (name, _, split) in parts]
    return labeled(spec, spec.folder, [(spec.folder / name, split) for name, split in tables], spec.options, whole=True)


class _Entry(NamedTuple):
    split: str
    labels: frozenset[str]
    group: str


def labeled(
    spec: object, folder: Path, tables: Sequence[tuple[Path, str]], options: Mapping[str, str], whole: bool = False
) -> Source:
    """The images in a folder that tables name, each table of a split or of all. whole: count images that none names."""
    base, listed, wrong = folder / options.get("root", ""), class_names(tables[0][0].parent / CLASSES), list[str]()
    if not base.is_dir():
        raise UserError(f'"{spec}": the folder {printable(str(base))} does not exist: correct root.')
    images, find, warnings, without, repeated = dict[str, _Entry](), Paths(base), list[str](), 0, 0
    for path, of_table in tables:
        header, rows = read_rows(path, CSV_LAYOUT)
        find.above = "." if "root" in options else os.path.relpath(path.parent, base)
        if any("." in name and find.direct(name) for name in header) or _is_row(header, rows, find):  # no header
            rows.insert(0, (1, dict(zip(header, cells_of(header), strict=True))))
        file = printable(str(path))
        if not rows:
            raise UserError(f"{file} does not name any image. {CSV_LAYOUT}")
        columns = _columns(path, header, rows, options, find)
        warnings += _unused(header, rows, columns)
        find.elsewhere = _elsewhere(["/".join(cell((row or {}).get(c)) for c in columns.file) for _, row in rows])
        for line, row in rows:
            text = "/".join(cell((row or {}).get(column)) for column in columns.file)
            try:
                if row is None:
                    raise ValueError("is not a JSON object")
                said, labels, found = cell(row.get(columns.split)) or of_table, _labels(row, columns), find(text)
                split = split_named(said) or (word[0] if (word := split_word(said)) else "")
                if said and not split:
                    raise ValueError(f"has the split {printable(said)}, which is not train, val or test")
                if not found:
                    raise ValueError("is missing")
                entry = _Entry(split, labels, cell(row.get(columns.group)))
                if (other := images.get(found, entry).labels) != labels:
                    if len(labels) == len(other) == 1:
                        said = f"is {printable(*other)} in one line and {printable(*labels)} in another"
                        raise ValueError(
                            f"{said}: leave one out; several labels of an image are in one line, as cat;dog"
                        )
                    raise ValueError("is named a second time and differs: name all labels in one line, as cat;dog")
                if images.get(found, entry) != entry:
                    raise ValueError("is named a second time, in another split or group: leave one of the two out")
                if found in images:
                    repeated += 1
                    continue
                if listed and (strange := sorted(labels.difference(listed))):
                    near = nearest(strange[0], listed)
                    raise ValueError(f"has the label {printable(strange[0])}. {near} ({CLASSES})")
                without += not labels
                images[found] = entry
            except ValueError as error:
                where = f"line {line} of {file}" if len(tables) > 1 else f"line {line}"
                wrong.append(f"{where}: {printable(text)[:_LONGEST] or '(no file)'} {error}")
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        if not images and all(text.endswith(" is missing") for text in wrong):
            more += f"\nImages are looked for below {printable(str(base))}: root=FOLDER names another place."
        lines = "".join(f"\n  {text}" for text in wrong[:_SHOWN])
        raise UserError(f"{spec} cannot be used as it is ({len(wrong)} lines):{lines}{more}")
    if len(columns.labels) == 1 and without and all(len(entry.labels) < 2 for entry in images.values()):
        images = {image: entry for image, entry in images.items() if entry.labels}
        warnings.append(f"{without:,} images without a label were left out.")
    warnings += [f"{repeated:,} lines that repeat another were left out."] if repeated else []
    folders = {image: split_named(image.partition("/")[0]) or "" for image in images}
    if not any(entry.split for entry in images.values()) and all(folders.values()) and "train" in folders.values():
        images = {image: entry._replace(split=folders[image]) for image, entry in images.items()}
    images = {image: entry._replace(split=entry.split or "train") for image, entry in sorted(images.items())}
    named_splits = dict.fromkeys(entry.split for entry in images.values())
    if len(named_splits) > 1 and "train" not in named_splits:
        raise UserError(f"{spec} lacks images with split train: name some, or leave the column out.")
    classes = listed or sorted(set().union(*(entry.labels for entry in images.values())))
    if not classes:
        raise UserError(f"{spec} does not label any image. {CSV_LAYOUT}")
    if unknown := [label for label in classes if label.lower() in _UNKNOWN]:
        warnings.append(f"The label {unknown[0]} is a class of its own: leave its cells empty if it is not known.")
    number, splits = {label: i for i, label in enumerate(classes)}, {}
    is_class = all(len(entry.labels) == 1 for entry in images.values())
    for split in named_splits:
        ids = tuple(image for image, entry in images.items() if entry.split == split)
        sets = tuple(tuple(sorted(number[label] for label in images[image].labels)) for image in ids)
        labels_of = np.array([one for (one,) in sets] if is_class else [0] * len(ids), np.int64)
        splits[split] = replace(
            file_records(ids, labels_of, [base / image for image in ids]),
            label_sets=None if is_class else sets,
            groups=tuple(images[image].group or image for image in ids) if any(images[i].group for i in ids) else None,
        )
    if whole and (left := find.tree().count - len(images) - without) > 0:
        warnings += [f"{left:,} images in {printable(str(base))} that the table does not name were left out."]
    first = tables[0][0]
    name = printable(folder.resolve().name if whole or first.name == CSV else first.stem)
    source = Source(name, tuple(map(printable, classes)), splits, warnings, target="class" if is_class else "labels")
    return source if is_class else with_rarest(source)


def _is_row(header: Sequence[str], rows: Sequence[Row], find: "Paths") -> bool:
    """Whether the first line names an image where the next one does, and is not a header."""
    if not rows or is_header(header):
        return False
    return any(find_any(find, name) and find_any(find, cell((rows[0][1] or {}).get(name))) for name in header)


class Paths:
    """From the name of an image in a table to its path below a folder, which is listed when it has to be."""

    def __init__(self, base: Path) -> None:
        self._base, self.above = base, "."  # the folder of the table, from there
        self.elsewhere = ""  # the folder of the images on another machine
        self._tree: Tree | None = None
        self._finder: Finder | None = None

    def tree(self) -> Tree:
        if self._tree is None:
            with listing():
                self._tree = list_tree(self._base)[0]
        return self._tree

    def direct(self, text: str) -> str:
        """The path, if the text is one from the folder of the table on, or from the listed folder; else ""."""
        for folder in dict.fromkeys([self.above, "."]) if text else ():
            path = os.path.join(self._base, folder, text.replace("\\", "/"))
            with suppress(ValueError):  # of a name that no file can have
                if os.path.isfile(path):
                    return os.path.relpath(path, self._base).replace(os.sep, "/")
        return ""

    def __call__(self, text: str) -> str | None:
        """Raises ValueError where several images could be meant."""
        if path := self.direct(text):
            return path
        text = text.replace("\\", "/").removeprefix(self.elsewhere)
        if self._finder is None:
            self._finder = Finder([_relative(self.tree(), path) for path in self.tree().paths()])
        return self._finder.find(text)


def _elsewhere(names: Sequence[str]) -> str:
    """The folder, or the address, that all of these paths begin with, if they are of another machine: the images may
    be here without it."""
    paths = [name.strip().replace("\\", "/") for name in names if name.strip()]
    if not paths or not all(map(_FROM_ROOT.match, paths)) or any(map(os.path.exists, paths[:_TRIED])):
        return ""
    folders = [f"{path.rpartition('/')[0]}/" for path in paths]
    return f"{os.path.commonprefix(folders).rpartition('/')[0]}/"  # noqa: RUF071, of addresses too


def _labels(row: Mapping[str, Any], columns: _Columns) -> frozenset[str]:
    if len(columns.labels) > 1:
        values = {name: cell(row.get(name)).lower() for name in columns.labels}
        if other := next((name for name, value in values.items() if value not in _YES | _NO), None):
            raise ValueError(
                f"has {printable(values[other])} in the column {printable(other)}, which is neither 1 nor 0"
            )
        return frozenset(name for name, value in values.items() if value in _YES)
    value = row.get(columns.labels[0])
    if isinstance(value, dict):
        raise ValueError(f"has an object as its label ({printable(str(value))[:60]})")
    return frozenset(_words(cell(value), columns.separator)) - {""}


def _words(text: str, separator: str) -> list[str]:
    """The labels in a cell, which may be a list as Python and JSON write it."""
    if re.fullmatch(r"[\[(].*[\])]", text):
        return [cell(word.strip().strip("'\"")) for word in text[1:-1].split(",")]
    return [cell(word) for word in re.split(separator, text)] if separator else [text]


def _unused(header: Sequence[str], rows: Sequence[Row], columns: _Columns) -> list[str]:
    """Sentences on columns that seem to have the splits or groups and are not used."""
    others = [name for name in header if name not in (*columns.file, *columns.labels, columns.split, columns.group)]
    values = {name: [cell(row.get(name)) for _, row in rows if row is not None] for name in others}
    texts = []
    for name, some in values.items():
        if not columns.split and len({*some}) > 1 and (name.lower() in _SPLITS[:-1] or split_word(name)):
            texts.append(f"The column {printable(name)} was not used: splits are called train, val and test there.")
        elif not columns.group and (_are_groups(some) or (_OF_GROUPS.search(name) and len({*some}) < len(some))):
            texts.append(
                f"The column {printable(name)} may say which images belong together: write group={printable(name)}."
            )
    return texts


def _columns(path: Path, header: list[str], rows: list[Row], options: Mapping[str, str], find: Paths) -> _Columns:
    """The columns of a table. Raises UserError where one is not there or not clear."""
    names = {name.lower(): name for name in reversed(header)}
    file = printable(str(path))

    def given(option: str) -> list[str]:
        asked = [word for word in options.get(option, "").split(",") if word]
        if unknown := [word for word in asked if word.lower() not in names]:
            raise UserError(f"{file} does not have the column {printable(unknown[0])}. {nearest(unknown[0], header)}")
        return [names[word.lower()] for word in asked]

    def usual(words: Sequence[str]) -> str:
        return next((names[word] for word in words if word in names), "")

    objects = [row for _, row in rows if row is not None]
    some = objects[:: max(1, len(objects) // _TRIED)]
    if not (images := given("file")):
        ordered = [names[word] for word in IMAGE_NAMES if word in names]
        direct = {name: sum(bool(find.direct(cell(row.get(name)))) for row in some) for name in ordered}
        images = [name for name in ordered if 2 * direct[name] > len(some)][:1]
    if not images and some:
        texts = {name: [cell(row.get(name)) for row in some] for name in [*ordered, *header]}
        certain = {name: texts[name] for name in ordered if name.lower() in _OF_IMAGES}
        if len(several := naming(certain, find) or naming(texts, find)) < 2:
            images = several or ordered[:1]
    if not images:
        raise UserError(
            f"Which column of {file} names the images? Add ?file=COLUMN; it has {printable(', '.join(header))}. "
            f"{CSV_LAYOUT}"
        )
    rest = [name for name in header if name not in images]
    split, group = (
        "".join(given(option)) or usual(words) for option, words in (("split", _SPLITS), ("group", _GROUPS))
    )
    if not options.get("split"):  # words that have other meanings, and columns of other names
        said = [split, *rest] if split.lower() not in _SPLITS[:1] else []
        split = next((name for name in said if _is_of_splits(objects, name)), "") if said else split
    others = [name for name in rest if name not in (split, group)]
    labels = given("label") or _usual_labels(objects, others) or label_columns(objects, others)
    if not labels or (len(labels) > 1 and not options.get("label") and not _is_one_hot(objects, labels)):
        which = first_of([f"{printable(name)} ({_count(objects, name):,} values)" for name in labels or others], 6)
        several = [name for name in others if _is_one_hot(objects, [name, name])]
        way = f"; or ?label={printable(','.join(several))}, a label each" if len(several) > 1 else ""
        wanted = "" if others else "labels is missing. "
        raise UserError(
            f"Which column of {file} has the labels? {wanted}Add ?label=COLUMN: {which or 'none'}{way}. {CSV_LAYOUT}"
        )
    values = {cell(row.get(name)) for row in objects for name in labels}
    column = f"The column {printable(labels[0])} of {file} has"
    if len(labels) > 1 and {"0", "-1"} <= values:
        raise UserError(f"{column} 1, 0 and -1: write 0 or 1 for what is not known, or leave its lines out.")
    if not options.get("label") and any(map(_NUMBER.fullmatch, values)):
        raise UserError(
            f"{column} {len(values)} numbers with decimals, which are not classes: name another by ?label=COLUMN, or "
            "write classes instead."
        )
    if any(values) and all(_BOXES.fullmatch(value) for value in values if value):
        raise UserError(
            f"{column} classes with their boxes ({printable(next(filter(None, sorted(values))))[:60]}), which are not "
            "labels: write the class alone. ImageNet as it is on Kaggle is read by --data imagenet:FOLDER."
        )
    separator = options.get("separator", "" if len(labels) == 1 else "none")
    if not separator and not any(map(re.compile(r"[;|]|^[\[(]").search, values)):
        for sign, name in ((",", ","), (" ", "space"), ("/", "/")):
            parts = [_words(value, re.escape(sign)) for value in values]
            words = {word for part in parts for word in part}
            classes_alone = sign == "," and any(len(part) > 1 and values & {*part} for part in parts)
            if len(words) < len(values) or classes_alone:
                raise UserError(
                    f"{column} {len(values)} labels, or several of {len(words)} "
                    f"({first_of(sorted(map(printable, words)), 4)}) in a line. Add ?separator={name}, or =none for "
                    "one label a line."
                )
    separator = {"": "[;|]", "space": r"\s+", "none": ""}.get(separator, re.escape(separator))
    return _Columns(images, labels, split, group, separator)


def _is_of_splits(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether the values of a column are splits, one of them train."""
    values = {cell(row.get(name)) for row in rows}
    words = {value: split_word(value) for value in values if len(values) <= _MOST_SPLITS}
    said = {word[0] for word in words.values() if word}
    return all(words.values()) and "train" in said and len(said) > 1


def _usual_labels(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """The columns that are called as labels: one of those that say the same, rather one of words than of numbers."""
    called = [name for word in _LABELS for name in names if name.lower() == word]
    several = [name for name in called if _count(rows, name) > 1] or called[:1]
    kept: list[str] = []
    for name in sorted(several, key=lambda name: all(cell(row.get(name)).isdigit() for row in rows)):
        pairs = {other: len({(cell(row.get(name)), cell(row.get(other))) for row in rows}) for other in kept}
        if not any(_count(rows, name) == _count(rows, other) == count for other, count in pairs.items()):
            kept.append(name)
    return kept


def _count(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return len({cell(row.get(name)) for row in rows})


def _is_one_hot(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> bool:
    return len(names) > 1 and all({cell(row.get(name)).lower() for row in rows} <= _YES | _NO for name in names)


def label_columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """The columns that may hold labels: those of yes and no if there are several, or those with few values, which are
    words or whole numbers."""
    names = [name for name in names if not ((word := split_word(name)) and word[1] <= {"is"})]  # is_test, valid
    names = [name for name in names if not _OF_NO_CLASS.fullmatch(name)] or names
    yes_or_no = [name for name in names if _is_one_hot(rows, [name, name]) and _count(rows, name) > 1]
    fitting = []
    for name in names:
        values = {cell(row.get(name)) for row in rows}
        if 1 < len(values) <= max(2, len(rows) / 2) and not any(map(_NUMBER.fullmatch, values)):
            fitting.append(name)
    return yes_or_no if len(yes_or_no) > 1 and set(fitting) <= set(yes_or_no) else fitting


# A table next to images that were given as a folder


def table_of(tree: Tree, reading: Reading, where: str) -> Source | None:
    """The source that a table makes of images without class folders, as Hugging Face writes it (metadata.csv or .jsonl
    with file_name); None if no table contradicts the folders. Raises UserError where one does."""
    places, folder = places_of(tree, reading), Path(tree.path)
    beside = [(place, split) for split, some in places.items() for place, _ in some] + [(tree, "")]
    if not any(ending_of(name) in TABLES for place, _ in beside for name in place.others):
        return None
    class_of = {
        _relative(tree, path): name
        for some in places.values()
        for place, label in some
        for name, below in ([(label, place)] if label else place.filled.items())
        for path in below.paths()
    }
    if not class_of:
        tables = [
            (Path(place.path, name), split)
            for place, split in beside
            for name in place.others
            if stem_of(name) == "metadata" and ending_of(name) in TABLES
        ]
        of_splits = [(path, split) for path, split in tables if path.parent != folder] or tables[:1]
        if of_splits and all("file_name" in read_rows(path)[0] for path, _ in of_splits):
            return labeled(where, folder, of_splits, {"file": "file_name"}, whole=True)
    classes = set(class_of.values())
    lines = [] if len(classes) > 1 else _of_splits(tree, where, places)
    lines += specifications(tree, where, class_of if len(classes) > 1 else {})
    if not lines:
        return None
    folders = (
        f"the folders ({first_of(sorted(map(printable, classes)), 4)}) say others" if classes else "no folder does"
    )
    said = f"A table in {where} says the labels of its images, and {folders}. Say which is meant:"
    raise UserError("\n".join([said, *lines, in_words(tree, reading, where)]))


def _of_splits(tree: Tree, where: str, places: Mapping[str, Sequence[tuple[Tree, str]]]) -> list[str]:
    """A line for tables that have the labels together: one in the folder of each split, or one that is called so."""
    of_splits = [
        (_relative(tree, os.path.join(place.path, name)), split)
        for split, some in places.items()
        for place, _ in some
        for name in place.others
        if place is not tree and ending_of(name) in TABLES
    ]
    names = [name for name in tree.others if ending_of(name) in TABLES]
    of_splits = of_splits or [(name, word[0]) for name in names if (word := split_word(stem_of(name)))]
    if len({split for _, split in of_splits}) == len(of_splits) > 1:
        with suppress(UserError):
            folder, option = Path(tree.path), ",".join(f"{name}:{split}" for name, split in of_splits)
            source = labeled(where, folder, [(folder / name, split) for name, split in of_splits], {}, whole=True)
            counts = ", ".join(f"{len(part)} for {split}" for split, part in source.splits.items())
            return [
                f'  {first_of([*source.classes], 4)} ({counts}): --data "{where}?labels={quote(option, safe="/ :,")}"'
            ]
    return []


def _relative(tree: Tree, path: str) -> str:
    return normalize("NFC", path[len(tree.path) + 1 :].replace(os.sep, "/"))


def specifications(tree: Tree, where: str, class_of: Mapping[str, str] = {}) -> list[str]:
    """A line for each column of labels in the tables next to the images. class_of: the class of each path by its
    folder; tables that agree with it are left out, and those whose columns are not called as labels."""
    lines = []
    for name in tree.others:
        header, rows = list[str](), list[Row]()
        try:
            header, rows = read_rows(Path(tree.path, name)) if ending_of(name) in TABLES else ([], [])
        except UserError as error:
            if not class_of and ending_of(name) != ".txt":  # which may be another kind of text
                lines.append(f"  {error}")
        objects = [row for _, row in rows if row is not None]
        file, paths = _named_in(tree, header, objects, bool(class_of)) if len(header) > 1 and objects else ("", [])
        word, root = split_word(stem_of(name)), None
        if not file and word and objects and not class_of:  # of a split, whose images are called as those of others
            root = next((below for below in tree.folders.values() if split_word(below.name) == word), None)
            file, paths = _named_in(root, header, objects, False) if root else ("", [])
        if not file:
            continue
        others = [column for column in header if column != file]
        if any(_agrees(column, objects, paths, class_of) for column in others if class_of):
            continue
        usual = [name for name in others if name.lower() in _LABELS and _count(objects, name) > 1]
        fitting = [name for name in label_columns(objects, others) if name.lower() not in (*_SPLITS, *_GROUPS)]
        columns = usual or ([] if class_of else fitting)
        groups = [c for c in others if c not in columns and _are_groups([cell(row.get(c)) for row in objects])]
        options = {"labels": name, "file": file} | ({"root": root.name} if root else {})
        more = {"group": groups[0]} if len(groups) == 1 else {}
        if _is_one_hot(objects, columns):
            found = {f"labels in the columns {first_of([*map(printable, columns)], 4)}": options | more}
        else:
            values = [first_of(sorted({printable(cell(row.get(c))) for row in objects}), 4) for c in columns[:3]]
            found = {
                f"{v} in the column {c}": options | {"label": c} | more for v, c in zip(values, columns, strict=False)
            }
        for text, chosen in found.items():
            query = "&".join(f"{key}={quote(value, safe=' /')}" for key, value in chosen.items())
            lines.append(f'  {text}: --data "{where}?{query}"')
    return lines


def _are_groups(values: Sequence[str]) -> bool:
    """Whether they look like the numbers of patients or scenes that have a few images each."""
    count = len(set(values))
    return len(values) / 5 <= count < len(values) and all(re.search(r"[^\W\d_].*\d", value) for value in values)


def _named_in(
    tree: Tree, header: Sequence[str], rows: Sequence[Mapping[str, Any]], most: bool
) -> tuple[str, list[str | None]]:
    """The column whose rows name at least 80 % of the images of the folder or, unless `most`, images by 80 % of them;
    and the path of each row."""
    finder = Finder([_relative(tree, path) for path in tree.paths()])

    def paths(column: str, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        values, found = [cell(row.get(column)) for row in rows], list[str | None]()
        for value in values if 5 * len(set(values)) >= 4 * len(values) else ():
            try:
                found.append(finder.find(value))
            except ValueError:
                found.append(None)
        return found

    few = rows[:_TRIED]
    alike = sum(5 * sum(map(bool, paths(column, few))) >= 4 * len(few) for column in header)  # an image and its mask
    best = naming({column: [cell(row.get(column)) for row in few] for column in header}, finder.find)
    ordered = sorted(header, key=lambda name: (name.lower() not in _OF_IMAGES, name not in best))
    for column in ordered if tree.count else ():
        named = sum(map(bool, found := paths(column, rows)))
        if 5 * named * max(1, alike) >= 4 * tree.count or (not most and 5 * named >= 4 * len(rows)):
            return column, found
    return "", []


def _agrees(
    column: str, rows: Sequence[Mapping[str, Any]], paths: Sequence[str | None], class_of: Mapping[str, str]
) -> bool:
    """Whether a column says the same as the class folders, in its own words, of nearly all images."""
    pairs = Counter(
        (class_of[p], cell(row.get(column))) for row, p in zip(rows, paths, strict=True) if p and p in class_of
    )
    words: dict[str, tuple[int, str]] = {}
    for (name, word), count in pairs.items():
        words[name] = max(words.get(name, (0, "")), (count, word))
    common = sum(count for count, _ in words.values())
    return len({word for _, word in words.values()}) == len(words) > 1 and common >= _NEARLY_ALL * pairs.total()
