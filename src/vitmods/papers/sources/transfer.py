"""The papers' transfer sets: those that torchvision reads, iNaturalist and VTAB-1k, with the splits of the papers.

VTAB-1k (Zhai et al. 2019, "A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark")
has 19 tasks with 800 images to train on, 200 to choose by and the whole test set. The benchmark's own 1,000 images are
the first in the order of TensorFlow Datasets, which the original files do not have. Lists made from it are followed
exactly; otherwise splits are random draws, which the warnings report.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitmods.data.records import Records, Source, joined, printable
from vitmods.data.sources import SOURCES, Spec
from vitmods.data.sources.files import file_records
from vitmods.data.sources.folder import folder
from vitmods.data.sources.torchvision import torchvision_set
from vitmods.data.splits import cut, limit, take_out
from vitmods.papers.sources import SETS, published_set
from vitmods.util.errors import UserError, nearest
from vitmods.util.limits import lines_of, read_json


def open_torchvision(name: str, torchvision_name: str, root: Path, options: Mapping[str, str]) -> Source:
    """torchvision's set for the source NAME. Raises UserError that says which files to put where."""
    try:
        source = torchvision_set(torchvision_name, root, options)
    except UserError as error:
        reason = str(error).partition(" Nothing is downloaded")[0]
        raise SOURCES[name].missing(root, reason) from error
    source.name = SOURCES[name].title
    return source


def transfer_set(spec: Spec) -> Source:
    """A set that torchvision reads. Flowers-102 is trained on its train and val together, as in the papers."""
    source = open_torchvision(spec.kind.name, SETS[spec.kind.name]["torchvision"], spec.folder, spec.options)
    if spec.kind.name == "flowers102":
        source.splits["train"] = joined(source.splits["train"], source.splits.pop("val"))
    return source


for _name in SETS:
    if "torchvision" in SETS[_name]:
        published_set(_name)(transfer_set)


@published_set("sun397")
def sun397(spec: Spec) -> Source:
    """SUN397 (Xiao et al., CVPR 2010), with the splits of lists if there are any.

    partition: 1 to 10, the published ones. Otherwise the lists of TensorFlow Datasets if they are in the folder.
    """
    root, partition = spec.folder, spec.options.get("partition")
    options = {key: value for key, value in spec.options.items() if key != "partition"}
    source = open_torchvision("sun397", "SUN397", root, options)
    images = root / "SUN397"
    if partition:
        if partition not in map(str, range(1, 11)):
            raise UserError(f"SUN397 has partitions 1 to 10, not {partition}.")
        names = {"train": f"Training_{int(partition):02d}.txt", "test": f"Testing_{int(partition):02d}.txt"}
        lists = {split: images / "Partitions" / name for split, name in names.items()}
    else:
        names = {"train": "tr", "val": "va", "test": "te"}
        lists = {split: root / f"sun397_tfds_{part}.txt" for split, part in names.items()}
        if not any(path.is_file() for path in lists.values()):
            source.warnings.append("SUN397 is without lists of splits: its splits are drawn, and differ from others'.")
            return source
    if missing := [printable(str(path)) for path in lists.values() if not path.is_file()]:
        raise spec.kind.missing(root, f"{' and '.join(missing)} missing")
    records = source.splits["train"]
    position = {name: i for i, name in enumerate(records.ids)}
    for split, path in lists.items():
        listed = [line.lstrip("/") for line in lines_of(path)]
        if unknown := [name for name in listed if name not in position]:
            raise UserError(
                f"{printable(str(path))} names {len(unknown)} images that are not in {printable(str(images))}, the "
                f"first of them {printable(unknown[0])}. Put them there, or remove the list."
            )
        source.splits[split] = records.take(np.array([position[name] for name in listed], dtype=np.int64))
    return source


@published_set("inat2019")
@published_set("inat2018")
def inaturalist(spec: Spec) -> Source:
    """iNaturalist of the year in the spec. The published val, on which papers report, is test."""
    root, year = spec.folder, spec.kind.name.removeprefix("inat")
    paths = {"train": root / f"train{year}.json", "test": root / f"val{year}.json"}
    for path in (*paths.values(), root / f"train_val{year}"):
        if not path.exists():
            raise spec.kind.missing(root, f"{path.name} is missing")
    source = Source(spec.kind.title, (), {})
    number: dict[int, int] = {}
    for split, path in paths.items():
        try:
            table = read_json(path, "JSON")
            if split == "train":
                names = {c["id"]: str(c["name"]) for c in sorted(table["categories"], key=lambda c: c["id"])}
                number, count = {category: i for i, category in enumerate(names)}, Counter(names.values())
                source.classes = tuple(
                    name if count[name] == 1 else f"{name} ({i})" for i, name in enumerate(names.values())
                )
            files = {image["id"]: image["file_name"] for image in table["images"]}
            rows = sorted((files[a["image_id"]], number[a["category_id"]]) for a in table["annotations"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{printable(str(path))} is not iNaturalist's table of images, annotations and categories, or labels "
                f"images or classes that are not listed ({type(error).__name__}: {error}). Fetch it again."
            ) from error
        ids = tuple(name for name, _ in rows)
        labels = np.array([label for _, label in rows], dtype=np.int64)
        source.splits[split] = file_records(ids, labels, [root / name for name in ids])
    return source


@dataclass(frozen=True)
class VtabTask:
    """A task of VTAB.

    classes, test: how many classes and test images the published task has.
    lists: its folder in copies of VTAB-1k.
    torchvision: its class there, for the original files; values: the labels that this gives, if they are not 0, 1, ...
    """

    title: str
    group: str
    classes: int
    test: int
    lists: str
    torchvision: str | None = None
    values: tuple[int, ...] = ()


TASKS = {name: VtabTask(**fields) for name, fields in SETS["vtab"]["tasks"].items()}
TRAIN, VAL = 800, 200
_SEED = 0  # of the draws that stand in for the benchmark's own
_TEST = 0.2  # fraction of a set without splits of its own: VTAB's for EuroSAT, Resisc45 and, nearly, SUN397
_LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}


@published_set("vtab", parts=tuple(TASKS))
def vtab(spec: Spec) -> Source:
    """The task that the spec names: from lists, class folders or torchvision's set, whichever is there first."""
    root, name = spec.folder, spec.rest
    if name not in TASKS:
        raise UserError(f'Unknown task "{name}" of VTAB. {nearest(name, TASKS)}')
    task = TASKS[name]
    lists = [base / task.lists for base in (root, root / "vtab-1k") if (base / task.lists / _LISTS["train"]).is_file()]
    path = root / name
    if lists:
        if missing := [name for name in _LISTS.values() if not (lists[0] / name).is_file()]:
            raise spec.kind.missing(lists[0].parent, f"{printable(str(lists[0]))} lacks {' and '.join(missing)}")
        splits = {split: _listed(lists[0], lists[0] / name, task) for split, name in _LISTS.items()}
        source = Source(task.title, tuple(str(i) for i in range(task.classes)), splits)
    elif path.is_dir() and not any((path / inner).exists() for inner in ("dtd", "2750")):  # torchvision's DTD, EuroSAT
        source = _drawn(folder(str(path)))
    elif task.torchvision is None:
        reason = f"{task.lists}/{_LISTS['train']} and a folder of the task are missing, and torchvision lacks it"
        raise spec.kind.missing(root, reason)
    else:
        options = {key: value for key, value in spec.options.items() if key != "root"}
        source = open_torchvision("vtab", task.torchvision, root, options)
        if task.values:
            source.classes = tuple(source.classes[value] for value in task.values)
            for split, records in source.splits.items():
                source.splits[split] = part = records.take(np.flatnonzero(np.isin(records.labels, task.values)))
                part.labels[:] = np.searchsorted(task.values, part.labels)
        if "val" in source.splits and "test" not in source.splits:  # CLEVR: the published test is without labels
            source.splits["test"] = source.splits.pop("val")
        source = _drawn(source)
    source.name = f"VTAB-1k {task.title}"
    if len(source.classes) != task.classes:
        source.warnings.append(f"{len(source.classes)} classes; VTAB's {task.title} has {task.classes}.")
    if (count := len(source.splits["test"])) != task.test:
        source.warnings.append(f"test has {count:,} images; VTAB's {task.title} has {task.test:,}.")
    return source


def _listed(where: Path, path: Path, task: VtabTask) -> Records:
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


def _drawn(source: Source) -> Source:
    """800 and 200 images of the set's own train and val, class by class."""
    splits = source.splits
    if "test" not in splits:
        parts = cut(splits["train"], _SEED, {"test": _TEST})
        splits |= {name: splits["train"].take(part) for name, part in parts.items()}
        source.warnings.append(f"The set is without a test split: a draw of {_TEST:.0%} replaces VTAB's.")
    if "val" in splits:
        splits["val"] = limit(splits["val"], VAL, _SEED)
    else:
        splits["train"], splits["val"] = take_out(splits["train"], VAL, _SEED)
    splits["train"] = limit(splits["train"], TRAIN, _SEED)
    source.warnings.append(f"{TRAIN} and {VAL} images are drawn at random: VTAB-1k's own lists are missing.")
    return source
