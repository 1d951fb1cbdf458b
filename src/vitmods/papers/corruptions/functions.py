"""The corruptions: noise, blur, weather and digital ones.

Each maps images, uint8 (B, C, H, W), by random numbers and the numbers of a severity, to uint8 images.

In between images are float64 in 0..1, as in the published scripts, and because results are cut to whole levels: sums
made in another order, as in a batch of another size, differ in digits that then cannot be seen.
"""

import io
import math
import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from scipy import ndimage
from torch import Tensor

from vitmods.util.errors import UserError

_LAST_DIGITS = 1e-6  # in levels: far more than float64 loses, far less than an image can tell


class Draws:
    """Draws for B images from 64-bit seeds (B,); results are (B, *shape) in float64."""

    def __init__(self, seeds: Iterable[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed >> 1) for seed in seeds]  # torch takes 63 bits

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers."""
        return self._draw(torch.empty(len(self._generators), *shape), Tensor.normal_).double()

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Draw uniform numbers in [low, high)."""
        numbers = self._draw(torch.empty(len(self._generators), *shape), Tensor.uniform_)
        return numbers.double() * (high - low) + low

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Draw uniform int64 in low ... high - 1."""
        numbers = torch.empty(len(self._generators), *shape, dtype=torch.int64)
        return self._draw(numbers, Tensor.random_, low, high)

    def poisson(self, rates: Tensor) -> Tensor:
        """Draw Poisson counts at the rates (B, ...)."""
        pairs = zip(rates.unbind(), self._generators, strict=True)
        return torch.stack([torch.poisson(row, generator=generator) for row, generator in pairs])

    def _draw(self, numbers: Tensor, fill: Callable[..., Tensor], *limits: int) -> Tensor:
        for row, generator in zip(numbers.unbind(), self._generators, strict=True):
            fill(row, *limits, generator=generator)
        return numbers


# What several corruptions share.


def unit(images: Tensor) -> Tensor:
    """uint8 -> 0..1."""
    return images.double().div_(255)


def levels(values: Tensor) -> Tensor:
    """0..1 -> uint8, clipped and cut (not rounded), as the published scripts do. A value that is a whole level except
    for its last digits counts as that level. `values` serve as working memory."""
    return values.mul_(255).add_(_LAST_DIGITS).clamp_(0, 255).to(torch.uint8)


def gray(values: Tensor) -> Tensor:
    """Luma (B, 1, H, W) of ITU-R BT.601; gray images are their own."""
    if values.shape[1] == 1:
        return values
    red, green, blue = values.unbind(1)
    return (red * 0.299 + green * 0.587 + blue * 0.114)[:, None]


def gaussian(values: Tensor, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> Tensor:
    """Gaussian blur of (..., H, W) by SciPy's definition, as one matrix product a side, which is faster on batches."""
    rows, columns = (_gaussian_matrix(n, sigma, mode, truncate) for n in values.shape[-2:])
    return rows @ (values @ columns.T)


@lru_cache(maxsize=8)
def _gaussian_matrix(size: int, sigma: float, mode: str, truncate: float) -> Tensor:
    return torch.from_numpy(ndimage.gaussian_filter(np.eye(size), (sigma, 0), mode=mode, truncate=truncate))


def correlate(values: Tensor, kernel: Tensor) -> Tensor:
    """Each pixel's neighborhood times the kernel (K, K), K odd; beyond the edge the image is mirrored (edge pixel
    not repeated), which needs sides above K / 2."""
    height, width = values.shape[-2:]
    padded = F.pad(values, [len(kernel) // 2] * 4, mode="reflect")
    size = [-(-n // 16) * 16 for n in padded.shape[-2:]]  # lengths that transform quickly
    spectrum = torch.fft.rfft2(padded, s=size) * torch.fft.rfft2(kernel, s=size).conj()
    correlated: Tensor = torch.fft.irfft2(spectrum, s=size)
    return correlated[..., :height, :width]


def motion(values: Tensor, radius: float, sigma: float, angles: Tensor) -> Tensor:
    """Smear along angles (B,), in degrees, clockwise from the right: the mean of the pixels 0, 1, 2 ... steps ahead,
    weighted by half a Gaussian of 2 ceil(radius) + 1 steps. Edge pixels are repeated beyond the edge.

    The definition is ImageMagick's MotionBlurImage, which the published scripts call.
    """
    height, width = values.shape[-2:]
    steps = torch.arange(2 * math.ceil(radius) + 1).double()
    weights = torch.exp(-(steps**2) / (2 * sigma**2))
    fractions = (weights / weights.sum()).tolist()
    reach = len(fractions) - 1
    padded = F.pad(values, [reach] * 4, mode="replicate")
    right, down = (
        torch.ceil(steps * part(torch.deg2rad(angles))[:, None] - 0.5).long() + reach for part in (torch.cos, torch.sin)
    )
    smeared = torch.zeros_like(values)
    for result, source, xs, ys in zip(smeared, padded, right.tolist(), down.tolist(), strict=True):
        for weight, x, y in zip(fractions, xs, ys, strict=True):
            result.add_(source[:, y : y + height, x : x + width], alpha=weight)
    return smeared


def zoom(values: Tensor, factor: float) -> Tensor:
    """The middle of (B, C, H, W), a `factor`-th of each side, linearly enlarged to fill the image: corner pixels stay
    corner pixels, and what is then too large is trimmed."""

    def middle(values: Tensor, size: Iterable[int]) -> Tensor:
        (top, height), (left, width) = (((n - m) // 2, m) for n, m in zip(values.shape[-2:], size, strict=True))
        return values[..., top : top + height, left : left + width]

    cut = [math.ceil(n / factor) for n in values.shape[-2:]]
    grown = [round(n * factor) for n in cut]
    enlarged = F.interpolate(middle(values, cut), grown, mode="bilinear", align_corners=True)
    return middle(enlarged, values.shape[-2:])


def by_pillow(images: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Apply a function of Pillow to each image, (H, W, 3) or (H, W)."""
    is_gray = images.shape[1] == 1
    stacked = (images[:, 0] if is_gray else images.permute(0, 2, 3, 1)).contiguous().numpy()
    changed = torch.from_numpy(np.stack([np.asarray(change(Image.fromarray(img))) for img in stacked]))
    return changed[:, None] if is_gray else changed.permute(0, 3, 1, 2).contiguous()


# Noise.


def gaussian_noise(images: Tensor, draws: Draws, std: float) -> Tensor:
    """x + N(0, std)."""
    return levels(draws.normal(*images.shape[1:]).mul_(std).add_(unit(images)))


def speckle_noise(images: Tensor, draws: Draws, std: float) -> Tensor:
    """x + x N(0, std): bright pixels suffer more."""
    values = unit(images)
    return levels(draws.normal(*images.shape[1:]).mul_(std).mul_(values).add_(values))


def shot_noise(images: Tensor, draws: Draws, photons: float) -> Tensor:
    """Counts of photons, so many on average in a white pixel: Poisson(x photons) / photons."""
    return levels(draws.poisson(unit(images) * photons) / photons)


def impulse_noise(images: Tensor, draws: Draws, amount: float) -> Tensor:
    """A part `amount` of the values becomes 0 or 255, either alike."""
    chance = draws.uniform(*images.shape[1:])
    kept = chance >= amount
    white = (chance >= amount / 2) & ~kept
    return images * kept + white.byte() * 255


# Blur.


def gaussian_blur(images: Tensor, draws: Draws, sigma: float) -> Tensor:
    """A Gaussian of `sigma` pixels."""
    return levels(gaussian(unit(images), sigma))


def defocus_blur(images: Tensor, draws: Draws, radius: float, softness: float) -> Tensor:
    """The mean over a disk of `radius` pixels whose edge is softened by a Gaussian of `softness` pixels."""
    return levels(correlate(unit(images), disk(radius, softness)))


def disk(radius: float, softness: float) -> Tensor:
    """(K, K), K odd: the pixels within `radius`, normalized, then smoothed over 3 x 3 pixels (up to a radius of 8, on a
    grid of 17 x 17 that clips the smoothing) or 5 x 5. Empty borders are left out."""
    half, reach = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    line = torch.arange(-half, half + 1).double()
    inside = (line[:, None] ** 2 + line**2 <= radius**2).double()
    near = torch.arange(-reach, reach + 1).double()
    weights = torch.exp(-(near**2) / (2 * softness**2))
    weights = weights / weights.sum()
    smooth = correlate((inside / inside.sum())[None, None], weights[:, None] * weights)[0, 0]
    used = int((smooth[half] > 1e-12).sum()) // 2  # half the width of the disk
    return smooth[half - used : half + used + 1, half - used : half + used + 1]


def motion_blur(images: Tensor, draws: Draws, radius: float, sigma: float) -> Tensor:
    """A smear along a line at most 45 degrees off the horizontal; rounded, as ImageMagick does."""
    return motion(images.double(), radius, sigma, draws.uniform(low=-45, high=45)).round_().to(torch.uint8)


def zoom_blur(images: Tensor, draws: Draws, stop: float, step: float) -> Tensor:
    """The mean of the image and its enlargements by 1, 1 + step, ... below `stop`."""
    values = unit(images)
    factors = np.arange(1, stop, step).tolist()  # rounding makes some one longer than they look: part of the definition
    total = values.clone()
    for factor in factors:
        total += zoom(values, factor)
    return levels(total / (len(factors) + 1))


def glass_blur(images: Tensor, draws: Draws, sigma: float, reach: int, rounds: int) -> Tensor:
    """Pixels are copied from up to `reach` away, `rounds` times, between two Gaussian blurs of `sigma` pixels."""
    blurred = levels(gaussian(unit(images), sigma))
    height, width = images.shape[-2:]
    sources = torch.arange(height * width).expand(len(images), -1)
    for _ in range(rounds):
        shape = (2, height - 2 * reach, width - 2 * reach)
        sources = sources.gather(1, scattered(draws.integers(-reach, reach, *shape), height, width))
    moved = blurred.flatten(2).gather(2, sources[:, None].expand(-1, images.shape[1], -1))
    return levels(gaussian(unit(moved.view_as(images)), sigma))


def scattered(offsets: Tensor, height: int, width: int) -> Tensor:
    """Where each pixel's value comes from (B, H W), after one round of copies by offsets (B, 2, H - 2 r, W - 2 r), down
    and right, of the pixels r + 1 ... H - r and r + 1 ... W - r.

    Pixels are visited from the last to the first and take the present value of the pixel at their offset, so a value
    may travel on. (The published loop means to swap two pixels; as NumPy gives views it copies one, in ImageNet-C too.)
    """
    batch, reach = len(offsets), (height - offsets.shape[2]) // 2
    places = torch.arange(height * width).view(height, width)
    visited = torch.zeros(height, width, dtype=torch.bool)
    window = (slice(reach + 1, height - reach + 1), slice(reach + 1, width - reach + 1))
    visited[window] = True
    taken = places.expand(batch, -1, -1).clone()
    taken[(slice(None), *window)] += offsets[:, 0] * width + offsets[:, 1]
    onward = (taken > places) & visited.flatten()[taken]  # from a pixel that was visited before
    follow = torch.where(onward, taken, places).flatten(1)
    while not torch.equal(further := follow.gather(1, follow), follow):
        follow = further
    return taken.flatten(1).gather(1, follow)


# Weather.


def snow(
    images: Tensor, draws: Draws, mean: float, std: float, factor: float, threshold: float, radius: float,
    sigma: float, kept: float,
) -> Tensor:  # fmt: skip
    """Flakes, that is enlarged and smeared noise above a threshold, over the whitened image; and the same flakes
    turned by 180 degrees."""
    flakes = zoom(draws.normal(1, *images.shape[-2:]) * std + mean, factor)
    flakes = levels(flakes.masked_fill(flakes < threshold, 0)).double()
    flakes = motion(flakes, radius, sigma, draws.uniform(low=-135, high=-45)).round_().div_(255)
    values = unit(images)
    whitened = torch.maximum(values, gray(values) * 1.5 + 0.5)
    return levels(values * kept + whitened * (1 - kept) + flakes + flakes.rot90(2, (2, 3)))


def fog(images: Tensor, draws: Draws, amount: float, decay: float) -> Tensor:
    """A plasma fractal of height `amount` is added, then all is scaled so that the image's brightest value stays."""
    height, width = images.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()
    values = unit(images)
    brightest = values.amax((1, 2, 3), keepdim=True)
    values = values + plasma(draws.uniform(side * side - 1, low=-1), decay)[:, None, :height, :width] * amount
    return levels(values * brightest / (brightest + amount))


def plasma(noise: Tensor, decay: float) -> Tensor:
    """Heights (B, S, S) from 0 to 1 by the diamond-square method on a torus, S a power of 2, from noise (B, S S - 1) in
    -1 ... 1. The noise shrinks by `decay` squared from a level to the next finer one."""
    side = round((noise.shape[1] + 1) ** 0.5)
    heights = torch.zeros(len(noise), side, side, dtype=noise.dtype)
    used, amount, step = 0, 1.0, side
    while step >= 2:
        count, half = side // step, step // 2
        fractions = noise[:, used : used + 3 * count**2].view(-1, 3, count, count) * amount
        corners = heights[:, ::step, ::step]
        below, right = corners.roll(-1, 1), corners.roll(-1, 2)
        centers = (corners + below + right + corners.roll((-1, -1), (1, 2))) / 4 + fractions[:, 0]
        heights[:, half::step, half::step] = centers
        heights[:, ::step, half::step] = (corners + right + centers + centers.roll(1, 1)) / 4 + fractions[:, 1]
        heights[:, half::step, ::step] = (corners + below + centers + centers.roll(1, 2)) / 4 + fractions[:, 2]
        used, amount, step = used + 3 * count**2, amount / decay**2, half
    heights -= heights.amin((1, 2), keepdim=True)
    return heights / heights.amax((1, 2), keepdim=True)


def brightness(images: Tensor, draws: Draws, amount: float) -> Tensor:
    """`amount` is added to the value of hue, saturation, value: channels keep their ratios, and black becomes gray."""
    values = unit(images)
    brightest = values.amax(1, keepdim=True)
    target = (brightest + amount).clamp(max=1)
    return levels(torch.where(brightest > 0, values * (target / brightest), target))


VARIABLE = "VITMODS_FROST"
FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")  # the authors' sixth is never drawn
SOURCE = "They are in the folder ImageNet-C/create_c of https://github.com/hendrycks/robustness."


def frost(images: Tensor, draws: Draws, kept: float, amount: float, scale: float, *, folder: Path) -> Tensor:
    """kept x + amount texture, at a random place of a random texture: five photographs of frozen glass in a folder."""
    textures = read_textures(folder, scale, tuple(images.shape[1:]))
    height, width = images.shape[-2:]
    parts = []
    for index, corner in zip(draws.integers(0, len(textures)).tolist(), draws.uniform(2).tolist(), strict=True):
        texture = textures[index]
        sides = zip(corner, texture.shape[-2:], (height, width), strict=True)
        top, left = (int(fraction * max(1, full - side)) for fraction, full, side in sides)
        parts.append(texture[:, top : top + height, left : left + width])
    return levels(unit(images).mul_(kept).add_(unit(torch.stack(parts)).mul_(amount)))


def texture_folder(folder: Path | None) -> Path:
    """Return the given folder, or that of $VITMODS_FROST. Raises UserError if none is set or a texture is missing."""
    name = folder or os.environ.get(VARIABLE)
    if not name:
        raise UserError(
            f"The frost corruption needs textures: a folder with {', '.join(FILES)}, named by textures (--textures) or "
            f"{VARIABLE}. Or leave frost out. {SOURCE}"
        )
    path = Path(name)
    if missing := [name for name in FILES if not (path / name).is_file()]:
        raise UserError(
            f"The frost corruption cannot find {', '.join(missing)} in {path}. Put {', '.join(FILES)} there, or set "
            f"{VARIABLE} to a folder that has them. {SOURCE}"
        )
    return path


@lru_cache(maxsize=2)  # decoding takes longer than laying it over a batch
def read_textures(folder: Path, scale: float, shape: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """The textures (C, H, W), uint8, `scale` times their size and at least as large as images of `shape`."""
    textures = []
    for path in (folder / name for name in FILES):
        try:
            with Image.open(path) as file:
                texture = torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)
        except (OSError, UnidentifiedImageError) as error:
            raise UserError(f"The frost texture {path} cannot be read ({error}). Copy it anew. {SOURCE}") from error
        sides = list(zip(shape[1:], texture.shape[1:], strict=True))
        needed = max(side / full for side, full in sides)
        values = texture[None].double()
        if scale != 1 and needed <= scale:  # without antialiasing, as the published scripts have it
            values = F.interpolate(values, scale_factor=scale, mode="bilinear", align_corners=False)
        elif needed > 1:
            size = [max(side, round(full * needed)) for side, full in sides]
            values = F.interpolate(values, size, mode="bilinear", align_corners=False)
        textures.append((gray(values) if shape[0] == 1 else values)[0].round().to(torch.uint8))
    return tuple(textures)


# Spatter: drops of water or of mud on the lens. Edges, distances and equalization are defined as OpenCV defines them,
# which the published scripts call.

_WATER, _MUD = (175, 238, 238), (63, 42, 20)
_LOW, _HIGH = 50, 150  # thresholds of the edges
_FAR = 20  # distances are cut off here, in pixels
_LENGTHS = {1: 1.0, 2: 1.4, 3: 2.1969}  # of the moves (1, 0), (1, 1) and (2, 1), by their steps
_TAN_22 = 13573  # tan(22.5 degrees), in parts of 2**15
_BOX = np.full((3, 3), 1 / 9)


def spatter(
    images: Tensor, draws: Draws, mean: float, std: float, sigma: float, threshold: float, last: float, mud: int
) -> Tensor:
    """Smoothed noise above a threshold is liquid. Water glistens by the distance to the drops' edges, mud covers."""
    liquid = gaussian(draws.normal(1, *images.shape[-2:]) * std + mean, sigma)
    values = unit(images)
    color = torch.tensor(_MUD if mud else _WATER).double().div(255).view(1, 3, 1, 1)
    color = color if images.shape[1] == 3 else gray(color)
    if mud:
        cover = gaussian((liquid > threshold).double(), last)
        cover = cover.masked_fill(cover < 0.8, 0)
        return levels(values * (1 - cover) + color * cover)
    drops = levels(liquid.masked_fill(liquid < threshold, 0)).double()
    near = equalized(filtered(distance(edges(drops)), _BOX).add(1e-6).floor())
    embossed = filtered(near, np.array([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])).clamp(0, 255)
    shine = drops * filtered(embossed, _BOX).round()
    brightest = shine.amax((1, 2, 3), keepdim=True)
    shine = torch.where(brightest > 0, shine / brightest, 0) * last
    return levels(values + shine * color)


def filtered(values: Tensor, kernel: np.ndarray, mode: str = "mirror") -> Tensor:
    """Correlate (B, 1, H, W) with 3 x 3 weights."""
    return torch.from_numpy(ndimage.correlate(values.numpy(), kernel[None, None], mode=mode))


def edges(drops: Tensor) -> Tensor:
    """Canny's edges, bool (B, 1, H, W), of whole numbers 0 to 255 (B, 1, H, W): |dx| + |dy| of the Sobel operator,
    thinned along the gradient, above 150 or above 50 and connected to such."""
    sobel = np.array([1.0, 2, 1])[:, None] * [-1.0, 0, 1]
    dx, dy = filtered(drops, sobel, "nearest"), filtered(drops, sobel.T, "nearest")
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
    weak, strong = ridge & (strength > _LOW), ridge & (strength > _HIGH)
    connected = ndimage.binary_propagation(strong.numpy(), np.ones((1, 1, 3, 3)), mask=weak.numpy())
    return torch.from_numpy(connected)


def distance(edge: Tensor) -> Tensor:
    """Return the distance to the nearest edge pixel (B, 1, H, W), at most 20, by moves (1, 0), (1, 1) and (2, 1)."""
    height, width = edge.shape[-2:]
    moves = [(y, x) for y in range(-2, 3) for x in range(-2, 3) if {abs(y), abs(x)} in ({0, 1}, {1}, {1, 2})]
    near = torch.where(edge, 0.0, float(_FAR)).double()
    while True:
        beyond = F.pad(near, [2] * 4, value=float(_FAR))
        nearer = near
        for y, x in moves:
            moved = beyond[..., 2 + y : 2 + y + height, 2 + x : 2 + x + width]
            nearer = torch.minimum(nearer, moved + _LENGTHS[abs(y) + abs(x)])
        if torch.equal(nearer, near):
            return near
        near = nearer


def equalized(values: Tensor) -> Tensor:
    """Whole numbers 0 to 255 mapped so that they are evenly used, each image for itself; the lowest becomes 0."""
    flat = values.long().flatten(1)
    counts = torch.stack([image.bincount(minlength=256) for image in flat]).double()
    lowest = flat.amin(1, keepdim=True)
    remaining = flat.shape[1] - counts.gather(1, lowest)
    above = counts.cumsum(1) - counts.gather(1, lowest)
    table = torch.where(remaining > 0, (above.clamp(min=0) * (255 / remaining)).round(), lowest.double())
    return table.gather(1, flat).view_as(values)


# Digital.


def contrast(images: Tensor, draws: Draws, kept: float) -> Tensor:
    """Every channel is drawn towards its mean over the image."""
    pixels = images.shape[-2] * images.shape[-1]
    means = images.sum((2, 3), keepdim=True).double() / (255 * pixels)  # summed as integers: exact in any order
    return levels(unit(images).sub_(means).mul_(kept).add_(means))


def saturate(images: Tensor, draws: Draws, factor: float, more: float) -> Tensor:
    """Saturation (of hue, saturation, value) becomes saturation x factor + more; gray has the hue of red."""
    if images.shape[1] != 3:
        raise UserError("The corruption 'saturate' needs color; these images are gray. Leave it out.")
    values = unit(images)
    brightest, darkest = values.amax(1, keepdim=True), values.amin(1, keepdim=True)
    span = brightest - darkest
    red = torch.tensor([0.0, 1.0, 1.0], dtype=values.dtype).view(3, 1, 1)
    below = torch.where(span > 0, (brightest - values) / span, red)  # how far down to the darkest channel, 0 to 1
    saturation = torch.where(brightest > 0, span / brightest, 0)
    return levels(brightest * (1 - (saturation * factor + more).clamp(0, 1) * below))


def elastic_transform(images: Tensor, draws: Draws, amount: float, sigma: float, jitter: float) -> Tensor:
    """A random affine map, then a smooth random displacement of every pixel; lengths in short sides of the image."""
    height, width = images.shape[-2:]
    side = min(height, width)
    pixels = torch.stack(torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy"), -1).double()

    # The affine map moves three points around the center; `back` (B, 3, 2) is its inverse.
    center = torch.tensor([width // 2, height // 2]).double()
    points = center + torch.tensor([[1, 1], [1, -1], [-1, -1]]) * (side // 3)
    moves = draws.uniform(3, 2, low=-(jitter * side), high=jitter * side)
    targets = torch.cat((points + moves, torch.ones(len(moves), 3, 1)), -1)
    back: Tensor = torch.linalg.solve(targets, points.expand(len(moves), -1, -1))
    places = 2 * (pixels @ back[:, None, :2] + back[:, None, 2:]) / (torch.tensor([width, height]) - 1) - 1
    values = F.grid_sample(unit(images), places, padding_mode="reflection", align_corners=True)

    noise = draws.uniform(2, height, width, low=-1)
    fields = gaussian(noise, sigma * side, mode="reflect", truncate=3) * (amount * side)
    places = (2 * (pixels + fields.permute(0, 2, 3, 1)) + 1) / torch.tensor([width, height]) - 1
    return levels(F.grid_sample(values, places, padding_mode="reflection", align_corners=False))


def pixelate(images: Tensor, draws: Draws, part: float) -> Tensor:
    """Shrunk to `part` of its sides by averaging boxes, then enlarged again, both by Pillow."""
    height, width = images.shape[-2:]
    small, box = (int(width * part), int(height * part)), Image.Resampling.BOX
    return by_pillow(images, lambda image: image.resize(small, box).resize((width, height), box))


def jpeg_compression(images: Tensor, draws: Draws, quality: int) -> Tensor:
    """Written as a JPEG file of this quality by Pillow, and read again."""

    def change(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return by_pillow(images, change)
