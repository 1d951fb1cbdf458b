"""Sets of other libraries: torchvision's for classification that are on the disk, and scikit-learn's digits.

Nothing is downloaded unless the spec says download=1.
"""

import inspect
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib.util import find_spec
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitmods.data.read import reading
from vitmods.data.records import Records, Source, printable
from vitmods.data.sources import Spec, data_source
from vitmods.util.errors import UserError, nearest

# The arguments of torchvision's sets for a split: train=True, or split="trainval" and the like.
_TRAIN_FLAG = (("train", True), ("test", False))
_SPLIT_NAMES = (
    ("train", "train"),
    ("train", "trainval"),
    ("train", "train-standard"),
    ("val", "val"),
    ("test", "test"),
)
_LABELS = ("targets", "_labels", "labels", "y")  # attributes that hold the labels of all images
_PAIRS = ("_samples", "samples")  # attributes that hold (path, label)


@data_source(
    "torchvision",
    "torchvision:NAME?root=FOLDER",
    "any classification set of torchvision on the disk; downloads only with `&download=1`",
    options=None,
)
def torchvision(spec: Spec) -> Source:
    """The set torchvision.datasets.NAME under root; the other options go to its constructor."""
    return torchvision_set(spec.rest, spec.folder, {k: v for k, v in spec.options.items() if k != "root"})


def torchvision_set(name: str, root: Path, options: Mapping[str, str]) -> Source:
    """The set torchvision.datasets.NAME in a folder; the options go to its constructor. download=1 lets torchvision
    fetch what is missing.

    Raises UserError for unknown names, missing files and sets that are not for classification.
    """
    from torchvision import datasets

    if name not in datasets.__all__:
        raise UserError(f'torchvision does not have a data set "{name}". {nearest(name, datasets.__all__)}')
    make: Callable[..., Any] = getattr(datasets, name)
    typed = {"true": True, "false": False}
    arguments: dict[str, Any] = {
        key: int(value) if value.isdecimal() else typed.get(value.lower(), value) for key, value in options.items()
    }
    download = bool(arguments.pop("download", False))
    kinds: tuple[type, ...] = getattr(make, "__mro__", ())[:-1]  # base classes take what the constructor hands on
    parameters = {parameter for kind in kinds for parameter in inspect.signature(kind).parameters}
    if download and "download" not in parameters:
        raise UserError(f"torchvision cannot download {name}: put its files under {printable(str(root))} yourself.")
    if "download" in parameters:
        arguments["download"] = download
    choice = next((a for a in ("train", "split") if a in parameters and a not in arguments), None)
    datasets_by_split = _open(make, root, arguments, choice)
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    files = repr([(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths])
    stamp = sha256(files.encode("utf-8", "replace")).hexdigest()
    source = Source(name, (), {})
    for split, dataset in datasets_by_split.items():
        labels = _labels(dataset, name)
        if labels is None:
            source.warnings.append(f"The labels of {name}'s {split} split are not public; it was not used.")
            continue
        source.splits[split] = _records(f"{name}/{split}", dataset, labels, stamp)
    train = datasets_by_split["train"]
    classes = getattr(train, "classes", None) or getattr(train, "categories", None) or []
    names = [", ".join(n) if isinstance(n, tuple) else str(n) for n in classes]
    count = max([len(names), *(int(records.labels.max(initial=-1)) + 1 for records in source.splits.values())])
    source.classes = (*names, *(str(i) for i in range(len(names), count)))
    return source


def _open(make: Callable[..., Any], root: Path, arguments: dict[str, Any], choice: str | None) -> dict[str, Any]:
    """The splits that are on the disk, train among them. choice: the argument that selects a split, if any."""
    attempts: tuple[tuple[str, Any], ...] = _TRAIN_FLAG if choice == "train" else _SPLIT_NAMES
    splits: dict[str, Any] = {}
    reason = "not found"
    for split, value in attempts if choice else (("train", None),):
        if split in splits:
            continue
        try:
            splits[split] = make(root, **arguments, **({choice: value} if choice else {}))
        except TypeError as error:
            raise UserError(f"torchvision's {make.__name__} does not take these options: {error}.") from error
        except (RuntimeError, OSError, ValueError, ImportError) as error:
            unknown_value = isinstance(error, ValueError) and "Unknown value" in str(error)
            if not unknown_value and "train" not in splits:
                reason = str(error).split("\n")[0].split(" You can use download")[0]
    if "train" in splits:
        return splits
    name = make.__name__
    raise UserError(
        f"torchvision's {name} cannot be read from {printable(str(root))}: {reason.rstrip('.')}. "
        f"Nothing is downloaded unless asked for: torchvision can fetch many sets with &download=1."
    )


def _labels(dataset: Any, name: str) -> NDArray[np.int64] | None:
    """(n,), or None where they are kept secret. Images are decoded for them only where no attribute has them."""
    columns = [getattr(dataset, attribute) for attribute in _LABELS if hasattr(dataset, attribute)]
    pairs = [getattr(dataset, attribute) for attribute in _PAIRS if hasattr(dataset, attribute)]
    columns += [[pair[1] for pair in column] for column in pairs if len(column) and len(column[0]) == 2]
    ends = {0, len(dataset) - 1} if len(dataset) else set()
    for values in columns:
        if len(values) == len(dataset) and all(np.array_equal(values[i], dataset[i][1]) for i in ends):
            break
    else:
        values = [dataset[i][1] for i in range(len(dataset))]
    if len(values) and all(value is None for value in values):
        return None
    try:
        return np.array([index(value) for value in values], dtype=np.int64)
    except TypeError:
        raise UserError(
            f"torchvision's {name} is not a classification set: its targets are not class numbers."
        ) from None


def _records(name: str, dataset: Any, labels: NDArray[np.int64], files: str) -> Records:
    def fetch(key: int) -> "Image.Image | NDArray[np.generic]":
        with reading():
            image = dataset[key][0]
            return image if isinstance(image, Image.Image) else np.asarray(image)

    ids = [f"{name}[{i}]" for i in range(len(labels))]
    keys = np.arange(len(labels))
    if type(dataset).__name__ == "SUN397":  # its images come in the order in which the disk has them: go by name
        ids = [path.relative_to(dataset._data_dir).as_posix() for path in dataset._image_files]
        keys = np.array(sorted(keys, key=ids.__getitem__), dtype=np.int64)
        ids.sort()
    return Records(tuple(ids), labels[keys], tuple(files + i for i in ids), fetch, keys)


@data_source("digits", "digits", "scikit-learn's 1,797 handwritten digits, 8 x 8 gray, no download")
def digits(spec: Spec) -> Source:
    """All of them (Alpaydin and Kaynak, UCI 1998) as train, for splits to be made of."""
    # The file that load_digits reads, as importing scikit-learn takes seconds, in every worker.
    sklearn = find_spec("sklearn")
    folder = Path(str(sklearn and sklearn.origin)).parent
    rows = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels = np.rint(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    n = len(pixels)
    ids = tuple(f"{i:04d}" for i in range(n))
    records = Records(ids, rows[:, -1].astype(np.int64), ids, lambda key: pixels[key], np.arange(n))
    return Source("digits", tuple(map(str, range(10))), {"train": records})
