"""A folder with one sub-folder per class, with or without train, val and test folders above them.

Hidden files, files with other endings and repeated directories (links that loop) are left out; all but hidden ones are
counted in the warnings. Files are only listed here, never opened.
"""

import functools
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from vitmods.data.read import Unreadable, reading
from vitmods.data.records import ENDINGS, Records, Source, printable, split_named
from vitmods.data.sources import Spec, data_source, known_specs
from vitmods.util.errors import UserError
from vitmods.util.files import expand_user, similar_folder
from vitmods.util.limits import lines_of, read_bytes

LAYOUT = "Expected FOLDER/class/image.jpg, or FOLDER/train/class/image.jpg with val and test next to train."
_IMAGES = {"image", "images", "img", "imgs", "jpegimages"}
_MASKS = {"annotation", "annotations", "gt", "labels", "mask", "masks", "segmentation", "segmentationclass", "trimaps"}


@dataclass
class _Files:
    """Images below one folder, and what was left out. Paths are strings: a million Path objects take seconds."""

    paths: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    other_endings: Counter[str] = field(default_factory=Counter)
    repeated: list[str] = field(default_factory=list)
    loose: int = 0
    inner_splits: set[str] = field(default_factory=set)
    empty: list[str] = field(default_factory=list)


@data_source(
    "folder",
    "path/to/folder",
    "one sub-folder per class, directly or below `train`, `val` and `test` folders",
    options=("stream", "buffer"),
)
def open_folder(spec: Spec) -> Source:
    """A folder of class folders."""
    source = folder(spec.rest)
    source.streaming = spec.streaming()
    return source


def folder(path: str | Path) -> Source:
    """List the images of a folder. Without any class folder its target is "nothing". Raises UserError if it is missing,
    not a folder, or without images."""
    where, root = printable(str(path)), expand_user(path)
    if not os.path.exists(root):  # unlike Path.exists, False for a name that is too long for the system
        hint = similar_folder(root) or f"Give a folder of images, or one of: {known_specs()}."
        raise UserError(f"The folder {where} does not exist. {hint}")
    if not root.is_dir():
        raise UserError(f"{where} is a file. Give the folder that holds the class folders. {LAYOUT}")
    with _listing():
        entries = list(root.iterdir())
        if any(entry.suffix == ".tar" for entry in entries) and not any(entry.is_dir() for entry in entries):
            raise UserError(
                f"{where} holds tar files without a manifest.json. If `vitmods data pack` was stopped before its "
                f"end, run it again; shards from elsewhere are read as wds:{where}."
            )
        of_splits = _split_folders(root)
        unused = [printable(p.name) for p in _directories(root) if p not in of_splits.values()] if of_splits else []
        text = f"Beside the split folders, these folders were not used: {', '.join(unused)}."
        warnings, folders = [text] if unused else [], of_splits or {"train": root}
        name = printable(root.resolve().name)
        if not any(map(_directories, folders.values())) and any(map(loose_images, folders.values())):
            splits = {}
            for split, path in folders.items():
                paths = [path / image for image in loose_images(path)]
                ids = tuple(normalize("NFC", image.relative_to(root).as_posix()) for image in paths)
                splits[split] = file_records(ids, np.zeros(len(ids), dtype=np.int64), paths)
            return Source(name, ("image",), splits, warnings, target="nothing")
    classes, splits, more = class_folders(root, folders)
    nested = not of_splits and any(image.count("/") > 1 for image in splits["train"].ids)
    if nested and (below := _deeper(root, classes)):
        raise UserError(f"{where} is above the folders of the classes. Give {' or '.join(below)}. {LAYOUT}")
    images, masks = ([label for label in classes if label.lower() in usual] for usual in (_IMAGES, _MASKS))
    if images and masks:
        raise UserError(
            f"{where} holds {printable(images[0])} and {printable(masks[0])}, which look like images and their masks "
            f"instead of two classes. For segmentation write masks:{where} (with classes.txt next to them); if they "
            "are classes, rename one."
        )
    return Source(name, tuple(map(printable, classes)), splits, warnings + more)


def _deeper(root: Path, classes: Sequence[str]) -> list[str]:
    """The folders up to three levels below root that are probably meant, where these are not classes: each has a train
    folder with class folders below it, or there would be only one class and they have several."""

    def has_train(path: Path) -> bool:
        return any(split_named(p.name) == "train" and len(_directories(p)) > 1 for p in _directories(path))

    level = [path for path in _directories(root) if normalize("NFC", path.name) in classes]
    for _ in range(3):
        meant = [path for path in level if has_train(path)]
        if len(classes) == 1 and not meant:
            meant = [path for path in level if sum(bool(loose_images(inner)) for inner in _directories(path)) > 1]
        if meant and (len(meant) == len(level) or len(classes) == 1):
            return [printable(str(path)) for path in meant]
        level = [inner for path in level for inner in _directories(path)]
    return []


def class_folders(
    root: Path, folders: dict[str, Path], order: Sequence[str] | None = None
) -> tuple[tuple[str, ...], dict[str, Records], list[str]]:
    """Class names, records and warnings of split folders at or below root that hold one folder per class.

    order: all possible classes, in their order; otherwise the folders' names, sorted. Raises UserError without images,
    and for folders that are not in `order`.
    """
    with _listing():
        listed = {split: _list(path) for split, path in folders.items()}
    warnings = [
        text for split, files in listed.items() for text in _file_warnings(printable(str(folders[split])), files)
    ]
    names = sorted({label for files in listed.values() for label in files.labels})
    if not names:
        where = " and ".join(printable(str(path)) for path in folders.values())
        raise UserError(" ".join([f"No images in class folders under {where}. {LAYOUT}", *warnings]))
    if strange := [name for name in names if order is not None and name not in order]:
        examples = ", ".join(map(printable, strange[:5]))
        raise UserError(
            f"Folders under {printable(str(root))} that are not classes of this set: {examples}. Move them."
        )
    classes, splits, start = tuple(order or names), {}, len(os.path.join(root, ""))
    number = {name: i for i, name in enumerate(classes)}
    for split, files in listed.items():
        ids = [normalize("NFC", path[start:].replace(os.sep, "/")) for path in files.paths]
        images = sorted(zip(ids, files.paths, files.labels, strict=True))
        labels = np.array([number[label] for *_, label in images], dtype=np.int64)
        splits[split] = file_records(tuple(name for name, *_ in images), labels, [path for _, path, _ in images])
    return classes, splits, warnings


@contextmanager
def _listing() -> Iterator[None]:
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
    for path in _directories(root):
        if (split := split_named(path.name)) and folders.setdefault(split, path) != path:
            raise UserError(f"Both {folders[split].name} and {path.name} in {root} could be {split}: keep one.")
    return folders


def _split_folders(root: Path) -> dict[str, Path]:
    """The train, val and test folders, or {} where the class folders are directly under root."""
    folders = folders_of_splits(root)
    # A class may be called "train" or "test" (vehicles, say): a train folder without folders is a split only where all
    # its neighbors are called as splits too.
    alone = len(folders) > 1 and len(folders) == len(_directories(root))
    if "train" in folders and (alone or _directories(folders["train"])):
        return folders
    if folders and "train" not in folders and all(map(_directories, folders.values())):
        names = " and ".join(path.name for path in folders.values())
        raise UserError(f"{printable(str(root))} holds {names} with class folders, but not a train folder. {LAYOUT}")
    return {}


def _directories(root: Path) -> list[Path]:
    with os.scandir(root) as entries:
        return sorted(Path(e.path) for e in entries if not e.name.startswith(".") and _is_dir(e))


def _is_dir(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that points to itself
        return False


def _list(split_folder: Path) -> _Files:
    files = _Files()
    files.loose = len(loose_images(split_folder))
    seen = {_identity(split_folder)}
    for class_folder in _directories(split_folder):
        before = len(files.paths)
        if class_folder.name == "__MACOSX":
            continue
        _walk(class_folder, normalize("NFC", class_folder.name), seen, files)
        if len(files.paths) == before:
            files.empty.append(printable(class_folder.name))
    return files


def loose_images(folder: Path) -> list[str]:
    """Names of the images that lie directly in a folder, sorted."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if _ending(e.name) in ENDINGS and os.path.isfile(e))


def _ending(name: str) -> str:
    """Return ".jpg" of a file's name that starts without a dot; os.path.splitext takes four times as long."""
    dot = name.rfind(".")
    return name[dot:].lower() if dot > 0 else ""


def images_below(folder: Path) -> list[Path]:
    """All images in a folder and its sub-folders by their endings, hidden ones left out, sorted. UserError where a
    folder cannot be listed."""
    files = _Files()
    with _listing():
        _walk(folder, "", set(), files)
    return sorted(map(Path, files.paths))


def _walk(folder: Path, label: str, seen: set[tuple[int, int]], files: _Files) -> None:
    pending = [str(folder)]
    while pending:
        current = pending.pop()
        if (identity := _identity(current)) in seen:
            files.repeated.append(printable(current))
            continue
        seen.add(identity)
        with os.scandir(current) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if _is_dir(entry):
                    pending.append(entry.path)
                    files.inner_splits |= {entry.name} if split_named(entry.name) else set()
                elif (ending := _ending(entry.name)) in ENDINGS:
                    files.paths.append(entry.path)
                    files.labels.append(label)
                else:
                    files.other_endings[ending or "no ending"] += 1


def _identity(path: Path | str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


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


def _file_warnings(where: str, files: _Files) -> list[str]:
    inner = ", ".join(map(printable, sorted(files.inner_splits)))
    endings = printable(", ".join(f"{count} {ending}" for ending, count in files.other_endings.most_common()))
    warnings = {
        f"{files.loose} images directly in {where}, outside of class folders, were not used.": files.loose,
        f"These folders of {where} do not hold images and are not classes: {', '.join(files.empty)}.": files.empty,
        f"Folders inside of class folders are not splits: {inner}. Put the classes inside of them instead.": (
            len(files.inner_splits) > 1
        ),
        f"Linked folders already read once were not read again: {', '.join(files.repeated)}.": files.repeated,
        f"Files in {where} that are not images by their ending were not used: {endings}.": files.other_endings,
    }
    return [text for text, applies in warnings.items() if applies]


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
