"""The part of an effect's variance that comes from which images were tested.

D[s,i] is arm minus base for a seed and an image. Seeds and images cross, so that with the means D_i over seeds,
D_s over images and d over both

    s2_images   = variance over i of D_i
    s2_residual = (sum D^2 - n sum D_i^2 - m sum D_s^2 + n m d^2) / ((n-1)(m-1))
    I           = max(0, s2_images / m - s2_residual / (n m))

What is subtracted is already in the variance over seeds. I shrinks with more images only.

Near 100 % few images differ, and other images may have more of them. Where D is not 0 on fewer than 10 images,
s2_images is raised by `step`^2 / m, with `step` the difference of right and wrong, as if one more differed. Where the
mean of D_i is skewed too, each end of the interval with the critical value c is moved by

    (1/6 + c^2/3) g / m,   g = third central moment of D_i / s2_images

(Johnson, JASA 73, 1978), in which the one more image differs towards that end; inwards half as far, since all of it
would miss the truth in up to 5 %.

A metric over a set of images (mean IoU, average precision) is not a mean over images. With R_i the metric without image
i, its jackknife form (Miller, Biometrika 61, 1974) is a number for each image whose mean is the metric R, and whose
spread is that of the metric over other images:

    x_i = R + (m-1) (mean of R_j - R_i)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vitmods.stats.fit import ROUNDING, Array

FEW_DIFFERING_IMAGES = 10  # images
NEAR_FRACTION = 0.05  # of the images: that are wrong, and that differ, where g counts; all of it up to half as many
INWARDS_FRACTION = 0.5


@dataclass(frozen=True)
class ImagesPart:
    """I and what it is made of, one for every contrast."""

    s2_images: Array
    s2_residual: Array
    n: int  #: seeds
    m: int  #: images, or clusters of them
    skew: tuple[Array | float, Array | float] = (0.0, 0.0)  #: g, for the lower and the upper end

    @property
    def unclipped(self) -> Array:
        """I before it is kept at zero or above: unbiased."""
        return self.s2_images / self.m - self.s2_residual / (self.n * self.m)

    @property
    def variance(self) -> Array:
        """I."""
        return np.maximum(self.unclipped, 0.0)

    @property
    def df_terms(self) -> Array:
        """The terms that I adds to the sum of V^2 / df (Welch and Satterthwaite), each with its own df."""
        images = (self.s2_images / self.m) ** 2 / max(self.m - 1, 1)
        residual = (self.s2_residual / (self.n * self.m)) ** 2 / max((self.n - 1) * (self.m - 1), 1)
        return np.asarray(images + residual)


def images_part(
    differences: Array, step: float, sets: Sequence[tuple[int, float]] = (), near: bool = True
) -> ImagesPart:
    """The part of `differences` (..., n, m) of every seed and image, without gaps; 0 for fewer than two images.

    `step`: between a right image and a wrong one; 0 for scores of other kinds.
    `sets`: of data sets side by side, the number of images and the step of each; how their means differ does not count.
    `near`: whether right images are nearly all, or hardly any.
    """
    n, m = differences.shape[-2:]
    if m < 2:
        zero = np.zeros(differences.shape[:-2])
        return ImagesPart(zero, zero, n, m)
    sizes, steps = zip(*(sets or [(m, step)]), strict=True)
    parts = np.split(differences, np.cumsum(sizes)[:-1], -1)
    differ = [(np.abs(part) > ROUNDING * s).any(-2).sum(-1) for part, s in zip(parts, steps, strict=True)]
    extra = [s * (count < FEW_DIFFERING_IMAGES) for count, s in zip(differ, steps, strict=True)]
    few, cubes = (sum(s**power for s in extra) for power in (2, 3))
    if sets:
        differences = np.concatenate([part - part.mean(-1, keepdims=True) for part in parts], -1)
    by_image, by_seed = differences.mean(-2), differences.mean(-1)
    both = by_seed.mean(-1)
    between = ((by_image - both[..., None]) ** 2).sum(-1)
    total = ((differences - by_seed[..., None]) ** 2).sum((-2, -1))
    residual = (total - n * between) / max((n - 1) * (m - 1), 1)
    variance, third = between / (m - 1) + few / m, ((by_image - both[..., None]) ** 3).mean(-1)
    counts = np.clip(2 - 2 * sum(differ) / (NEAR_FRACTION * m), 0, 1) if near and min(steps) > 0 else 0.0
    full = counts / np.where(variance > 0, variance, np.inf)
    low, high = full * (third - cubes / m), full * (third + cubes / m)
    skew = np.where(low > 0, INWARDS_FRACTION, 1) * low, np.where(high < 0, INWARDS_FRACTION, 1) * high
    return ImagesPart(variance, np.maximum(residual, 0.0), n, m, skew)


def clusters(x: Array, groups: ArrayLike) -> Array:
    """Images (..., m) that belong together (`groups` (m,) labels) as clusters (..., C): C / m times their sum.

    The mean over clusters is the mean over images, and a cluster then counts as one image.
    """
    labels, which = np.unique(np.asarray(groups), return_inverse=True)
    order = np.argsort(which, kind="stable")
    starts = np.searchsorted(which[order], np.arange(len(labels)))
    sums = np.add.reduceat(np.asarray(x, dtype=float)[..., order], starts, axis=-1)
    return np.asarray(sums * (len(labels) / len(which)))


def jackknife(metric: float, changes: ArrayLike) -> Array:
    """The form (m,) of a metric, of which R - R_i are the `changes` (m,) or, for a mean over K parts, (m, K)."""
    x = np.asarray(changes, dtype=float)
    x = x if x.ndim == 1 else x.mean(1)
    return np.asarray(metric + max(len(x) - 1, 1) * (x - x.mean()))


def mean_ratio(numerators: ArrayLike, denominators: ArrayLike) -> Array:
    """The jackknife form (m,) of the mean over k of sum(numerators) / sum(denominators), both (m, K) by image.

    A ratio whose denominator sums to 0 is left out, and not changed by its only image.
    """
    above, below = (np.asarray(x, dtype=float) for x in (numerators, denominators))
    above, below = (x[:, below.sum(0) > 0] for x in (above, below))
    total = below.sum(0)
    ratios, others = above.sum(0) / total, total - below
    return jackknife(ratios.mean(), np.where(others > 0, (above - ratios * below) / np.where(others > 0, others, 1), 0))


def precision(
    scores: ArrayLike, right: ArrayLike, image: ArrayLike, objects: ArrayLike, interpolated: bool = False
) -> tuple[float, Array]:
    """Average precision, the mean over objects of the precision at which each is found, and its changes (m,) without
    each image (`jackknife`), to first order except for its objects.

    Args:
        scores, right, image: (d,) of each detection, whether it finds an object, and the number of its image.
        objects: (m,) those of each image.
        interpolated: the precision is the best at which so many objects or more are found.
    """
    order, objects = np.argsort(-np.asarray(scores), kind="stable"), np.asarray(objects, dtype=float)
    hits, owner = np.asarray(right, dtype=float)[order], np.asarray(image)[order]
    rank = np.arange(len(order))
    at, best = np.cumsum(hits) / (rank + 1), rank
    if interpolated:  # the first rank from here on at which the precision is not exceeded later
        is_best = at >= np.maximum.accumulate(at[::-1])[::-1]
        best = np.minimum.accumulate(np.where(is_best, rank, len(rank))[::-1])[::-1]
    reads = np.bincount(best[hits > 0], minlength=len(rank)) / (rank + 1)  # how often each precision counts
    later, later_at = (np.cumsum(x[::-1])[::-1] for x in (reads, reads * at))
    change = np.bincount(owner, hits * at[best] + hits * later - later_at, minlength=len(objects))
    average, others = (hits * at[best]).sum() / objects.sum(), objects.sum() - objects
    return float(average), np.asarray(
        np.where(others > 0, (change - average * objects) / np.where(others > 0, others, 1), 0)
    )
