"""Objects in an image (boxes, classes and perhaps masks), and images with them as detectors see them: resized whole,
flipped, padded to one size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.data.augment import padded
from vitmods.data.dataset import Annotated, Draw
from vitmods.data.geometry import Geometry, resize
from vitmods.data.records import Broken, Source, printable
from vitmods.data.rng import Stream, uniform
from vitmods.recipes import Augment
from vitmods.util.errors import UserError, needs

Floats = NDArray[np.float32]
Segment = Sequence[Sequence[float]] | Mapping[str, Any]
"""The outline of an object: polygons x1 y1 x2 y2 ... in pixels, or COCO's run lengths with `size` and `counts`."""


@dataclass(frozen=True, eq=False)
class Objects:
    """The n objects of one image, in pixels of the image as it is in its file.

    boxes: (n, 4), left, top, right, bottom, the right and lower ends excluded. labels: (n,), positions in the classes.
    crowd: (n,), whether a box holds many objects that nobody counted. area: (n,), by which COCO sorts objects
    by size: of the mask if known, else of the box. size: height and width in the source; None: boxes are fractions of
    them. segments: the outlines; None: unknown.
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
        """Return a hash of all columns."""
        digest = blake2b(digest_size=16)
        for column in (self.boxes, self.labels, self.crowd, self.area):
            digest.update(column.tobytes())
        digest.update(repr((self.size, self.segments)).encode())
        return digest.hexdigest()

    def at(self, native: tuple[int, int]) -> "Objects":
        """With boxes, areas and outlines in pixels of an image of this height and width."""
        if self.size is not None:
            return self
        height, width = native
        sides = np.array([width, height, width, height], dtype=np.float32)
        segments = self.segments and tuple(
            [[value * native[1 - i % 2] for i, value in enumerate(polygon)] for polygon in segment]
            for segment in self.segments
            if not isinstance(segment, Mapping)
        )
        return Objects(self.boxes * sides, self.labels, self.crowd, self.area * height * width, native, segments)

    def masks(self) -> NDArray[np.bool_]:
        """(n, height, width). UserError without outlines, or without the package that draws them."""
        if self.segments is None or self.size is None:
            raise UserError("These objects have boxes without masks: train them with --task detection.")
        nothing = np.zeros((0, *self.size), dtype=np.bool_)
        return np.stack([drawn(segment, self.size) for segment in self.segments]) if len(self) else nothing


def drawn(segment: Segment, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Draw the mask (height, width) of an outline, as COCO's tools do."""
    return np.asarray(coco_masks().decode(_runs(segment, size))).astype(np.bool_)


def outline_area(segment: Segment, size: tuple[int, int] | None) -> float:
    """Return the area of an outline's mask in pixels; without a size, of its polygons, as a fraction of the image."""
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
        fit = [isinstance(objects, Objects) and objects.segments is not None for objects in records.annotations or ()]
        broken += [
            Broken(split, name, "has boxes without masks: leave it out, or use --task detection")
            for name, kept in zip(records.ids, fit, strict=True)
            if not kept
        ]
        splits[split] = records.take(np.flatnonzero(fit))
    outlines = [objects for part in splits.values() for objects in part.annotations or () if len(objects)]  # type: ignore[arg-type]
    if not outlines:
        raise UserError(f"{printable(source.spec)} has boxes without masks: train it with --task detection.")
    return replace(source, splits=splits, broken=broken, target="instances")


def coco_masks() -> Any:
    """COCO's mask code. UserError where it is not installed."""
    with needs("Masks need faster-coco-eval", "tasks"):
        from faster_coco_eval.core import mask
    return mask


Stored = Sequence[NDArray[np.uint8]]


def view_size(native: tuple[int, int], img_size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image of `native` size, resized until its short side is min(img_size), or its long side
    max(img_size) where that is less; aspect kept, halves rounded up, at least one pixel."""
    short, long = min(native), max(native)
    scale = min(min(img_size) / short, max(img_size) / long)
    height, width = (max(1, int(side * scale + 0.5)) for side in native)
    return height, width


def training_views(
    stored: Stored, annotated: Sequence[Annotated], draw: Draw, masks: bool = False
) -> tuple[tuple[Tensor, ...], Any]:
    """A `Joint` for boxes: views uint8 (B, C, H, W), and for each image the targets of `Detector`; masks: those of all
    objects too, padded as the images are."""
    flips = uniform(draw.seed, Stream.FLIP, draw.epoch, draw.views) < draw.augment.flip
    views, targets = _views(stored, annotated, draw.img_size, draw.augment, flips.tolist(), masks)
    return (views,), targets


def evaluation_views(
    stored: Stored, annotated: Sequence[Annotated], img_size: tuple[int, int], augment: Augment, masks: bool = False
) -> tuple[Tensor, Any]:
    """A `JointView` for boxes: the views of training, not flipped. Targets have the annotation too, as `truth`."""
    return _views(stored, annotated, img_size, augment, [False] * len(stored), masks)


def _views(
    stored: Stored,
    annotated: Sequence[Annotated],
    img_size: tuple[int, int],
    augment: Augment,
    flips: Sequence[bool],
    masks: bool,
) -> tuple[Tensor, Any]:
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    images = zip(stored, annotated, flips, strict=True)
    both = [view(image, objects, img_size, augment, flip) for image, objects, flip in images]
    views, targets = padded([image for image, _ in both], augment), [target for _, target in both]
    for target, flip in zip(targets, flips, strict=True) if masks else ():
        if (truth := target.get("truth")) is None:
            continue
        outlines = torch.from_numpy(truth.masks()[~truth.crowd]).to(torch.uint8)
        height, width = target["size"]
        target["masks"] = torch.zeros(len(outlines), *views.shape[-2:], dtype=torch.uint8)
        if len(outlines):
            moved = F.resize_mask(outlines, [height, width], InterpolationMode.NEAREST_EXACT)
            target["masks"][:, :height, :width] = F.horizontal_flip(moved) if flip else moved
    return views, targets


def view(
    image: NDArray[np.uint8], annotated: Annotated, img_size: tuple[int, int], augment: Augment, flip: bool
) -> tuple[Tensor, dict[str, Any]]:
    """One image uint8 (C, H, W), and its target: `size` of the view and `native`. With an annotation also boxes float32
    (n, 4) in pixels of the view and labels int64 (n,) of all objects but crowds, and the annotation itself, `truth`, in
    pixels of the image in its file."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as F

    size, method = view_size(annotated.native, img_size), Geometry(img_size, resample=augment.resample).view_method
    seen = torch.from_numpy(image.copy())
    seen = seen if tuple(seen.shape[-2:]) == size else resize(seen[None], size, method)[0]
    seen = F.horizontal_flip(seen) if flip else seen
    target: dict[str, Any] = {"size": size, "native": annotated.native}
    if annotated.annotation is None:
        return seen, target
    truth: Objects = annotated.annotation.at(annotated.native)
    kept = ~truth.crowd
    boxes = tv_tensors.BoundingBoxes(torch.from_numpy(truth.boxes[kept]), format="XYXY", canvas_size=annotated.native)
    boxes = F.resize(boxes, list(size))
    boxes = F.horizontal_flip(boxes) if flip else boxes
    labels = torch.from_numpy(truth.labels[kept])
    return seen, {**target, "boxes": boxes.as_subclass(Tensor).float(), "labels": labels, "truth": truth}
