"""The corruptions of ImageNet-C, made on the fly for any images at five severities.

Source: Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations",
ICLR 2019, arXiv:1903.12261. What is exact and what is not: docs/corruptions.md.
"""

import tomllib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.data.rng import Stream, bits
from vitmods.papers.corruptions import functions
from vitmods.papers.corruptions.functions import Draws
from vitmods.util.errors import UserError, nearest

__all__ = ["CORRUPTIONS", "EXTRA", "SEVERITIES", "check_corruptions", "corrupt"]

SEVERITIES = (1, 2, 3, 4, 5)
TABLES: dict[str, dict[str, list[Any]]] = tomllib.loads(
    (Path(__file__).parent / "severities.toml").read_text(encoding="utf-8")
)
"""name -> "32", "64" or "224" -> the arguments of severities 1 to 5"""
_ALL = tuple(TABLES)
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
    """Corrupt images, uint8 (B, C, H, W) with C 1 or 3: a new uint8 tensor of the same shape.

    The random numbers of an image depend on the seed, the corruption, the severity and the image's index (int64,
    (B,)), not on the batch. The severity's numbers are those published for 32, 64 or 224 pixels, whichever is
    nearest to the short side. `textures` is the folder with frost's textures, by default $VITMODS_FROST.

    UserError: unknown name, severity not 1 to 5, images of another shape or type or below 8 pixels, textures missing,
    saturate on gray images.
    """
    check_corruptions([name], textures=textures)
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise UserError(f"The severity of a corruption is a whole number from 1 to 5, not {severity!r}.")
    is_image = images.dtype == torch.uint8 and images.ndim == 4 and images.shape[1] in (1, 3)
    if not is_image or min(images.shape[-2:]) < _SMALLEST:
        raise UserError(
            f"Corruptions need uint8 images (batch, 1 or 3 channels, height, width) of at least {_SMALLEST} pixels a "
            f"side; these are {images.dtype} {tuple(images.shape)}."
        )
    change = corruption(name, textures)
    numbers = strength(name, int(severity), min(images.shape[-2:]))
    seeds = bits(seed, Stream.CORRUPTION, _ALL.index(name), int(severity), np.asarray(index)).tolist()
    if len(seeds) != len(images):
        raise UserError(f"{len(images)} images came with {len(seeds)} indices; give each its place in the split.")
    part = max(1, _AT_ONCE // images[:1].numel()) if len(images) else 1
    starts = range(0, len(images), part)
    corrupted = [change(images[i : i + part], Draws(seeds[i : i + part]), *numbers) for i in starts]
    return torch.cat(corrupted) if corrupted else images.clone()


def check_corruptions(names: Iterable[str], *, textures: Path | None = None) -> None:
    """Raise UserError, before long work, for an unknown name, or for frost if its textures are missing."""
    for name in names:
        if name not in _ALL:
            raise UserError(f"Unknown corruption '{name}'. {nearest(name, _ALL)}")
        if name == "frost":
            functions.texture_folder(textures)


def corruption(name: str, textures: Path | None = None) -> Callable[..., Tensor]:
    """The function of a known name: images, Draws and a severity's numbers -> images."""
    function: Callable[..., Tensor] = getattr(functions, name)
    return partial(function, folder=functions.texture_folder(textures)) if name == "frost" else function


def table_side(side: int) -> int:
    """Which table serves images of this short side: that of the nearest published size, by ratio (up to 45: 32; up to
    119: 64; else 224)."""
    return min((32, 64, 224), key=lambda table: max(side / table, table / side))


def strength(name: str, severity: int, side: int) -> tuple[float, ...]:
    """The numbers of one corruption at severity 1 to 5 for images of this short side, in pixels."""
    table = table_side(side)
    numbers = TABLES[name][str(table)][severity - 1]
    unit = 244 / 224 if (name, table) == ("elastic_transform", 224) else 1  # the published script's own oddity
    return tuple(unit * number for number in (numbers if isinstance(numbers, list) else [numbers]))
