"""ImageNet's 1,000 classes, and the labels of its validation images where they lie in one folder or tar.

Classes are WordNet numbers in their order, which is the order of the models' logits, and names. Labels are read from
whichever list is at hand.
"""

import gzip
import io
import re
import tarfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vitmods.data.records import Source, printable
from vitmods.util.errors import UserError
from vitmods.util.files import expand_user
from vitmods.util.limits import MOST_BYTES, check_bytes, lines_of, table

DEVKIT = "ILSVRC2012_devkit_t12"
_TRUTH, _META = "data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"
_LISTS = (
    "LOC_val_solution.csv",
    "val.txt",
    "imagenet_2012_validation_synset_labels.txt",
    "ILSVRC2012_validation_ground_truth.txt",
)
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")


def _info() -> Any:
    from timm.data.imagenet_info import ImageNetInfo

    return ImageNetInfo("imagenet-1k")


@cache
def wnids() -> tuple[str, ...]:
    """n01440764, n01443537, ...: the name at position i is class i."""
    return tuple(_info().label_names())


@cache
def _positions() -> dict[str, int]:
    return {wnid: i for i, wnid in enumerate(wnids())}


@cache
def titles() -> tuple[str, ...]:
    """A readable name for each class, no two alike: the first of its WordNet lemmas, with more where that is shared."""
    lemmas = _info().label_descriptions()
    first = [text.split(", ")[0] for text in lemmas]
    shared, twice = Counter(first), Counter(lemmas)
    return tuple(
        short if shared[short] == 1 else text if twice[text] == 1 else f"{text} ({wnid})"
        for short, text, wnid in zip(first, lemmas, wnids(), strict=True)
    )


def present(source: Source, names: Sequence[str]) -> Source:
    """The source, whose labels are positions in `names`, with the classes alone that have an image; class_map has
    their positions where some are left out."""
    used = np.unique(np.concatenate([records.labels for records in source.splits.values()]))
    source.classes = tuple(names[i] for i in used)
    if len(used) == len(names):
        return source
    source.class_map = tuple(used.tolist())
    for records in source.splits.values():
        records.labels[:] = np.searchsorted(used, records.labels)
    return source


def number_of(name: str) -> int | None:
    """17 of .../ILSVRC2012_val_00000017.JPEG; None of other names."""
    found = _NUMBER.search(name)
    return int(found[1]) if found else None


def val_labels(folders: list[Path], chosen: str | None) -> dict[int, int] | None:
    """Class (0 to 999) of each validation image by the number in its name, or None where there is no list.

    Looked for in the folders: the devkit (archive or folder), a list of "file class", one of WordNet numbers, Kaggle's
    table. chosen: the path of the list to use instead. Raises UserError for one that cannot be understood.
    """
    if chosen is not None:
        path = expand_user(chosen)
        if not path.is_file():
            raise UserError(f"There is no list of labels {printable(chosen)}: correct labels=.")
        return _from_list(path)
    for folder in folders:
        if (archive := folder / f"{DEVKIT}.tar.gz").is_file():
            return _from_archive(archive)
        if (folder / DEVKIT / _META).is_file() and (folder / DEVKIT / _TRUTH).is_file():
            return _from_devkit((folder / DEVKIT / _TRUTH).read_text(), folder / DEVKIT / _META)
    found = [folder / name for folder in folders for name in _LISTS if (folder / name).is_file()]
    return _from_list(found[0]) if found else None


def _from_archive(path: Path) -> dict[int, int]:
    try:
        with gzip.open(path) as packed:
            content = packed.read(MOST_BYTES["archive"] + 1)
        check_bytes(len(content), "archive")
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            truth, meta = (archive.extractfile(f"{DEVKIT}/{name}") for name in (_TRUTH, _META))
            if truth is None or meta is None:
                raise KeyError(f"{_TRUTH} and {_META} should be files")
            return _from_devkit(truth.read().decode(), io.BytesIO(meta.read()))
    except UserError:
        raise
    except Exception as error:  # gzip, zlib, tarfile and scipy raise what they like of a damaged one:
        raise UserError(f"The devkit {printable(str(path))} cannot be read: {error}. Fetch it again.") from error


def _from_devkit(truth: str, meta: Any) -> dict[int, int]:
    """The devkit has numbers of its own, 1 to 1,000, which its meta.mat translates."""
    from scipy.io import loadmat

    synsets = np.atleast_1d(loadmat(meta, squeeze_me=True)["synsets"])
    classes = {int(s["ILSVRC2012_ID"]): _positions().get(str(s["WNID"])) for s in synsets}
    return _numbered([classes.get(int(line)) for line in truth.split()], "the devkit")


def _from_list(path: Path) -> dict[int, int]:
    lines = lines_of(path)
    if lines and lines[0].startswith("ImageId"):
        return _from_pairs([(row["ImageId"], row["PredictionString"]) for row in table(lines)], path)
    words = [line.split() for line in lines if line.strip()]
    if words and all(len(row) == 2 for row in words):
        return _from_pairs([(row[0], row[1]) for row in words], path)
    if words and all(len(row) == 1 and row[0].startswith("n") for row in words):
        return _numbered([_positions().get(row[0]) for row in words], printable(str(path)))
    raise UserError(
        f"{printable(str(path))} does not say which class each validation image has. Numbers alone do not suffice: "
        f"they count classes in an order that only {DEVKIT}.tar.gz knows. Put that beside it, or a list with lines of "
        "image and class, where the class is a WordNet number (n01440764) or its position, 0 to 999."
    )


def _from_pairs(pairs: list[tuple[str, str]], path: Path) -> dict[int, int]:
    position = _positions() | {str(i): i for i in range(len(wnids()))}
    found = {number_of(name): position.get(label.split()[0]) for name, label in pairs}
    strange = [f"{name} {label}" for name, label in pairs if None in (number_of(name), position.get(label.split()[0]))]
    if strange:
        raise UserError(f"{printable(str(path))} has lines that name no image and class of ImageNet: {strange[0]!r}.")
    return {number: label for number, label in found.items() if number is not None and label is not None}


def _numbered(labels: list[int | None], where: str) -> dict[int, int]:
    if None in labels:
        raise UserError(f"Line {labels.index(None) + 1} of the labels in {where} names no class of ImageNet-1k.")
    return {i: label for i, label in enumerate(labels, 1) if label is not None}
