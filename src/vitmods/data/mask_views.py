"""Images and their masks as training and evaluation see them. Both are cut alike, whatever is drawn."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.data.dataset import Annotated, Draw
from vitmods.data.geometry import LONGEST, Geometry, Method, resize
from vitmods.data.masks import IGNORE
from vitmods.data.rng import Stream, uniform
from vitmods.recipes import Augment

_TRIES = 10  # crops that are drawn before one with too much of a class is taken
_BRIGHTNESS, _FACTOR, _HUE = 32, 0.5, 0.1  # as mmsegmentation: levels, part of contrast and saturation, of the circle

Stored = Sequence[NDArray[np.uint8]]


def training_views(
    stored: Stored, annotated: Sequence[Annotated], draw: Draw
) -> tuple[tuple[Tensor], tuple[Tensor, Tensor]]:
    """Views uint8 (B, C, H, W) of images as stored (C, h, w), and their masks int64 (B, H, W), with the number of
    labelled pixels of an image of this batch on average, float32 (B,): what a loss over a part of it is divided by.

    Each image is resized to a random size (`resize_range`), a crop is cut out of it (drawn anew, ten times at most,
    while more than `most_of_class` of its labelled pixels are of one class), mirrored, and its colors are distorted.
    What it lacks of (H, W) is added on the right and below, in the mean color, with masks of IGNORE: the steps of
    mmsegmentation for ADE20K. All is a function of (seed, epoch, view) alone.
    """
    height, width = draw.img_size
    views = np.empty((len(stored), len(stored[0]), height, width), dtype=np.uint8)
    views[...] = mean_color(draw.augment, len(stored[0]))
    masks = torch.full((len(stored), height, width), IGNORE, dtype=torch.int64)
    for i, (image, one) in enumerate(zip(stored, annotated, strict=True)):
        view, mask = _drawn(image, one.annotation.read(), draw, int(draw.views[i]))
        views[i, :, : view.shape[1], : view.shape[2]] = view.numpy()
        masks[i, : mask.shape[0], : mask.shape[1]] = mask
    return (torch.from_numpy(views),), (masks, labelled_pixels(masks))


def labelled_pixels(masks: Tensor) -> Tensor:
    """The labelled pixels of an image on average, float32 (B,), of masks (B, H, W); at least 1."""
    return ((masks != IGNORE).sum() / len(masks)).clamp(min=1).expand(len(masks))


def evaluation_views(
    stored: Stored, annotated: Sequence[Annotated], img_size: tuple[int, int], augment: Augment
) -> tuple[Tensor, dict[str, Any]]:
    """Whole images, resized so that they just cover img_size, padded on the right and below to one size:
    uint8 (B, C, H, W).

    The targets are sizes int64 (B, 2): `size` of each image without its padding, `native` in its file, `window` for
    img_size; and `mask`, a list of uint8 (native height, native width), or None where it is not known.
    """
    geometry = Geometry(img_size, resample=augment.resample)
    images = [_resized(image, geometry.covering(*image.shape[1:]), geometry.view_method) for image in stored]
    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = sizes.amax(dim=0).tolist()
    views = np.empty((len(images), len(images[0]), height, width), dtype=np.uint8)
    views[...] = mean_color(augment, len(images[0]))
    for view, image in zip(views, images, strict=True):
        view[:, : image.shape[1], : image.shape[2]] = image.numpy()
    native = [(min(h, LONGEST * w), min(w, LONGEST * h)) for h, w in (one.native for one in annotated)]
    masks = [None if one.annotation is None else torch.from_numpy(one.annotation.read()) for one in annotated]
    window = torch.tensor(img_size).expand(len(images), 2)
    return torch.from_numpy(views), {"size": sizes, "native": torch.tensor(native), "window": window, "mask": masks}


def mean_color(augment: Augment, channels: int) -> NDArray[np.uint8]:
    """What becomes about 0 when it is normalized, (C, 1, 1)."""
    mean = augment.mean if len(augment.mean) == channels else (float(np.mean(augment.mean)),) * channels
    color: NDArray[np.uint8] = np.rint(255 * np.array(mean)).astype(np.uint8)[:, None, None]
    return color


def _drawn(image: NDArray[np.uint8], mask: NDArray[np.uint8], draw: Draw, view: int) -> tuple[Tensor, Tensor]:
    """The crop of an image and of its mask, not yet padded."""
    augment, size = draw.augment, draw.img_size

    def number(stream: Stream, counter: int = 0) -> float:
        return float(uniform(draw.seed, stream, draw.epoch, view, counter))

    low, high = augment.resize_range or (1.0, 1.0)
    scale = low + number(Stream.MASK_SIZE) * (high - low)
    covering = max(side / own for side, own in zip(size, mask.shape, strict=True))
    whole = tuple(max(1, round(side * covering * scale)) for side in mask.shape)
    labels = _resized_mask(mask, whole)
    room = [max(0, own - side) for own, side in zip(whole, size, strict=True)]
    for attempt in range(_TRIES):
        top, left = (
            int(number(stream, attempt) * (free + 1))
            for stream, free in zip((Stream.CROP_TOP, Stream.CROP_LEFT), room, strict=True)
        )
        box = slice(top, top + size[0]), slice(left, left + size[1])
        counts = torch.bincount(labels[box].flatten(), minlength=IGNORE)[:IGNORE]
        if not counts.any() or counts.max() <= augment.most_of_class * counts.sum():
            break
    geometry = Geometry(size, resample=augment.resample)
    pixels, cut = _resized(image, whole, geometry.crop_method)[:, *box], labels[box]
    if number(Stream.FLIP) < augment.flip:
        pixels, cut = pixels.flip(-1), cut.flip(-1)
    return _distorted(pixels, augment.photometric, number), cut


def _resized(image: NDArray[np.uint8], size: tuple[int, ...], method: Method) -> Tensor:
    whole = torch.from_numpy(image.copy())
    return whole if image.shape[1:] == size else resize(whole[None], (size[0], size[1]), method)[0]


def _resized_mask(mask: NDArray[np.uint8], size: tuple[int, ...]) -> Tensor:
    """To (H, W), each pixel that of the nearest center."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    whole = torch.from_numpy(mask)[None]
    resized: Tensor = F.resize_image(whole, list(size), InterpolationMode.NEAREST_EXACT)[0].long()
    return resized


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
