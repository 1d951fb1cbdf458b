"""Images with boxes and masks as detectors see them: resized whole, flipped, padded to one size."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.data.dataset import Annotated, Draw
from vitmods.data.geometry import Geometry, resize
from vitmods.data.mask_views import mean_color
from vitmods.data.objects import Objects
from vitmods.data.rng import Stream, uniform
from vitmods.recipes import Augment

Stored = Sequence[NDArray[np.uint8]]


def view_size(native: tuple[int, int], img_size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image of `native` size, resized until its short side is min(img_size), or its long side
    max(img_size) where that is less; aspect kept, halves rounded up, at least one pixel."""
    short, long = min(native), max(native)
    scale = min(min(img_size) / short, max(img_size) / long)
    height, width = (max(1, int(side * scale + 0.5)) for side in native)
    return height, width


def training_views(stored: Stored, annotated: Sequence[Annotated], draw: Draw) -> tuple[tuple[Tensor, ...], Any]:
    """A `Joint` for boxes: views uint8 (B, C, H, W), and of each image what `Detector` trains on."""
    flips = uniform(draw.seed, Stream.FLIP, draw.epoch, draw.views) < draw.augment.flip
    both = [
        view(image, one, draw.img_size, draw.augment, bool(flip))
        for image, one, flip in zip(stored, annotated, flips, strict=True)
    ]
    return (padded([image for image, _ in both], draw.augment),), [target for _, target in both]


def training_views_with_masks(
    stored: Stored, annotated: Sequence[Annotated], draw: Draw
) -> tuple[tuple[Tensor, ...], Any]:
    """The same with the masks of all objects, padded as the images are."""
    views, targets = training_views(stored, annotated, draw)
    flips = uniform(draw.seed, Stream.FLIP, draw.epoch, draw.views) < draw.augment.flip
    found = zip(targets, annotated, flips, strict=True)
    return views, [{**target, "masks": _masks(target, one, bool(flip), views[0])} for target, one, flip in found]


def evaluation_views(
    stored: Stored, annotated: Sequence[Annotated], img_size: tuple[int, int], augment: Augment
) -> tuple[Tensor, Any]:
    """A `JointView` for boxes: what training sees, not flipped. Targets have the annotation too, as `truth`."""
    both = [view(image, one, img_size, augment, False) for image, one in zip(stored, annotated, strict=True)]
    return padded([image for image, _ in both], augment), [target for _, target in both]


def evaluation_views_with_masks(
    stored: Stored, annotated: Sequence[Annotated], img_size: tuple[int, int], augment: Augment
) -> tuple[Tensor, Any]:
    """The same with the masks of all objects."""
    views, targets = evaluation_views(stored, annotated, img_size, augment)
    found = zip(targets, annotated, strict=True)
    return views, [
        target if one.annotation is None else {**target, "masks": _masks(target, one, False, views)}
        for target, one in found
    ]


def view(
    image: NDArray[np.uint8], annotated: Annotated, img_size: tuple[int, int], augment: Augment, flip: bool
) -> tuple[Tensor, dict[str, Any]]:
    """One image uint8 (C, H, W), and its target: `size` of the view, `native`, and if there is an annotation boxes
    float32 (n, 4) in pixels of the view and labels int64 (n,) of all objects but crowds, and the annotation itself,
    `truth`, in pixels of the image in its file."""
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
    boxes = tv_tensors.BoundingBoxes(
        torch.from_numpy(truth.boxes[~truth.crowd]), format="XYXY", canvas_size=annotated.native
    )
    boxes = F.resize(boxes, list(size))
    boxes = F.horizontal_flip(boxes) if flip else boxes
    labels = torch.from_numpy(truth.labels[~truth.crowd])
    return seen, {**target, "boxes": boxes.as_subclass(Tensor).float(), "labels": labels, "truth": truth}


def _masks(target: dict[str, Any], annotated: Annotated, flip: bool, views: Tensor) -> Tensor:
    """Masks uint8 (n, H, W) of the objects but crowds, moved as the view was and padded to the size of `views`."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    truth: Objects = target["truth"]
    whole = torch.from_numpy(truth.masks()[~truth.crowd]).to(torch.uint8)
    (height, width), found = target["size"], torch.zeros(len(whole), *views.shape[-2:], dtype=torch.uint8)
    if len(whole):
        moved = F.resize_mask(whole, [height, width], InterpolationMode.NEAREST_EXACT)
        found[:, :height, :width] = F.horizontal_flip(moved) if flip else moved
    return found


def padded(images: Sequence[Tensor], augment: Augment) -> Tensor:
    """Images (C, h, w) on the upper left of the largest height and width among them, and the mean color beside."""
    height, width = (max(image.shape[side] for image in images) for side in (-2, -1))
    found = torch.empty(len(images), images[0].shape[0], height, width, dtype=torch.uint8)
    found[...] = torch.from_numpy(mean_color(augment, images[0].shape[0]))
    for whole, image in zip(found, images, strict=True):
        whole[:, : image.shape[1], : image.shape[2]] = image
    return found
