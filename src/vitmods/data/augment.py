"""Augmentation of a batch (B, C, H, W), mixing, and random boxes for cropping, erasing and CutMix, drawn for a whole
batch at once. A box is (top, left, height, width) in pixels; boxes are int64 (B, 4).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from vitmods.data.geometry import Method, resize
from vitmods.data.rng import Stream, uniform
from vitmods.recipes import Augment

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_TRIES = np.arange(10)  # boxes drawn before giving up, as in torchvision
INCEPTION_TRIES = 100  # boxes drawn before the whole image is taken
ERASE_SCALE, ERASE_RATIO = (0.02, 1 / 3), (0.3, 10 / 3)


def crop_boxes(
    seed: int, epoch: int, index: Ints, sizes: Ints, scale: tuple[float, float], ratio: tuple[float, float]
) -> Ints:
    """Boxes of random resized crop (Szegedy et al., "Going deeper with convolutions", CVPR 2015), as in torchvision.

    sizes (B, 2) are the images' heights and widths. A box covers a part in `scale` of the area and has width / height
    in `ratio`, uniform in its logarithm. After ten that do not fit: the center, at the nearest allowed shape.
    """
    area = sizes.prod(axis=1)[:, None] * _between(scale, uniform(seed, Stream.CROP_SIZE, epoch, index[:, None], _TRIES))
    aspect = np.exp(_between(np.log(ratio), uniform(seed, Stream.CROP_SHAPE, epoch, index[:, None], _TRIES)))
    shapes = np.stack([np.rint(np.sqrt(area / aspect)), np.rint(np.sqrt(area * aspect))], axis=-1).astype(np.int64)
    fits = _all(shapes > 0) & _all(shapes <= sizes[:, None])
    box = shapes[np.arange(len(index)), fits.argmax(axis=1)]
    unfit = ~fits.any(axis=1)
    if unfit.any():  # the largest box whose width / height is in `ratio`
        high, wide = sizes[unfit].T
        tall = np.where(wide / high < ratio[0], np.rint(wide / ratio[0]), high)
        broad = np.where(wide / high > ratio[1], np.rint(high * ratio[1]), wide)
        box[unfit] = np.stack([np.clip(tall, 1, high), np.clip(broad, 1, wide)], axis=1).astype(np.int64)
    top = _place(uniform(seed, Stream.CROP_TOP, epoch, index), sizes[:, 0] - box[:, 0])
    left = _place(uniform(seed, Stream.CROP_LEFT, epoch, index), sizes[:, 1] - box[:, 1])
    corner = np.stack([top, left], axis=1)
    corner[unfit] = (sizes[unfit] - box[unfit]) // 2
    return np.concatenate([corner, box], axis=1)


def inception_boxes(
    seed: int, epoch: int, index: Ints, sizes: Ints, scale: tuple[float, float], ratio: tuple[float, float]
) -> Ints:
    """Boxes of the crop that Inception was trained with (Szegedy et al., CVPR 2015), as TensorFlow draws them.

    Arguments as in `crop_boxes`, but the aspect is uniform itself, not in its logarithm, and then the height is uniform
    among those that keep the area in its range; so large boxes are rarer. The last row and column are never reached
    unless the box spans the image.
    """
    boxes = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
    pending = np.arange(len(index))
    for attempt in range(INCEPTION_TRIES):
        draws = [
            uniform(seed, stream, epoch, index[pending], attempt)
            for stream in (Stream.CROP_SHAPE, Stream.CROP_SIZE, Stream.CROP_TOP, Stream.CROP_LEFT)
        ]
        drawn, fits = _inception_box(sizes[pending], scale, ratio[0] + draws[0] * (ratio[1] - ratio[0]), draws[1:])
        boxes[pending[fits]] = drawn[fits]
        pending = pending[~fits]
        if not len(pending):
            break
    return boxes


def _inception_box(sizes: Ints, scale: tuple[float, float], aspect: Floats, draws: list[Floats]) -> tuple[Ints, Bools]:
    """A box for each image, and whether it is one: inside, and of an area in the range."""
    image_h, image_w = sizes.T
    least, most = (part * image_h * image_w for part in scale)
    shortest, tallest = (np.rint(np.sqrt(area / aspect)).astype(np.int64) for area in (least, most))
    widest = ((image_w + 0.5 - 1e-7) / aspect).astype(np.int64)
    widest -= _width(widest, aspect) > image_w
    tallest = np.minimum(np.where(_width(tallest, aspect) > image_w, widest, tallest), image_h)
    shortest = np.minimum(shortest, tallest)
    height = shortest + (draws[0] * (tallest - shortest + 1)).astype(np.int64)
    height += _width(height, aspect) * height < least  # rounding shall not make it fail
    height -= _width(height, aspect) * height > most
    width = _width(height, aspect)
    area = width * height
    fits = (least <= area) & (area <= most) & (width <= image_w) & (height <= image_h) & (area > 0)
    top = (draws[1] * np.maximum(image_h - height, 1)).astype(np.int64)
    left = (draws[2] * np.maximum(image_w - width, 1)).astype(np.int64)
    return np.stack([top, left, height, width], axis=1), fits


def _width(height: Ints, aspect: Floats) -> Ints:
    return np.rint(height * aspect).astype(np.int64)


def erase_boxes(seed: int, epoch: int, index: Ints, size: tuple[int, int], probability: float) -> tuple[Ints, Ints]:
    """Boxes of random erasing (Zhong et al., AAAI 2020), as in torchvision: positions in the batch (E,), boxes (E, 4).

    An image is erased with the given probability; one for which ten boxes did not fit is left as it is.
    """
    chosen = np.flatnonzero(uniform(seed, Stream.ERASE, epoch, index) < probability)
    samples = index[chosen]
    part = uniform(seed, Stream.ERASE_SIZE, epoch, samples[:, None], _TRIES)
    area = size[0] * size[1] * _between(ERASE_SCALE, part)
    shape = uniform(seed, Stream.ERASE_SHAPE, epoch, samples[:, None], _TRIES)
    aspect = np.exp(_between(np.log(ERASE_RATIO), shape))
    shapes = np.stack([np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))], axis=-1).astype(np.int64)
    fits = _all(shapes > 0) & _all(shapes < np.array(size))
    fit = fits.any(axis=1)
    box = shapes[np.arange(len(chosen)), fits.argmax(axis=1)][fit]
    top = _place(uniform(seed, Stream.ERASE_TOP, epoch, samples[fit]), size[0] - box[:, 0])
    left = _place(uniform(seed, Stream.ERASE_LEFT, epoch, samples[fit]), size[1] - box[:, 1])
    return chosen[fit], np.concatenate([top[:, None], left[:, None], box], axis=1)


def _between(bounds: "tuple[float, float] | Floats", draw: Floats) -> Floats:
    return bounds[0] + draw * (bounds[1] - bounds[0])


def _all(fits: Bools) -> Bools:
    """Whether both height and width fit: (B, tries, 2) -> (B, tries)."""
    return fits[..., 0] & fits[..., 1]


def _place(draw: Floats, room: Ints) -> Ints:
    """A corner in 0..room, each equally likely."""
    return (draw * (room + 1)).astype(np.int64)


IN_CACHE = 1 << 18  # values that stay in a core's cache from one step of arithmetic to the next


def pad_black(pixels: Tensor, pad: tuple[int, int]) -> Tensor:
    """Add so many black rows and columns on every side of images (N, C, H, W)."""
    return torch.nn.functional.pad(pixels, (pad[1], pad[1], pad[0], pad[0]))


def crops(images: Tensor, which: Ints, top: Ints, left: Ints, size: tuple[int, int]) -> Tensor:
    """Cut `size` at (top, left) (B,) out of the images `which` (B,) of uint8 (N, C, H', W'): (B, C, H, W). One kernel
    on a device, which nothing waits for."""
    channels, height, width = images.shape[1:]
    planes = which[:, None] * channels + np.arange(channels)
    rows = planes[:, :, None] * height + (top[:, None] + np.arange(size[0]))[:, None]
    starts = placed(rows * width + left[:, None, None], images.device)
    return images.view(-1).unfold(0, size[1], 1).index_select(0, starts.view(-1)).view(*starts.shape, size[1])


def placed(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values on a device; the host does not wait for it."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def resized_crops(pixels: Sequence[NDArray[np.uint8]], boxes: Ints, size: tuple[int, int], method: Method) -> Tensor:
    """Cut the box (top, left, height, width) (B, 4) out of each image (C, H', W') and resize it: (B, C, H, W)."""
    crops = np.empty((len(pixels), len(pixels[0]), *size), dtype=np.uint8)
    for crop, image, (top, left, height, width) in zip(crops, pixels, boxes.tolist(), strict=True):
        part = torch.from_numpy(image[:, top : top + height, left : left + width].copy())[None]
        crop[...] = (part if (height, width) == size else resize(part, size, method))[0].numpy()
    return torch.from_numpy(crops)


def flip(pixels: Tensor, which: NDArray[np.bool_]) -> Tensor:
    """Mirror left and right where `which` (B,) is true; on a CPU in place."""
    if pixels.device.type != "cpu":
        return torch.where(placed(which, pixels.device)[:, None, None, None], pixels.flip(-1), pixels)
    array, chosen = pixels.numpy(), np.flatnonzero(which)
    array[chosen] = torch.from_numpy(array[chosen]).flip(-1).numpy()  # numpy gathers, torch mirrors the faster
    return pixels


def normalize(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 -> float32 (x / 255 - mean) / std, with mean and std (C, 1, 1)."""
    if pixels.device.type != "cpu":
        return pixels.float().mul_(1 / 255).sub_(mean).div_(std)
    images = torch.from_numpy(np.empty(pixels.shape, dtype=np.float32))  # numpy asks the system for large pages
    step = max(1, IN_CACHE // pixels.shape[1:].numel())
    for start in range(0, len(pixels), step):
        part = slice(start, start + step)
        images[part].copy_(pixels[part]).mul_(1 / 255).sub_(mean).div_(std)
    return images


def per_channel(values: Sequence[float], channels: int) -> Tensor:
    """A mean or std as (C, 1, 1); one value serves all channels, and gray images take the mean of three."""
    tensor = torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1)
    return tensor if len(tensor) == channels else tensor.mean(0, keepdim=True).expand(channels, 1, 1)


@dataclass(frozen=True)
class Mixing:
    """How the images of a batch are mixed with their predecessors: `kept` of each stays; box: where the predecessor's
    pixels are pasted (CutMix), None: everywhere, blended (mixup)."""

    kept: float
    box: tuple[slice, slice] | None = None

    @classmethod
    def pasted(cls, size: tuple[int, int], kept: float, at: tuple[float, float]) -> Self:
        """With CutMix's box (Yun et al., ICCV 2019) in images of `size`: 1 - kept of the area around the point `at`
        (0..1), cut at edges; `kept` becomes the area that stays."""
        half = 0.5 * (1.0 - kept) ** 0.5
        centers = [(int(point * side), int(half * side), side) for point, side in zip(at, size, strict=True)]
        rows, columns = (slice(max(0, c - reach), min(side, c + reach)) for c, reach, side in centers)
        pasted = (rows.stop - rows.start) * (columns.stop - columns.start)
        return cls(1.0 - pasted / (size[0] * size[1]), (rows, columns))

    def images(self, images: Tensor, before: Tensor) -> Tensor:
        """Mix images with those before them, (B, C, H, W) each."""
        if self.box is None:
            return torch.lerp(before, images, self.kept)
        mixed, box = images.clone(), (..., *self.box)
        mixed[box] = before[box]
        return mixed


def draw_mixing(size: tuple[int, int], *, mixup: float, cutmix: float, seed: int, epoch: int, batch: int) -> Mixing:
    """Draw the mixing of the batch of this number: each image of `size` with its predecessor, as the order is random.

    mixup and cutmix are the alphas of the Beta(alpha, alpha) distribution of the part of each image that stays; 0 is
    off; with both on, each batch takes one with equal chance. Mixup: Zhang et al., ICLR 2018.
    """
    from scipy.special import betaincinv

    def draw(stream: Stream) -> float:
        return float(uniform(seed, stream, epoch, batch))

    use_cutmix = cutmix > 0 and (mixup == 0 or draw(Stream.MIX_KIND) < 0.5)
    # The quantile of Beta(alpha, alpha): a pure function, where a sampler would need a state.
    alpha = cutmix if use_cutmix else mixup
    kept = float(betaincinv(alpha, alpha, draw(Stream.MIX_LAMBDA)))
    if use_cutmix:
        return Mixing.pasted(size, kept, (draw(Stream.MIX_TOP), draw(Stream.MIX_LEFT)))
    # As in big_vision the larger share is the image's own. The order of a batch is random, and exchanging the shares
    # exchanges an image with its successor: the mixed images of a batch are distributed as without this.
    return Mixing(max(kept, 1 - kept))


def mix_targets(mixing: Mixing, labels: Tensor, classes: int, predecessors: bool = False) -> Tensor:
    """Targets (B, K) of mixed images, of labels (B,), or float (B, K) of several labels each. predecessors: the labels
    are those of the images and, behind them, of their predecessors."""
    targets = labels if labels.is_floating_point() else one_hot(labels, classes).float()
    first, before = targets.chunk(2) if predecessors else (targets, targets.roll(1, 0))
    return torch.lerp(before, first, mixing.kept)


def padded(images: Sequence[Tensor], augment: Augment, size: tuple[int, int] | None = None) -> Tensor:
    """Images (C, h, w) in the upper left of `size`, by default the largest height and width. The rest has the mean
    color, which normalization brings to about 0."""
    channels = images[0].shape[0]
    mean = augment.mean if len(augment.mean) == channels else (float(np.mean(augment.mean)),) * channels
    color = torch.from_numpy(np.rint(255 * np.array(mean)).astype(np.uint8)[:, None, None])
    height, width = size or (max(image.shape[side] for image in images) for side in (-2, -1))
    canvas = torch.empty(len(images), channels, height, width, dtype=torch.uint8)
    for place, image in zip(canvas, images, strict=True):
        place[...] = color
        place[:, : image.shape[1], : image.shape[2]] = image
    return canvas
