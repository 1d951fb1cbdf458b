"""Images that are files: listed, with records that read them."""

import functools
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitmods.data.read import Unreadable, reading
from vitmods.data.records import PICTURES, Records, printable, split_named
from vitmods.data.sources.layout import ending_of, is_dir, list_tree
from vitmods.util.errors import UserError
from vitmods.util.limits import lines_of, read_bytes


@contextmanager
def listing() -> Iterator[None]:
    """Turn errors of the disk into a UserError that names the folder."""
    try:
        yield
    except OSError as error:
        where = printable(str(error.filename))
        raise UserError(
            f"The folder {where} cannot be listed: {error.strerror}. Make it readable or move it."
        ) from error


def folders_of_splits(root: Path) -> dict[str, Path]:
    """The folders that are called as splits. UserError where two could be the same."""
    folders: dict[str, Path] = {}
    with os.scandir(root) as entries:
        for path in sorted(Path(e.path) for e in entries if not e.name.startswith(".") and is_dir(e)):
            if (split := split_named(path.name)) and folders.setdefault(split, path) != path:
                raise UserError(f"Both {folders[split].name} and {path.name} in {root} could be {split}: keep one.")
    return folders


def loose_images(folder: Path) -> list[str]:
    """Names of the images that lie directly in a folder, sorted."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if ending_of(e.name) in PICTURES and os.path.isfile(e))


def images_below(folder: Path) -> list[Path]:
    """All images in a folder and its sub-folders, hidden ones left out, sorted. UserError where a folder cannot be
    listed."""
    with listing():
        tree, _ = list_tree(folder)
    return sorted(map(Path, tree.paths()))


def file_records(ids: tuple[str, ...], labels: NDArray[np.int64], paths: Sequence[Path | str]) -> Records:
    """Return the records of images that are a file each."""
    absolute = functools.cache(os.path.abspath)  # of a folder, not of a million files in it

    def stamp(path: str) -> str:
        folder, _, name = path.rpartition(os.sep)
        try:
            status = os.stat(path)
        except (OSError, ValueError) as error:  # ValueError: of a name that no file can have
            return f"{path}:{getattr(error, 'errno', None)}"
        return f"{absolute(folder)}/{name}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"

    stamps = tuple(stamp(os.fspath(path)) for path in paths)

    def fetch(key: int) -> bytes:
        with reading():
            if not stat.S_ISREG(os.stat(paths[key]).st_mode):
                raise Unreadable("not a regular file")
            return read_bytes(Path(paths[key]), "image")

    return Records(ids, labels, stamps, fetch, np.arange(len(paths)))


CLASSES = "classes.txt"


def class_names(path: Path) -> list[str]:
    """The lines of the file that are not empty, in their order; none without the file.

    Raises:
        UserError: it is not text in UTF-8, or names a class twice.
    """
    if not path.is_file():
        return []
    names = lines_of(path)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{printable(str(path))} names {printable(twice[0])} twice: leave one out.")
    return names
