"""The factor between a standard error and the half-width of intervals that hold together.

For K contrasts whose errors are (sqrt(rho) z0 + sqrt(1 - rho) z_j) / s, with z standard normal and s = sqrt(chi2 / df)
the error of the common standard deviation, the critical value c solves

    P(max over K of |T_j| > c) = alpha

- rho = 1/2: K arms against one base with equal variances (Dunnett, 1955).
- rho = 0: any other set of contrasts. By Sidak's inequality (1967) it is valid whatever their correlation.
- K = 1: Student's t.

The probability is a double integral by fixed quadrature: no random numbers, the same answer on every machine.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import interpolate, optimize, special, stats

Array = NDArray[np.float64]

Z_NODES, S_NODES = 64, 96
TAIL = 1e-12  # of the distribution of s, left out at both ends
SLACK = 1e-3  # of the bracket, in log c, for the rounding of the quadrature
GRID = np.linspace(0, 1, 25) ** 2  # of 1 / df; 0 is the normal limit


def critical_value(k: int, df: ArrayLike, alpha: float, rho: float = 0.5, one_sided: bool = False) -> Array:
    """c for every element of `df` (1 or more, inf allowed; NaN stays NaN), between grid points to about 1e-6.

    `one_sided`: of P(max T_j > c) instead, for the set of arms that may be best.
    """
    assert k >= 1, k
    assert 0 < alpha < 1, alpha
    degrees = np.maximum(np.asarray(df, dtype=float), 1.0)
    if k == 1:
        return np.asarray(special.stdtrit(degrees, 1 - alpha / (1 if one_sided else 2)))
    return np.asarray(np.exp(_curve(k, alpha, rho, one_sided)(1 / degrees)))


@lru_cache(maxsize=512)
def _curve(k: int, alpha: float, rho: float, one_sided: bool) -> interpolate.CubicSpline:
    """log c over 1 / df."""
    return interpolate.CubicSpline(
        GRID, np.log([_solve(k, 1 / x if x else np.inf, alpha, rho, one_sided) for x in GRID])
    )


def _solve(k: int, df: float, alpha: float, rho: float, one_sided: bool) -> float:
    """One critical value, between the t quantiles of one contrast and of Bonferroni's inequality."""
    tails = 1 if one_sided else 2
    low, high = np.log(special.stdtrit(df, 1 - alpha / tails / np.array([1, k])))

    def excess(log_c: float) -> float:
        return exceedance(float(np.exp(log_c)), k, df, rho, one_sided) - alpha

    return float(np.exp(optimize.brentq(excess, low - SLACK, high + SLACK, xtol=1e-10)))


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
    ends = np.log(stats.chi2.ppf([TAIL, 1 - TAIL], df) / df) / 2
    nodes, weights = np.polynomial.legendre.leggauss(S_NODES)
    log_s = ends.mean() + nodes * np.ptp(ends) / 2
    square = df * np.exp(2 * log_s)
    weights = weights * stats.chi2.pdf(square, df) * square
    return np.exp(log_s), weights / weights.sum()
