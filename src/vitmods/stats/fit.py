"""From scores of arms and seeds to differences, their variances and degrees of freedom.

A score is Y[a,s] = mu[a] + u[s] + e[a,s]: an arm's mean, what the seed does to all arms, and an error whose variance
may differ between arms. Seeds are blocks, always. Arrays are (..., g, n): any studies, g arms with base, n seeds;
NaN is a missing cell. Arms with seeds leave residuals r with df_e degrees of freedom, MSE = sum r^2 / df_e, and

    v[a]   unbiased for the arm's own error variance, from q[a] = sum over seeds of r[a,s]^2
    w[a] = max((d0 MSE + (n[a]-1) v[a]) / (d0 + n[a]-1),  v[a],  floor^2),   d0 = 4

w is drawn to the common variance but never below the arm's own, so that a noisy arm is not made to look steady. A
contrast with weights c over the arms is estimated on the n seeds that all its arms share, and has two variances:

    pooled p = sum c[a]^2 w[a] / n,    df = p^2 / sum((c[a]^2 w[a] / n)^2 / nu[a])    (Satterthwaite), at most df_e,
               nu[a] = min(d0 + n[a]-1, df_e); of the reference, which is in every effect, n[a]-1 where it has
               fewer than 5 seeds and v[a] > MSE
    own    o = sample variance over its seeds of sum c[a] Y[a,s], / n, at least sum c[a]^2 floor^2 / n;    df = n - 1

Where the reference has at least 8 seeds and some that no arm has (a base that was known before), these count too. Then
seeds are not blocks: v[a] is the sample variance of the arm's scores, MSE pools them with sum(n[a] - 1) degrees of
freedom, d0 = 2, and nu[a] = n[a]-1 where v[a] > MSE. The pooled form compares means over all seeds of each arm, with
p = sum c[a]^2 w[a] / n[a]. The own form remains that of the shared seeds, and has its own estimate: it is better for an
arm that follows base from seed to seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

PRIOR_DF, FREE_DF = 4, 2  # d0 where seeds are blocks, and where not
SHARED_SEEDS = 3  # the fewest seeds for a correlation or a ratio of sds: of two, every correlation is 1 or -1
FEW_SEEDS = 5  # below which the spread of base is so uncertain that the level needs its own degrees of freedom
KNOWN_SEEDS = 8  # seeds of base from which those that no arm has count
SINGULAR = 1e-9
ROUNDING = 1e-12  # of the scores: what differs by less does not differ


@dataclass(frozen=True)
class Errors:
    """The noise, estimated from the residuals of arms and seeds; (..., g) or (...)."""

    mse: Array
    df_error: Array
    unbiased: Array  #: v
    guarded: Array  #: w; NaN for an arm that is left out of the pool
    df: Array  #: nu, of w
    seed_share: Array  #: the part of the variance within arms that seeds explain; NaN where these are not blocks
    blocks: bool  #: whether seeds are blocks


@dataclass(frozen=True)
class Contrasts:
    """Weighted sums of arms; (..., q). A variance that cannot be had is infinite."""

    estimate: Array
    seeds: Array  #: how many its arms share
    pooled: Array  #: p
    pooled_df: Array
    own: Array  #: o
    own_df: Array
    paired: Array  #: the estimate that o is the variance of: over the seeds that its arms share
    base_seeds: Array  #: of the arm that is subtracted: more than `seeds` where seeds are not blocks

    @property
    def knows_more(self) -> Mask:
        """Whether seeds of base count that the arm does not have."""
        return np.asarray(self.base_seeds > self.seeds)

    @property
    def variance(self) -> Array:
        """The larger of both if they are of one estimate: o also sees errors that arms share with base."""
        is_one = np.isfinite(self.own) & ~self.knows_more
        return np.where(is_one, np.maximum(self.pooled, self.own), self.pooled)

    @property
    def rho(self) -> Array:
        """The correlation of two contrasts with the same base, by their numbers of seeds."""
        return self.seeds / np.maximum(self.seeds + self.base_seeds, 1)

    @property
    def pooled_or_own(self) -> tuple[Array, Array]:
        """`variance` with the pooled degrees of freedom; an arm outside of the pool has its own of both."""
        in_pool = np.isfinite(self.pooled)
        return np.where(in_pool, self.variance, self.own), np.where(in_pool, self.pooled_df, self.own_df)


@dataclass(frozen=True)
class Fit:
    """Every arm against the reference; `against` is (..., k) in the order of the other arms."""

    errors: Errors
    against: Contrasts
    correlation: Array  #: (..., k) of arm and reference over the seeds that they share; NaN below 3


def fit(scores: Array, reference: int = 0, floor: float = 0.0, pooled: Mask | None = None) -> Fit:
    """Fits studies (..., g, n). `pooled` (..., g, n): the cells that enter the errors; an arm without one stays out."""
    g = scores.shape[-2]
    weights = np.delete(np.eye(g), reference, axis=0)
    weights[:, reference] = -1
    present = np.isfinite(scores)
    base_alone = present[..., reference, :] & ~np.delete(present, reference, -2).any(-2)
    knows_more = base_alone.any(-1) & (present[..., reference, :].sum(-1) >= KNOWN_SEEDS)
    errors = noise(scores, floor, pooled, blocks=not knows_more.all())
    seeds = np.isfinite(scores[..., reference, :]).sum(-1)
    noisy = (errors.unbiased[..., reference] > errors.mse) & (seeds < FEW_SEEDS)
    errors.df[..., reference] = np.where(noisy, seeds - 1, errors.df[..., reference])
    if not errors.blocks:
        noisy = errors.unbiased > errors.mse[..., None]
        errors.df[...] = np.where(noisy, np.maximum(present.sum(-1) - 1, 1), errors.df)
    others = np.delete(scores, reference, axis=-2)
    base = np.where(np.isnan(others), np.nan, scores[..., reference, None, :])
    others = np.where(np.isnan(base), np.nan, others)
    a, b = (values - _mean(values)[..., None] for values in (others, base))
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = np.nansum(a * b, -1) / np.sqrt(np.nansum(a * a, -1) * np.nansum(b * b, -1))
    against = contrasts(scores, weights, errors, floor)
    return Fit(errors, against, np.where(against.seeds < SHARED_SEEDS, np.nan, correlation))


def contrasts(scores: Array, weights: Array, errors: Errors, floor: float = 0.0) -> Contrasts:
    """Contrasts with `weights` (q, g); each uses the seeds in which none of its arms is missing. Where seeds are not
    blocks, its pooled form uses all seeds of its arms."""
    used = weights != 0
    present = np.isfinite(scores)
    seeds = np.stack([present[..., row, :].all(-2) for row in used], -2)  # (..., q, n)
    sums = np.where(seeds, np.einsum("qg,...gn->...qn", weights, np.where(present, scores, 0.0)), np.nan)
    n = seeds.sum(-1).astype(float)
    paired = estimate = _mean(sums)
    count, base_seeds = n[..., None], n
    if not errors.blocks:
        count = present.sum(-1)[..., None, :].astype(float)
        means = _mean(np.where(present, scores, np.nan))
        estimate = np.where(used, weights * means[..., None, :], 0.0).sum(-1)
        base_seeds = count[..., 0, :][..., weights.argmin(-1)]
    rounding = (ROUNDING * np.nanmax(np.abs(scores), (-2, -1), initial=0.0)) ** 2  # no spread is not certainty
    with np.errstate(invalid="ignore", divide="ignore"):
        own_variance = np.nansum((sums - paired[..., None]) ** 2, -1) / (n - 1) / n
        own_variance = np.maximum(own_variance, (weights**2).sum(-1) * floor**2 / n)
        own_variance = np.where(own_variance > rounding[..., None], own_variance, np.inf)
        parts = np.where(used, weights**2 * errors.guarded[..., None, :] / count, 0.0)  # (..., q, g)
        pooled = parts.sum(-1)
        spent = np.where(used & (parts > 0), parts**2 / errors.df[..., None, :], 0.0).sum(-1)
        df = np.fmin(errors.df_error[..., None], np.where(spent > 0, pooled**2 / spent, np.inf))
    pooled = np.where(np.isfinite(pooled) & (pooled > rounding[..., None]), pooled, np.inf)
    estimate = np.where(np.isfinite(pooled), estimate, paired)
    return Contrasts(estimate, n, pooled, df, own_variance, n - 1, paired, base_seeds)


def noise(scores: Array, floor: float = 0.0, pooled: Mask | None = None, blocks: bool = True) -> Errors:
    """MSE, v and w of studies (..., g, n)."""
    present = np.isfinite(scores) if pooled is None else np.isfinite(scores) & pooled
    count = present.sum(-1).astype(float)
    if not blocks:
        mse, df_error, unbiased = separate_errors(np.where(present, scores, np.nan))
    elif present.all():
        mse, df_error, unbiased = complete_errors(scores)
    else:
        mse, df_error, unbiased = incomplete_errors(scores, present)
    mse, prior = np.where(df_error > 0, mse, np.nan), PRIOR_DF if blocks else FREE_DF
    with np.errstate(invalid="ignore", divide="ignore"):
        arm_variance = np.where(df_error[..., None] > 0, np.maximum(unbiased, 0), np.nan)
        drawn = (prior * mse[..., None] + (count - 1) * arm_variance) / (prior + count - 1)
        guarded = np.where(count > 0, np.maximum(np.maximum(drawn, arm_variance), floor**2), np.nan)
        cells = np.where(present, scores, np.nan)
        total = np.nansum((cells - _mean(cells)[..., None]) ** 2, (-2, -1)) / (count.sum(-1) - (count > 0).sum(-1))
        seed_share = np.clip(1 - mse / total, 0, 1) if blocks else np.full(mse.shape, np.nan)
    df = np.minimum(prior + count - 1, df_error[..., None])
    return Errors(mse, df_error, arm_variance, guarded, df, seed_share, blocks)


def separate_errors(cells: Array) -> tuple[Array, Array, Array]:
    """MSE, df_e and v if seeds are not blocks: from each arm's sample variance. NaN is a missing cell."""
    squares = np.nansum((cells - _mean(cells)[..., None]) ** 2, -1)
    df = np.maximum(np.isfinite(cells).sum(-1) - 1.0, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mse = squares.sum(-1) / df.sum(-1)
        return mse, df.sum(-1), np.where(df > 0, squares / df, mse[..., None])


def complete_errors(scores: Array) -> tuple[Array, Array, Array]:
    """MSE, df_e = (g-1)(n-1) and unclipped v[a] = (q[a]/(n-1) - MSE/g) / (1 - 2/g); for two arms v = MSE."""
    g, n = scores.shape[-2:]
    residual = scores - scores.mean(-1, keepdims=True)
    residual = residual - residual.mean(-2, keepdims=True)
    q = (residual**2).sum(-1)
    df = float((g - 1) * (n - 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        mse = q.sum(-1) / df
        unbiased = (q / (n - 1) - mse[..., None] / g) / (1 - 2 / g) if g > 2 else np.stack([mse] * g, -1)
    return mse, np.full(mse.shape, df), unbiased


def incomplete_errors(scores: Array, present: Mask) -> tuple[Array, Array, Array]:
    """Estimate these with missing cells: v = H^-1 q, where E q = H sigma^2. If H does not determine v, it is MSE."""
    shape, (g, n) = scores.shape[:-2], scores.shape[-2:]
    cells, masks = scores.reshape(-1, g * n), present.reshape(-1, g * n)
    mse, df, unbiased = np.empty(len(cells)), np.empty(len(cells)), np.empty((len(cells), g))
    patterns, which = np.unique(masks, axis=0, return_inverse=True)
    for i, pattern in enumerate(patterns):
        rows = np.flatnonzero(which.ravel() == i)
        maker, df[rows], inverse, estimable = _layout(pattern.tobytes(), g, n)
        residual = np.where(pattern, cells[rows], 0.0) @ maker
        q = (residual**2).reshape(-1, g, n).sum(-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            mse[rows] = q.sum(-1) / df[rows]
        unbiased[rows] = np.where(estimable, q @ inverse, mse[rows, None])
    return mse.reshape(shape), df.reshape(shape), unbiased.reshape(*shape, g)


@lru_cache(maxsize=64)
def _layout(pattern: bytes, g: int, n: int) -> tuple[Array, float, Array, Mask]:
    """For a pattern of cells: M = I - X(X'X)^-1 X', df_e, H^-1 (H[a,b]: sum of M^2 between a and b), if v is known."""
    present = np.frombuffer(pattern, dtype=bool)
    arms = np.kron(np.eye(g), np.ones((n, 1)))
    seeds = np.kron(np.ones((g, 1)), np.eye(n))
    design = np.hstack([arms, seeds]) * present[:, None]
    maker = np.diag(present.astype(float)) - design @ np.linalg.pinv(design.T @ design, hermitian=True) @ design.T
    df = float(round(np.trace(maker)))
    h = arms.T @ maker**2 @ arms
    inverse = np.linalg.pinv(h, rcond=SINGULAR, hermitian=True)
    estimable = np.isclose((inverse @ h).diagonal(), 1.0)
    return maker, df, inverse, estimable


def _mean(values: Array) -> Array:
    """Over seeds, without NaN; NaN where there is none."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.nansum(values, -1) / np.isfinite(values).sum(-1))
