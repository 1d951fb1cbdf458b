"""Noise, blur and digital corruptions: all that happens between lens and file.

What several corruptions share: random numbers, levels and filters. Images are float64 (B, C, H, W) in 0..1 unless it
says otherwise.

float64, as in the published scripts, and because results are cut to whole levels: sums made in another order, as in a
batch of another size, differ in digits that then cannot be seen.
"""

import io
import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitmods.papers.corruptions.tables import Strength
from vitmods.util.errors import UserError

_LAST_DIGITS = 1e-6  # in levels: far more than float64 loses, far less than an image can tell


def unit(images: Tensor) -> Tensor:
    """uint8 -> 0..1."""
    return images.double().div_(255)


def levels(values: Tensor) -> Tensor:
    """0..1 -> uint8, clipped and cut (not rounded), as the published scripts do. A value that is a whole level but for
    its last digits counts as that level. `values` serve as working memory."""
    return values.mul_(255).add_(_LAST_DIGITS).clamp_(0, 255).to(torch.uint8)


def gray(values: Tensor) -> Tensor:
    """Luma (B, 1, H, W) of ITU-R BT.601; gray images are their own."""
    if values.shape[1] == 1:
        return values
    red, green, blue = values.unbind(1)
    return (red * 0.299 + green * 0.587 + blue * 0.114)[:, None]


def gaussian(values: Tensor, sigma: float, *, reflect: bool = False, truncate: float = 4.0) -> Tensor:
    """Gaussian blur of (..., H, W), cut off at `truncate` sigmas. Beyond the edge lies the edge pixel, or with
    `reflect` the mirrored image (edge pixel repeated), however far."""
    rows, columns = (_gaussian_matrix(n, sigma, truncate, reflect) for n in values.shape[-2:])
    return rows @ (values @ columns.T)


def _gaussian_matrix(size: int, sigma: float, truncate: float, reflect: bool) -> Tensor:
    """(size, size): row i holds what each pixel gives to the blurred pixel i."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return torch.eye(size, dtype=torch.float64)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    source = torch.arange(size)[:, None] + offsets
    if reflect:
        source = source % (2 * size)
        source = torch.minimum(source, 2 * size - 1 - source)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, source.clamp(0, size - 1), (weights / weights.sum()).expand(size, -1))


def correlate(values: Tensor, kernel: Tensor) -> Tensor:
    """Each pixel's neighborhood times the kernel (K, K), K odd; beyond the edge the image is mirrored (edge pixel
    not repeated), which needs sides above K / 2."""
    height, width = values.shape[-2:]
    reach = len(kernel) // 2
    padded = F.pad(values, [reach] * 4, mode="reflect")
    size = [-(-n // 16) * 16 for n in padded.shape[-2:]]  # lengths that transform quickly
    spectrum = torch.fft.rfft2(padded, s=size) * torch.fft.rfft2(kernel, s=size).conj()
    correlated: Tensor = torch.fft.irfft2(spectrum, s=size)
    return correlated[..., :height, :width]


def motion(values: Tensor, radius: float, sigma: float, angles: Tensor) -> Tensor:
    """Smear along angles (B,), in radians, clockwise from the right: the mean of the pixels that lie 0, 1, 2 ... steps
    ahead, weighted by half a Gaussian of 2 ceil(radius) + 1 steps. Beyond the edge lies the edge pixel.

    The definition is ImageMagick's MotionBlurImage, which the published scripts call.
    """
    height, width = values.shape[-2:]
    steps = torch.arange(2 * math.ceil(radius) + 1).double()
    weights = torch.exp(-(steps**2) / (2 * sigma**2))
    fractions = (weights / weights.sum()).tolist()
    reach = len(fractions) - 1
    padded = F.pad(values, [reach] * 4, mode="replicate")
    right = torch.ceil(steps * torch.cos(angles)[:, None] - 0.5).long() + reach
    down = torch.ceil(steps * torch.sin(angles)[:, None] - 0.5).long() + reach
    smeared = torch.zeros_like(values)
    for result, source, lefts, tops in zip(smeared, padded, right.tolist(), down.tolist(), strict=True):
        for weight, left, top in zip(fractions, lefts, tops, strict=True):
            result.add_(source[:, top : top + height, left : left + width], alpha=weight)
    return smeared


def zoom(values: Tensor, factor: float) -> Tensor:
    """The middle of (B, C, H, W), a `factor`-th of each side, linearly enlarged to fill the image: corner pixels stay
    corner pixels, and what is then too large is trimmed."""
    size = values.shape[-2:]
    cut = [math.ceil(n / factor) for n in size]
    values = _middle(values, cut)
    grown = [round(n * factor) for n in cut]
    return _middle(F.interpolate(values, grown, mode="bilinear", align_corners=True), size)


def _middle(values: Tensor, size: "torch.Size | list[int]") -> Tensor:
    top, left = ((n - m) // 2 for n, m in zip(values.shape[-2:], size, strict=True))
    return values[..., top : top + size[0], left : left + size[1]]


class Draws:
    """Draws for B images from 64-bit seeds (B,); results are (B, *shape) in float64."""

    def __init__(self, seeds: Iterable[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed >> 1) for seed in seeds]  # torch takes 63 bits

    def normal(self, *shape: int) -> Tensor:
        """Unit normal."""
        return self._draw(torch.empty(len(self._generators), *shape), Tensor.normal_).double()

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Even in [low, high)."""
        numbers = self._draw(torch.empty(len(self._generators), *shape), Tensor.uniform_)
        return numbers.double() * (high - low) + low

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64, even in low ... high - 1."""
        numbers = torch.empty(len(self._generators), *shape, dtype=torch.int64)
        return self._draw(numbers, Tensor.random_, low, high)

    def _draw(self, numbers: Tensor, fill: Callable[..., Tensor], *limits: int) -> Tensor:
        for row, generator in zip(numbers.unbind(), self._generators, strict=True):
            fill(row, *limits, generator=generator)
        return numbers

    def poisson(self, rates: Tensor) -> Tensor:
        """Counts at the rates (B, ...)."""
        drawn = zip(rates.unbind(), self._generators, strict=True)
        return torch.stack([torch.poisson(row, generator=generator) for row, generator in drawn])


def gaussian_noise(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """x + N(0, std)."""
    (std,) = strength
    return levels(draws.normal(*images.shape[1:]).mul_(std).add_(unit(images)))


def speckle_noise(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """x + x N(0, std): bright pixels suffer more."""
    (std,) = strength
    values = unit(images)
    return levels(draws.normal(*images.shape[1:]).mul_(std).mul_(values).add_(values))


def shot_noise(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Counts of photons, `full` of them on average in a white pixel: Poisson(x full) / full."""
    (full,) = strength
    return levels(draws.poisson(unit(images) * full) / full)


def impulse_noise(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """A part `amount` of the values becomes 0 or 255, either alike."""
    (amount,) = strength
    chance = draws.uniform(*images.shape[1:])
    kept = chance >= amount
    white = (chance >= amount / 2) & ~kept
    return images * kept + white.byte() * 255


def gaussian_blur(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """A Gaussian of `sigma` pixels."""
    (sigma,) = strength
    return levels(gaussian(unit(images), sigma))


def defocus_blur(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """The mean over a disk of `radius` pixels whose edge is softened by a Gaussian of `soft` pixels."""
    radius, soft = strength
    return levels(correlate(unit(images), disk(radius, soft)))


def disk(radius: float, soft: float) -> Tensor:
    """(K, K), K odd: the pixels within `radius`, normalized, then smoothed over 3 x 3 pixels (up to a radius of 8, on a
    grid of 17 x 17 that clips the smoothing) or 5 x 5. Empty borders are left out."""
    half, reach = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    line = torch.arange(-half, half + 1).double()
    inside = (line[:, None] ** 2 + line**2 <= radius**2).double()
    near = torch.arange(-reach, reach + 1).double()
    weights = torch.exp(-(near**2) / (2 * soft**2))
    weights = weights / weights.sum()
    smooth = correlate((inside / inside.sum())[None, None], weights[:, None] * weights)[0, 0]
    used = int((smooth[half] > 1e-12).sum()) // 2  # half the width of the disk
    return smooth[half - used : half + used + 1, half - used : half + used + 1]


def motion_blur(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """A smear along a line at most 45 degrees off the horizontal; rounded, as ImageMagick does."""
    radius, sigma = strength
    angles = torch.deg2rad(draws.uniform(low=-45, high=45))
    return motion(images.double(), radius, sigma, angles).round_().to(torch.uint8)


def zoom_blur(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """The mean of the image and its enlargements by 1, 1 + step, ... below `stop`."""
    stop, step = strength
    values = unit(images)
    factors = np.arange(1, stop, step).tolist()  # rounding makes some one longer than they look: part of the definition
    total = values.clone()
    for factor in factors:
        total += zoom(values, factor)
    return levels(total / (len(factors) + 1))


def glass_blur(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Pixels are copied from up to `reach` away, `rounds` times, between two Gaussian blurs of `sigma` pixels."""
    sigma, reach, rounds = strength[0], int(strength[1]), int(strength[2])
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


def contrast(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Every channel is drawn towards its mean over the image."""
    (kept,) = strength
    pixels = images.shape[-2] * images.shape[-1]
    means = images.sum((2, 3), keepdim=True).double() / (255 * pixels)  # summed as integers: exact in any order
    return levels(unit(images).sub_(means).mul_(kept).add_(means))


def saturate(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Saturation (of hue, saturation, value) becomes saturation x factor + more; gray has the hue of red."""
    factor, more = strength
    if images.shape[1] != 3:
        raise UserError("The corruption 'saturate' needs color; these images are gray. Leave it out.")
    values = unit(images)
    brightest, darkest = values.amax(1, keepdim=True), values.amin(1, keepdim=True)
    span = brightest - darkest
    red = torch.tensor([0.0, 1.0, 1.0], dtype=values.dtype).view(3, 1, 1)
    below = torch.where(span > 0, (brightest - values) / span, red)  # how far down to the darkest channel, 0 to 1
    saturation = torch.where(brightest > 0, span / brightest, 0)
    return levels(brightest * (1 - (saturation * factor + more).clamp(0, 1) * below))


def elastic_transform(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """A random affine map, then a smooth random displacement of every pixel; lengths in short sides of the image."""
    height, width = images.shape[-2:]
    amount, sigma, jitter = (part * min(height, width) for part in strength)
    moves = draws.uniform(3, 2, low=-jitter, high=jitter)
    values = _sample(unit(images), _affine(moves, height, width), edge_repeated=False)
    fields = gaussian(draws.uniform(2, height, width, low=-1), sigma, reflect=True, truncate=3) * amount
    return levels(_sample(values, _grid(height, width) + fields.permute(0, 2, 3, 1), edge_repeated=True))


def _grid(height: int, width: int) -> Tensor:
    """(H, W, 2): x and y of each pixel."""
    y, x = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    return torch.stack((x, y), -1)


def _affine(moves: Tensor, height: int, width: int) -> Tensor:
    """Where each pixel comes from, x and y (B, H, W, 2), if three points around the center go by moves (B, 3, 2)."""
    center = torch.tensor([width // 2, height // 2]).double()
    points = center + torch.tensor([[1, 1], [1, -1], [-1, -1]]) * (min(height, width) // 3)
    targets = torch.cat((points + moves, torch.ones(len(moves), 3, 1)), -1)
    back: Tensor = torch.linalg.solve(targets, points.expand(len(moves), -1, -1))  # (B, 3, 2)
    return _grid(height, width) @ back[:, None, :2] + back[:, None, 2:]


def _sample(values: Tensor, places: Tensor, *, edge_repeated: bool) -> Tensor:
    """Images at places x, y (B, H, W, 2), in pixels, linearly interpolated; beyond the edge they are mirrored."""
    size = torch.tensor([values.shape[-1], values.shape[-2]])
    where = (2 * places + 1) / size - 1 if edge_repeated else 2 * places / (size - 1) - 1
    return F.grid_sample(values, where, mode="bilinear", padding_mode="reflection", align_corners=not edge_repeated)


def pixelate(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Shrunk to `part` of its sides by averaging boxes, then enlarged again, both by Pillow."""
    (part,) = strength
    height, width = images.shape[-2:]
    small = (int(width * part), int(height * part))

    def change(image: Image.Image) -> Image.Image:
        box = Image.Resampling.BOX
        return image.resize(small, box).resize((width, height), box)

    return _by_pillow(images, change)


def jpeg_compression(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Written as a JPEG file of this quality by Pillow, and read again."""
    (quality,) = strength

    def change(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=int(quality))
        return Image.open(file)

    return _by_pillow(images, change)


def _by_pillow(images: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Each image goes to Pillow, (H, W, 3) or (H, W), and comes back."""
    gray = images.shape[1] == 1
    stacked = (images[:, 0] if gray else images.permute(0, 2, 3, 1)).contiguous().numpy()
    changed = torch.from_numpy(np.stack([np.asarray(change(Image.fromarray(img))) for img in stacked]))
    return changed[:, None] if gray else changed.permute(0, 3, 1, 2).contiguous()
