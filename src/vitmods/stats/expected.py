"""The effect to expect of an arm that helps.

An arm helps if its estimate is large, and estimates are large in part by luck. The effect to expect is the mean of

    theta[a] ~ N(0, tau^2),   d[a] = theta[a] + e[a] - e[0],   e ~ N(0, sd^2 / n + I)

given the estimates d of all arms. sd is as uncertain as its degrees of freedom say, and tau is one of `TAUS`, in sd of
one trial, with prior weights that make the mean true on average in simulated studies, whatever tau is
(docs/statistics.md). It does not depend on when a study stopped or on which arm is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from scipy import special

from vitmods.stats.fit import Array
from vitmods.stats.verdict import Effect

TAUS, WEIGHTS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4), (3, 3, 1, 1, 1, 1)
SD_QUANTILES = 16  # quantiles of the sd


def expected(estimate: Array, sd: Array, df: Array, own: Array, base: Array, images: Array) -> Array:
    """Means (..., k) of the effects of k arms of one study, of estimates (..., k) whose variance is sd^2 times `own`
    seeds' and `base` seeds' part, and that of `images`."""
    quantiles = (np.arange(SD_QUANTILES) + 0.5) / SD_QUANTILES
    degrees = df.mean(-1)[..., None]
    scale = (degrees / (2 * special.gammaincinv(degrees / 2, quantiles)))[..., :, None, None]
    d, one, apart, shared, of_images = (x[..., None, None, :] for x in (estimate, sd**2, own, base, images))
    prior = np.array(TAUS)[:, None] ** 2 * one * scale
    alone, common = prior + one * scale * apart + of_images, (one * scale * shared).mean(-1)
    weighted, total = d / alone, (1 / alone).sum(-1)  # the inverse of a diagonal and a constant (Sherman, Morrison)
    pull = common * weighted.sum(-1) / (1 + common * total)
    log_p = -0.5 * (np.log(alone).sum(-1) + np.log1p(common * total))
    log_p -= 0.5 * ((d * weighted).sum(-1) - pull * weighted.sum(-1))
    p = np.exp(log_p - log_p.max((-2, -1), keepdims=True)) * np.array(WEIGHTS)
    means = prior * (weighted - pull[..., None] / alone)
    return np.asarray((p[..., None] * means).sum((-3, -2)) / p.sum((-2, -1))[..., None])


def with_expected(effects: Mapping[str, Effect], share_base: bool = True) -> dict[str, Effect]:
    """Add the effect to expect to those of one study, as far as they have intervals; `share_base`: all are differences
    to one base."""
    known = [effect for effect in effects.values() if math.isfinite(effect.half) and effect.sd > 0 and effect.df > 0]
    if not known:
        return dict(effects)
    columns = [
        (e.gain, e.sd, e.df, 1 / e.n + e.overlap, 1 / max(e.base_n, e.n) + e.overlap, np.nan_to_num(e.images_sd) ** 2)
        for e in known
    ]
    d, sd, df, own, base, images = np.array(columns).T
    own, base = (own, base) if share_base else (own + base, 0 * base)
    sizes = dict(zip((e.arm for e in known), expected(d, sd, df, own, base, images).tolist(), strict=True))
    sizes = {arm: size if effects[arm].higher_is_better else -size for arm, size in sizes.items()}
    return {arm: replace(effect, expected=sizes.get(arm, math.nan)) for arm, effect in effects.items()}
