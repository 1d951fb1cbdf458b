"""Lists that say which images of class folders are in which split, one image a line.

    food-101/images/apple_pie/134.jpg
    food-101/meta/train.txt             apple_pie/134
    food-101/meta/test.txt

Lines name an image by its path, with or without ending, and may have more columns, such as its label; one column of a
list has the names. Lists are used as `?splits=../meta/train.txt:train,../meta/test.txt:test`; where they are there and
nobody says so, an error shows this.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import numpy as np

from vitmods.data.records import SPLITS, Records, printable, split_named
from vitmods.data.sources.layout import Tree, ending_of, is_dir, split_word, stem_of
from vitmods.util.errors import UserError, explaining
from vitmods.util.limits import MOST_COLUMNS
from vitmods.util.tables import Finder, divided, find_any, is_header, naming, read_lines
from vitmods.util.text import first_of

ENDINGS = {".txt", ".csv", ".tsv", ".lst", ".list"}
MOST_ENTRIES, MOST_FOLDERS = 1000, 20  # of the folder above, in which lists are looked for
TRIED = 50  # lines of a list
_TOGETHER = re.compile(r"train[-_ ]?(test|val)|splits?$", re.IGNORECASE)  # of train_test_split.txt
_WHOLE = "\x1f"  # no file has it in a line, so that a line is one column
_FIRST, _LAST = "first", "last"  # a line is divided after its first word, or before its last word
_WAYS = (*",;\t| ", _FIRST, _LAST, _WHOLE)


def divide(
    records: Records, root: Path, lists: Mapping[str, str], classes: Sequence[str]
) -> tuple[dict[str, Records], list[str]]:
    """Return the images of each split, and what to say of those that no list names, or a list twice.

    lists: file, as a path from root -> split. Raises UserError where a list names something else, or says another class
    or split, or two lists name an image.
    """
    position, words = {name: i for i, name in enumerate(records.ids)}, {name for name in classes if not name.isdigit()}
    finder, split_of, repeated = Finder(records.ids), dict[int, str](), 0
    for file, split in lists.items():
        shown, column, other = printable(str(root / file)), -1, dict[int, str]()
        for number, column, cells in _lines(root / file, finder):
            where, name = f"Line {number} of {shown}", cells[column]
            with explaining(lambda error: f"{where}: {printable(name)} {error}.", ValueError):  # noqa: B023
                found = finder.find(name)
            if found is None:
                raise UserError(
                    f"{where} names {printable(name)}, which {printable(str(root))} does not have: "
                    "correct the line, or leave the list out of splits."
                )
            image = position[found]
            repeated += image in split_of
            if split_of.setdefault(image, split) != split:
                raise UserError(f"{printable(found)} is in the lists of two splits: leave it out of one ({shown}).")
            label = classes[records.labels[image]]
            for key, word in enumerate(cells):
                meant = split_named(word)
                if key != column and word not in words and not meant:
                    other[key] = ""  # a column of other things than classes or splits
                elif key != column and word != label and meant != split:
                    other.setdefault(key, f"{where} says {word} of {found}")
        if column < 0:
            raise UserError(f"{shown} does not name any image: leave it out of splits.")
        if said := next(filter(None, other.values()), ""):
            raise UserError(
                f"{printable(said)}, which its folder or the option splits contradicts: correct the line. Or leave "
                f'splits out, and write "?labels={as_option(lists)}" if the lists have the labels, or --split-file '
                f"{shown} if it has the splits."
            )
    parts = {split: sorted(i for i, other in split_of.items() if other == split) for split in SPLITS}
    left = len(records) - len(split_of)
    return (
        {split: records.take(np.array(part)) for split, part in parts.items() if part},
        [f"{left:,} images that no list of a split names were left out."] * bool(left)
        + [f"{repeated:,} lines that repeat another were left out."] * bool(repeated),
    )


def as_option(lists: Mapping[str, str]) -> str:
    """The option of a specification that names lists and their splits."""
    return ",".join(f"{quote(file, safe='/. ')}:{split}" for file, split in lists.items())


def find_lists(
    tree: Tree, records: Records, classes: Sequence[str]
) -> tuple[dict[str, str], dict[str, Records], list[str]]:
    """Find lists of a folder's images, in it and next to it: file, as a path from root -> split; what they divide; and
    what to say of those that cannot be used.

    Empty unless those of one folder name images, each in one split, and train is one of several.
    """
    root, finder, notes = Path(tree.path), None, list[str]()
    for folder, names in _places(tree):
        together = [name for name in names if ending_of(name) in ENDINGS and _TOGETHER.search(stem_of(name))]
        notes += [
            f"{printable(os.path.join(folder, name))} may have the splits of these images and was not used: a list of "
            "names for each split is (?splits=FILE:train,FILE:test), or a table with the columns image and split "
            "(--split-file)."
            for name in together
            if split_word(stem_of(name)) is None
        ]
        of_split: dict[str, str] = {}
        for name in sorted(names):
            word = split_word(re.sub("(?i)(train)val", r"\1", stem_of(name))) if ending_of(name) in ENDINGS else None
            if word is None or word[0] in of_split:
                continue
            finder = finder or Finder(records.ids)
            with suppress(UserError):  # another kind of text
                lines = islice(_lines(Path(folder, name), finder), TRIED)
                if any(find_any(finder.find, cells[column]) for _, column, cells in lines):
                    of_split[word[0]] = os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")
        lists = {of_split[split]: split for split in SPLITS if split in of_split}
        if not lists:
            continue
        try:
            parts, left = divide(records, root, lists, classes)
        except UserError as error:
            notes.append(f"The lists {first_of([*map(printable, lists)], 3)} were not used: {error}")
            continue
        if len(parts) > 1 and "train" in parts:
            return lists, parts, notes
        if left or len(lists) > 1:
            notes.append(
                f"The lists {first_of([*map(printable, lists)], 3)} were not used. If they are meant, write "
                f'"?splits={as_option(lists)}".'
            )
    return {}, {}, notes


def _places(tree: Tree) -> Iterator[tuple[str, list[str]]]:
    """Yield the folder, those in it without pictures, the one above it, and those next to it that have files alone,
    each with the names of its files: one with folders in it is another set, whose lists are its own."""
    for inside in (tree, *(folder for folder in tree.walk() if not folder.count)):
        yield inside.path, inside.others
    here = os.path.abspath(tree.path)
    files, folders = _entries(os.path.dirname(here))
    yield os.path.dirname(here), files
    for path in folders if len(folders) <= MOST_FOLDERS else ():
        files, below = _entries(path)
        if path != here and not below:
            yield path, files


def _entries(folder: str) -> tuple[list[str], list[str]]:
    """The names of files, and the paths of folders, of which the first ones of a large folder are enough."""
    with suppress(OSError), os.scandir(folder) as entries:
        some = [entry for entry in islice(entries, MOST_ENTRIES) if not entry.name.startswith(".")]
        return [e.name for e in some if not is_dir(e)], sorted(e.path for e in some if is_dir(e))
    return [], []


def _lines(path: Path, finder: Finder) -> Iterator[tuple[int, int, list[str]]]:
    """Yield the number of each line that is not empty or a header, the column that names the image, and all columns.

    Raises UserError for what is not text, and where two columns name images.
    """
    with explaining(lambda error: f"{printable(str(path))} cannot be read as a list: {error}.", ValueError):
        lines = read_lines(path)
        columns: dict[tuple[str, int], list[str]] = {}
        for _, line in lines[1:][:: max(1, len(lines) // TRIED)] or lines:
            for way in _WAYS:
                for column, cell in enumerate(_columns(line, way)[:MOST_COLUMNS]):
                    columns.setdefault((way, column), []).append(cell)
        if len(best := naming(columns, finder.find)) > 1:
            texts = " or ".join(printable(columns[key][0]) for key in best)
            raise UserError(f"{printable(str(path))} names different images in its columns ({texts}): keep one column.")
        way, column = best[0] if best else (_WHOLE, 0)
        for number, line in lines:
            cells = [*_columns(line, way), *[""] * column]
            if number > lines[0][0] or not is_header(cells) or find_any(finder.find, cells[column]):
                yield number, column, cells


def _columns(line: str, way: str) -> list[str]:
    if way in (_FIRST, _LAST):
        return line.split(maxsplit=1) if way == _FIRST else line.rsplit(maxsplit=1)
    return divided(line, way)
