"""What sources of boxes have in common: from what a file says of each image to records, with all that is wrong."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unicodedata import normalize

import numpy as np

from vitmods.data.geometry import LONGEST
from vitmods.data.multilabel import with_rarest
from vitmods.data.objects import Objects, Segment, outline_area
from vitmods.data.read import Unreadable, size_in_header
from vitmods.data.records import SPLITS, Broken, Raw, Records, Source, printable
from vitmods.data.sources import Spec
from vitmods.data.sources.folder import file_records
from vitmods.util.errors import UserError, nearest
from vitmods.util.limits import MOST_PIXELS

OPTIONS = ("classes", "agnostic")
OVERHANG = 1.0  # pixels that a box may stand out by: rounding, or pixels counted from 1
THINNEST = 1e-3  # pixels that a box has at least: float32 loses less where it is scaled and mirrored
FRACTION_OVERHANG = 0.01  # the same of a box in fractions of the sides


@dataclass
class Found:
    """An image as a source lists it: its file, its boxes left, top, right, bottom and what belongs to each.

    size: height and width; None: not said, and boxes are fractions of the sides. wrong: why it cannot be used.
    """

    path: Path
    size: tuple[int, int] | None
    boxes: list[tuple[float, float, float, float]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    crowd: list[bool] = field(default_factory=list)
    area: list[float | None] = field(default_factory=list)
    segments: list[Segment | None] = field(default_factory=list)
    wrong: str = ""

    def add(
        self,
        box: Sequence[float],
        label: str,
        *,
        crowd: bool = False,
        area: float | None = None,
        segment: Segment | None = None,
    ) -> None:
        """One more object. A box that cannot be one makes the image unfit."""
        left, top, right, bottom = map(float, box)
        height, width = self.size or (1, 1)
        if not 0 < height * width <= MOST_PIXELS or min(height, width) < 1:
            self.wrong = self.wrong or f"is said to have {self.extent()}"
        most = OVERHANG if self.size else FRACTION_OVERHANG
        cut = (max(left, 0.0), max(top, 0.0), min(right, width), min(bottom, height))
        if not np.isfinite([left, top, right, bottom]).all() or right <= left or bottom <= top:
            self.wrong = self.wrong or f"a box of {label} is empty: {_numbers(box)}"
        elif left < -most or top < -most or right > width + most or bottom > height + most:
            self.wrong = self.wrong or f"a box of {label} is outside of {self.extent()}: {_numbers(box)}"
        elif min(cut[2] - cut[0], cut[3] - cut[1]) < (THINNEST if self.size else THINNEST / 1000):
            self.wrong = self.wrong or f"a box of {label} is empty in {self.extent()}: {_numbers(box)}"
        self.boxes.append(cut)
        self.labels.append(label)
        self.crowd.append(crowd)
        self.area.append(area)
        self.segments.append(segment)

    def extent(self) -> str:
        """Width and height in words."""
        return "its image" if self.size is None else f"{self.size[1]} x {self.size[0]} pixels"


def _numbers(box: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in box)


def source_of_boxes(
    spec: Spec, name: str, classes: Sequence[str], splits: Mapping[str, Sequence[Found]], broken: Iterable[Broken] = ()
) -> Source:
    """The source of what was found, with the classes that the spec's options `classes` and `agnostic` leave.

    Images that cannot be used are in `broken`; those that only their pixels show (other sizes than the source says,
    files that are missing) are found when they are read.

    Raises:
        UserError: the options name no class that there is, or there are no images.
    """
    kept = _chosen(spec, classes)
    agnostic = spec.options.get("agnostic", "0")
    if agnostic not in ("0", "1"):
        raise UserError(f'"{spec}": agnostic is 0 or 1, not {agnostic}.')
    number = {one: 0 if agnostic == "1" else i for i, one in enumerate(kept)}
    root = spec.folder if spec.folder.is_dir() else spec.folder.parent
    lacking, records, repeated = list(broken), {}, list[str]()
    for split, images in ((name, splits[name]) for name in SPLITS if name in splits):
        seen: set[Path] = set()
        for image in images:
            if image.path in seen:
                image.wrong = image.wrong or "is listed a second time: put all its objects into one entry"
            seen.add(image.path)
        fit = [image for image in images if not image.wrong]
        ends = [max(box[2:]) for image in fit if image.size is not None for box in image.boxes]
        if ends and max(ends) <= 1:
            raise UserError(
                f"{spec}: all boxes of {split} lie in the first pixel, so they look like fractions of the images' "
                "sides. Multiply them by width and height."
            )
        repeated += [
            _id(image.path, root) for image in fit if len(set(zip(image.boxes, image.labels))) < len(image.boxes)
        ]
        lacking += [Broken(split, _id(image.path, root), image.wrong) for image in images if image.wrong]
        records[split] = _records(root, fit, number)
    if not any(map(len, records.values())) and not lacking:
        raise UserError(f"{spec} lists no images.")
    named = ("object",) if agnostic == "1" else kept
    warnings = [
        f"{len(repeated)} {'image has' if len(repeated) == 1 else 'images have'} the same box of the same class twice "
        f"({', '.join(map(printable, repeated[:3]))}): each counts as an object of its own. Remove the copies."
    ]
    source = Source(name, tuple(map(printable, named)), records, warnings * bool(repeated), lacking, target="boxes")
    return with_rarest(source)


def _chosen(spec: Spec, classes: Sequence[str]) -> tuple[str, ...]:
    asked = [one.strip() for one in spec.options.get("classes", "").split(",") if one.strip()]
    if "classes" in spec.options and not asked:
        raise UserError(f'"{spec}": classes names none. Write classes=person, or several with commas.')
    for one in asked:
        if one not in classes:
            raise UserError(f'"{spec}": there is no class {one!r}. {nearest(one, classes)}')
    return tuple(one for one in classes if not asked or one in asked)


def _id(path: Path, root: Path) -> str:
    try:
        return normalize("NFC", path.relative_to(root).as_posix())
    except ValueError:  # the source names a file elsewhere
        return normalize("NFC", path.as_posix())


def _records(root: Path, images: Sequence[Found], number: Mapping[str, int]) -> Records:
    images = sorted(images, key=lambda image: _id(image.path, root))
    known = tuple(_objects(image, number) for image in images)
    ids = tuple(_id(image.path, root) for image in images)
    files = file_records(ids, np.zeros(len(ids), np.int64), [image.path for image in images])

    def fetch(key: int) -> Raw:
        raw = files.fetch(key)
        assert isinstance(raw, bytes)
        _check_size(raw, known[key].size)
        return raw

    return replace(
        files,
        fetch=fetch,
        stamps=tuple(f"{stamp}:{one.size}" for stamp, one in zip(files.stamps, known, strict=True)),
        label_sets=tuple(tuple(sorted(set(one.labels.tolist()))) for one in known),
        annotations=known,
    )


def _objects(image: Found, number: Mapping[str, int]) -> Objects:
    kept = [i for i, label in enumerate(image.labels) if label in number]
    boxes = np.array([image.boxes[i] for i in kept], dtype=np.float32).reshape(-1, 4)
    sides = boxes[:, 2:] - boxes[:, :2]
    area = sides.prod(axis=1)
    for row, i in enumerate(kept):
        if (known := image.area[i]) is not None:
            area[row] = known
        elif segment := image.segments[i]:
            area[row] = outline_area(segment, image.size)
    segments = tuple(one for i in kept if (one := image.segments[i]))
    return Objects(
        boxes,
        np.array([number[image.labels[i]] for i in kept], dtype=np.int64),
        np.array([image.crowd[i] for i in kept], dtype=np.bool_),
        area,
        image.size,
        segments if len(segments) == len(kept) else None,
    )


def _check_size(raw: bytes, said: tuple[int, int] | None) -> None:
    """Raise Unreadable where boxes would not lie on what they are of. Reads the head of the file alone."""
    try:
        shown = size_in_header(raw)
    except Unreadable:  # decoding says what is wrong with it
        return
    if max(shown) > LONGEST * min(shown):
        raise Unreadable(f"longer than {LONGEST}:1 ({shown[1]} x {shown[0]} pixels): boxes need the whole image")
    if said is None or said == shown:
        return
    reason = f"is {shown[1]} x {shown[0]} pixels, and its boxes are for {said[1]} x {said[0]}"
    raise Unreadable(f"{reason}, as it is without the turn that its EXIF asks for" if said == shown[::-1] else reason)
