"""What augmentation does to a batch, once its numbers are drawn, and mixing. Images are (B, C, H, W)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from vitmods.data.boxes import Ints, cutmix_box
from vitmods.data.geometry import Method, resize
from vitmods.data.rng import Stream, uniform

IN_CACHE = 1 << 18  # values that stay in a core's cache from one step of arithmetic to the next


def pad_crop(pixels: NDArray[np.uint8], top: Ints, left: Ints, pad: tuple[int, int]) -> Tensor:
    """Add `pad` black rows and columns on every side, then cut the old size at (top, left) (B,) of each image."""
    batch, channels, height, width = pixels.shape
    padded = np.zeros((batch, channels, height + 2 * pad[0], width + 2 * pad[1]), dtype=np.uint8)
    padded[:, :, pad[0] : pad[0] + height, pad[1] : pad[1] + width] = pixels
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    return torch.from_numpy(windows.transpose(0, 2, 3, 1, 4, 5)[np.arange(batch), top, left])


def resized_crop(image: NDArray[np.uint8], box: Ints, size: tuple[int, int], method: Method = "bicubic") -> Tensor:
    """Cut the box (top, left, height, width) out of one image (C, H', W') and resize it to (1, C, H, W)."""
    top, left, height, width = box.tolist()
    cut = torch.from_numpy(image[:, top : top + height, left : left + width].copy())[None]
    return cut if (height, width) == size else resize(cut, size, method)


def resized_crops(pixels: Sequence[NDArray[np.uint8]], boxes: Ints, size: tuple[int, int], method: Method) -> Tensor:
    """resized_crop of each image with its box (B, 4): (B, C, H, W)."""
    crops = np.empty((len(pixels), len(pixels[0]), *size), dtype=np.uint8)
    for crop, image, box in zip(crops, pixels, boxes, strict=True):
        crop[...] = resized_crop(image, box, size, method)[0].numpy()
    return torch.from_numpy(crops)


def flip(pixels: Tensor, which: NDArray[np.bool_]) -> Tensor:
    """Mirror left and right where `which` (B,) is true, in place."""
    array, chosen = pixels.numpy(), np.flatnonzero(which)
    array[chosen] = torch.from_numpy(array[chosen]).flip(-1).numpy()  # numpy gathers, torch mirrors the faster
    return pixels


def normalize(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 -> float32 (x / 255 - mean) / std, with mean and std (C, 1, 1)."""
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


def erase(pixels: Tensor, positions: Ints, boxes: Ints, seeds: NDArray[np.uint64]) -> Tensor:
    """Fill each box (E, 4) of the images at `positions` (E,) with unit normal noise of its own seed, in place."""
    noise = box_noise(pixels.shape[1], boxes, seeds)
    for position, (top, left, height, width), one in zip(positions.tolist(), boxes.tolist(), noise, strict=True):
        pixels[position, :, top : top + height, left : left + width] = one
    return pixels


def box_noise(channels: int, boxes: Ints, seeds: NDArray[np.uint64]) -> list[Tensor]:
    """For each box unit normal noise of its own seed, (channels, height, width)."""
    found = []
    for (_, _, height, width), seed in zip(boxes.tolist(), seeds.tolist(), strict=True):
        generator = torch.Generator().manual_seed(seed >> 1)  # torch takes 63 bits
        found.append(torch.randn((channels, height, width), generator=generator))
    return found


@dataclass(frozen=True)
class Mixing:
    """How the images of a batch are mixed with their predecessors: `kept` of each stays; box: where the predecessor's
    pixels are pasted (CutMix), None: everywhere, blended (mixup)."""

    kept: float
    box: tuple[slice, slice] | None = None

    @classmethod
    def pasted(cls, size: tuple[int, int], kept: float, at: tuple[float, float]) -> Self:
        """With a box of about 1 - kept of the area of images of `size`; `kept` becomes the area that stays."""
        top, left, height, width = cutmix_box(size, kept, at)
        box = (slice(top, top + height), slice(left, left + width))
        return cls(1.0 - height * width / (size[0] * size[1]), box)

    def images(self, images: Tensor, before: Tensor) -> Tensor:
        """(B, C, H, W) each."""
        if self.box is None:
            return blend(images, before, self.kept)
        mixed, box = images.clone(), (..., *self.box)
        mixed[box] = before[box]
        return mixed

    def targets(self, targets: Tensor, before: Tensor) -> Tensor:
        """(B, K) each."""
        return blend(targets, before, self.kept)


def mix(
    images: Tensor,
    labels: Tensor,
    classes: int,
    *,
    mixup: float,
    cutmix: float,
    seed: int,
    epoch: int,
    batch: int,
    predecessors: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mixup or CutMix of a whole batch: each image with its predecessor, as the order is random already.

    predecessors: these are some images of a batch, and behind them their predecessors, which are not given back.

    Partners and amount are a function of (seed, epoch, batch number).

    images (B, C, H, W) float and labels (B,), or float (B, K) of several labels each -> images and targets (B, K).
    mixup and cutmix are the alphas of the Beta(alpha, alpha) that says how much of each image stays; 0 is off; with
    both on, each batch takes one or the other with equal chance. Mixup: Zhang et al., ICLR 2018. CutMix: Yun et al.,
    ICCV 2019. With one image in the batch there is no partner and only the targets change their form.
    """

    size = (images.shape[-2], images.shape[-1])
    how = draw_mixing(size, mixup=mixup, cutmix=cutmix, seed=seed, epoch=epoch, batch=batch)
    return how.images(*_pairs(images, predecessors)), mix_targets(how, labels, classes, predecessors)


def draw_mixing(size: tuple[int, int], *, mixup: float, cutmix: float, seed: int, epoch: int, batch: int) -> Mixing:
    """How the batch of that number is mixed, its images being of `size`."""

    def draw(stream: Stream) -> float:
        return float(uniform(seed, stream, epoch, batch))

    use_cutmix = cutmix > 0 and (mixup == 0 or draw(Stream.MIX_KIND) < 0.5)
    kept = _beta(cutmix if use_cutmix else mixup, draw(Stream.MIX_LAMBDA))
    if use_cutmix:
        return Mixing.pasted(size, kept, (draw(Stream.MIX_TOP), draw(Stream.MIX_LEFT)))
    # As in big_vision the larger share is the image's own. The order of a batch is random, and exchanging the shares
    # exchanges an image with its successor: the mixed images of a batch are distributed as without this.
    return Mixing(max(kept, 1 - kept))


def mix_targets(how: Mixing, labels: Tensor, classes: int, predecessors: bool = False) -> Tensor:
    """Targets (B, K) of mixed images, of labels as `mix` takes them."""
    targets = labels if labels.is_floating_point() else one_hot(labels, classes).float()
    return how.targets(*_pairs(targets, predecessors))


def _pairs(values: Tensor, predecessors: bool) -> tuple[Tensor, Tensor]:
    """Values of images, and of their predecessors in the batch."""
    if not predecessors:
        return values, values.roll(1, 0)
    own, before = values.chunk(2)
    return own, before


def blend(values: Tensor, before: Tensor, kept: float) -> Tensor:
    """kept * value + (1 - kept) * predecessor's value, along the batch."""
    return torch.lerp(before, values, kept)


def _beta(alpha: float, draw: float) -> float:
    """The Beta(alpha, alpha) number at this quantile: a pure function, where a sampler would need a state."""
    from scipy.special import betaincinv

    return float(betaincinv(alpha, alpha, draw))
