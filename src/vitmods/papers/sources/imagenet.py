"""ImageNet-1k (Deng et al., CVPR 2009; ILSVRC 2012) in the layouts that people have it in.

Evaluation sets for models of ImageNet-1k's classes: V2, R, C and the ReaL labels.

Each has one split, test, and nothing to train on. Where a set has some of the classes, class_map says which.

ImageNet's 1,000 classes, and the labels of its validation images where they lie in one folder or tar.

Classes are WordNet numbers in their order, which is the order of the models' logits, and names. Labels are read from
whichever list is at hand.
"""

import gzip
import io
import pkgutil
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vitmods.data.records import ENDINGS, Records, Source, printable
from vitmods.data.rng import text_order
from vitmods.data.shards import Tar, open_tar
from vitmods.data.sources import SOURCES, Spec, data_source
from vitmods.data.sources.folder import class_folders, file_records, loose_images
from vitmods.data.sources.hf import hf_set
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import expand_user
from vitmods.util.limits import MOST_BYTES, check_bytes, lines_of, parse_json, read_bytes, table

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
    match = _NUMBER.search(name)
    return int(match[1]) if match else None


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
    lists = [folder / name for folder in folders for name in _LISTS if (folder / name).is_file()]
    return _from_list(lists[0]) if lists else None


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
    labels = {number_of(name): position.get(label.split()[0]) for name, label in pairs}
    strange = [f"{name} {label}" for name, label in pairs if None in (number_of(name), position.get(label.split()[0]))]
    if strange:
        raise UserError(f"{printable(str(path))} has lines without an image and class of ImageNet: {strange[0]!r}.")
    return {number: label for number, label in labels.items() if number is not None and label is not None}


def _numbered(labels: list[int | None], where: str) -> dict[int, int]:
    if None in labels:
        raise UserError(f"Line {labels.index(None) + 1} of the labels in {where} is not a class of ImageNet-1k.")
    return {i: label for i, label in enumerate(labels, 1) if label is not None}


ORIGIN = "image-net.org (ILSVRC 2012; needs an account)"
MINIVAL = 0.99  # train[:99%] and train[99%:], as big_vision's ImageNet recipes have it
_BASES = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC")  # the others are Kaggle's
_WNID = re.compile(r"n\d{8}")

Found = tuple[Records, list[str]]  # labels are 0 to 999; warnings
Reader = Callable[[], Found]


@data_source(
    "imagenet",
    "imagenet:FOLDER",
    "ImageNet-1k",
    options=("minival", "labels"),
    layout=(
        "train/n01440764/*.JPEG and val/n01440764/*.JPEG, 1,000 folders each",
        "val/ILSVRC2012_val_00000001.JPEG, ... with ILSVRC2012_devkit_t12.tar.gz or a list of labels beside val",
        "ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz as they come",
        "ILSVRC/Data/CLS-LOC/train and val, with LOC_val_solution.csv (Kaggle)",
        "data/train-*.parquet and validation-*.parquet (Hugging Face)",
    ),
    origin=ORIGIN,
    classes=1000,
    counts={"train": 1_281_167, "val": 50_000},
    used_in="Dual PatchNorm, Tables 1, 2, 4, 6; DTN, Tables 1-3, 5, 7-10, 12; Three Things, Tables 1-3, 5, 7",
    terms="non-commercial research and education",
    arrange=lambda spec, source: minival(source, spec.options["minival"]) if "minival" in spec.options else source,
)
def imagenet(spec: Spec) -> Source:
    """train and val of ImageNet-1k.

    Where val alone is there, an evaluation set. A part of the classes is taken as it is, with their class_map.
    """
    root = spec.folder
    if list(root.glob("data/train-*.parquet")) or list(root.glob("data/validation-*.parquet")):
        return _parquet(root)
    readers = {"train": _train_readers(root), "val": val_readers(root, spec.options.get("labels"))}
    if not readers["val"]:
        raise SOURCES["imagenet"].missing(root, _what_is_there(root, bool(readers["train"])))
    source = Source("ImageNet-1k", (), {})
    for split, ways in readers.items():
        if ways:
            source.splits[split], warnings = next(iter(ways.values()))()
            source.warnings += warnings
        if len(ways) > 1:
            first, *others = ways
            source.warnings.append(f"{split} was read from {first}; {' and '.join(others)} beside it was not used.")
    return present(source, titles())


def _train_readers(root: Path) -> dict[str, Reader]:
    """Every way in which train is there, by what is read, the best first."""
    readers: dict[str, Reader] = {}
    for folder in (root / base / "train" for base in _BASES):
        if _has_classes(folder):
            readers[printable(str(folder))] = lambda folder=folder: _folders(root, folder)  # type: ignore[misc]
    if (archive := root / "ILSVRC2012_img_train.tar").is_file():
        readers[archive.name] = lambda: _train_tar(archive)
    return readers


def val_readers(root: Path, labels: str | None) -> dict[str, Reader]:
    """Every way in which val is there. labels: the list for images without class folders."""
    lists = [root, root / "val", *(root / base for base in _BASES)]
    readers: dict[str, Reader] = {}
    for folder in (root / base / "val" for base in _BASES):
        if _has_classes(folder):
            readers[printable(str(folder))] = lambda folder=folder: _folders(root, folder)  # type: ignore[misc]
        elif folder.is_dir() and any(number_of(name) for name in loose_images(folder)):
            readers[printable(str(folder))] = lambda folder=folder: _flat(root, folder, lists, labels)  # type: ignore[misc]
    if (archive := root / "ILSVRC2012_img_val.tar").is_file():
        readers[archive.name] = lambda: _val_tar(root, archive, lists, labels)
    return readers


def _has_classes(folder: Path) -> bool:
    return folder.is_dir() and any(_WNID.fullmatch(path.name) and path.is_dir() for path in folder.iterdir())


def _what_is_there(root: Path, train: bool) -> str:
    if train:
        return "there is train, but no val, on which results are reported"
    if _has_classes(root):
        return "the class folders lie directly in it; give the folder above, which holds train and val"
    return "it holds " + (", ".join(sorted(printable(p.name) for p in root.iterdir())[:8]) or "nothing")


def _folders(root: Path, folder: Path) -> Found:
    if folder.name == "val" and (mixed := [n for n in loose_images(folder) if number_of(n)]):
        raise UserError(
            f"{printable(str(folder))} holds class folders and, beside them, {len(mixed)} images such as {mixed[0]}: "
            "two layouts are mixed. Finish sorting them into the class folders, or take all out of them."
        )
    _, splits, warnings = class_folders(root, {"train": folder}, wnids())
    return splits["train"], warnings


def _flat(root: Path, folder: Path, lists: list[Path], chosen: str | None) -> Found:
    files = sorted((number, name) for name in loose_images(folder) if (number := number_of(name)) is not None)
    paths = [folder / name for _, name in files]
    labels = _val_classes(root, [number for number, _ in files], lists, chosen)
    ids = tuple(path.relative_to(root).as_posix() for path in paths)
    return file_records(ids, labels, paths), []


def _val_classes(root: Path, numbers: list[int], lists: list[Path], chosen: str | None) -> np.ndarray:
    labels = val_labels(lists, chosen)
    if labels is None:
        raise SOURCES["imagenet"].missing(root, "the validation images have neither class folders nor a list of labels")
    if unknown := [number for number in numbers if number not in labels]:
        raise UserError(
            f"The list of labels lacks {len(unknown)} of the {len(numbers)} validation images, the first of them "
            f"number {unknown[0]}. Give the list of ILSVRC 2012, with labels=FILE if there are several."
        )
    return np.array([labels[number] for number in numbers], dtype=np.int64)


def _train_tar(path: Path) -> Found:
    tar, position = open_tar(path), {wnid: i for i, wnid in enumerate(wnids())}
    members = [i for i, name in enumerate(tar.names) if Path(name).suffix.lower() in ENDINGS]
    labels = [position.get(tar.names[i].split("/")[0]) for i in members]
    if not members or None in labels:
        raise UserError(
            f"{printable(str(path))} is not ILSVRC 2012's: it should hold n01440764.tar and 999 more, each with the "
            "images of its class. Fetch it again, or unpack it to train/n01440764/*.JPEG."
        )
    return _in_tar(tar, members, labels), []


def _val_tar(root: Path, path: Path, lists: list[Path], chosen: str | None) -> Found:
    tar = open_tar(path)
    files = sorted((number, i) for i, name in enumerate(tar.names) if (number := number_of(name)) is not None)
    if not files:
        raise UserError(f"{printable(str(path))} does not hold ILSVRC2012_val_00000001.JPEG, ...: fetch it again.")
    labels = _val_classes(root, [number for number, _ in files], lists, chosen)
    return _in_tar(tar, [i for _, i in files], labels), []


def _in_tar(tar: Tar, members: "list[int]", labels: "list[int | None] | np.ndarray") -> Records:
    status = tar.path.stat()
    stamp = f"{tar.path}:{status.st_size}:{status.st_mtime_ns}"
    ids = tuple(f"{tar.path.name}/{tar.names[i]}" for i in members)
    stamps = tuple(f"{stamp}:{tar.offsets[i]}" for i in members)
    return Records(ids, np.array(labels, dtype=np.int64), stamps, tar.read, np.array(members, dtype=np.int64))


def _parquet(root: Path) -> Source:
    """Hugging Face's copy; its classes are in the same order, and its test has no labels."""
    source = hf_set(str(root), {})
    if len(source.classes) != len(wnids()):
        raise UserError(f"The parquet files in {printable(str(root))} have {len(source.classes)} classes, not 1,000.")
    splits = {name: records for name, records in source.splits.items() if name != "test"}
    return replace(source, name="ImageNet-1k", classes=titles(), splits=splits)


def minival(source: Source, asked: str) -> Source:
    """asked "1": train[:99%] as train, train[99%:] as val, the published val as test.

    The order is drawn from the file names: the original's is that of a shuffled TensorFlow Datasets copy, which cannot
    be had from the files.
    """
    if asked not in ("0", "1"):
        raise UserError(f"minival is 1 or 0, not {asked}.")
    if asked == "0":
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


V2_VARIANTS = ("matched-frequency", "threshold0.7", "top-images")
SEVERITIES = (1, 2, 3, 4, 5)
ARCHIVES = {  # of ImageNet-C, and the corruptions in each
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
}


@data_source(
    "imagenet-v2",
    "imagenet-v2:FOLDER",
    "ImageNet-V2",
    options=("variant",),
    layout=("imagenetv2-matched-frequency-format-val/0/*.jpeg to 999/*.jpeg (and the other two variants' folders)",),
    origin="Recht et al. 2019 (huggingface.co/datasets/vaishaal/ImageNetV2)",
    classes=1000,
    counts={"test": 10_000},
    used_in="Three Things, Tables 1-3, 5, 7",
    terms="MIT",
)
def v2(spec: Spec) -> Source:
    """ImageNet-V2 (Recht et al., ICML 2019). variant: one of V2_VARIANTS, matched-frequency unless said otherwise.

    Its folders are class numbers without leading zeros, so their order is not that of their names.
    """
    root, variant = spec.folder, spec.options.get("variant", V2_VARIANTS[0])
    if variant not in V2_VARIANTS:
        raise UserError(f'ImageNet-V2 has no variant "{variant}". {nearest(variant, V2_VARIANTS)}')
    names = (f"imagenetv2-{variant}-format-val", f"imagenetv2-{variant}", variant)
    folder = next((root / name for name in names if (root / name).is_dir()), None)
    if folder is None and "variant" in spec.options:
        raise spec.kind.missing(root, f"there is no folder {names[0]}")
    folder = folder or root
    if not (folder / "0").is_dir():
        raise spec.kind.missing(root, f"there is no class folder 0 in {printable(str(folder))}")
    numbers = tuple(str(i) for i in range(len(wnids())))
    variant = next((v for v in V2_VARIANTS if v in folder.resolve().name), variant)  # the folder's own name wins
    return _evaluation_set(f"ImageNet-V2 {variant}", root, folder, numbers)


@data_source(
    "imagenet-r",
    "imagenet-r:FOLDER",
    "ImageNet-R",
    layout=("imagenet-r/n01443537/*.jpg, 200 folders",),
    origin="Hendrycks et al. 2021 (github.com/hendrycks/imagenet-r)",
    classes=200,
    counts={"test": 30_000},
    used_in="DTN, appendix B.2",
)
def renditions(spec: Spec) -> Source:
    """ImageNet-R (Hendrycks et al., ICCV 2021): 200 of the classes, as art, cartoons, toys, ..."""
    root = spec.folder
    folder = root / "imagenet-r" if (root / "imagenet-r").is_dir() else root
    if not any(path.name in wnids() for path in folder.iterdir()):
        raise spec.kind.missing(root, "there are no class folders such as n01443537")
    return _evaluation_set("ImageNet-R", root, folder, wnids())


@data_source(
    "imagenet-c",
    "imagenet-c:FOLDER?corruption=fog&severity=3",
    "ImageNet-C",
    options=("corruption", "severity"),
    layout=(
        "fog/3/n01440764/*.JPEG, for each corruption and severities 1 to 5",
        "weather/fog/3/n01440764/*.JPEG, below the names of the five archives",
    ),
    origin="Hendrycks and Dietterich 2019 (zenodo.org, record 2235448)",
    classes=1000,
    counts={"test": 50_000},
    used_in="DTN, Table 6",
    terms="CC BY 4.0",
)
def corrupted(spec: Spec) -> Source:
    """One corruption at one severity of ImageNet-C (Hendrycks and Dietterich, ICLR 2019)."""
    corruption, severity = spec.options.get("corruption", ""), spec.options.get("severity", "")
    usage = f"write {spec.kind.usage}"
    names = [name for group in ARCHIVES.values() for name in group]
    if corruption not in names:
        raise UserError(f'ImageNet-C needs a corruption, not "{corruption}": {usage}. {nearest(corruption, names)}')
    if severity not in map(str, SEVERITIES):
        raise UserError(f'ImageNet-C needs a severity from 1 to 5, not "{severity}": {usage}.')
    folder = _corruption_folder(spec.folder, corruption)
    if folder is None or not (folder / severity).is_dir():
        raise spec.kind.missing(spec.folder, f"there is no folder {corruption}/{severity}")
    return _evaluation_set(f"ImageNet-C {corruption} {severity}", spec.folder, folder / severity, wnids())


def corruption_specs(root: Path | str, *, extra: bool = False) -> Iterator[tuple[str, int, str]]:
    """(corruption, severity, spec) of ImageNet-C's 15 corruptions at 5 severities, with extra of all 19.

    Raises UserError before the first if a folder is missing, naming all that are.
    """
    root = expand_user(root)
    names = [name for archive, group in ARCHIVES.items() if extra or archive != "extra" for name in group]
    folders = {name: _corruption_folder(root, name) or root / name for name in names}
    missing = [f"{n}/{s}" for n, folder in folders.items() for s in SEVERITIES if not (folder / str(s)).is_dir()]
    if missing:
        examples = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise SOURCES["imagenet-c"].missing(root, f"there are no folders {examples}")
    return ((n, s, f"imagenet-c:{root}?corruption={n}&severity={s}") for n in names for s in SEVERITIES)


@data_source(
    "imagenet-real",
    "imagenet-real:FOLDER",
    "ImageNet-ReaL",
    options=("labels",),
    layout=(
        "val in any layout of imagenet; the labels come with timm",
        "val in any layout of imagenet, and real.json with the labels",
    ),
    origin=f"{ORIGIN}; the labels from Beyer et al. 2020 (github.com/google-research/reassessed-imagenet)",
    classes=1000,
    counts={"test": 46_837},
    used_in="none; labels without the known errors of ImageNet's",
    terms="labels: Apache-2.0",
)
def real(spec: Spec) -> Source:
    """ImageNet's validation images with the ReaL labels (Beyer et al. 2020, "Are we done with ImageNet?").

    A prediction is correct if it is among an image's labels; images that have none are left out, as they are there.
    labels: real.json, by default the one in the folder, or else the copy that comes with timm.
    """
    root = spec.folder
    readers = val_readers(root, None)
    if not readers:
        raise spec.kind.missing(root, "there are no validation images")
    records, warnings = next(iter(readers.values()))()
    label_sets, origin = _real_labels(root, spec.options.get("labels"))
    numbers = [number_of(name) for name in records.ids]
    if unknown := [name for name, n in zip(records.ids, numbers, strict=True) if n is None or n > len(label_sets)]:
        raise UserError(
            f"{len(unknown)} validation images are not called ILSVRC2012_val_00000001.JPEG, ... (such as "
            f"{printable(unknown[0])}): the labels go by those names. Give them back their names."
        )
    sets = tuple(label_sets[n - 1] for n in numbers if n is not None)
    labeled = np.flatnonzero([bool(labels) for labels in sets])
    source = Source("ImageNet-ReaL", titles(), {"test": replace(records, label_sets=sets).take(labeled)})
    out = len(sets) - len(labeled)
    source.warnings = [*warnings, f"Labels from {origin}; {out:,} images without a ReaL label are left out."]
    return source


def _real_labels(root: Path, chosen: str | None) -> tuple[list[tuple[int, ...]], str]:
    path = expand_user(chosen) if chosen else root / "real.json"
    if not path.is_file():
        if chosen:
            raise UserError(f"There is no file {printable(chosen)}: correct labels=, or leave it out for timm's copy.")
        text, origin = pkgutil.get_data("timm.data", "_info/imagenet_real_labels.json"), "timm's copy of real.json"
        assert text is not None, "it is part of timm"
    else:
        text, origin = read_bytes(path, "JSON"), printable(str(path))
    try:
        lists = [tuple(int(label) for label in labels) for labels in parse_json(text)]
    except (ValueError, TypeError) as error:
        raise UserError(f"{origin} is not a JSON list of lists of class numbers: {error}. Fetch it again.") from error
    if any(not 0 <= label < len(wnids()) for labels in lists for label in labels):
        raise UserError(f"{origin} has class numbers outside 0 to 999: it is not real.json.")
    return lists, origin


def _evaluation_set(name: str, root: Path, folder: Path, order: tuple[str, ...]) -> Source:
    _, splits, warnings = class_folders(root, {"test": folder}, order)
    return present(Source(name, (), splits, warnings), titles())


def _corruption_folder(root: Path, corruption: str) -> Path | None:
    archive = next(name for name, group in ARCHIVES.items() if corruption in group)
    return next((path for path in (root / corruption, root / archive / corruption) if path.is_dir()), None)
