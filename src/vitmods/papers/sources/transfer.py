"""The papers' transfer sets: those that torchvision reads, iNaturalist and VTAB-1k, with the splits of the papers.

VTAB-1k (Zhai et al. 2019, "A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark")
has 19 tasks with 800 images to train on, 200 to choose by and the whole test set. The benchmark's own 1,000 images are
the first in the order of TensorFlow Datasets, which the original files do not have. Lists made from it are followed
exactly; all other splits are random draws of ours, which the warnings report.
"""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitmods.data.records import Records, Source, joined, printable
from vitmods.data.sources import SOURCES, Spec, data_source
from vitmods.data.sources.folder import file_records, folder
from vitmods.data.sources.torchvision import torchvision_set
from vitmods.data.splits import cut, limit, take_out
from vitmods.util.errors import UserError, nearest
from vitmods.util.limits import lines_of, read_json

SETS: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "sets.toml").read_text(encoding="utf-8"))
"""Name of a set -> its class in torchvision, and the facts of its SourceKind."""


def _transfer_set(spec: Spec) -> Source:
    """One of the sets. Flowers-102 is trained on its train and val together, 2,040 images, as in the papers."""
    source = open_torchvision(spec.kind.name, SETS[spec.kind.name]["torchvision"], spec.folder, spec.options)
    if spec.kind.name == "flowers102":
        source.splits["train"] = joined(source.splits["train"], source.splits.pop("val"))
    return source


for _name, _set in SETS.items():
    _facts: dict[str, Any] = {
        field: tuple(value) if isinstance(value, list) else value for field, value in _set.items()
    }
    _title, _ = _facts.pop("title"), _facts.pop("torchvision")
    data_source(_name, f"{_name}:FOLDER", _title, options=("download",), **_facts)(_transfer_set)


def open_torchvision(name: str, their_name: str, root: Path, options: Mapping[str, str]) -> Source:
    """torchvision's set for the source NAME. Raises UserError that says which files to put where."""
    try:
        source = torchvision_set(their_name, root, options)
    except UserError as error:
        reason = str(error).partition(" Nothing is downloaded")[0]
        raise SOURCES[name].missing(root, reason) from error
    source.name = SOURCES[name].title
    return source


@data_source(
    "sun397",
    "sun397:FOLDER",
    "SUN397",
    options=("partition", "download"),
    layout=("SUN397/a/abbey/sun_*.jpg, ... and SUN397/ClassName.txt",),
    origin="its authors; torchvision fetches it with ?download=1",
    classes=397,
    used_in="Dual PatchNorm, Tables 3 and 7",
    notes=(
        "with the lists of TensorFlow Datasets in FOLDER, sun397_tfds_tr.txt, sun397_tfds_va.txt and "
        "sun397_tfds_te.txt: their splits (76,128, 10,875 and 21,750)",
        "with partition=1 (to 10): SUN397/Partitions/Training_01.txt and Testing_01.txt (19,850 each)",
        "otherwise train, val and test are made, class by class, from split_seed",
    ),
)
def sun397(spec: Spec) -> Source:
    """SUN397 (Xiao et al., CVPR 2010), with the splits of lists where there are any.

    partition: 1 to 10, the published ones. Otherwise the lists of TensorFlow Datasets if they are in the folder.
    """
    root = spec.folder
    chosen = {key: value for key, value in spec.options.items() if key != "partition"}
    source = open_torchvision("sun397", "SUN397", root, chosen)
    if partition := spec.options.get("partition"):
        if partition not in map(str, range(1, 11)):
            raise UserError(f"SUN397 has partitions 1 to 10, not {partition}.")
        number, folder = f"{int(partition):02d}", root / "SUN397" / "Partitions"
        lists = {"train": folder / f"Training_{number}.txt", "test": folder / f"Testing_{number}.txt"}
    else:
        names = {"train": "tr", "val": "va", "test": "te"}
        lists = {split: root / f"sun397_tfds_{part}.txt" for split, part in names.items()}
        if not any(path.is_file() for path in lists.values()):
            source.warnings.append("SUN397 has no lists of splits here: its splits are made, so others' differ.")
            return source
    if absent := [printable(str(path)) for path in lists.values() if not path.is_file()]:
        raise spec.kind.missing(root, f"there is no {' and no '.join(absent)}")
    source.splits = {split: by_list(source.splits["train"], root / "SUN397", path) for split, path in lists.items()}
    return source


def by_list(records: Records, folder: Path, path: Path) -> Records:
    """The images that a text file names, one a line, by their path below the folder."""
    position = {name: i for i, name in enumerate(records.ids)}
    names = [line.lstrip("/") for line in lines_of(path)]
    if absent := [name for name in names if name not in position]:
        raise UserError(
            f"{printable(str(path))} names {len(absent)} images that are not in {printable(str(folder))}, the first "
            f"of them {printable(absent[0])}. Put them there, or remove the list."
        )
    return records.take(np.array([position[name] for name in names], dtype=np.int64))


def shifted(records: Records, values: Sequence[int]) -> Records:
    """The images whose label is one of the values, labeled by its place among them."""
    kept = np.flatnonzero(np.isin(records.labels, values))
    part = records.take(kept)
    part.labels[:] = np.searchsorted(values, part.labels)
    return part


_COLUMNS = {"images": ("id", "file_name"), "annotations": ("image_id", "category_id"), "categories": ("id", "name")}


def _inaturalist(spec: Spec) -> Source:
    """The year that the spec names; the published val, on which papers report, is test."""
    root, year = spec.folder, spec.kind.name.removeprefix("inat")
    paths = {split: root / f"{part}{year}.json" for split, part in (("train", "train"), ("test", "val"))}
    for path in (*paths.values(), root / f"train_val{year}"):
        if not path.exists():
            raise spec.kind.missing(root, f"there is no {path.name}")
    tables: dict[str, Any] = {}
    for split, path in paths.items():
        try:
            tables[split] = read_json(path, "JSON")
            for part, columns in _COLUMNS.items():
                for column in columns:
                    tables[split][part][0][column]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UserError(
                f"{printable(str(path))} is not iNaturalist's table of images, annotations and categories "
                f"({type(error).__name__}: {error}). Fetch it again."
            ) from error
    categories = sorted(tables["train"]["categories"], key=lambda category: category["id"])
    number = {category["id"]: i for i, category in enumerate(categories)}
    names = [str(category["name"]) for category in categories]
    count = Counter(names)
    classes = tuple(name if count[name] == 1 else f"{name} ({i})" for i, name in enumerate(names))
    source = Source(spec.kind.title, classes, {})
    for split, table in tables.items():
        files = {image["id"]: image["file_name"] for image in table["images"]}
        rows = sorted((files.get(a["image_id"], ""), number.get(a["category_id"], -1)) for a in table["annotations"])
        if rows[0][0] == "" or min(label for _, label in rows) < 0:
            raise UserError(
                f"{printable(str(paths[split]))} labels images or classes that are not listed. Fetch it again."
            )
        ids = tuple(name for name, _ in rows)
        labels = np.array([label for _, label in rows], dtype=np.int64)
        source.splits[split] = file_records(ids, labels, [root / name for name in ids])
    return source


for _year, _classes, _train, _test in ((2018, 8_142, 437_513, 24_426), (2019, 1_010, 265_213, 3_030)):
    data_source(
        f"inat{_year}",
        f"inat{_year}:FOLDER",
        f"iNaturalist {_year}",
        layout=(f"train_val{_year}/*/*/*.jpg, train{_year}.json and val{_year}.json",),
        origin="github.com/visipedia/inat_comp",
        classes=_classes,
        counts={"train": _train, "test": _test},
        used_in="Three Things, Table 6",
        terms="non-commercial research and education",
        notes=("test is the published val, on which the papers report; the published test has no labels",),
    )(_inaturalist)


TRAIN, VAL = 800, 200
_SEED = 0  # of the draws that stand in for the benchmark's own
_TEST = 0.2  # fraction of a set without splits of its own: VTAB's for EuroSAT, Resisc45 and, nearly, SUN397
_LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}


@dataclass(frozen=True)
class VtabTask:
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
    "caltech101": VtabTask("Caltech101", "natural", 102, 6_084, "caltech101", "Caltech101"),
    "cifar100": VtabTask("CIFAR-100", "natural", 100, 10_000, "cifar", "CIFAR100"),
    "dtd": VtabTask("DTD", "natural", 47, 1_880, "dtd", "DTD"),
    "flowers102": VtabTask("Flowers102", "natural", 102, 6_149, "oxford_flowers102", "Flowers102"),
    "pets": VtabTask("Pets", "natural", 37, 3_669, "oxford_iiit_pet", "OxfordIIITPet"),
    "sun397": VtabTask("Sun397", "natural", 397, 21_750, "sun397", "SUN397"),
    "svhn": VtabTask("SVHN", "natural", 10, 26_032, "svhn", "SVHN"),
    "camelyon": VtabTask("Camelyon", "specialized", 2, 32_768, "patch_camelyon", "PCAM"),
    "eurosat": VtabTask("EuroSAT", "specialized", 10, 5_400, "eurosat", "EuroSAT"),
    "resisc45": VtabTask("Resisc45", "specialized", 45, 6_300, "resisc45"),
    "retinopathy": VtabTask("Retinopathy", "specialized", 5, 42_670, "diabetic_retinopathy"),
    "clevr-count": VtabTask(
        "Clevr-Count", "structured", 8, 15_000, "clevr_count", "CLEVRClassification", (3, 4, 5, 6, 7, 8, 9, 10)
    ),
    "clevr-dist": VtabTask("Clevr-Dist", "structured", 6, 15_000, "clevr_dist"),
    "dmlab": VtabTask("DMLab", "structured", 6, 22_735, "dmlab"),
    "kitti-dist": VtabTask("KITTI-Dist", "structured", 4, 711, "kitti"),
    "dspr-loc": VtabTask("dSpr-Loc", "structured", 16, 73_728, "dsprites_loc"),
    "dspr-ori": VtabTask("dSpr-Ori", "structured", 16, 73_728, "dsprites_ori"),
    "snorb-azim": VtabTask("sNORB-Azim", "structured", 18, 12_150, "smallnorb_azi"),
    "snorb-elev": VtabTask("sNORB-Elev", "structured", 9, 12_150, "smallnorb_ele"),
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
    path = root / name
    if lists:
        if absent := [name for name in _LISTS.values() if not (lists[0] / name).is_file()]:
            raise spec.kind.missing(lists[0].parent, f"{printable(str(lists[0]))} lacks {' and '.join(absent)}")
        splits = {split: _listed(lists[0], lists[0] / name, task) for split, name in _LISTS.items()}
        source = Source(task.title, tuple(str(i) for i in range(task.classes)), splits)
    elif path.is_dir() and not any((path / inner).exists() for inner in ("dtd", "2750")):  # torchvision's DTD, EuroSAT
        source = _drawn(folder(str(path)))
    else:
        source = _drawn(_from_torchvision(root, task, spec.options))
    source.name = f"VTAB-1k {task.title}"
    if len(source.classes) != task.classes:
        source.warnings.append(f"{len(source.classes)} classes; VTAB's {task.title} has {task.classes}.")
    if len(source.splits["test"]) != task.test:
        tested = len(source.splits["test"])
        source.warnings.append(f"test has {tested:,} images; VTAB's {task.title} has {task.test:,}.")
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


def _from_torchvision(root: Path, task: VtabTask, options: Mapping[str, str]) -> Source:
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
