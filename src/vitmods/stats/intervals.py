"""Intervals at 95 %: over the images that were looked at, and over repetitions with other seeds."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Interval = tuple[float, float]
LEVEL = 0.95


def wilson(hits: ArrayLike, images: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lower and upper ends for a fraction of `hits` among `images`, arrays of one shape (Wilson, 1927).

    Unlike the normal approximation it stays within 0 and 1 and is good at both ends. Without images: 0 and 1.
    """
    x, n = np.asarray(hits, dtype=np.float64), np.asarray(images, dtype=np.float64)
    z = _normal_quantile()
    middle = (x + z**2 / 2) / (n + z**2)
    half = z * np.sqrt(x * (n - x) / np.maximum(n, 1) + z**2 / 4) / (n + z**2)
    return np.where(x == 0, 0.0, middle - half), np.where(x == n, 1.0, middle + half)


def fraction(hits: int, images: int) -> Interval:
    """Wilson's interval of one fraction."""
    low, high = wilson(hits, images)
    return float(low), float(high)


def mean_of_fractions(hits: NDArray[np.int64], images: NDArray[np.int64]) -> Interval:
    """For the mean of independent shares, from Wilson's interval of each (Zou and Donner, 2008)."""
    fractions = hits / images
    low, high = wilson(hits, images)
    mean, count = float(fractions.mean()), len(fractions)
    below, above = (math.sqrt(float(((fractions - end) ** 2).sum())) / count for end in (low, high))
    return max(mean - below, 0.0), min(mean + above, 1.0)


def mean_over_images(values: NDArray[np.float64]) -> Interval | None:
    """For the mean of a number that each image has, by the normal approximation; None for fewer than two."""
    if len(values) < 2:
        return None
    mean, half = float(values.mean()), _normal_quantile() * float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def mean_over_seeds(values: Sequence[float]) -> Interval | None:
    """For the mean over repetitions, by Student's t; None for fewer than two."""
    if len(values) < 2:
        return None
    mean, n = float(np.mean(values)), len(values)
    half = float(special.stdtrit(n - 1, (1 + LEVEL) / 2)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


def _normal_quantile() -> float:
    return float(special.ndtri((1 + LEVEL) / 2))
