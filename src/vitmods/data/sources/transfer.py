"""The papers' transfer sets that torchvision can read, with the splits that the papers use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitmods.data.records import Records, Source, joined, printable
from vitmods.data.sources import SOURCES, Spec, data_source
from vitmods.data.sources.torchvision import torchvision_set
from vitmods.util.errors import UserError
from vitmods.util.limits import lines_of

_FETCHED = "torchvision fetches it with ?download=1"
_AUTHORS = f"its authors; {_FETCHED}"
_3T = "Three Things, Table 6"
_VTAB = "VTAB in Dual PatchNorm, Table 3"


@dataclass(frozen=True)
class _Set:
    """A set that torchvision reads as `theirs`, and the facts of SourceKind."""

    theirs: str
    title: str
    classes: int
    counts: dict[str, int]
    layout: str
    origin: str
    used_in: str
    terms: str = "see its authors"
    notes: tuple[str, ...] = ()


_SETS = {
    "cifar10": _Set(
        "CIFAR10",
        "CIFAR-10",
        10,
        {"train": 50_000, "test": 10_000},
        "cifar-10-batches-py/data_batch_1, ..., test_batch, batches.meta",
        f"Krizhevsky 2009, cs.toronto.edu; {_FETCHED}",
        _3T,
    ),
    "cifar100": _Set(
        "CIFAR100",
        "CIFAR-100",
        100,
        {"train": 50_000, "test": 10_000},
        "cifar-100-python/train, test, meta",
        f"Krizhevsky 2009, cs.toronto.edu; {_FETCHED}",
        f"{_3T}; {_VTAB}",
    ),
    "cars": _Set(
        "StanfordCars",
        "Stanford Cars",
        196,
        {"train": 8_144, "test": 8_041},
        "stanford_cars/cars_train/*.jpg, cars_test/*.jpg, devkit/cars_train_annos.mat, devkit/cars_meta.mat and "
        "cars_test_annos_withlabels.mat",
        "Krause et al. 2013; the authors' page is gone, copies are on Kaggle and Hugging Face",
        _3T,
    ),
    "flowers102": _Set(
        "Flowers102",
        "Oxford Flowers-102",
        102,
        {"train": 2_040, "test": 6_149},
        "flowers-102/jpg/image_00001.jpg, ..., imagelabels.mat and setid.mat",
        f"Nilsback and Zisserman 2008, robots.ox.ac.uk; {_FETCHED}",
        f"{_3T}; {_VTAB}",
        notes=("train is the published train and val together, 1,020 each, as in the transfer tables",),
    ),
    "pets": _Set(
        "OxfordIIITPet",
        "Oxford-IIIT Pets",
        37,
        {"train": 3_680, "test": 3_669},
        "oxford-iiit-pet/images/*.jpg and annotations/trainval.txt, test.txt",
        f"Parkhi et al. 2012, robots.ox.ac.uk; {_FETCHED}",
        _VTAB,
        "CC BY-SA 4.0",
        ("train is the published trainval",),
    ),
    "food101": _Set(
        "Food101",
        "Food-101",
        101,
        {"train": 75_750, "test": 25_250},
        "food-101/images/*/*.jpg and meta/train.json, test.json",
        _AUTHORS,
        "none; a usual transfer set",
    ),
    "dtd": _Set(
        "DTD",
        "Describable Textures",
        47,
        {"train": 1_880, "val": 1_880, "test": 1_880},
        "dtd/dtd/images/*/*.jpg and labels/train1.txt, val1.txt, test1.txt",
        _AUTHORS,
        _VTAB,
        notes=("the first of its ten partitions",),
    ),
}


def _open(spec: Spec) -> Source:
    """One of the sets. Flowers-102 is trained on its train and val together, 2,040 images, in the transfer tables."""
    source = open_torchvision(spec.kind.name, _SETS[spec.kind.name].theirs, spec.folder, spec.options)
    if spec.kind.name == "flowers102":
        source.splits["train"] = joined(source.splits["train"], source.splits.pop("val"))
    return source


for _name, _facts in _SETS.items():
    _about = {field: value for field, value in vars(_facts).items() if field not in ("theirs", "title", "layout")}
    data_source(_name, f"{_name}:FOLDER", _facts.title, options=("download",), layout=(_facts.layout,), **_about)(_open)


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
    origin=_AUTHORS,
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
