"""The corruptions of ImageNet-C, made on the fly for any images at five severities.

Source: Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations",
ICLR 2019, arXiv:1903.12261. What is exact and what is not: docs/corruptions.md.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.data.rng import Stream, bits
from vitmods.papers.corruptions import pixels, weather
from vitmods.papers.corruptions.pixels import Draws
from vitmods.papers.corruptions.tables import SEVERITIES, Strength, strength
from vitmods.util.errors import UserError, nearest

__all__ = ["CORRUPTIONS", "EXTRA", "SEVERITIES", "check_corruptions", "corrupt"]

Corruption = Callable[[Tensor, Strength, Draws], Tensor]  # uint8 (B, C, H, W) -> the same

_FIFTEEN: tuple[Callable[..., Tensor], ...] = (
    pixels.gaussian_noise,
    pixels.shot_noise,
    pixels.impulse_noise,
    pixels.defocus_blur,
    pixels.glass_blur,
    pixels.motion_blur,
    pixels.zoom_blur,
    weather.snow,
    weather.frost,
    weather.fog,
    weather.brightness,
    pixels.contrast,
    pixels.elastic_transform,
    pixels.pixelate,
    pixels.jpeg_compression,
)
_FOUR = (pixels.speckle_noise, pixels.gaussian_blur, weather.spatter, pixels.saturate)
_FUNCTIONS = {function.__name__: function for function in _FIFTEEN + _FOUR}
_ALL = tuple(_FUNCTIONS)  # a name's place is part of its random numbers: add at the end only
CORRUPTIONS, EXTRA = _ALL[:15], _ALL[15:]

_SMALLEST = 8  # pixels a side
_AT_ONCE = 2**18  # values that are worked on together: what is made of them stays in the caches


def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    *,
    seed: int,
    index: Tensor | NDArray[np.int64],
    textures: Path | None = None,
) -> Tensor:
    """Images, uint8 (B, C, H, W) with C 1 or 3, as this corruption leaves them: a new uint8 tensor of the same shape.

    What is drawn at random for an image depends on the seed, the corruption, the severity and the image's index, an
    int64 (B,), alone: not on the batch. The severity's numbers are those published for 32, 64 or 224 pixels, whichever
    is nearest to the short side. `textures` is the folder with frost's textures, by default $VITMODS_FROST.

    UserError: unknown name, severity not 1 to 5, images of another shape or type or below 8 pixels, textures missing,
    saturate on gray images.
    """
    check_corruptions([name], textures=textures)
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise UserError(f"The severity of a corruption is a whole number from 1 to 5, not {severity!r}.")
    _check_images(images)
    change = corruption(name, textures)
    numbers = strength(name, int(severity), min(images.shape[-2:]))
    seeds = bits(seed, Stream.CORRUPTION, _ALL.index(name), int(severity), np.asarray(index)).tolist()
    if len(seeds) != len(images):
        raise UserError(f"{len(images)} images came with {len(seeds)} indices; give each its place in the split.")
    part = max(1, _AT_ONCE // images[:1].numel()) if len(images) else 1
    starts = range(0, len(images), part)
    done = [change(images[i : i + part], numbers, Draws(seeds[i : i + part])) for i in starts]
    return torch.cat(done) if done else images.clone()


def check_corruptions(names: Iterable[str], *, textures: Path | None = None) -> None:
    """Raise UserError for an unknown name, or where frost is named and its textures are missing: before long work."""
    for name in names:
        if name not in _ALL:
            raise UserError(f"There is no corruption '{name}'. {nearest(name, _ALL)}")
        if name == "frost":
            weather.texture_folder(textures)


def corruption(name: str, textures: Path | None = None) -> Corruption:
    """The function of a known name."""
    function = _FUNCTIONS[name]
    return partial(function, folder=weather.texture_folder(textures)) if name == "frost" else function


def _check_images(images: Tensor) -> None:
    fits = images.dtype == torch.uint8 and images.ndim == 4 and images.shape[1] in (1, 3)
    if not fits or min(images.shape[-2:]) < _SMALLEST:
        raise UserError(
            f"Corruptions need uint8 images (batch, 1 or 3 channels, height, width) of at least {_SMALLEST} pixels a "
            f"side; these are {images.dtype} {tuple(images.shape)}."
        )
