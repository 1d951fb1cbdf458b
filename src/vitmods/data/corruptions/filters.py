"""What several corruptions share: random numbers, levels and filters. Images are float64 (B, C, H, W) in 0..1 unless it
says otherwise.

float64, as in the published scripts, and because results are cut to whole levels: sums made in another order, as in a
batch of another size, differ in digits that then cannot be seen.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

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
