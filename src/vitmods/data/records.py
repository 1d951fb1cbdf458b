"""What a source of pictures offers: names, labels and a way to fetch each picture."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    pass

Raw = "bytes | Image | NDArray[np.generic]"
"""A picture before it is read: the bytes of a file, an open PIL picture, or an array (H, W) or (H, W, channels)."""

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Records:
    """The pictures of one split, in an order that does not depend on the order of files on the disk.

    ids name pictures for people and for splitting; stamps change whenever a picture may have changed and key the cache;
    fetch(keys[i]) returns picture i and raises if it cannot. Labels are (n,) positions in the source's classes.
    label_sets: where several classes are right for a picture, all of them, for each picture.
    """

    ids: tuple[str, ...]
    labels: NDArray[np.int64]
    stamps: tuple[str, ...]
    fetch: Callable[[int], Raw]  # type: ignore[valid-type]
    keys: NDArray[np.int64]
    label_sets: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.labels) == len(self.stamps) == len(self.keys)

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, index: NDArray[np.int64]) -> "Records":
        """The records at these positions, in this order."""
        return replace(
            self,
            ids=tuple(self.ids[i] for i in index),
            labels=self.labels[index],
            stamps=tuple(self.stamps[i] for i in index),
            keys=self.keys[index],
            label_sets=None if self.label_sets is None else tuple(self.label_sets[i] for i in index),
        )


def joined(*parts: Records) -> Records:
    """All pictures of the parts, one part after the other. Label sets are not kept."""
    starts = np.cumsum([0, *(len(part) for part in parts)])

    def fetch(key: int) -> Raw:  # type: ignore[valid-type]
        part = int(np.searchsorted(starts, key, side="right")) - 1
        return parts[part].fetch(int(parts[part].keys[key - starts[part]]))

    return Records(
        ids=tuple(name for part in parts for name in part.ids),
        labels=np.concatenate([part.labels for part in parts]),
        stamps=tuple(stamp for part in parts for stamp in part.stamps),
        fetch=fetch,
        keys=np.arange(starts[-1]),
    )


@dataclass
class Source:
    """A data set as found: its splits among train, val and test (train alone where there are none; none of train where
    the set is for evaluation only), and what was passed over.

    class_map: where its classes are some of a larger set's that models are trained on (200 of ImageNet's 1,000), their
    positions there, in the order of `classes`. allow: which of ALLOWED is no more than a warning.
    """

    name: str
    spec: str
    classes: tuple[str, ...]
    splits: dict[str, Records]
    warnings: list[str] = field(default_factory=list)
    class_map: tuple[int, ...] | None = None
    allow: frozenset[str] = frozenset()


ALLOWED = {
    "overlap": "pictures of val or test that are in train too",
    "missing": "classes of val or test without a training picture",
}


def printable(name: str) -> str:
    """A file name that any terminal and any UTF-8 file can take; bytes that are not text become backslash codes."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")
