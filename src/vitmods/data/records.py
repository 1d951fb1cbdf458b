"""Images as a source offers them: names, labels and a way to fetch each image."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Union

import numpy as np
from numpy.typing import NDArray

from vitmods.util.text import printable as printable

if TYPE_CHECKING:
    from PIL.Image import Image

Raw = Union[bytes, "Image", NDArray[np.generic]]
"""An image before it is read: the bytes of a file, an open PIL image, or an array (H, W) or (H, W, channels)."""

SPLITS = ("train", "val", "test")
SPLIT_NAMES = {
    "train": ("train", "training", "trainieren", "entrenamiento", "addestramento", "treino", "treinamento"),
    "val": (
        *("val", "valid", "validation", "dev", "validierung", "validacion", "validación", "validazione"),
        *("validacao", "validação"),
    ),
    "test": ("test", "testing", "testen", "prueba", "pruebas", "teste"),
}
"""The names of a split's folders, shards and tables, in English and, of folders, in other languages of the West."""


def split_named(word: str) -> str | None:
    """Return the split that a word names, in upper or lower case; None for other words."""
    return next((split for split, names in SPLIT_NAMES.items() if word.lower() in names), None)


ENDINGS = frozenset(
    ".avif .bmp .dib .gif .ico .jfif .jp2 .jpe .jpeg .jpg .pbm .pcx .pgm .png .pnm .ppm .tga .tif .tiff .webp".split()  # noqa: SIM905
)
"""endings of image files, in lower case"""
PICTURES = ENDINGS | set(
    ".arw .cr2 .cr3 .dcm .dng .eps .exr .hdr .heic .heif .hif .jxl .nef .orf .pef .psd .raf .rw2 .srw .svg .xcf".split()  # noqa: SIM905
)
"""and those of pictures that cannot be read, or only with an extra: they are listed, and reading says why not"""


class Annotation(Protocol):
    """Facts of one image beyond its classes (a mask, boxes), in pixels of the image as in its file."""

    @property
    def stamp(self) -> str:
        """Changes with the facts; part of the data set's fingerprint, so not a path or a time."""
        ...


_COLUMNS = ("ids", "labels", "keys", "label_sets", "annotations", "groups", "shards", "native", "digests", "rows")


@dataclass(frozen=True)
class Records:
    """The images of one split, in an order that does not depend on the order of files on the disk.

    ids name images for people and for splitting; fetch(keys[i]) returns image i or raises. labels (n,): positions in
    the classes. stamps: one for each image of the part of the source that these were taken from, which changes
    whenever the image may have; they key the cache. rows (n,): the place of each among them. label_sets: all labels of
    each image, where there may be several. annotations: of each image, where the target has facts beyond classes;
    label_sets then has the classes in it. groups: the group of each image, if the source names them; those of one group
    belong together.

    If a source knows more without reading an image: shards (n,), the number of the file of each, one after the other by
    their keys; native (n, 2), heights and widths, 0 if unknown; digests (n, 16), as in Index. sequential: to fetch an
    image, those before it in its file have to be read too.
    """

    ids: tuple[str, ...]
    labels: NDArray[np.int64]
    stamps: tuple[str, ...]
    fetch: Callable[[int], Raw]
    keys: NDArray[np.int64]
    label_sets: tuple[tuple[int, ...], ...] | None = None
    annotations: tuple[Annotation, ...] | None = None
    groups: tuple[str, ...] | None = None
    shards: NDArray[np.int64] | None = None
    native: NDArray[np.int64] | None = None
    digests: NDArray[np.uint8] | None = None
    sequential: bool = False
    rows: NDArray[np.int64] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.rows is None:
            object.__setattr__(self, "rows", np.arange(len(self.stamps)))
        columns = [column for column in (self.shards, self.native, self.digests) if column is not None]
        assert {len(self.labels), len(self.rows), len(self.keys), *map(len, columns)} == {len(self.ids)}

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, index: NDArray[np.int64]) -> "Records":
        """The records at these positions, in this order."""
        positions = index.tolist()

        def of(column: Any) -> Any:
            if isinstance(column, tuple):
                return tuple(map(column.__getitem__, positions))
            return None if column is None else column[index]

        return replace(self, **{name: of(getattr(self, name)) for name in _COLUMNS})

    def some(self, count: int) -> "Records":
        """About `count` of them: spread evenly, or the first of the first file if they are sequential."""
        if self.sequential:
            return self.take(np.argsort(self.keys, kind="stable")[:count])
        return self.take(np.arange(0, len(self), max(1, len(self) // count)))


class Broken(NamedTuple):
    """An entry that should be an image with a label, and is not."""

    split: str
    path: str
    reason: str


@dataclass(frozen=True)
class Streaming:
    """How images are read. asked: True, decoded when needed; False, decoded once and kept; None, by size. buffer: the
    number of places that an image may move from the order of files."""

    asked: bool | None = None
    buffer: int = 10_000


def joined(*parts: Records) -> Records:
    """Concatenate the images of several records."""
    starts = np.cumsum([0, *(len(part) for part in parts)])
    sets, annotations = [part.label_sets for part in parts], [part.annotations for part in parts]
    groups = [part.groups for part in parts]

    def fetch(key: int) -> Raw:
        part = int(np.searchsorted(starts, key, side="right")) - 1
        return parts[part].fetch(int(parts[part].keys[key - starts[part]]))

    return Records(
        ids=tuple(name for part in parts for name in part.ids),
        labels=np.concatenate([part.labels for part in parts]),
        stamps=tuple(part.stamps[row] for part in parts for row in part.rows),
        fetch=fetch,
        keys=np.arange(starts[-1]),
        label_sets=None if None in sets else tuple(labels for part in sets for labels in part or ()),
        annotations=None if None in annotations else tuple(item for part in annotations for item in part or ()),
        groups=None if None in groups else tuple(name for part in groups for name in part or ()),
    )


class Inputs(ABC):
    """Inputs of another kind than images, such as sequences of tokens."""

    title: ClassVar[str]
    """in the plural, for messages"""
    task: ClassVar[str]
    """that reads them"""

    @abstractmethod
    def recommend(self, source: "Source") -> tuple[str, tuple[int, int], str, int]:
        """Default base model, img_size, recipe and in_chans."""

    @abstractmethod
    def summarize(self, source: "Source", options: Any) -> dict[str, Any]:
        """Counts, warnings and problems of the splits, as `ImageDataset.summary`; options: `SplitOptions`."""


@dataclass
class Source:
    """A data set as found: its splits among train, val and test (without train: for evaluation only).

    class_map: where its classes are some of a larger set's that models are trained on (200 of ImageNet's 1,000), their
    positions there, in the order of `classes`. target: the fact that it has of each image, such as "class" or "labels".
    allow: which of ALLOWED is no more than a warning. broken: entries that are not records. unseen: the listed classes
    that no mask shows, in a sentence. verify: compares the files with their checksums and returns the problems. spec:
    set by `open_source`. inputs: the inputs that `fetch` gives; None: images.
    """

    name: str
    classes: tuple[str, ...]
    splits: dict[str, Records]
    warnings: list[str] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    streaming: Streaming = Streaming()
    verify: Callable[[], list[str]] | None = None
    class_map: tuple[int, ...] | None = None
    allow: frozenset[str] = frozenset()
    target: str = "class"
    unseen: str = ""
    spec: str = ""
    inputs: "Inputs | None" = None


ALLOWED = {
    "overlap": "images of val or test that are in train too",
    "missing": "classes of val or test without a training image, and classes that no mask shows",
}
