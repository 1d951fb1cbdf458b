"""Masks: files whose pixels say of each pixel of an image what class it shows.

Images and their masks as training and evaluation see them. Both are cut alike, whatever is drawn.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.data.augment import padded
from vitmods.data.dataset import Annotated, Draw
from vitmods.data.geometry import LONGEST, Geometry, Method, middle, resize
from vitmods.data.read import Unreadable, digest, opened, reading, size_in_header
from vitmods.data.records import Broken, Records, printable
from vitmods.data.rng import Stream, uniform
from vitmods.data.sources.files import file_records
from vitmods.data.store import remembered
from vitmods.data.threads import AHEAD, busy_with, cores, in_order
from vitmods.recipes import Augment
from vitmods.tasks.segmentation.recipes import SegmentationPart
from vitmods.util.errors import UserError
from vitmods.util.limits import read_bytes

IGNORE = 255
"""the class of pixels that are neither trained on nor evaluated"""
_REMEMBERED = 100  # masks: what is found in fewer is not kept
_FORMAT = "vitmods masks 3"


@dataclass(frozen=True)
class Coding:
    """The meaning of the values of a mask's pixels: (value, class or IGNORE) in the order of values.

    A value is a number, or where the masks are colored 0xRRGGBB. source: the file of the meanings, for messages.
    """

    meanings: tuple[tuple[int, int], ...]
    colored: bool
    source: str

    @cached_property
    def _values(self) -> NDArray[np.int64]:
        return np.array([value for value, _ in self.meanings], dtype=np.int64)

    def read(self, raw: bytes) -> NDArray[np.uint8]:
        """Classes (H, W) of a mask file. Raises Unreadable where it is not a mask, or holds an unknown value."""
        return np.array([label for _, label in self.meanings], dtype=np.uint8)[self.places(raw)]

    def places(self, raw: bytes) -> NDArray[np.int64]:
        """Positions (H, W) of the pixels' values in `meanings`. Raises Unreadable as `read` does."""
        with reading():
            image = opened(raw)
            if image.format == "JPEG":
                raise Unreadable("its mask is a JPEG file, whose compression alters values: export masks as PNG")
            if self.colored:
                r, g, b = np.asarray(image.convert("RGB"), dtype=np.int64).transpose(2, 0, 1)
                values = r << 16 | g << 8 | b
            elif image.mode == "RGB" and not np.ptp(np.asarray(image), axis=2).any():  # gray values, three times
                values = np.asarray(image)[..., 0]
            elif image.mode in ("RGB", "RGBA", "CMYK", "YCbCr"):
                raise Unreadable(f"its mask has colors, and {self.source} numbers: give a palette.csv instead")
            else:
                values = np.asarray(image if image.mode != "LA" else image.getchannel(0))
                if values.dtype.kind == "f" and (fractions := values != np.rint(values)).any():
                    raise Unreadable(f"its mask holds {values[fractions][0]:g}, and values are whole numbers")
                values = values.astype(np.int64)
        place: NDArray[np.int64] = np.searchsorted(self._values, values).clip(max=len(self._values) - 1)
        if (strange := self._values[place] != values).any():
            held = f"the {'color' if self.colored else 'value'} {self.named(int(values[strange][0]))}"
            raise Unreadable(f"its mask holds {held}, which {self.source} does not know")
        return middle(place)

    def named(self, value: int) -> str:
        """A value in words: a number, or red, green and blue."""
        return f"{value >> 16}, {value >> 8 & 255}, {value & 255}" if self.colored else str(value)


@dataclass(frozen=True)
class MaskFile:
    """The annotation of an image by a mask. stamp: a hash of the file's bytes and of what they mean; classes: those
    that it holds, with their numbers of pixels."""

    path: Path
    coding: Coding
    stamp: str
    classes: tuple[int, ...]
    pixels: tuple[int, ...]

    def read(self) -> NDArray[np.uint8]:
        """Classes (H, W), IGNORE where there is none. UserError where the file can no longer be read."""
        try:
            with reading():
                raw = read_bytes(self.path, "image")
            return self.coding.read(raw)
        except Unreadable as error:
            raise UserError(f"{printable(str(self.path))} cannot be read any more: {error}. Repair it.") from error


class ImageAndMask(NamedTuple):
    """An image, by its name, and its mask."""

    id: str
    image: Path
    mask: Path


class _Seen(NamedTuple):
    """A checked mask: why it cannot be used ("": it can), its stamp, the positions of its values in the coding's
    meanings, and their pixels."""

    reason: str
    stamp: str
    places: tuple[int, ...]
    pixels: tuple[int, ...]


def masked_records(split: str, pairs: Sequence[ImageAndMask], coding: Coding) -> tuple[Records, list[Broken], set[int]]:
    """The images with their masks, those with unusable masks, and the values that the masks hold. Every mask is read;
    the outcome of many is kept in the user's cache folder until a file changes."""
    ids, none = tuple(pair.id for pair in pairs), np.zeros(len(pairs), np.int64)
    images = file_records(ids, none, [pair.image for pair in pairs])
    masks = file_records(ids, none, [pair.mask for pair in pairs])
    if len(images) < _REMEMBERED:
        seen = _look(images, masks, coding)
    else:
        content = "\0".join([_FORMAT, repr(coding), *images.stamps, *masks.stamps]).encode("utf-8", "surrogateescape")
        rows = remembered(f"masks/{sha256(content).hexdigest()[:32]}.json", lambda: _look(images, masks, coding))
        seen = [_Seen(reason, stamp, tuple(places), tuple(pixels)) for reason, stamp, places, pixels in rows]
    good = np.array([i for i, mask in enumerate(seen) if not mask.reason], dtype=np.int64)
    annotations = []
    for i in good.tolist():
        counts = Counter[int]()
        for place, pixels in zip(seen[i].places, seen[i].pixels, strict=True):
            counts[coding.meanings[place][1]] += pixels
        classes = tuple(sorted(counts.keys() - {IGNORE}))
        pixels_of_classes = tuple(counts[label] for label in classes)
        annotations.append(MaskFile(pairs[i].mask, coding, seen[i].stamp, classes, pixels_of_classes))
    records = replace(
        images.take(good), label_sets=tuple(a.classes for a in annotations), annotations=tuple(annotations)
    )
    values = {coding.meanings[place][0] for look in seen for place in look.places}
    return records, [Broken(split, ids[i], mask.reason) for i, mask in enumerate(seen) if mask.reason], values


def _look(images: Records, masks: Records, coding: Coding) -> list[_Seen]:
    def look(position: int) -> _Seen:
        try:
            raw = masks.fetch(position)
            assert isinstance(raw, bytes)
            indices = coding.places(raw)
            with reading():
                size = opened(raw).size[::-1]
        except Unreadable as error:
            reason = str(error)
            return _Seen(reason if reason.startswith("its mask") else f"its mask cannot be read: {reason}", "", (), ())
        with suppress(Unreadable):  # the store reports an unreadable image
            image = images.fetch(position)
            assert isinstance(image, bytes)
            if (expected := size_in_header(image)) != size:
                return _Seen(f"its mask is {size[0]} x {size[1]}, the image {expected[0]} x {expected[1]}", "", (), ())
        counts = np.bincount(indices.ravel())
        places = np.flatnonzero(counts)
        held = tuple(places.tolist()), tuple(counts[places].tolist())
        if all(coding.meanings[place][1] == IGNORE for place in held[0]):
            return _Seen("no pixel of its mask has a class", "", *held)
        return _Seen("", sha256(digest(raw) + repr(coding.meanings).encode()).hexdigest()[:32], *held)

    def named(position: int) -> _Seen:
        with busy_with(printable(images.ids[position])):
            return look(position)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(in_order(named, range(len(images)), cores(), ahead=AHEAD))


_TRIES = 10  # crops that are drawn before one with too much of a class is taken
_BRIGHTNESS, _FACTOR, _HUE = 32, 0.5, 0.1  # as mmsegmentation: levels, part of contrast and saturation, of the circle

Stored = Sequence[NDArray[np.uint8]]


def training_views(
    part: SegmentationPart, stored: Stored, annotated: Sequence[Annotated], draw: Draw
) -> tuple[tuple[Tensor], tuple[Tensor, Tensor]]:
    """Views uint8 (B, C, H, W) of images as stored (C, h, w), their masks int64 (B, H, W), and the mean number of
    labelled pixels of an image of this batch, float32 (B,): the divisor of a loss over a part of the batch.

    The steps of mmsegmentation for ADE20K: each image is resized to a random size (`resize_range`), cropped (drawn
    anew, up to ten times, while more than `most_of_class` of the labelled pixels are of one class), mirrored, its
    colors are distorted, and it is padded on the right and below, in the mean color with masks of IGNORE. All is a
    function of (seed, epoch, view).
    """
    height, width = draw.img_size
    views, masks = [], torch.full((len(stored), height, width), IGNORE, dtype=torch.int64)
    for i, (image, record) in enumerate(zip(stored, annotated, strict=True)):
        view, mask = _drawn(part, image, record.annotation.read(), draw, int(draw.views[i]))
        views.append(view)
        masks[i, : mask.shape[0], : mask.shape[1]] = mask
    return (padded(views, draw.augment, draw.img_size),), (masks, labelled_pixels(masks))


def labelled_pixels(masks: Tensor) -> Tensor:
    """The labelled pixels of an image on average, float32 (B,), of masks (B, H, W); at least 1."""
    return ((masks != IGNORE).sum() / len(masks)).clamp(min=1).expand(len(masks))


def evaluation_views(
    stored: Stored, annotated: Sequence[Annotated], img_size: tuple[int, int], augment: Augment
) -> tuple[Tensor, dict[str, Any]]:
    """Whole images, resized to just cover img_size, padded on the right and below to one size: uint8 (B, C, H, W).

    Targets: sizes int64 (B, 2), `size` of each image without its padding, `native` in its file, `window` for img_size;
    and `mask`, a list of uint8 (native height, native width) or None.
    """
    geometry = Geometry(img_size, resample=augment.resample)
    images = [_resized(image, geometry.covering(*image.shape[1:]), geometry.view_method) for image in stored]
    sizes = torch.tensor([image.shape[1:] for image in images])
    native = [(min(h, LONGEST * w), min(w, LONGEST * h)) for h, w in (record.native for record in annotated)]
    masks = [None if record.annotation is None else torch.from_numpy(record.annotation.read()) for record in annotated]
    window = torch.tensor(img_size).expand(len(images), 2)
    return padded(images, augment), {"size": sizes, "native": torch.tensor(native), "window": window, "mask": masks}


def _drawn(
    part: SegmentationPart, image: NDArray[np.uint8], mask: NDArray[np.uint8], draw: Draw, view: int
) -> tuple[Tensor, Tensor]:
    """The crop of an image and of its mask, not yet padded."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    augment, size = draw.augment, draw.img_size

    def number(stream: Stream, counter: int = 0) -> float:
        return float(uniform(draw.seed, stream, draw.epoch, view, counter))

    low, high = part.resize_range or (1.0, 1.0)
    scale = low + number(Stream.MASK_SIZE) * (high - low)
    covering = max(side / full for side, full in zip(size, mask.shape, strict=True))
    resized = tuple(max(1, round(side * covering * scale)) for side in mask.shape)
    nearest = InterpolationMode.NEAREST_EXACT
    labels: Tensor = F.resize_image(torch.from_numpy(mask)[None], list(resized), nearest)[0].long()
    room = [max(0, full - side) for full, side in zip(resized, size, strict=True)]
    for attempt in range(_TRIES):
        y, x = (
            int(number(stream, attempt) * (free + 1))
            for stream, free in zip((Stream.CROP_TOP, Stream.CROP_LEFT), room, strict=True)
        )
        box = slice(y, y + size[0]), slice(x, x + size[1])
        counts = torch.bincount(labels[box].flatten(), minlength=IGNORE)[:IGNORE]
        if not counts.any() or counts.max() <= part.most_of_class * counts.sum():
            break
    geometry = Geometry(size, resample=augment.resample)
    pixels, cut = _resized(image, resized, geometry.crop_method)[:, *box], labels[box]
    if number(Stream.FLIP) < augment.flip:
        pixels, cut = pixels.flip(-1), cut.flip(-1)
    return _distorted(pixels, part.photometric, number), cut


def _resized(image: NDArray[np.uint8], size: tuple[int, ...], method: Method) -> Tensor:
    pixels = torch.from_numpy(image.copy())
    return pixels if image.shape[1:] == size else resize(pixels[None], (size[0], size[1]), method)[0]


def _distorted(pixels: Tensor, strength: float, number: Any) -> Tensor:
    """Brightness, contrast, saturation and hue of an image uint8 (C, H, W), each with probability 0.5, contrast before
    or after the two of color. Saturation is torchvision's (towards gray), not that of HSV."""
    if strength == 0:
        return pixels
    from torchvision.transforms.v2 import functional as F

    def amount(which: int, largest: float) -> float | None:
        chosen = number(Stream.PHOTOMETRIC, 2 * which) < 0.5
        return (2 * number(Stream.PHOTOMETRIC, 2 * which + 1) - 1) * largest * strength if chosen else None

    def contrast(image: Tensor) -> Tensor:
        factor = amount(1, _FACTOR)
        return image if factor is None else (image.float() * (1 + factor)).round().clamp(0, 255).to(torch.uint8)

    contrast_first = number(Stream.PHOTOMETRIC, 8) < 0.5
    if (levels := amount(0, _BRIGHTNESS)) is not None:
        pixels = (pixels.float() + levels).round().clamp(0, 255).to(torch.uint8)
    pixels = contrast(pixels) if contrast_first else pixels
    if (factor := amount(2, _FACTOR)) is not None:
        pixels = F.adjust_saturation(pixels, 1 + factor)
    if (turn := amount(3, _HUE)) is not None:
        pixels = F.adjust_hue(pixels, turn)
    return pixels if contrast_first else contrast(pixels)
