"""A folder with one sub-folder per class, with or without train, val and test folders above them.

Files are only listed here; `layout` says what the folders are. Hidden files, files that are not pictures and repeated
directories (links that loop) are left out; all but hidden ones are counted in the warnings.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from unicodedata import normalize

import numpy as np

from vitmods.data.records import Records, Source, printable, split_named
from vitmods.data.sources import Spec, data_source, known_specs, labels
from vitmods.data.sources.files import file_records, listing
from vitmods.data.sources.layout import (
    LAYOUT,
    SeveralReadings,
    Tree,
    ending_of,
    in_words,
    leave_out_copies,
    list_tree,
    parse_reading,
    places_of,
    understand,
)
from vitmods.data.sources.lists import as_option, divide, find_lists
from vitmods.util.errors import UserError
from vitmods.util.files import expand_user, similar_folder
from vitmods.util.tables import TABLES
from vitmods.util.text import first_of

Places = Mapping[str, list[tuple[Tree, str]]]
"""split -> its folders, each with its class, or "" where the folders in it are classes"""


@data_source(
    "folder",
    "path/to/folder",
    "one sub-folder per class, with or without splits (`?splits=`), or images and a table of their labels (`?labels=`)",
    options=("stream", "buffer", "splits", *labels.LABEL_OPTIONS),
)
def open_folder(spec: Spec) -> Source:
    """A folder of class folders, or of images and a table with their labels."""
    options = spec.options
    if "labels" in options or ("splits" not in options and os.path.isfile(spec.folder / labels.CSV)):
        if "splits" in options:
            raise UserError(f'"{spec}": the splits are those of the table (?split=COLUMN): leave splits out.')
        source = labels.from_option(spec, options.get("labels", labels.CSV))
    elif given := [name for name in labels.LABEL_OPTIONS if name in options]:
        raise UserError(f'"{spec}": {given[0]} is a column of a table: write "?labels=FILE&{given[0]}=...".')
    else:
        source = folder(spec.rest, options.get("splits"))
    source.streaming = spec.streaming()
    return source


def folder(path: str | Path, splits: str | None = None) -> Source:
    """List the images of a folder. Without any class folder its target is "none".

    splits: as the option. Raises UserError if it is missing, not a folder, or without images, and if what its folders
    are is not clear.
    """
    where, root = printable(str(path)).rstrip("/") or "/", expand_user(path)
    if not os.path.exists(root):  # unlike Path.exists, False for a name that is too long for the system
        hint = similar_folder(root) or f"Give a folder of images, or one of: {known_specs()}."
        raise UserError(f"The folder {where} does not exist. {hint}")
    if root.suffix.lower() in TABLES:
        raise UserError(f'{where} is a file. If it says the labels, write "{root.parent}?labels={root.name}".')
    if not root.is_dir():
        raise UserError(f"{where} is a file. Give the folder that holds the class folders. {LAYOUT}")
    with listing():
        tree, repeated = list_tree(root)
        if any(name.endswith(".tar") for name in tree.others) and not tree.folders:
            raise UserError(
                f"{where} holds tar files without a manifest.json. If `vitmods data pack` was stopped before its "
                f"end, run it again; shards from elsewhere are read as wds:{where}."
            )
        warnings = leave_out_copies(tree)
        given = None if splits is None else parse_reading(splits)
        lists = {name: split for name, split in (given or {}).items() if (root / name).is_file()}
        if lists and given:
            given = {name: split for name, split in given.items() if name not in lists} or None
        try:
            found, notes = understand(tree, where) if given is None else (given, [])
        except SeveralReadings as error:  # a table may say what is meant
            lines = labels.specifications(error.tree, error.where)
            raise UserError("\n".join([error.text(as_option(lists)), *lines])) from None
        if given is None and not lists and (table := labels.table_of(tree, found, where)):
            return table
    places = places_of(tree, found)
    warnings += [f"Linked folders already read once were not read again: {', '.join(repeated)}."] if repeated else []
    inside = {id(place): label for some in places.values() for place, label in some}
    unused = [f"{printable(name)} ({count:,} images)" for name, count in _unused(tree, inside).items()]
    warnings += notes + [f"Beside the split folders, these folders were not used: {', '.join(unused)}."] * bool(unused)
    name = printable(root.resolve().name)
    bare = {split for split, some in places.items() if not any(label or place.filled for place, label in some)}
    if bare == places.keys() and lists:
        raise UserError(
            f"{where} does not have class folders, whose images {first_of([*map(printable, lists)], 3)} could divide. "
            f'If they have the labels, write "{where}?labels={as_option(lists)}"; or name a table of labels that has a '
            "column split (?labels=FILE)."
        )
    if bare == places.keys() and tree.count:
        records = {}
        for split, some in places.items():
            paths = sorted(path for place, _ in some for path in place.paths())
            records[split] = file_records(_ids(root, paths), np.zeros(len(paths), dtype=np.int64), paths)
        return Source(name, ("image",), records, warnings, target="none")
    for split in bare - {"train"}:  # the images of a contest's test split, say
        if count := sum(place.count for place, _ in places[split]):
            warnings.append(f"{count:,} images of {split} are in no class folder: {split} was not used.")
            del places[split]
    classes, records, more = _class_records(root, places)
    if lists:
        if records.keys() != {"train"}:
            raise UserError(f"{where} has split folders: leave the lists {first_of([*lists], 3)} out of splits.")
        records, left = divide(records["train"], root, lists, classes)
        more += left
    elif records.keys() == {"train"} and splits != "none":
        seen, parts, notes = find_lists(tree, records["train"], classes)
        more += notes
        unnamed = len(records["train"]) - sum(map(len, parts.values()))
        counts = [f"{len(part):,} for {split}" for split, part in parts.items()] + [f"{unnamed:,} for none"][:unnamed]
        text = f"lists {first_of([*map(printable, seen)], 3)} ({', '.join(counts)})"
        option = as_option(seen)
        if seen and splits is None:
            raise UserError(
                f"{where} has lists of its splits. Say whether they are meant:\n"
                f'  the {text}: --data "{where}?{"splits" if len(classes) > 1 else "labels"}={option}"\n'
                f"{in_words(tree, found, where)}, from which val and test are made"
            )
        if seen:
            more.append(f'The {text} were not used. If they are meant, write "?splits={splits},{option}".')
    return Source(name, tuple(map(printable, classes)), records, warnings + more)


def _unused(tree: Tree, places: Mapping[int, str]) -> Counter[str]:
    """Count the images of the folders that a reading passes by, by name."""
    if id(tree) in places:
        return Counter()
    if not any(id(below) in places for below in tree.walk()):
        return Counter({tree.name: tree.count})
    counts = Counter({f"directly in {tree.name}": len(tree.pictures)}) if tree.pictures else Counter[str]()
    for below in tree.folders.values():
        for name, count in _unused(below, places).items():
            counts[name] += count
    return counts


def class_folders(
    root: Path, folders: dict[str, Path], order: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, Records], list[str]]:
    """Class names, records and warnings of split folders at or below root that hold one folder per class.

    order: all possible classes, in their order. Raises UserError without images, and for other folders.
    """
    with listing():
        trees = {split: list_tree(folder) for split, folder in folders.items()}
    classes, records, warnings = _class_records(
        root, {split: [(tree, "")] for split, (tree, _) in trees.items()}, order
    )
    repeated = [name for _, names in trees.values() for name in names]
    warnings += [f"Linked folders already read once were not read again: {', '.join(repeated)}."] if repeated else []
    return classes, records, warnings


def _class_records(
    root: Path, places: Places, order: Sequence[str] | None = None
) -> tuple[tuple[str, ...], dict[str, Records], list[str]]:
    listed, warnings, all_names = dict[str, list[tuple[str, str, str]]](), list[str](), set[str]()
    for split, some in places.items():
        images, loose, empty, inner, endings = listed.setdefault(split, []), 0, [], set[str](), Counter[str]()
        for place, label in some:
            loose += 0 if label else len(place.pictures)
            for name, below in [(label, place)] if label else [(tree.name, tree) for tree in place.folders.values()]:
                paths = list(below.paths())
                images += zip(_ids(root, paths), paths, [name] * len(paths), strict=True)
                trees = list(below.walk())
                others = Counter(ending_of(file) or "no ending" for tree in trees for file in tree.others)
                endings += others
                inner |= {tree.name for tree in trees[1:] if split_named(tree.name)} if not label else set()
                if not paths and name != "__MACOSX":
                    what = ", ".join(f"{count} {ending}" for ending, count in others.most_common(3))
                    empty.append(printable(f"{name} ({what})" if what else name))
        where = " and ".join(printable(place.path) for place, _ in some[:3])
        text = printable(", ".join(f"{count} {ending}" for ending, count in endings.most_common()))
        texts = {
            f"{loose} images directly in {where}, outside of class folders, were not used.": loose,
            f"These folders of {where} do not hold images and are not classes: {', '.join(empty)}.": empty,
            f"Folders inside of class folders are not splits: {', '.join(map(printable, sorted(inner)))}. Put the "
            "classes inside of them instead.": len(inner) > 1,
            f"Files in {where} that are not images by their ending were not used: {text}.": endings,
        }
        warnings += [text for text, applies in texts.items() if applies]
        all_names |= {name for *_, name in images}
    if not all_names:
        where = " and ".join(printable(place.path) for some in places.values() for place, _ in some)
        raise UserError(" ".join([f"No images in class folders under {where}. {LAYOUT}", *warnings]))
    if strange := [name for name in sorted(all_names) if order is not None and name not in order]:
        examples = ", ".join(map(printable, strange[:5]))
        raise UserError(
            f"Folders under {printable(str(root))} that are not classes of this set: {examples}. Move them."
        )
    classes = tuple(order or sorted(all_names))
    number, splits = {name: i for i, name in enumerate(classes)}, {}
    for split, images in listed.items():
        images.sort()
        labels = np.array([number[label] for *_, label in images], dtype=np.int64)
        splits[split] = file_records(tuple(name for name, *_ in images), labels, [path for _, path, _ in images])
    return classes, splits, warnings


def _ids(root: Path, paths: Sequence[str]) -> tuple[str, ...]:
    start = len(os.path.join(root, ""))
    return tuple(normalize("NFC", path[start:].replace(os.sep, "/")) for path in paths)
