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


def nadeau_bengio_variance(
    values: ArrayLike, n_test: int | Sequence[int], n_train: int | Sequence[int]
) -> NDArray[np.float64]:
    """Variance of the mean over J test parts, s^2 * (1 / J + n_test / n_train), where trainings share images.

    values (..., J): what each part gives, for instance the difference of an arm to base with fold j as test; s^2 is
    their variance (J - 1 degrees of freedom). n_test, n_train: images of a part and of what is trained on with it,
    numbers or (J,), of which the means count. Trainings on parts of the same images resemble each other, which s^2 / J,
    the variance for independent ones, leaves out. A claim with it is about other training images too. Nadeau and
    Bengio, "Inference for the generalization error", Machine Learning 52, 2003.

    NaN for fewer than two values. ValueError for n_test and n_train that are not above 0.
    """
    x = np.asarray(values, dtype=np.float64)
    if not (np.min(n_test) > 0 and np.min(n_train) > 0):
        raise ValueError(f"n_test and n_train are numbers of images, above 0, not {n_test} and {n_train}.")
    parts = x.shape[-1]
    if parts < 2:
        return np.full(x.shape[:-1], np.nan)
    variance: NDArray[np.float64] = x.var(axis=-1, ddof=1) * (1 / parts + np.mean(n_test) / np.mean(n_train))
    return variance


def _normal_quantile() -> float:
    return float(special.ndtri((1 + LEVEL) / 2))
