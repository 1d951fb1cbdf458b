"""A study's trials as gains: more is better, fractions in points, failures sorted out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vitmods.stats.failures import collapsed
from vitmods.stats.fit import Array, Fit, Mask, fit
from vitmods.stats.images import ImagesPart, clusters, images_part
from vitmods.stats.read import Table
from vitmods.util.errors import UserError

HALF_AN_IMAGE = 0.5


@dataclass(frozen=True)
class Gains:
    """g arms, base first, and n seeds."""

    trials: Array  #: (g, n); NaN where there is none, and for all arms where base failed
    images: Array | None  #: (g, n, m)
    floor: float  #: the least sd of a trial: half an image where scores are right or wrong
    failures: Mask  #: (g, n) diverged or collapsed
    ended: Mask  #: (g, n)
    pooled: Mask  #: (g,) arms whose trials enter the common variance: none collapsed, no more failures than base

    def fit(self) -> Fit:
        """Every arm against base."""
        return fit(self.trials, 0, self.floor, np.broadcast_to(self.pooled[:, None], self.trials.shape))

    def shared(self, arm: int, other: int = 0) -> Mask:
        """(n,) seeds that both have."""
        return np.asarray(np.isfinite(self.trials[arm]) & np.isfinite(self.trials[other]))

    def images_part(self, arm: int, other: int = 0) -> ImagesPart | None:
        """Of arm minus another over the seeds that both have; None without per-image scores."""
        seeds = self.shared(arm, other)
        if self.images is None or not seeds.any():
            return None
        return images_part(self.images[arm, seeds] - self.images[other, seeds])


def gains_of(table: Table, scale: float, chance: float | None, groups: ArrayLike | None) -> Gains:
    """Scores times `scale` (negative where less is better). `chance` None: collapsed trials are not looked for."""
    trials, images, floor = table.trials * scale, table.images, 0.0
    if images is not None:
        if np.isin(images[np.isfinite(images)], (0, 1)).all():
            floor = HALF_AN_IMAGE * abs(scale) / images.shape[-1]
        images = images * scale
    if groups is not None:
        images = clusters(*_grouped(images, groups))
    collapses = np.zeros(trials.shape, bool) if chance is None else collapsed(trials, chance * scale)
    failures = table.diverged | collapses
    count = failures.sum(-1)
    pooled = ~collapses.any(-1) & (count <= count[0])
    pooled[0] = True
    return Gains(np.where(failures[0], np.nan, trials), images, floor, failures, table.ended, pooled)


def _grouped(images: Array | None, groups: ArrayLike) -> tuple[Array, ArrayLike]:
    if images is None:
        raise UserError("groups need per-image scores: give an array of scores for every trial.")
    if np.shape(groups) != images.shape[-1:]:
        raise UserError(f"groups must have one label for each of {images.shape[-1]} images, not {np.shape(groups)}.")
    return images, groups
