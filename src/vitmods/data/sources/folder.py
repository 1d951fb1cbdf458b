"""A folder with one sub-folder per class, with or without train, val and test folders above them; and images that a
CSV file lists with any number of labels.

Hidden files, files with other endings and repeated directories (links that loop) are left out; all but hidden ones are
counted in the warnings. Files are only listed here, never opened.
"""

import functools
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from vitmods.data.multilabel import with_rarest
from vitmods.data.read import Unreadable, reading
from vitmods.data.records import ENDINGS, Records, Source, printable, split_named
from vitmods.data.sources import Spec, data_source, known_specs
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import expand_user, similar_folder
from vitmods.util.limits import lines_of, read_bytes, read_table

LAYOUT = "Expected FOLDER/class/image.jpg, or FOLDER/train/class/image.jpg with val and test next to train."
_IMAGES = {"image", "images", "img", "imgs", "jpegimages"}
_MASKS = {"annotation", "annotations", "gt", "labels", "mask", "masks", "segmentation", "segmentationclass", "trimaps"}


class _Files:
    """Images below one folder, and what was left out. Paths are strings: a million Path objects take seconds."""

    def __init__(self, *visited: Path) -> None:
        """visited: folders that links inside may lead back to."""
        self.paths: list[str] = []
        self.labels: list[str] = []
        self.other_endings = Counter[str]()
        self.repeated: list[str] = []
        self.inner_splits: set[str] = set()
        self._visited = {(status.st_dev, status.st_ino) for status in map(os.stat, visited)}

    def add(self, folder: Path, label: str = "") -> None:
        """Add the images in a folder and its sub-folders."""
        pending = [str(folder)]
        while pending:
            current = pending.pop()
            status = os.stat(current)
            if (identity := (status.st_dev, status.st_ino)) in self._visited:
                self.repeated.append(printable(current))
                continue
            self._visited.add(identity)
            with os.scandir(current) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if _is_dir(entry):
                        pending.append(entry.path)
                        self.inner_splits |= {entry.name} if split_named(entry.name) else set()
                    elif (ending := _ending(entry.name)) in ENDINGS:
                        self.paths.append(entry.path)
                        self.labels.append(label)
                    else:
                        self.other_endings[ending or "no ending"] += 1


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
    """List the images of a folder. Without any class folder its target is "none". Raises UserError if it is missing,
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
            return Source(name, ("image",), splits, warnings, target="none")
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
    listed, warnings = dict[str, _Files](), []
    with _listing():
        for split, folder in folders.items():
            where, empty = printable(str(folder)), []
            listed[split] = files = _Files(folder)
            for class_folder in _directories(folder):
                before = len(files.paths)
                if class_folder.name != "__MACOSX":
                    files.add(class_folder, normalize("NFC", class_folder.name))
                    empty += [printable(class_folder.name)] if len(files.paths) == before else []
            loose, inner = len(loose_images(folder)), ", ".join(map(printable, sorted(files.inner_splits)))
            endings = printable(", ".join(f"{count} {ending}" for ending, count in files.other_endings.most_common()))
            texts = {
                f"{loose} images directly in {where}, outside of class folders, were not used.": loose,
                f"These folders of {where} do not hold images and are not classes: {', '.join(empty)}.": empty,
                f"Folders inside of class folders are not splits: {inner}. Put the classes inside of them instead.": (
                    len(files.inner_splits) > 1
                ),
                f"Linked folders already read once were not read again: {', '.join(files.repeated)}.": files.repeated,
                f"Files in {where} that are not images by their ending were not used: {endings}.": endings,
            }
            warnings += [text for text, applies in texts.items() if applies]
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
        files.add(folder)
    return sorted(map(Path, files.paths))


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


CSV = "labels.csv"
CSV_LAYOUT = 'Its first line is "file,labels" or "file,labels,split", with labels separated by ; or |, not by commas.'
_SHOWN = 5


@data_source(
    "labels",
    "path/to/labels.csv",
    "a CSV file with any number of labels per image, or the folder of a `labels.csv`",
    claims=lambda path: path.suffix == ".csv" or os.path.isfile(path / CSV),
)
def labels_csv(spec: Spec) -> Source:
    """The images that a CSV file names, with any number of labels each.

        file,labels[,split]
        cats/1.jpg,cat;indoor,train
        2.jpg,,                       an image with none of the labels

    Files are named from the folder of the CSV on; labels are separated by ; or |. classes.txt next to it, one label a
    line, sets their order and refuses others. Raises UserError with all that is wrong, counted and with examples.
    """
    path = spec.folder if spec.folder.suffix == ".csv" else spec.folder / CSV
    listed, file = class_names(path.parent / CLASSES), printable(str(path))
    images, wrong = dict[str, tuple[str, set[str]]](), list[str]()
    for line, row in read_table(path, ("file", "labels"), CSV_LAYOUT, skipinitialspace=True):
        name = normalize("NFC", row["file"].strip())
        labels = {label.strip() for label in row["labels"].replace("|", ";").split(";")} - {""}
        split = split_named(row.get("split", "").strip() or "train")
        strange = sorted(labels.difference(listed)) if listed else []
        if split is None:
            reason = f"has the split {printable(row['split'])}, which is not train, val or test"
        elif not name or not os.path.isfile(path.parent / name):
            reason = "is missing"
        elif name in images:
            reason = "is named a second time"
        elif strange:
            reason = f"has the label {printable(strange[0])}. {nearest(strange[0], listed)} ({CLASSES})"
        else:
            images[name] = split, labels
            continue
        wrong.append(f"line {line}: {printable(name) or '(no file)'} {reason}")
    if not images and not wrong:
        raise UserError(f"{file} does not name any image. {CSV_LAYOUT}")
    named_splits = dict.fromkeys(split for split, _ in images.values())
    if len(named_splits) > 1 and "train" not in named_splits:
        raise UserError(f"{file} lacks images with split train: name some, or leave the column out.")
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        lines = "".join(f"\n  {text}" for text in wrong[:_SHOWN])
        raise UserError(f"{spec} cannot be used as it is ({len(wrong)} lines):{lines}{more}")
    classes = listed or sorted(set().union(*(labels for _, labels in images.values())))
    if not classes:
        raise UserError(f"{spec} does not label any image. {CSV_LAYOUT}")
    number, splits = {label: i for i, label in enumerate(classes)}, {}
    for split in named_splits:
        ids = tuple(sorted(name for name, (of_image, _) in images.items() if of_image == split))
        sets = tuple(tuple(sorted(number[label] for label in images[name][1])) for name in ids)
        records = file_records(ids, np.zeros(len(ids), np.int64), [path.parent / name for name in ids])
        splits[split] = replace(records, label_sets=sets)
    name = printable(path.resolve().parent.name if path.name == CSV else path.stem)
    return with_rarest(Source(name, tuple(map(printable, classes)), splits, target="labels"))
