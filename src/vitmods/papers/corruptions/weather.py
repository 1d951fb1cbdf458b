"""Snow, frost, fog and brightness, and spatter: drops of water or of mud on the lens.

Frost lays one of five photographs of frozen glass, read from a folder, over the image. Spatter's edges, distances and
equalization are defined as OpenCV defines them, which the published scripts call.
"""

import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from vitmods.papers.corruptions.pixels import Draws, gaussian, gray, levels, motion, unit, zoom
from vitmods.papers.corruptions.tables import Strength
from vitmods.util.errors import UserError


def snow(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Flakes, that is enlarged and smeared noise above a threshold, over the whitened image; and the same flakes
    turned by 180 degrees."""
    mean, std, factor, threshold, radius, sigma, kept = strength
    noise = draws.normal(1, *images.shape[-2:]) * std + mean
    flakes = zoom(noise, factor)
    flakes = levels(flakes.masked_fill(flakes < threshold, 0)).double()
    angles = torch.deg2rad(draws.uniform(low=-135, high=-45))
    flakes = motion(flakes, radius, sigma, angles).round_().div_(255)
    values = unit(images)
    whitened = torch.maximum(values, gray(values) * 1.5 + 0.5)
    return levels(values * kept + whitened * (1 - kept) + flakes + flakes.rot90(2, (2, 3)))


def fog(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """A plasma fractal of height `amount` is added, then all is scaled so that the image's brightest value stays."""
    amount, decay = strength
    height, width = images.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()
    values = unit(images)
    brightest = values.amax((1, 2, 3), keepdim=True)
    values = values + plasma(draws.uniform(side * side - 1, low=-1), decay)[:, None, :height, :width] * amount
    return levels(values * brightest / (brightest + amount))


def plasma(noise: Tensor, decay: float) -> Tensor:
    """Heights (B, S, S) from 0 to 1 by the diamond-square method on a torus, S a power of 2, from noise (B, S S - 1) in
    -1 ... 1. The noise shrinks by `decay` squared from a level to the next finer one."""
    batch, side = len(noise), round((noise.shape[1] + 1) ** 0.5)
    heights = torch.zeros(batch, side, side, dtype=noise.dtype)
    used, amount, step = 0, 1.0, side
    while step >= 2:
        count = side // step
        fractions = noise[:, used : used + 3 * count**2].view(batch, 3, count, count) * amount
        half = step // 2
        corners = heights[:, ::step, ::step]
        centers = (
            _four(corners, corners.roll(-1, 1), corners.roll(-1, 2), corners.roll((-1, -1), (1, 2))) + fractions[:, 0]
        )
        heights[:, half::step, half::step] = centers
        heights[:, ::step, half::step] = (
            _four(corners, corners.roll(-1, 2), centers, centers.roll(1, 1)) + fractions[:, 1]
        )
        heights[:, half::step, ::step] = (
            _four(corners, corners.roll(-1, 1), centers, centers.roll(1, 2)) + fractions[:, 2]
        )
        used, amount, step = used + 3 * count**2, amount / decay**2, half
    heights -= heights.amin((1, 2), keepdim=True)
    return heights / heights.amax((1, 2), keepdim=True)


def _four(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return (a + b + c + d) / 4


def brightness(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """`amount` is added to the value of hue, saturation, value: channels keep their ratios, and black becomes gray."""
    (amount,) = strength
    values = unit(images)
    brightest = values.amax(1, keepdim=True)
    target = (brightest + amount).clamp(max=1)
    return levels(torch.where(brightest > 0, values * (target / brightest), target))


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


_WATER, _MUD = (175, 238, 238), (63, 42, 20)
_LOW, _HIGH = 50, 150  # thresholds of the edges
_FAR = 20  # distances are cut off here, in pixels
_KNIGHT, _DIAGONAL = 2.1969, 1.4  # lengths of the moves (2, 1) and (1, 1); (1, 0) is 1
_TAN_22 = 13573  # tan(22.5 degrees), in parts of 2**15


def spatter(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Smoothed noise above a threshold is liquid. Water glistens by the distance to the drops' edges, mud covers."""
    mean, std, sigma, threshold, last, mud = strength
    liquid = gaussian(draws.normal(1, *images.shape[-2:]) * std + mean, sigma)
    values = unit(images)
    color = torch.tensor(_MUD if mud else _WATER).double().div(255).view(1, 3, 1, 1)
    color = color if images.shape[1] == 3 else gray(color)
    if mud:
        cover = gaussian((liquid > threshold).double(), last)
        cover = cover.masked_fill(cover < 0.8, 0)
        return levels(values * (1 - cover) + color * cover)
    drops = levels(liquid.masked_fill(liquid < threshold, 0)).double()
    shine = drops * _relief(edges(drops))
    brightest = shine.amax((1, 2, 3), keepdim=True)
    shine = torch.where(brightest > 0, shine / brightest, 0) * last
    return levels(values + shine * color)


def _relief(edge: Tensor) -> Tensor:
    """How strongly water shines (B, 1, H, W), 0 to 255, from where the drops' edges are."""
    near = _box_blur(distance(edge)).add(1e-6).floor()
    emboss = torch.tensor([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=near.dtype)
    return _box_blur(_filter(_equalized(near), emboss, "reflect").clamp(0, 255)).round()


def edges(drops: Tensor) -> Tensor:
    """Canny's edges, bool (B, 1, H, W), of whole numbers 0 to 255 (B, 1, H, W): |dx| + |dy| of the Sobel operator,
    thinned along the gradient, above 150 or above 50 and connected to such."""
    smooth, slope = torch.tensor([1.0, 2, 1]).double(), torch.tensor([-1.0, 0, 1]).double()
    dx = _filter(drops, smooth[:, None] * slope, "replicate")
    dy = _filter(drops, slope[:, None] * smooth, "replicate")
    strength = dx.abs() + dy.abs()
    across = dx.abs() * _TAN_22
    level = dy.abs() * 2**15 < across
    upright = dy.abs() * 2**15 > across + dx.abs() * 2**16
    falling = (dx < 0) == (dy < 0)  # OpenCV's rule: a zero counts as positive
    sides = F.pad(strength, [1] * 4)

    def above(down: int, right: int, *, ties: bool = False) -> Tensor:
        height, width = strength.shape[-2:]
        other = sides[..., 1 + down : 1 + down + height, 1 + right : 1 + right + width]
        return strength >= other if ties else strength > other

    ridge = torch.where(falling, above(-1, -1) & above(1, 1), above(-1, 1) & above(1, -1))
    ridge = torch.where(upright, above(-1, 0) & above(1, 0, ties=True), ridge)
    ridge = torch.where(level, above(0, -1) & above(0, 1, ties=True), ridge)
    weak = (ridge & (strength > _LOW)).float()
    strong = weak * (strength > _HIGH)
    while not torch.equal(more := F.max_pool2d(strong, 3, 1, 1) * weak, strong):
        strong = more
    return strong > 0


def distance(edge: Tensor) -> Tensor:
    """To the nearest edge pixel (B, 1, H, W), at most 20: the shortest way by moves (1, 0), (1, 1) and (2, 1)."""
    height, width = edge.shape[-2:]
    moves = [(y, x) for y in range(-2, 3) for x in range(-2, 3) if {abs(y), abs(x)} in ({0, 1}, {1}, {1, 2})]
    lengths = {1: 1.0, 2: _DIAGONAL, 3: _KNIGHT}
    near = torch.where(edge, 0.0, float(_FAR)).double()
    while True:
        beyond = F.pad(near, [2] * 4, value=float(_FAR))
        nearer = near
        for y, x in moves:
            moved = beyond[..., 2 + y : 2 + y + height, 2 + x : 2 + x + width]
            nearer = torch.minimum(nearer, moved + lengths[abs(y) + abs(x)])
        if torch.equal(nearer, near):
            return near
        near = nearer


def _equalized(values: Tensor) -> Tensor:
    """Whole numbers 0 to 255 mapped so that they are evenly used, each image for itself; the lowest becomes 0."""
    flat = values.long().flatten(1)
    counts = torch.zeros(len(flat), 256, dtype=torch.float64)
    counts.scatter_add_(1, flat, torch.ones(1, dtype=torch.float64).expand_as(flat))
    lowest = flat.amin(1, keepdim=True)
    remaining = flat.shape[1] - counts.gather(1, lowest)
    above = counts.cumsum(1) - counts.gather(1, lowest)
    table = torch.where(remaining > 0, (above.clamp(min=0) * (255 / remaining)).round(), lowest.double())
    return table.gather(1, flat).view_as(values)


def _box_blur(values: Tensor) -> Tensor:
    return _filter(values, torch.full((3, 3), 1 / 9, dtype=values.dtype), "reflect")


def _filter(values: Tensor, kernel: Tensor, beyond: str) -> Tensor:
    """Correlate (B, 1, H, W) with 3 x 3 weights."""
    height, width = values.shape[-2:]
    padded = F.pad(values, [1] * 4, mode=beyond)
    total = torch.zeros_like(values)
    for y, row in enumerate(kernel.tolist()):
        for x, weight in enumerate(row):
            if weight:
                total += padded[..., y : y + height, x : x + width] * weight
    return total
