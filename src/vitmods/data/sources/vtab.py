"""VTAB-1k (Zhai et al. 2019, "A Large-scale Study of Representation Learning with the Visual Task Adaptation
Benchmark"): 19 tasks with 800 images to train on, 200 to choose by and the whole test set.

The benchmark's own 1,000 images are the first of TensorFlow Datasets' order, which cannot be had from the original
files. Lists that were made from it are followed exactly; everything else is a draw of ours, and the warnings say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitmods.data.records import Records, Source, printable
from vitmods.data.sources import SOURCES, Spec, data_source
from vitmods.data.sources.folder import file_records, folder
from vitmods.data.sources.transfer import open_torchvision, shifted
from vitmods.data.splits import cut, limit, take_out
from vitmods.util.errors import UserError, nearest
from vitmods.util.limits import lines_of

TRAIN, VAL = 800, 200
_SEED = 0  # of the draws that stand in for the benchmark's own
_TEST = 0.2  # fraction of a set without splits of its own: VTAB's for EuroSAT, Resisc45 and, nearly, SUN397
_LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}


@dataclass(frozen=True)
class Task:
    """classes, and test images as in VTAB. lists: its folder in copies of VTAB-1k. torchvision: its class there, for
    the original files; values: the labels that this gives, where they are not 0, 1, ..."""

    title: str
    group: str
    classes: int
    test: int
    lists: str
    torchvision: str | None = None
    values: tuple[int, ...] = ()


TASKS = {
    "caltech101": Task("Caltech101", "natural", 102, 6_084, "caltech101", "Caltech101"),
    "cifar100": Task("CIFAR-100", "natural", 100, 10_000, "cifar", "CIFAR100"),
    "dtd": Task("DTD", "natural", 47, 1_880, "dtd", "DTD"),
    "flowers102": Task("Flowers102", "natural", 102, 6_149, "oxford_flowers102", "Flowers102"),
    "pets": Task("Pets", "natural", 37, 3_669, "oxford_iiit_pet", "OxfordIIITPet"),
    "sun397": Task("Sun397", "natural", 397, 21_750, "sun397", "SUN397"),
    "svhn": Task("SVHN", "natural", 10, 26_032, "svhn", "SVHN"),
    "camelyon": Task("Camelyon", "specialized", 2, 32_768, "patch_camelyon", "PCAM"),
    "eurosat": Task("EuroSAT", "specialized", 10, 5_400, "eurosat", "EuroSAT"),
    "resisc45": Task("Resisc45", "specialized", 45, 6_300, "resisc45"),
    "retinopathy": Task("Retinopathy", "specialized", 5, 42_670, "diabetic_retinopathy"),
    "clevr-count": Task(
        "Clevr-Count", "structured", 8, 15_000, "clevr_count", "CLEVRClassification", (3, 4, 5, 6, 7, 8, 9, 10)
    ),
    "clevr-dist": Task("Clevr-Dist", "structured", 6, 15_000, "clevr_dist"),
    "dmlab": Task("DMLab", "structured", 6, 22_735, "dmlab"),
    "kitti-dist": Task("KITTI-Dist", "structured", 4, 711, "kitti"),
    "dspr-loc": Task("dSpr-Loc", "structured", 16, 73_728, "dsprites_loc"),
    "dspr-ori": Task("dSpr-Ori", "structured", 16, 73_728, "dsprites_ori"),
    "snorb-azim": Task("sNORB-Azim", "structured", 18, 12_150, "smallnorb_azi"),
    "snorb-elev": Task("sNORB-Elev", "structured", 9, 12_150, "smallnorb_ele"),
}


@data_source(
    "vtab",
    "vtab:TASK?root=FOLDER",
    "VTAB-1k",
    options=("download",),
    layout=(
        "FOLDER-OF-TASK/train800.txt, val200.txt and test.txt, lines of path and class number, as the usual copies "
        "of VTAB-1k have them",
        "TASK/train/CLASS/*.jpg and TASK/test/CLASS/*.jpg (and val), from which 800 and 200 are drawn",
        "the files of torchvision's set, for the tasks that it has",
    ),
    origin="Zhai et al. 2019 (github.com/google-research/task_adaptation)",
    counts={"train": TRAIN, "val": VAL},
    used_in="Dual PatchNorm, Table 3",
)
def vtab(spec: Spec) -> Source:
    """The task that the spec names: from lists, class folders or torchvision's set, whichever is there first."""
    root, name = spec.folder, spec.rest
    if name not in TASKS:
        raise UserError(f'VTAB has no task "{name}". {nearest(name, TASKS)}')
    task = TASKS[name]
    lists = [base / task.lists for base in (root, root / "vtab-1k") if (base / task.lists / _LISTS["train"]).is_file()]
    own = root / name
    if lists:
        if absent := [name for name in _LISTS.values() if not (lists[0] / name).is_file()]:
            raise spec.kind.missing(lists[0].parent, f"{printable(str(lists[0]))} lacks {' and '.join(absent)}")
        splits = {split: _listed(lists[0], lists[0] / name, task) for split, name in _LISTS.items()}
        source = Source(task.title, tuple(str(i) for i in range(task.classes)), splits)
    elif own.is_dir() and not any((own / inner).exists() for inner in ("dtd", "2750")):  # torchvision's DTD, EuroSAT
        source = _drawn(folder(str(own)))
    else:
        source = _drawn(_from_torchvision(root, task, spec.options))
    source.name = f"VTAB-1k {task.title}"
    if len(source.classes) != task.classes:
        source.warnings.append(f"{len(source.classes)} classes; VTAB's {task.title} has {task.classes}.")
    if len(source.splits["test"]) != task.test:
        found = len(source.splits["test"])
        source.warnings.append(f"test has {found:,} images; VTAB's {task.title} has {task.test:,}.")
    return source


def _listed(where: Path, path: Path, task: Task) -> Records:
    """Lines of a path below `where` and a class number."""
    rows = [line.rsplit(maxsplit=1) for line in lines_of(path)]
    for number, row in enumerate(rows, 1):
        if len(row) != 2 or not row[1].isdecimal() or int(row[1]) >= task.classes:
            raise UserError(
                f"Line {number} of {printable(str(path))} is not an image's path and a class from 0 to "
                f"{task.classes - 1}: {printable(' '.join(row))!r}. Fix it, or fetch the copy again."
            )
    if not rows:
        raise UserError(f"{printable(str(path))} is empty. Fetch the copy again.")
    labels = np.array([int(label) for _, label in rows], dtype=np.int64)
    return file_records(tuple(name for name, _ in rows), labels, [where / name for name, _ in rows])


def _from_torchvision(root: Path, task: Task, options: Mapping[str, str]) -> Source:
    if task.torchvision is None:
        reason = f"there is no {task.lists}/{_LISTS['train']}, no folder of the task, and torchvision lacks it"
        raise SOURCES["vtab"].missing(root, reason)
    source = open_torchvision("vtab", task.torchvision, root, {k: v for k, v in options.items() if k != "root"})
    if task.values:
        source.splits = {split: shifted(records, task.values) for split, records in source.splits.items()}
        source.classes = tuple(source.classes[value] for value in task.values)
    if "val" in source.splits and "test" not in source.splits:  # CLEVR: the published test has no labels
        source.splits["test"] = source.splits.pop("val")
    return source


def _drawn(source: Source) -> Source:
    """800 and 200 images of the set's own train and val, class by class."""
    splits = source.splits
    if "test" not in splits:
        parts = cut(splits["train"], _SEED, {"test": _TEST})
        splits |= {name: splits["train"].take(part) for name, part in parts.items()}
        source.warnings.append(f"The set has no test split here: a draw of {_TEST:.0%} stands in for VTAB's.")
    if "val" in splits:
        splits["val"] = limit(splits["val"], VAL, _SEED)
    else:
        splits["train"], splits["val"] = take_out(splits["train"], VAL, _SEED)
    splits["train"] = limit(splits["train"], TRAIN, _SEED)
    source.warnings.append(f"{TRAIN} and {VAL} images are a draw of ours: VTAB-1k's own lists were not there.")
    return source
