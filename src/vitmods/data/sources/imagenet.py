"""ImageNet-1k (Deng et al., CVPR 2009; ILSVRC 2012) in the layouts that people have it in."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitmods.data.records import ENDINGS, Records, Source, printable
from vitmods.data.rng import text_order
from vitmods.data.sources import SOURCES, Spec, data_source
from vitmods.data.sources.folder import class_folders, file_records, loose_images
from vitmods.data.sources.hf import hf_set
from vitmods.data.sources.imagenet_labels import number_of, present, titles, val_labels, wnids
from vitmods.data.tars import Tar, open_tar
from vitmods.util.errors import UserError

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
    for split, found in readers.items():
        if found:
            source.splits[split], warnings = next(iter(found.values()))()
            source.warnings += warnings
        if len(found) > 1:
            first, *others = found
            source.warnings.append(f"{split} was read from {first}; {' and '.join(others)} beside it was not used.")
    return present(source, titles())


def _train_readers(root: Path) -> dict[str, Reader]:
    """Every way in which train is there, by what is read, the best first."""
    found: dict[str, Reader] = {}
    for folder in (root / base / "train" for base in _BASES):
        if _has_classes(folder):
            found[printable(str(folder))] = lambda folder=folder: _folders(root, folder)  # type: ignore[misc]
    if (archive := root / "ILSVRC2012_img_train.tar").is_file():
        found[archive.name] = lambda: _train_tar(archive)
    return found


def val_readers(root: Path, labels: str | None) -> dict[str, Reader]:
    """Every way in which val is there. labels: the list for images without class folders."""
    lists = [root, root / "val", *(root / base for base in _BASES)]
    found: dict[str, Reader] = {}
    for folder in (root / base / "val" for base in _BASES):
        if _has_classes(folder):
            found[printable(str(folder))] = lambda folder=folder: _folders(root, folder)  # type: ignore[misc]
        elif folder.is_dir() and any(number_of(name) for name in loose_images(folder)):
            found[printable(str(folder))] = lambda folder=folder: _flat(root, folder, lists, labels)  # type: ignore[misc]
    if (archive := root / "ILSVRC2012_img_val.tar").is_file():
        found[archive.name] = lambda: _val_tar(root, archive, lists, labels)
    return found


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
        raise UserError(f"{printable(str(path))} holds no ILSVRC2012_val_00000001.JPEG, ...: fetch it again.")
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
