"""The part of an effect's variance that comes from which images were tested.

D[s,i] is arm minus base for a seed and an image. Seeds and images cross, so that with the means D_i over seeds,
D_s over images and d over both

    s2_images   = variance over i of D_i
    s2_residual = (sum D^2 - n sum D_i^2 - m sum D_s^2 + n m d^2) / ((n-1)(m-1))
    I           = max(0, s2_images / m - s2_residual / (n m))

What is subtracted is already in the variance over seeds. I does not shrink with more seeds, only with more images.

Near 100 % few images are right in one trial and wrong in another, and other images may have more of them than these
happen to have. Where D is not 0 on fewer than 10 images, s2_images is taken as if one more differed fully: plus
`step`^2 / m, with `step` the difference of right and wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

FEW_DIFFER = 10  # images


@dataclass(frozen=True)
class ImagesPart:
    """I and what it is made of, one for every contrast."""

    s2_images: Array
    s2_residual: Array
    n: int  #: seeds
    m: int  #: images, or clusters of them

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


def images_part(differences: Array, step: float = 0.0) -> ImagesPart:
    """The part of `differences` (..., n, m) of every seed and image, without gaps; 0 for fewer than two images.

    `step`: between a right image and a wrong one; 0 for scores of other kinds.
    """
    n, m = differences.shape[-2:]
    if m < 2:
        zero = np.zeros(differences.shape[:-2])
        return ImagesPart(zero, zero, n, m)
    by_image, by_seed = differences.mean(-2), differences.mean(-1)
    both = by_seed.mean(-1)
    between = ((by_image - both[..., None]) ** 2).sum(-1)
    total = ((differences - by_seed[..., None]) ** 2).sum((-2, -1))
    residual = (total - n * between) / max((n - 1) * (m - 1), 1)
    few = (differences != 0).any(-2).sum(-1) < FEW_DIFFER
    return ImagesPart(between / (m - 1) + few * step**2 / m, np.maximum(residual, 0.0), n, m)


def clusters(x: Array, groups: ArrayLike) -> Array:
    """Images (..., m) that belong together (`groups` (m,) labels) as clusters (..., C): C / m times their sum.

    The mean over clusters is the mean over images, and a cluster then counts as one image.
    """
    labels, which = np.unique(np.asarray(groups), return_inverse=True)
    order = np.argsort(which, kind="stable")
    starts = np.searchsorted(which[order], np.arange(len(labels)))
    sums = np.add.reduceat(np.asarray(x, dtype=float)[..., order], starts, axis=-1)
    return np.asarray(sums * (len(labels) / len(which)))
