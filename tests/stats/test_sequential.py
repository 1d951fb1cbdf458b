"""Critical values, looks, levels, and the order of trials."""

import numpy as np
import pytest
from scipy import integrate, special, stats

import vitmods as vm
from vitmods.stats.fit import fit
from vitmods.stats.sequential import (
    INTERIM_LEVEL,
    LAST_LEVEL,
    decided,
    extended,
    futile,
    interim_level,
    looks,
    nominal_level,
)
from vitmods.stats.width import critical_value, exceedance
from vitmods.util.errors import UserError


def test_looks_and_levels():
    assert looks(16) == (4, 5, 6, 8, 10, 12, 16)
    assert looks(7) == (4, 5, 6, 7)
    assert looks(4) == (4,)
    assert [nominal_level(16, n) for n in (4, 8, 16)] == [LAST_LEVEL / 16, LAST_LEVEL / 4, LAST_LEVEL]
    assert nominal_level(9, 9) == nominal_level(32, 32) == LAST_LEVEL
    assert [interim_level(*seeds) for seeds in ((5, 5), (3, None))] == [None, None]
    assert interim_level(1, 5) == interim_level(2, 5) < interim_level(4, 5) == INTERIM_LEVEL * 0.8**2
    for most in (3, 33):
        with pytest.raises(UserError, match="4 to 32 seeds"):
            looks(most)


def test_an_arm_stops_at_a_clear_verdict_alone():
    half, margin = np.array([1.0, 1.0, 0.2, 0.4, 0.4]), 0.5
    estimate = np.array([1.1, -1.1, 0.1, 0.3, 0.2])
    assert decided(estimate, half, margin).tolist() == [True, True, True, False, False]
    study = {"base": dict(enumerate([0.80, 0.81, 0.79, 0.80])), "a": dict(enumerate([0.90, 0.91, 0.90, 0.90]))}
    assert vm.decide(study)["a"].stops
    assert vm.decide(study, base="a")["base"].stops
    assert not vm.decide(study, margin=0.0, base="base")["a"].futile


def test_more_seeds_of_the_same_spread_have_the_variance_of_more_seeds():
    rng = np.random.default_rng(0)
    now, later = (fit(rng.standard_normal((4000, 5, n))).against for n in (6, 16))
    scaled = extended(now, 16)
    assert (scaled.seeds == 16).all()
    assert (scaled.own_df == later.own_df).all()
    assert scaled.own.mean() == pytest.approx(later.own.mean(), rel=0.02)
    assert scaled.pooled.mean() == pytest.approx(later.pooled.mean(), rel=0.1)


def test_futile_arms_are_those_that_more_seeds_would_not_decide():
    scores = np.random.default_rng(0).standard_normal((5, 8))
    scores -= scores.mean(-1, keepdims=True)
    scores[1:] += np.array([[0.1], [0.2], [1.2], [3.0]])
    result = fit(scores).against
    assert futile(result, None, "seeds", 0.05, 4, 16).tolist() == [True, True, False, False]
    assert futile(result, None, "seeds", 1.5, 4, 16).tolist() == [False, False, False, False]
    for n, hopeless in ((3, False), (4, True)):  # not before 4 seeds
        few = fit(scores[:, :n] - scores[:, :n].mean(-1, keepdims=True)).against
        assert futile(few, None, "seeds", 0.05, 4, 8).all() == hopeless
    assert not futile(result, None, "seeds", 0.05, 4, 8).any()  # no seeds are left
    study = {name: dict(enumerate(row)) for name, row in zip(("base", "a", "b", "c", "d"), scores)}
    decision = vm.decide(study, unit="nats", margin=0.05, most_seeds=16)
    assert [effect.futile for effect in decision.effects.values()] == [True, True, False, False]


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
