"""Frost: one of five photographs of frozen glass is laid over the image. They are read from a folder."""

import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from vitmods.data.corruptions.draws import Draws
from vitmods.data.corruptions.filters import gray, levels, unit
from vitmods.data.corruptions.tables import Strength
from vitmods.util.errors import UserError

VARIABLE = "VITMODS_FROST"
FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")  # the authors' sixth is never drawn
SOURCE = "They are in the folder ImageNet-C/create_c of https://github.com/hendrycks/robustness."


def frost(images: Tensor, strength: Strength, draws: Draws, folder: Path) -> Tensor:
    """kept x + laid texture, at a random place of a random texture."""
    kept, laid, scale = strength
    textures = _read(folder, scale, tuple(images.shape[1:]))
    which = draws.integers(0, len(textures)).tolist()
    corners = draws.uniform(2).tolist()
    cut = torch.stack([_cut(textures[w], corner, images.shape[-2:]) for w, corner in zip(which, corners, strict=True)])
    return levels(unit(images).mul_(kept).add_(unit(cut).mul_(laid)))


def texture_folder(folder: Path | None) -> Path:
    """The folder given, else that of $VITMODS_FROST; UserError where there is none or a texture is missing in it."""
    named = folder or os.environ.get(VARIABLE)
    if not named:
        raise UserError(
            f"The frost corruption needs textures: a folder with {', '.join(FILES)}, named by textures (--textures) or "
            f"{VARIABLE}. Or leave frost out. {SOURCE}"
        )
    path = Path(named)
    if missing := [name for name in FILES if not (path / name).is_file()]:
        raise UserError(
            f"The frost corruption finds no {', '.join(missing)} in {path}. Put {', '.join(FILES)} there, or set "
            f"{VARIABLE} to a folder that has them. {SOURCE}"
        )
    return path


def _cut(texture: Tensor, corner: list[float], size: torch.Size) -> Tensor:
    room = (texture.shape[-2] - size[0], texture.shape[-1] - size[1])
    top, left = (int(part * max(1, pixels)) for part, pixels in zip(corner, room, strict=True))
    return texture[:, top : top + size[0], left : left + size[1]]


@lru_cache(maxsize=2)  # decoding takes longer than laying it over a batch
def _read(folder: Path, scale: float, shape: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """The textures (C, H, W), uint8, `scale` times their size and at least as large as images of `shape`."""
    return tuple(_fitted(_decoded(folder / name), scale, shape) for name in FILES)


def _decoded(path: Path) -> Tensor:
    try:
        with Image.open(path) as file:
            return torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"The frost texture {path} cannot be read ({error}). Copy it anew. {SOURCE}") from error


def _fitted(texture: Tensor, scale: float, shape: tuple[int, int, int]) -> Tensor:
    channels, height, width = shape
    values = texture[None].double()
    needed = max(height / texture.shape[1], width / texture.shape[2])
    if scale != 1 and needed <= scale:  # without antialiasing, as the published scripts have it
        values = F.interpolate(values, scale_factor=scale, mode="bilinear", align_corners=False)
    elif needed > 1:
        size = [max(n, round(n_old * needed)) for n, n_old in zip((height, width), texture.shape[1:], strict=True)]
        values = F.interpolate(values, size, mode="bilinear", align_corners=False)
    values = gray(values) if channels == 1 else values
    return values[0].round().to(torch.uint8)
