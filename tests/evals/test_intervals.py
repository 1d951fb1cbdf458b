import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitmods.stats.width import fraction, mean_of_fractions, mean_over_images, mean_over_seeds, wilson


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipy_s(counts):
    hits, dataset = counts
    known = stats.binomtest(hits, dataset).proportion_ci(method="wilson")
    assert fraction(hits, dataset) == pytest.approx((known.low, known.high), abs=1e-12)
    assert 0 <= fraction(hits, dataset)[0] <= hits / dataset <= fraction(hits, dataset)[1] <= 1


def test_wilson_covers():
    rng, dataset = np.random.default_rng(0), 60
    for p in (0.02, 0.3, 0.9):
        low, high = wilson(rng.binomial(dataset, p, 20_000), np.full(20_000, dataset))
        assert 0.92 <= ((low <= p) & (p <= high)).mean() <= 0.98


def test_the_mean_of_shares_covers():
    assert fraction(0, 0) == (0.0, 1.0)
    assert mean_of_fractions(np.array([7]), np.array([9])) == pytest.approx(fraction(7, 9))
    rng, dataset, truth = np.random.default_rng(1), np.array([8, 40, 200]), np.array([0.95, 0.6, 0.3])
    intervals = [mean_of_fractions(rng.binomial(dataset, truth), dataset) for _ in range(4000)]
    assert 0.92 <= np.mean([low <= truth.mean() <= high for low, high in intervals]) <= 0.985


def test_the_mean_over_images_covers():
    rng = np.random.default_rng(2)
    intervals = [mean_over_images(rng.exponential(1.0, 200)) for _ in range(4000)]
    assert 0.92 <= np.mean([low <= 1 <= high for low, high in intervals]) <= 0.965
    assert mean_over_images(np.array([1.0])) is None


def test_the_mean_over_seeds_is_student_s():
    values = [0.71, 0.74, 0.69]
    known = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert mean_over_seeds(values) == pytest.approx(known, rel=1e-12)
    assert mean_over_seeds([0.7]) is None
