"""Half-widths of intervals that hold together over a family of contrasts.

The critical value c is the factor between a standard error and the half-width. For K contrasts whose errors are
(sqrt(rho) z0 + sqrt(1 - rho) z_j) / s, with z standard normal and s = sqrt(chi2 / df), it solves

    P(max over K of |T_j| > c) = alpha

with rho = 1/2 for arms against one base (Dunnett, 1955), rho = 0 for any other contrasts, valid whatever their
correlation (Sidak, 1967), and Student's t for K = 1. Fixed quadrature gives the same answer on every machine.

With a variance V over seeds that has df_V, the images' part I and a critical value c(df),

    h(V, df_V, c) = max(c(df_V) sqrt(V),  c(df) sqrt(V + I)),
    df = (V + I)^2 / (V^2/df_V + (s2_images/m)^2/(m-1) + (s2_residual/(nm))^2/((n-1)(m-1))),
         not below df_V where there are 20 images or groups of them

(Welch and Satterthwaite): a claim about other images too is never narrower than one on these images. For k arms against
one base the level alpha is split 8 : 2 between the pooled variance and each arm's own, and the narrower one counts,

    half[a] = min(h(V_pooled, c(k, 0.8 alpha)),  h(V_own, c(1, 0.2 alpha / k))),    k >= 2
    half[a] = h(V_own, c(1, alpha)),                                                 k = 1: the paired t interval

so that an arm that follows base closely is not widened by noisy arms. An arm outside of the pool, one of whose trials
failed, has only its own variance, with all of alpha / k. Where base has seeds that the arm does not have, the two forms
have two estimates, also of a single arm, and effects correlate by rho = (1/n_base) / (1/n_base + 1/n).

Intervals of evaluations are at 95 %: over the images that were looked at, and over repetitions with other seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from vitmods.stats.fit import Array, Contrasts
from vitmods.stats.images import ImagesPart
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from scipy.interpolate import CubicSpline

POOLED_FRACTION = 0.8  # of alpha
ENOUGH_IMAGES = 20  # or groups, from which their part does not lower the degrees of freedom


@dataclass(frozen=True)
class HalfWidth:
    """On other images from the same source, and on these images alone; and the variance V that it comes from."""

    total: Array
    seeds: Array
    variance: Array
    df: Array  #: of V
    shift: Array | float = 0.0  #: from the pooled estimate to the one that the interval is around


def against_base(contrasts: Contrasts, images: ImagesPart | None, alpha: float, family: int) -> HalfWidth:
    """Half-widths of `family` arms against one base, with the level split between pooled and own variance."""
    more = contrasts.knows_more
    if family == 1 and not more.any():
        return _h(contrasts.own, contrasts.own_df, images, lambda df: critical_value(1, df, alpha))
    own_level, outside = (1 - POOLED_FRACTION) * alpha / family, ~np.isfinite(contrasts.pooled)
    pooled = _h(
        contrasts.variance, contrasts.pooled_df, images,
        lambda df: critical_value(family, df, POOLED_FRACTION * alpha, contrasts.rho if more.any() else 0.5),
    )  # fmt: skip
    own_half = _h(
        contrasts.own, contrasts.own_df, images,
        lambda df: np.where(outside, critical_value(1, df, alpha / family), critical_value(1, df, own_level)),
    )  # fmt: skip
    narrower = own_half.total < pooled.total
    seeds = np.where(narrower, own_half.seeds, pooled.seeds)
    return HalfWidth(
        np.where(narrower, own_half.total, pooled.total),
        np.where(more, seeds, np.minimum(pooled.seeds, own_half.seeds)),
        np.where(narrower, own_half.variance, pooled.variance), np.where(narrower, own_half.df, pooled.df),
        np.where(narrower & more, contrasts.paired - contrasts.estimate, 0.0),
    )  # fmt: skip


def half_width(variance: Array, df: Array, images: ImagesPart | None, alpha: float, family: int) -> HalfWidth:
    """Half-widths of any family of contrasts, without a split."""
    return _h(variance, df, images, lambda degrees: critical_value(family, degrees, alpha, 0.0))


def bounds(center: Array, half: HalfWidth, images: ImagesPart | None) -> tuple[Array, Array]:
    """The ends on other images, moved where images are skewed (`vitmods.stats.images`)."""
    down, up = center - half.total, center + half.total
    if images is None or not any(np.any(skew) for skew in images.skew):
        return down, up
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = (1 / 6 + half.total**2 / (half.variance + images.variance) / 3) / images.m
    low, high = (np.nan_to_num(factor * skew) for skew in images.skew)
    return np.minimum(down + low, center - half.seeds), np.maximum(up + high, center + half.seeds)


def total_df(variance: Array, df: Array, images: ImagesPart) -> Array:
    """Degrees of freedom of V + I."""
    with np.errstate(invalid="ignore", divide="ignore"):
        degrees = (variance + images.variance) ** 2 / (variance**2 / df + images.df_terms)
    return np.fmax(degrees, df) if images.m >= ENOUGH_IMAGES else degrees


def _h(variance: Array, df: Array, images: ImagesPart | None, c: Callable[[Array], Array]) -> HalfWidth:
    seeds = c(df) * np.sqrt(variance)
    if images is None:
        return HalfWidth(seeds, seeds, variance, df)
    total = c(total_df(variance, df, images)) * np.sqrt(variance + images.variance)
    return HalfWidth(np.maximum(seeds, total), seeds, variance, df)


Z_NODES, S_NODES = 64, 96
TAIL_PROBABILITY = 1e-12  # of the distribution of s, left out at both ends
BRACKET_SLACK = 1e-3  # of the bracket, in log c, for the rounding of the quadrature
INVERSE_DF_GRID = np.linspace(0, 1, 25) ** 2  # of 1 / df; 0 is the normal limit


def critical_value(k: int, df: ArrayLike, alpha: float, rho: ArrayLike = 0.5, one_sided: bool = False) -> Array:
    """c for every element of `df` (1 or more, inf allowed; NaN stays NaN), between grid points to about 1e-6.

    `one_sided`: of P(max T_j > c) instead, for the set of arms that may be best.
    """
    assert k >= 1, k
    assert 0 < alpha < 1, alpha
    degrees = np.maximum(np.asarray(df, dtype=float), 1.0)
    if k == 1:
        return np.asarray(special.stdtrit(degrees, 1 - alpha / (1 if one_sided else 2)))
    values, rhos = np.empty_like(degrees), np.broadcast_to(rho, degrees.shape)
    for value in np.unique(rhos):
        where = rhos == value
        values[where] = np.exp(_curve(k, alpha, float(value), one_sided)(1 / degrees[where]))
    return np.asarray(values)


@lru_cache(maxsize=512)
def _curve(k: int, alpha: float, rho: float, one_sided: bool) -> CubicSpline:
    """log c over 1 / df."""
    from scipy.interpolate import CubicSpline  # most of a second, which workers do without

    return CubicSpline(
        INVERSE_DF_GRID, np.log([_solve(k, 1 / x if x else np.inf, alpha, rho, one_sided) for x in INVERSE_DF_GRID])
    )


def _solve(k: int, df: float, alpha: float, rho: float, one_sided: bool) -> float:
    """One critical value, between the t quantiles of one contrast and of Bonferroni's inequality."""
    from scipy.optimize import brentq

    tails = 1 if one_sided else 2
    low, high = np.log(special.stdtrit(df, 1 - alpha / tails / np.array([1, k])))

    def excess(log_c: float) -> float:
        return exceedance(float(np.exp(log_c)), k, df, rho, one_sided) - alpha

    return float(np.exp(brentq(excess, low - BRACKET_SLACK, high + BRACKET_SLACK, xtol=1e-10)))


def exceedance(c: float, k: int, df: float, rho: float, one_sided: bool = False) -> float:
    """P(max > c): how often at least one of `k` true null contrasts is called different."""
    z, z_weights = _normal_nodes()
    s, s_weights = _chi_nodes(df)
    shift = np.sqrt(rho) * z[:, None]
    inside = special.ndtr((c * s - shift) / np.sqrt(1 - rho))
    if not one_sided:
        inside = inside - special.ndtr((-c * s - shift) / np.sqrt(1 - rho))
    return float(1 - z_weights @ inside**k @ s_weights)


@lru_cache(maxsize=1)
def _normal_nodes() -> tuple[Array, Array]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(Z_NODES)
    return nodes, weights / weights.sum()


@lru_cache(maxsize=64)
def _chi_nodes(df: float) -> tuple[Array, Array]:
    """Nodes s and weights for the mean over s = sqrt(chi2 / df), by Gauss-Legendre in log s."""
    if np.isinf(df):
        return np.ones(1), np.ones(1)
    ends = np.log(2 * special.gammaincinv(df / 2, [TAIL_PROBABILITY, 1 - TAIL_PROBABILITY]) / df) / 2
    nodes, weights = np.polynomial.legendre.leggauss(S_NODES)
    log_s = ends.mean() + nodes * np.ptp(ends) / 2
    log_density = df * log_s - df * np.exp(2 * log_s) / 2  # of log s, but for a constant
    weights = weights * np.exp(log_density - log_density.max())
    return np.exp(log_s), weights / weights.sum()


def overlap_of(n_test: float, n_train: float) -> float:
    """n_test / n_train, where each trial is tested on another part of the images and trained on the rest."""
    if not (n_test > 0 and n_train > 0):
        raise UserError(f"n_test and n_train are numbers of images, above 0, not {n_test} and {n_train}.")
    return n_test / n_train


def over_parts(contrasts: Contrasts, overlap: float) -> Contrasts:
    """Widen the variances of contrasts to other training sets and other images.

    Trainings that share images vary more over n of them than the spread between them suggests. Nadeau and Bengio
    ("Inference for the generalization error", Machine Learning 52, 2003) take s^2 (1 / n + overlap) as the variance of
    their mean instead of s^2 / n, which does not shrink to zero with more seeds.
    """
    factor = 1 + contrasts.seeds * overlap
    return dataclasses.replace(contrasts, pooled=contrasts.pooled * factor, own=contrasts.own * factor)


Interval = tuple[float, float]
CONFIDENCE_LEVEL = 0.95
NORMAL_QUANTILE = float(special.ndtri((1 + CONFIDENCE_LEVEL) / 2))


def wilson(hits: ArrayLike, images: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lower and upper ends for a fraction of `hits` among `images`, arrays of one shape (Wilson, 1927).

    Unlike the normal approximation it stays within 0 and 1 and is good at both ends. Without images: 0 and 1.
    """
    x, n = np.asarray(hits, dtype=np.float64), np.asarray(images, dtype=np.float64)
    z = NORMAL_QUANTILE
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
    mean, half = float(values.mean()), NORMAL_QUANTILE * float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def mean_over_seeds(values: Sequence[float]) -> Interval | None:
    """For the mean over repetitions, by Student's t; None for fewer than two."""
    if len(values) < 2:
        return None
    mean, n = float(np.mean(values)), len(values)
    half = float(special.stdtrit(n - 1, (1 + CONFIDENCE_LEVEL) / 2)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean - half, mean + half
