"""Lists that say which images of class folders are in which split, one image a line.

    food-101/images/apple_pie/134.jpg
    food-101/meta/train.txt             apple_pie/134
    food-101/meta/test.txt

Lines name an image by its path, with or without ending, and may have more columns, such as its label. Lists are used as
`?splits=../meta/train.txt:train,../meta/test.txt:test`; where they are there and nobody says so, an error shows this.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from vitmods.data.records import SPLITS, Records, printable
from vitmods.data.sources.layout import Tree, ending_of, is_dir, split_word, stem_of
from vitmods.util.errors import UserError
from vitmods.util.tables import IMAGE_NAMES, Finder, read_rows

ENDINGS = {".txt", ".csv", ".tsv", ".lst", ".list"}
MOST_ENTRIES, MOST_FOLDERS = 1000, 20  # of the folder above, in which lists are looked for
TRIED = 50  # lines of a list
NAMED = 0.9  # of the images, at least, that lists name together
_WHOLE = "\x1f"  # no file has it in a line, so that a line is one column


def divide(records: Records, root: Path, lists: Mapping[str, str]) -> tuple[dict[str, Records], list[str]]:
    """Return the images of each split, and what to say of those that no list names.

    lists: file, as a path from root -> split. Raises UserError where a list names something else, or two name an image.
    """
    position = {name: i for i, name in enumerate(records.ids)}
    finder, split_of = Finder(records.ids), dict[int, str]()
    for file, split in lists.items():
        shown = printable(str(root / file))
        for line, name in _lines(root / file):
            try:
                found = _find(finder, name)
            except ValueError as error:
                raise UserError(f"Line {line} of {shown}: {printable(name)} {error}.") from None
            if found is None and line == 1 and _is_header(name):
                continue
            if found is None:
                raise UserError(
                    f"Line {line} of {shown} names {printable(name)}, which {printable(str(root))} does not have: "
                    "correct the line, or leave the list out of splits."
                )
            if split_of.setdefault(position[found], split) != split:
                raise UserError(f"{printable(found)} is in the lists of two splits: leave it out of one ({shown}).")
    parts = {split: sorted(i for i, other in split_of.items() if other == split) for split in SPLITS}
    left = len(records) - len(split_of)
    return (
        {split: records.take(np.array(part)) for split, part in parts.items() if part},
        [f"{left:,} images that no list of a split names were left out."] * bool(left),
    )


def find_lists(tree: Tree, records: Records) -> tuple[dict[str, str], dict[str, Records]]:
    """Find lists of a folder's images, in it and next to it: file, as a path from root -> split; and what they divide.

    Empty unless those of one folder name nearly all images, each in one split, and train is one of several.
    """
    root, finder = Path(tree.path), None
    for folder, names in _places(tree):
        of_split: dict[str, str] = {}
        for name in sorted(names):
            word = split_word(stem_of(name)) if ending_of(name) in ENDINGS else None
            if word is None or word[0] in of_split:
                continue
            finder = finder or Finder(records.ids)
            with suppress(UserError, ValueError):  # another kind of text, or names that several images have
                lines = islice(_lines(Path(folder, name)), TRIED)
                first = [_find(finder, line) for number, line in lines if number > 1 or not _is_header(line)]
                if first and all(first):
                    of_split[word[0]] = name
        if "train" not in of_split or len(of_split) < 2:
            continue
        lists = {os.path.relpath(os.path.join(folder, of_split[s]), root): s for s in SPLITS if s in of_split}
        with suppress(UserError):
            parts, _ = divide(records, root, lists)
            if sum(map(len, parts.values())) >= NAMED * len(records):
                return {file.replace(os.sep, "/"): split for file, split in lists.items()}, parts
    return {}, {}


def _places(tree: Tree) -> Iterator[tuple[str, list[str]]]:
    """Yield the folder, the one above it, and those in both without pictures, each with the names of its files."""
    for inside in (tree, *(below for below in tree.folders.values() if not below.count)):
        yield inside.path, inside.others
    here = os.path.abspath(tree.path)
    files, folders = _entries(os.path.dirname(here))
    yield os.path.dirname(here), files
    for path in folders if len(folders) <= MOST_FOLDERS else ():
        if path != here:
            yield path, _entries(path)[0]


def _entries(folder: str) -> tuple[list[str], list[str]]:
    """The names of files, and the paths of folders, of which the first ones of a large folder are enough."""
    with suppress(OSError), os.scandir(folder) as entries:
        some = [entry for entry in islice(entries, MOST_ENTRIES) if not entry.name.startswith(".")]
        return [e.name for e in some if not is_dir(e)], sorted(e.path for e in some if is_dir(e))
    return [], []


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line that is not empty. Raises UserError for what is not text."""
    header, rows = read_rows(path, delimiter=_WHOLE)
    yield from ((1, line) for line in header)
    for number, row in rows:
        yield number, str((row or {}).get(header[0], ""))


def _find(finder: Finder, line: str) -> str | None:
    """The image that a line names: all of it (names may have spaces), or its first column. Raises ValueError where
    several could be meant."""
    columns = re.split(r"[,;\t|]", line)[0].strip(' "'), line.split()[0], line.rsplit(maxsplit=1)[0]
    return next(filter(None, map(finder.find, dict.fromkeys([line, *columns]))), None)


def _is_header(line: str) -> bool:
    return re.split(r"[,;\t| ]", line.lower())[0].strip('"') in IMAGE_NAMES
