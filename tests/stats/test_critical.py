"""Critical values against t, tabulated values, adaptive integration and scipy's Dunnett test."""

import numpy as np
import pytest
from scipy import integrate, special, stats

from vitmods.stats.width import critical_value, exceedance


@pytest.mark.parametrize("df", [1, 1.3, 4, 17.5, 33.3, np.inf])
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_of_one_contrast_it_is_students(df, rho):
    assert critical_value(1, df, 0.05, rho) == pytest.approx(stats.t.ppf(0.975, df), abs=1e-6)
    assert critical_value(1, df, 0.05, rho, one_sided=True) == pytest.approx(stats.t.ppf(0.95, df), abs=1e-6)


@pytest.mark.parametrize(
    ("k", "df", "alpha", "rho", "expected"),
    [
        (4, 10, 0.05, 0.5, 2.8905),
        (2, 6, 0.05, 0.5, 2.8628),
        (8, 16, 0.05, 0.5, 2.9736),
        (4, 8, 0.04, 0.5, 3.1765),
        (4, 12, 0.010, 0.5, 3.7095),
        (4, 14, 0.05, 0.0, 2.8297),
    ],
)
def test_tabulated(k, df, alpha, rho, expected):
    assert critical_value(k, df, alpha, rho) == pytest.approx(expected, abs=5e-4)


def test_the_quadrature_equals_an_adaptive_one():
    k, df, c = 3, 7, 2.5

    def density(s):  # of sqrt(chi2 / df)
        log = (1 - df / 2) * np.log(2) - special.gammaln(df / 2) + (df - 1) * np.log(s * np.sqrt(df)) - df * s * s / 2
        return np.exp(log) * np.sqrt(df)

    def inside(z, s):  # rho 1/2: (z + z_j) / sqrt(2)
        both = special.ndtr(np.sqrt(2) * c * s - z) - special.ndtr(-np.sqrt(2) * c * s - z)
        return both**k * np.exp(-z * z / 2) / np.sqrt(2 * np.pi) * density(s)

    expected = 1 - integrate.dblquad(inside, 1e-9, 5, -8, 8, epsabs=1e-9)[0]
    assert exceedance(c, k, df, 0.5) == pytest.approx(expected, abs=1e-6)


def test_it_agrees_with_scipys_dunnett():
    rng = np.random.default_rng(3)
    samples = rng.standard_normal((4, 6)) + np.array([0, 0.4, 1.2, 1.9])[:, None]
    reference = stats.dunnett(*samples[1:], control=samples[0], random_state=np.random.default_rng(0))
    for statistic, p in zip(reference.statistic, reference.pvalue):
        assert exceedance(abs(statistic), 3, 20, 0.5) == pytest.approx(p, abs=0.003)


def test_arrays_infinity_and_nan():
    values = critical_value(3, [[5.0, np.inf], [np.nan, 5.0]], 0.05)
    assert values.shape == (2, 2)
    assert values[0, 0] == values[1, 1] > values[0, 1] > stats.norm.ppf(0.975)
    assert np.isnan(values[1, 0])
    assert critical_value(5, 8, 0.05, rho=0.0) > critical_value(5, 8, 0.05) > critical_value(4, 8, 0.05)
