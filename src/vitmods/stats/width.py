"""Half-widths of intervals that hold together over a family of contrasts.

With a variance V over seeds that has df_V, the images' part I and a critical value c(df),

    h(V, df_V, c) = max(c(df_V) sqrt(V),  c(df) sqrt(V + I)),
    df = (V + I)^2 / (V^2/df_V + (s2_images/m)^2/(m-1) + (s2_residual/(nm))^2/((n-1)(m-1))), not below df_V

(Welch and Satterthwaite). The maximum: a claim about other images too is never narrower than one on these images.

For k arms against one base the level alpha is split 8 : 2 between the pooled variance and each arm's own,

    half[a] = min(h(V_pooled, c(k, 0.8 alpha)),  h(V_own, c(1, 0.2 alpha / k))),    k >= 2
    half[a] = h(V_own, c(1, alpha)),                                                 k = 1: the paired t interval

It costs 4 to 5 % of the width, and an arm that follows base closely is then not widened by wild ones beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitmods.stats.critical import critical_value
from vitmods.stats.fit import Array, Contrasts
from vitmods.stats.images import ImagesPart

POOLED = 0.8  # of alpha


@dataclass(frozen=True)
class HalfWidth:
    """On other images from the same source, and on these images alone; and the variance V that it comes from."""

    total: Array
    seeds: Array
    variance: Array
    df: Array  #: of V


def against_base(found: Contrasts, images: ImagesPart | None, alpha: float, family: int) -> HalfWidth:
    """Of `family` arms against one base, with the level split between pooled and own variance."""
    if family == 1:
        return _h(found.own, found.own_df, images, lambda df: critical_value(1, df, alpha))
    own_level = (1 - POOLED) * alpha / family
    pooled = _h(found.variance, found.pooled_df, images, lambda df: critical_value(family, df, POOLED * alpha))
    own = _h(found.own, found.own_df, images, lambda df: critical_value(1, df, own_level))
    narrower = own.total < pooled.total
    return HalfWidth(
        np.minimum(pooled.total, own.total), np.minimum(pooled.seeds, own.seeds),
        np.where(narrower, own.variance, pooled.variance), np.where(narrower, own.df, pooled.df),
    )  # fmt: skip


def half_width(
    variance: Array, df: Array, images: ImagesPart | None, alpha: float, family: int, rho: float = 0.0
) -> HalfWidth:
    """Of any family of contrasts, without a split; `rho` 1/2 where all share one base."""
    return _h(variance, df, images, lambda degrees: critical_value(family, degrees, alpha, rho))


def total_df(variance: Array, df: Array, images: ImagesPart) -> Array:
    """Degrees of freedom of V + I."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found = (variance + images.variance) ** 2 / (variance**2 / df + images.df_terms)
    return np.fmax(found, df)


def _h(variance: Array, df: Array, images: ImagesPart | None, c: Callable[[Array], Array]) -> HalfWidth:
    seeds = c(df) * np.sqrt(variance)
    if images is None:
        return HalfWidth(seeds, seeds, variance, df)
    total = c(total_df(variance, df, images)) * np.sqrt(variance + images.variance)
    return HalfWidth(np.maximum(seeds, total), seeds, variance, df)
