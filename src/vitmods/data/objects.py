"""Objects in an image: boxes, classes and, where they are known, masks. What a source of boxes says of each image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitmods.data.records import Broken, Source, printable
from vitmods.util.errors import UserError

Floats = NDArray[np.float32]
Segment = Sequence[Sequence[float]] | Mapping[str, Any]
"""The outline of an object: polygons x1 y1 x2 y2 ... in pixels, or COCO's run lengths with `size` and `counts`."""


@dataclass(frozen=True, eq=False)
class Objects:
    """The n objects of one image, in pixels of the image as it is in its file.

    boxes: (n, 4), left, top, right, bottom, the right and lower ends excluded. labels: (n,), positions in the classes.
    crowd: (n,), whether a box holds many objects that nobody counted. area: (n,), by which COCO tells small objects
    from large ones: of the mask where there is one, else of the box. size: height and width that the source says;
    None: boxes are fractions of them. segments: the outlines; None: not known.
    """

    boxes: Floats
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    area: Floats
    size: tuple[int, int] | None
    segments: tuple[Segment, ...] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def stamp(self) -> str:
        """A hash of all that it says."""
        found = blake2b(digest_size=16)
        for column in (self.boxes, self.labels, self.crowd, self.area):
            found.update(column.tobytes())
        found.update(repr((self.size, self.segments)).encode())
        return found.hexdigest()

    def at(self, native: tuple[int, int]) -> "Objects":
        """With boxes, areas and outlines in pixels of an image of this height and width."""
        if self.size is not None:
            return self
        height, width = native
        boxes = self.boxes * np.array([width, height, width, height], dtype=np.float32)
        segments = None if self.segments is None else tuple(_scaled(one, native) for one in self.segments)
        return Objects(boxes, self.labels, self.crowd, self.area * height * width, native, segments)

    def masks(self) -> NDArray[np.bool_]:
        """(n, height, width). UserError where outlines are not known, or what draws them is not installed."""
        if self.segments is None or self.size is None:
            raise UserError("These objects have boxes and no masks: train them with --task detection.")
        found = np.zeros((len(self), *self.size), dtype=np.bool_)
        for mask, segment in zip(found, self.segments, strict=True):
            mask[...] = drawn(segment, self.size)
        return found


def _scaled(segment: Segment, native: tuple[int, int]) -> Segment:
    """Polygons of fractions as polygons of pixels."""
    assert not isinstance(segment, Mapping)
    sides = native[::-1]
    return [[value * sides[i % 2] for i, value in enumerate(polygon)] for polygon in segment]


def drawn(segment: Segment, size: tuple[int, int]) -> NDArray[np.bool_]:
    """The mask (height, width) of an outline, as COCO's own tools draw it."""
    mask: NDArray[np.bool_] = np.asarray(coco_masks().decode(_runs(segment, size))).astype(np.bool_)
    return mask


def outline_area(segment: Segment, size: tuple[int, int] | None) -> float:
    """Of its mask, in pixels; where no size is known, of its polygons, as a fraction of the image."""
    if size is not None:
        return float(coco_masks().area(_runs(segment, size)))
    assert not isinstance(segment, Mapping)
    corners = [np.reshape(polygon, (-1, 2)).T for polygon in segment]
    return sum(abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2 for x, y in corners)


def _runs(segment: Segment, size: tuple[int, int]) -> Any:
    """COCO's packed run lengths of an outline."""
    code = coco_masks()
    height, width = size
    if isinstance(segment, Mapping):
        packed = isinstance(segment["counts"], str | bytes)
        return dict(segment) if packed else code.frPyObjects(dict(segment), height, width)
    polygons = [list(map(float, polygon)) for polygon in segment]
    return code.merge(code.frPyObjects(polygons, height, width))


def with_instances(source: Source) -> Source:
    """A source of boxes as one of masks of single objects: images with an object without an outline are broken.

    Raises:
        UserError: no image has outlines.
    """
    splits, broken = {}, list(source.broken)
    for split, records in source.splits.items():
        fit = [isinstance(one, Objects) and one.segments is not None for one in records.annotations or ()]
        broken += [
            Broken(split, name, "has boxes without masks: leave it out, or use --task detection")
            for name, kept in zip(records.ids, fit, strict=True)
            if not kept
        ]
        splits[split] = records.take(np.flatnonzero(fit))
    outlines = [one for part in splits.values() for one in part.annotations or () if len(one)]  # type: ignore[arg-type]
    if not outlines:
        raise UserError(f"{printable(source.spec)} has boxes and no masks: train it with --task detection.")
    return replace(source, splits=splits, broken=broken, target="instances")


def coco_masks() -> Any:
    """COCO's mask code. UserError where it is not installed."""
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise UserError(f"Masks need faster-coco-eval ({error}): pip install 'vitmods[tasks]'.") from error
    return mask
