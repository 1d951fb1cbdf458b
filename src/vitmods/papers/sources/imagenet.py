"""ImageNet-1k (Deng et al., CVPR 2009; ILSVRC 2012) and its evaluation sets: V2, R, C and the ReaL labels.

Classes are WordNet numbers in their order, which is the order of the models' logits. An evaluation set has one split,
test; where a set has some of the classes, class_map says which.
"""

import gzip
import io
import pkgutil
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from vitmods.data.records import ENDINGS, Records, Source, printable
from vitmods.data.rng import text_order
from vitmods.data.sources import SOURCES, Spec
from vitmods.data.sources.files import file_records, loose_images
from vitmods.data.sources.folder import class_folders
from vitmods.data.sources.hf import hf_set
from vitmods.data.sources.wds import Member, open_tar, read_at
from vitmods.papers.sources import published_set
from vitmods.util.errors import UserError, explaining, nearest
from vitmods.util.files import expand_user
from vitmods.util.limits import MOST_BYTES, check_bytes, lines_of, parse_json, read_bytes
from vitmods.util.tables import read_rows

DEVKIT = "ILSVRC2012_devkit_t12"
_TRUTH, _META = "data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"
_LISTS = (
    "LOC_val_solution.csv",
    "val.txt",
    "imagenet_2012_validation_synset_labels.txt",
    "ILSVRC2012_validation_ground_truth.txt",
)
_BASES = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC")  # below the folder; the others are Kaggle's
MINIVAL = 0.99  # train[:99%] and train[99%:], as big_vision's ImageNet recipes have it

Reader = Callable[[], tuple[Records, list[str]]]
"""reads a split: records with labels 0 to 999, and warnings"""


@cache
def _classes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    from timm.data.imagenet_info import ImageNetInfo

    info: Any = ImageNetInfo("imagenet-1k")
    wnids, lemmas = tuple(info.label_names()), info.label_descriptions()
    first = [text.split(", ")[0] for text in lemmas]
    shared, twice = Counter(first), Counter(lemmas)
    return wnids, tuple(
        short if shared[short] == 1 else text if twice[text] == 1 else f"{text} ({wnid})"
        for short, text, wnid in zip(first, lemmas, wnids, strict=True)
    )


def wnids() -> tuple[str, ...]:
    """n01440764, n01443537, ...: the name at position i is class i."""
    return _classes()[0]


def titles() -> tuple[str, ...]:
    """A readable name for each class, all different: the first WordNet lemma, with more where that is shared."""
    return _classes()[1]


@cache
def _positions() -> dict[str, int]:
    return {wnid: i for i, wnid in enumerate(wnids())}


def present(source: Source, names: Sequence[str]) -> Source:
    """The source, whose labels are positions in `names`, with only the classes that have an image; class_map has
    their positions where some are left out."""
    used = np.unique(np.concatenate([records.labels for records in source.splits.values()]))
    source.classes = tuple(names[i] for i in used)
    if len(used) < len(names):
        source.class_map = tuple(used.tolist())
        for records in source.splits.values():
            records.labels[:] = np.searchsorted(used, records.labels)
    return source


def number_of(name: str) -> int | None:
    """17 of .../ILSVRC2012_val_00000017.JPEG; None of other names."""
    match = re.search(r"ILSVRC2012_val_(\d{8})", name)
    return int(match[1]) if match else None


# The labels of validation images in one folder or tar.


def val_labels(folders: list[Path], chosen: str | None) -> dict[int, int] | None:
    """Class (0 to 999) of each validation image by the number in its name, or None without a list.

    Looked for in the folders: the devkit (archive or folder), a list of "file class", one of WordNet numbers, Kaggle's
    table. chosen: the path of the list to use instead. Raises UserError for one that cannot be understood.
    """
    if chosen is not None:
        path = expand_user(chosen)
        if not path.is_file():
            raise UserError(f"The list of labels {printable(chosen)} does not exist: correct labels=.")
        return _from_list(path)
    for folder in folders:
        if (archive := folder / f"{DEVKIT}.tar.gz").is_file():
            return from_archive(archive)
        if (folder / DEVKIT / _META).is_file() and (folder / DEVKIT / _TRUTH).is_file():
            return _from_devkit((folder / DEVKIT / _TRUTH).read_text(), folder / DEVKIT / _META)
    lists = (folder / name for folder in folders for name in _LISTS)
    path = next(filter(Path.is_file, lists), None)  # type: ignore[assignment]
    return _from_list(path) if path else None


def from_archive(path: Path) -> dict[int, int]:
    """The labels in the devkit as it is distributed."""
    with explaining(lambda error: f"The devkit {printable(str(path))} cannot be read: {error}. Fetch it again."):
        with gzip.open(path) as packed:
            content = packed.read(MOST_BYTES["archive"] + 1)
        check_bytes(len(content), "archive")
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            truth, meta = (archive.extractfile(f"{DEVKIT}/{name}") for name in (_TRUTH, _META))
            if truth is None or meta is None:
                raise KeyError(f"{_TRUTH} and {_META} should be files")
            return _from_devkit(truth.read().decode(), io.BytesIO(meta.read()))


def _from_devkit(truth: str, meta: Any) -> dict[int, int]:
    """The devkit counts classes from 1 to 1,000 in an order that its meta.mat translates."""
    from scipy.io import loadmat

    synsets = np.atleast_1d(loadmat(meta, squeeze_me=True)["synsets"])
    classes = {int(s["ILSVRC2012_ID"]): _positions().get(str(s["WNID"])) for s in synsets}
    return _numbered([classes.get(int(line)) for line in truth.split()], "the devkit")


def _numbered(labels: list[int | None], where: str) -> dict[int, int]:
    if None in labels:
        raise UserError(f"Line {labels.index(None) + 1} of the labels in {where} is not a class of ImageNet-1k.")
    return {i: label for i, label in enumerate(labels, 1) if label is not None}


def _from_list(path: Path) -> dict[int, int]:
    where, lines = printable(str(path)), lines_of(path)
    words = [line.split() for line in lines if line.strip()]
    if lines and lines[0].startswith("ImageId"):
        words = [[row["ImageId"], row["PredictionString"].split()[0]] for _, row in read_rows(path)[1] if row]
    if words and all(len(row) == 1 and row[0].startswith("n") for row in words):
        return _numbered([_positions().get(row[0]) for row in words], where)
    if not words or any(len(row) != 2 for row in words):
        raise UserError(
            f"{where} does not say which class each validation image has. Numbers do not suffice: they count "
            f"classes in an order that only {DEVKIT}.tar.gz knows. Put that next to it, or a list with lines of "
            "image and class, where the class is a WordNet number (n01440764) or its position, 0 to 999."
        )
    position = _positions() | {str(i): i for i in range(len(wnids()))}
    labels = {}
    for name, word in words:
        number, label = number_of(name), position.get(word)
        if number is None or label is None:
            raise UserError(f"{where} has lines without an image and class of ImageNet: {f'{name} {word}'!r}.")
        labels[number] = label
    return labels


# ImageNet-1k.


def minival(source: Source, value: str) -> Source:
    """value "1": train[:99%] as train, train[99%:] as val, the published val as test.

    The order is drawn from the file names: the original's is that of a shuffled TensorFlow Datasets copy, which cannot
    be had from the files.
    """
    if value not in ("0", "1"):
        raise UserError(f"minival is 1 or 0, not {value}.")
    if value == "0":
        return source
    if "train" not in source.splits:
        raise UserError(
            "minival=1 takes val out of ImageNet's train, which is not there: add it, or leave minival out."
        )
    train = source.splits["train"]
    order = text_order(0, "minival", (name.rpartition("/")[2] for name in train.ids))
    kept = round(MINIVAL * len(order))
    parts = {"train": train.take(np.sort(order[:kept])), "val": train.take(np.sort(order[kept:]))}
    record = f"minival: val is {1 - MINIVAL:.0%} of train, and test is the published val."
    return replace(source, splits=parts | {"test": source.splits["val"]}, warnings=[*source.warnings, record])


@published_set("imagenet", arrange=lambda spec, source: minival(source, spec.options.get("minival", "0")))
def imagenet(spec: Spec) -> Source:
    """train and val of ImageNet-1k.

    With only val, an evaluation set. A part of the classes is read as it is, with their class_map.
    """
    root = spec.folder
    if list(root.glob("data/train-*.parquet")) or list(root.glob("data/validation-*.parquet")):
        source = hf_set(str(root), {})  # Hugging Face's copy has the classes in the same order
        if (count := len(source.classes)) != len(wnids()):
            raise UserError(f"The parquet files in {printable(str(root))} have {count} classes, not 1,000.")
        source.splits.pop("test", None)  # its test is without labels
        return replace(source, name="ImageNet-1k", classes=titles())
    readers = {"train": readers_of(root, "train"), "val": readers_of(root, "val", spec.options.get("labels"))}
    if not readers["val"]:
        reason = f"it holds {', '.join(sorted(printable(p.name) for p in root.iterdir())[:8]) or 'nothing'}"
        if readers["train"]:
            reason = "there is train, but not val, on which results are reported"
        elif _has_classes(root):
            reason = "the class folders lie directly in it; give the folder above, which holds train and val"
        raise SOURCES["imagenet"].missing(root, reason)
    source = Source("ImageNet-1k", (), {})
    for split, ways in readers.items():
        if ways:
            source.splits[split], warnings = next(iter(ways.values()))()
            source.warnings += warnings
        if len(ways) > 1:
            first, *others = ways
            source.warnings.append(f"{split} was read from {first}; {' and '.join(others)} was not used.")
    return present(source, titles())


def readers_of(root: Path, split: str, labels: str | None = None) -> dict[str, Reader]:
    """Every way in which train or val is there, by what is read, the best first. labels: the list for validation images
    without class folders."""
    readers: dict[str, Reader] = {}
    for folder in (root / base / split for base in _BASES):
        if _has_classes(folder):
            readers[printable(str(folder))] = partial(_from_folders, root, folder)
        elif split == "val" and folder.is_dir() and any(number_of(name) for name in loose_images(folder)):
            readers[printable(str(folder))] = partial(_from_flat_folder, root, folder, labels)
    if (archive := root / f"ILSVRC2012_img_{split}.tar").is_file():
        readers[archive.name] = partial(_from_train_tar, archive)
        if split == "val":
            readers[archive.name] = partial(_from_val_tar, root, archive, labels)
    return readers


def _has_classes(folder: Path) -> bool:
    return folder.is_dir() and any(re.fullmatch(r"n\d{8}", path.name) and path.is_dir() for path in folder.iterdir())


def _from_folders(root: Path, folder: Path) -> tuple[Records, list[str]]:
    if folder.name == "val" and (mixed := [n for n in loose_images(folder) if number_of(n)]):
        raise UserError(
            f"{printable(str(folder))} holds class folders and also {len(mixed)} images such as {mixed[0]}: "
            "two layouts are mixed. Finish sorting them into the class folders, or take all out of them."
        )
    _, splits, warnings = class_folders(root, {"train": folder}, wnids())
    return splits["train"], warnings


def _from_flat_folder(root: Path, folder: Path, chosen: str | None) -> tuple[Records, list[str]]:
    files = sorted((number, folder / name) for name in loose_images(folder) if (number := number_of(name)) is not None)
    labels = _val_classes(root, [number for number, _ in files], chosen)
    ids = tuple(path.relative_to(root).as_posix() for _, path in files)
    return file_records(ids, labels, [path for _, path in files]), []


def _val_classes(root: Path, numbers: list[int], chosen: str | None) -> np.ndarray:
    labels = val_labels([root, root / "val", *(root / base for base in _BASES)], chosen)
    if labels is None:
        raise SOURCES["imagenet"].missing(root, "the validation images have neither class folders nor a list of labels")
    if unknown := [number for number in numbers if number not in labels]:
        raise UserError(
            f"The list of labels lacks {len(unknown)} of the {len(numbers)} validation images, the first of them "
            f"number {unknown[0]}. Give the list of ILSVRC 2012, with labels=FILE if there are several."
        )
    return np.array([labels[number] for number in numbers], dtype=np.int64)


def _from_train_tar(path: Path) -> tuple[Records, list[str]]:
    members = [member for member in open_tar(path) if Path(member.name).suffix.lower() in ENDINGS]
    labels = [_positions().get(member.name.split("/")[0]) for member in members]
    if not members or None in labels:
        raise UserError(
            f"{printable(str(path))} is not ILSVRC 2012's: it should hold n01440764.tar and 999 more, each with the "
            "images of its class. Fetch it again, or unpack it to train/n01440764/*.JPEG."
        )
    return _tar_records(path, members, np.array(labels, dtype=np.int64)), []


def _from_val_tar(root: Path, path: Path, chosen: str | None) -> tuple[Records, list[str]]:
    members = sorted((number, member) for member in open_tar(path) if (number := number_of(member.name)) is not None)
    if not members:
        raise UserError(f"{printable(str(path))} does not hold ILSVRC2012_val_00000001.JPEG, ...: fetch it again.")
    labels = _val_classes(root, [number for number, _ in members], chosen)
    return _tar_records(path, [member for _, member in members], labels), []


def _tar_records(path: Path, members: list[Member], labels: np.ndarray) -> Records:
    status = path.stat()
    stamps = tuple(f"{path}:{status.st_size}:{status.st_mtime_ns}:{member.offset}" for member in members)
    ids = tuple(f"{path.name}/{member.name}" for member in members)

    def fetch(key: int) -> bytes:
        return read_at(path, members[key].offset, members[key].size)

    return Records(ids, labels, stamps, fetch, np.arange(len(members)))


# Evaluation sets.

V2_VARIANTS = ("matched-frequency", "threshold0.7", "top-images")
SEVERITIES = (1, 2, 3, 4, 5)
ARCHIVES = {  # of ImageNet-C, and the corruptions in each
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
}


def _evaluation_set(name: str, root: Path, folder: Path, order: tuple[str, ...]) -> Source:
    _, splits, warnings = class_folders(root, {"test": folder}, order)
    return present(Source(name, (), splits, warnings), titles())


@published_set("imagenet-v2")
def v2(spec: Spec) -> Source:
    """ImageNet-V2 (Recht et al., ICML 2019). variant: one of V2_VARIANTS, by default matched-frequency.

    Its folders are class numbers without leading zeros, so their order is not that of their names.
    """
    root, variant = spec.folder, spec.options.get("variant", V2_VARIANTS[0])
    if variant not in V2_VARIANTS:
        raise UserError(f'Unknown variant "{variant}" of ImageNet-V2. {nearest(variant, V2_VARIANTS)}')
    names = (f"imagenetv2-{variant}-format-val", f"imagenetv2-{variant}", variant)
    folder = next((root / name for name in names if (root / name).is_dir()), None)
    if folder is None and "variant" in spec.options:
        raise spec.kind.missing(root, f"the folder {names[0]} is missing")
    folder = folder or root
    if not (folder / "0").is_dir():
        raise spec.kind.missing(root, f"the class folder 0 is missing in {printable(str(folder))}")
    variant = next((v for v in V2_VARIANTS if v in folder.resolve().name), variant)  # the folder's own name wins
    return _evaluation_set(f"ImageNet-V2 {variant}", root, folder, tuple(map(str, range(len(wnids())))))


@published_set("imagenet-r")
def renditions(spec: Spec) -> Source:
    """ImageNet-R (Hendrycks et al., ICCV 2021): 200 of the classes, as art, cartoons, toys, ..."""
    root = spec.folder
    folder = root / "imagenet-r" if (root / "imagenet-r").is_dir() else root
    if not any(path.name in wnids() for path in folder.iterdir()):
        raise spec.kind.missing(root, "class folders such as n01443537 are missing")
    return _evaluation_set("ImageNet-R", root, folder, wnids())


def _corruption_folder(root: Path, corruption: str) -> Path:
    """The folder of a corruption, which may be below that of its archive."""
    archive = next(name for name, group in ARCHIVES.items() if corruption in group)
    return next((path for path in (root / corruption, root / archive / corruption) if path.is_dir()), root / corruption)


@published_set("imagenet-c")
def corrupted(spec: Spec) -> Source:
    """One corruption at one severity of ImageNet-C (Hendrycks and Dietterich, ICLR 2019)."""
    corruption, severity = spec.options.get("corruption", ""), spec.options.get("severity", "")
    usage = f"write {spec.kind.usage}"
    names = [name for group in ARCHIVES.values() for name in group]
    if corruption not in names:
        raise UserError(f'ImageNet-C needs a corruption, not "{corruption}": {usage}. {nearest(corruption, names)}')
    if severity not in map(str, SEVERITIES):
        raise UserError(f'ImageNet-C needs a severity from 1 to 5, not "{severity}": {usage}.')
    folder = _corruption_folder(spec.folder, corruption) / severity
    if not folder.is_dir():
        raise spec.kind.missing(spec.folder, f"the folder {corruption}/{severity} is missing")
    return _evaluation_set(f"ImageNet-C {corruption} {severity}", spec.folder, folder, wnids())


def corruption_specs(root: Path | str, *, extra: bool = False) -> Iterator[tuple[str, int, str]]:
    """(corruption, severity, spec) of ImageNet-C's 15 corruptions at 5 severities, with extra of all 19.

    Raises UserError before the first if a folder is missing, naming all that are.
    """
    root = expand_user(root)
    names = [name for archive, group in ARCHIVES.items() if extra or archive != "extra" for name in group]
    parts = [(name, severity) for name in names for severity in SEVERITIES]
    if missing := [f"{n}/{s}" for n, s in parts if not (_corruption_folder(root, n) / str(s)).is_dir()]:
        examples = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise SOURCES["imagenet-c"].missing(root, f"these folders are missing: {examples}")
    return ((n, s, f"imagenet-c:{root}?corruption={n}&severity={s}") for n, s in parts)


@published_set("imagenet-real")
def real(spec: Spec) -> Source:
    """ImageNet's validation images with the ReaL labels (Beyer et al. 2020, "Are we done with ImageNet?").

    A prediction is correct if it is among an image's labels; images without labels are left out, as in the paper.
    labels: real.json, by default the one in the folder, or else the copy that comes with timm.
    """
    root, chosen = spec.folder, spec.options.get("labels")
    readers = readers_of(root, "val")
    if not readers:
        raise spec.kind.missing(root, "the validation images are missing")
    records, warnings = next(iter(readers.values()))()
    path = expand_user(chosen) if chosen else root / "real.json"
    if path.is_file():
        text, origin = read_bytes(path, "JSON"), printable(str(path))
    elif chosen:
        raise UserError(f"The file {printable(chosen)} does not exist: correct labels=, or drop it for timm's copy.")
    else:
        text, origin = pkgutil.get_data("timm.data", "_info/imagenet_real_labels.json") or b"", "timm's copy"
    try:
        labels = [tuple(int(label) for label in labels) for labels in parse_json(text)]
    except (ValueError, TypeError) as error:
        raise UserError(f"{origin} is not a JSON list of lists of class numbers: {error}. Fetch it again.") from error
    if any(not 0 <= label < len(wnids()) for image in labels for label in image):
        raise UserError(f"{origin} has class numbers outside 0 to 999: it is not real.json.")
    numbers = [number_of(name) for name in records.ids]
    if unknown := [name for name, n in zip(records.ids, numbers, strict=True) if n is None or n > len(labels)]:
        raise UserError(
            f"{len(unknown)} validation images are not called ILSVRC2012_val_00000001.JPEG, ... (such as "
            f"{printable(unknown[0])}): the labels go by those names. Give them back their names."
        )
    sets = tuple(labels[n - 1] for n in numbers if n is not None)
    labeled = np.flatnonzero([bool(image) for image in sets])
    source = Source("ImageNet-ReaL", titles(), {"test": replace(records, label_sets=sets).take(labeled)}, warnings)
    unlabeled = len(sets) - len(labeled)
    source.warnings.append(f"Labels from {origin}; {unlabeled:,} images without a ReaL label are left out.")
    return source
