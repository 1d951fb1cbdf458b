"""The papers' transfer sets that torchvision can read, with the splits that the papers use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitmods.data.records import Records, Source, joined, printable
from vitmods.data.sets.known import KNOWN
from vitmods.data.torchvision_sets import torchvision_set
from vitmods.util.errors import UserError

SETS = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "cars": "StanfordCars",
    "flowers102": "Flowers102",
    "pets": "OxfordIIITPet",
    "food101": "Food101",
    "dtd": "DTD",
}


def from_torchvision(spec: str, root: Path, options: dict[str, str]) -> Source:
    """One of SETS. Flowers-102 is trained on its train and val together, 2,040 images, in the transfer tables."""
    name = spec.partition(":")[0]
    source = open_torchvision(name, SETS[name], root, options)
    if name == "flowers102":
        train = joined(source.splits["train"], source.splits.pop("val"))
        source.splits["train"] = train
    return source


def open_torchvision(name: str, their_name: str, root: Path, options: dict[str, Any]) -> Source:
    """torchvision's set for NAME of KNOWN. Raises UserError that says which files to put where."""
    try:
        source = torchvision_set(name, their_name, {"root": str(root), **options})
    except UserError as error:
        reason = str(error).partition(" Nothing is downloaded")[0]
        raise KNOWN[name].missing(root, reason) from error
    source.name = KNOWN[name].title
    return source


def sun397(spec: str, root: Path, options: dict[str, str]) -> Source:
    """SUN397 (Xiao et al., CVPR 2010), with the splits of lists where there are any.

    partition: 1 to 10, the published ones. Otherwise the lists of TensorFlow Datasets if they are in the folder.
    """
    chosen = {key: value for key, value in options.items() if key != "partition"}
    source = open_torchvision("sun397", "SUN397", root, chosen)
    if partition := options.get("partition"):
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
        raise KNOWN["sun397"].missing(root, f"there is no {' and no '.join(absent)}")
    source.splits = {split: by_list(source.splits["train"], root / "SUN397", path) for split, path in lists.items()}
    return source


def by_list(records: Records, folder: Path, path: Path) -> Records:
    """The images that a text file names, one a line, by their path below the folder."""
    position = {name: i for i, name in enumerate(records.ids)}
    names = [line.strip().lstrip("/") for line in path.read_text().splitlines() if line.strip()]
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
