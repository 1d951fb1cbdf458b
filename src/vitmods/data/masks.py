"""Masks: files whose pixels say of each pixel of an image what class it shows."""

import json
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitmods.data.geometry import middle
from vitmods.data.read import Unreadable, digest, opened, reading, size_in_header
from vitmods.data.records import Broken, Records, printable
from vitmods.data.sources.folder import file_records
from vitmods.data.threads import AHEAD, busy_with, cores, in_order
from vitmods.util.cache import user_cache
from vitmods.util.errors import UserError
from vitmods.util.files import write_atomically
from vitmods.util.limits import read_bytes, read_json

IGNORE = 255
"""the class of pixels that are neither trained on nor evaluated"""
_REMEMBERED = 100  # masks: what is found in fewer is not kept
_FORMAT = "vitmods masks 3"


@dataclass(frozen=True)
class Coding:
    """What the values of a mask's pixels mean: (value, class or IGNORE) in the order of values.

    A value is a number, or where the masks are colored 0xRRGGBB. source: what gives the meanings, for messages.
    """

    meanings: tuple[tuple[int, int], ...]
    colored: bool
    source: str

    @cached_property
    def _values(self) -> NDArray[np.int64]:
        return np.array([value for value, _ in self.meanings], dtype=np.int64)

    @cached_property
    def _classes(self) -> NDArray[np.uint8]:
        return np.array([label for _, label in self.meanings], dtype=np.uint8)

    def read(self, raw: bytes) -> NDArray[np.uint8]:
        """Classes (H, W) of a mask file. Raises Unreadable where it is not a mask, or holds an unknown value."""
        return self._classes[self.places(raw)]

    def places(self, raw: bytes) -> NDArray[np.int64]:
        """Positions (H, W) of the pixels' values in `meanings`. Raises Unreadable as `read` does."""
        with reading():
            image = opened(raw)
            if image.format == "JPEG":
                raise Unreadable("its mask is a JPEG file, whose compression alters values: export masks as PNG")
            if self.colored:
                r, g, b = np.asarray(image.convert("RGB"), dtype=np.int64).transpose(2, 0, 1)
                values = r << 16 | g << 8 | b
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


class Pair(NamedTuple):
    """An image and its mask. id: what the image is called."""

    id: str
    image: Path
    mask: Path


class _Seen(NamedTuple):
    """What a look at a mask gave: why it cannot be used ("": it can), its stamp, the positions of its values in the
    coding's meanings, and their pixels."""

    reason: str
    stamp: str
    places: tuple[int, ...]
    pixels: tuple[int, ...]


def masked_records(split: str, pairs: Sequence[Pair], coding: Coding) -> tuple[Records, list[Broken], set[int]]:
    """The images with their masks, those whose masks cannot be used, and the values that the masks hold. Every mask is
    read; the outcome of many is kept in the user's cache folder until a file changes."""
    ids, none = tuple(pair.id for pair in pairs), np.zeros(len(pairs), np.int64)
    images = file_records(ids, none, [pair.image for pair in pairs])
    masks = file_records(ids, none, [pair.mask for pair in pairs])
    seen = _remembered(images, masks, coding)
    good = np.array([i for i, one in enumerate(seen) if not one.reason], dtype=np.int64)
    records, shown = images.take(good), [_shown(seen[i], coding) for i in good]
    records = replace(
        records,
        label_sets=tuple(classes for classes, _ in shown),
        annotations=tuple(MaskFile(pairs[i].mask, coding, seen[i].stamp, *shown[k]) for k, i in enumerate(good)),
    )
    values = {coding.meanings[place][0] for look in seen for place in look.places}
    return records, [Broken(split, ids[i], one.reason) for i, one in enumerate(seen) if one.reason], values


def _shown(seen: _Seen, coding: Coding) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The classes of a mask, in order, and their pixels."""
    counts: dict[int, int] = {}
    for place, pixels in zip(seen.places, seen.pixels, strict=True):
        label = coding.meanings[place][1]
        counts[label] = counts.get(label, 0) + pixels
    classes = tuple(sorted(counts.keys() - {IGNORE}))
    return classes, tuple(counts[label] for label in classes)


def _remembered(images: Records, masks: Records, coding: Coding) -> list[_Seen]:
    if len(images) < _REMEMBERED:
        return _look(images, masks, coding)
    content = "\0".join([_FORMAT, repr(coding), *images.stamps, *masks.stamps])
    try:
        kept = user_cache() / "masks" / f"{sha256(content.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.json"
    except UserError:  # there is no place for caches
        return _look(images, masks, coding)
    with suppress(OSError, ValueError, TypeError):
        rows = read_json(kept, "JSON")
        return [_Seen(reason, stamp, tuple(places), tuple(pixels)) for reason, stamp, places, pixels in rows]
    found = _look(images, masks, coding)
    with suppress(OSError, UserError):  # what cannot be kept is made again
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, lambda file: file.write(json.dumps(found).encode()))
    return found


def _look(images: Records, masks: Records, coding: Coding) -> list[_Seen]:
    def one(position: int) -> _Seen:
        with busy_with(printable(images.ids[position])):
            return seen(position)

    def seen(position: int) -> _Seen:
        try:
            raw = masks.fetch(position)
            assert isinstance(raw, bytes)
            found = coding.places(raw)
            with reading():
                size = opened(raw).size[::-1]
        except Unreadable as error:
            reason = str(error)
            return _Seen(reason if reason.startswith("its mask") else f"its mask cannot be read: {reason}", "", (), ())
        with suppress(Unreadable):  # of the image itself the store says so
            image = images.fetch(position)
            assert isinstance(image, bytes)
            if (expected := size_in_header(image)) != size:
                return _Seen(f"its mask is {size[0]} x {size[1]}, the image {expected[0]} x {expected[1]}", "", (), ())
        counts = np.bincount(found.ravel())
        places = np.flatnonzero(counts)
        held = tuple(places.tolist()), tuple(counts[places].tolist())
        if all(coding.meanings[place][1] == IGNORE for place in held[0]):
            return _Seen("no pixel of its mask has a class", "", *held)
        meanings = repr(coding.meanings).encode()
        return _Seen("", sha256(digest(raw) + meanings).hexdigest()[:32], *held)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(in_order(one, range(len(images)), cores(), ahead=AHEAD))
