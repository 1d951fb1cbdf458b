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
    """

    ids: tuple[str, ...]
    labels: NDArray[np.int64]
    stamps: tuple[str, ...]
    fetch: Callable[[int], Raw]  # type: ignore[valid-type]
    keys: NDArray[np.int64]

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
        )


@dataclass
class Source:
    """A data set as found: its splits among train, val and test (train alone where there are none), and what was
    passed over."""

    name: str
    spec: str
    classes: tuple[str, ...]
    splits: dict[str, Records]
    warnings: list[str] = field(default_factory=list)


def printable(name: str) -> str:
    """A file name that any terminal and any UTF-8 file can take; bytes that are not text become backslash codes."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")
