"""Differences and their variances against statsmodels, scipy, a worked table, and what is known of simulated arms."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf

from vitmods.stats.fit import complete_errors, fit, incomplete_errors, noise
from vitmods.stats.width import against_base

WORKED = np.array([[347, 347, 346], [334, 316, 317], [333, 342, 340], [349, 338, 345], [344, 342, 347]]) * 100 / 359


def ols(scores):
    arms, seeds = np.nonzero(np.isfinite(scores))
    return smf.ols("y ~ C(arm) + C(seed)", pd.DataFrame({"y": scores[arms, seeds], "arm": arms, "seed": seeds})).fit()


def random_table(g=4, n=5, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((g, n)) * np.arange(1, g + 1)[:, None] + rng.standard_normal(n) + 80


def with_gaps():
    scores = random_table(5, 6)
    scores[3, 4:], scores[4, 2], scores[1, 0] = np.nan, np.nan, np.nan
    return scores


def test_tables_equal_ordinary_least_squares():
    scores, reference = random_table(), ols(random_table())
    result = fit(scores)
    for table in (scores, with_gaps()):
        errors, least_squares = noise(table), ols(table)
        assert errors.mse == pytest.approx(least_squares.mse_resid, rel=1e-9)
        assert errors.df_error == least_squares.df_resid
    assert result.against.estimate == pytest.approx(reference.params[["C(arm)[T.1]", "C(arm)[T.2]", "C(arm)[T.3]"]])


def test_each_arms_variance_is_unbiased():
    sds = np.array([1.0, 2.0, 3.0])
    scores = np.random.default_rng(0).standard_normal((20_000, 3, 5)) * sds[:, None]
    assert complete_errors(scores)[2].mean(0) == pytest.approx(sds**2, rel=0.02)
    scores = np.random.default_rng(1).standard_normal((200_000, 3, 5)) * sds[:, None]
    scores[:, 2, 3:], scores[:, 1, 0] = np.nan, np.nan
    assert incomplete_errors(scores, np.isfinite(scores))[2].mean(0) == pytest.approx(sds**2, rel=0.03)


def test_the_worked_table():
    """Images that five arms got right of 359, with seeds 0 to 2."""
    result = fit(WORKED, floor=50 / 359)
    assert result.errors.mse == pytest.approx(2.678, abs=0.005)
    assert result.errors.guarded == pytest.approx([1.785, 7.710, 5.227, 1.999, 1.803], abs=0.005)
    assert result.against.estimate == pytest.approx([-6.778, -2.321, -0.743, -0.650], abs=0.005)
    assert against_base(result.against, None, 0.05, 4).seeds == pytest.approx([5.65, 4.86, 3.57, 3.47], abs=0.02)


def test_batches_and_paths_agree():
    batch = np.stack([random_table(4, 5, 1), random_table(4, 5, 2), with_gaps()[:4, :5]])
    together = fit(batch)
    for i, scores in enumerate(batch):
        alone = fit(scores)
        for name in ("estimate", "seeds", "pooled", "pooled_df", "own", "own_df"):
            assert getattr(together.against, name)[i] == pytest.approx(getattr(alone.against, name), rel=1e-9)
    scores = np.stack([random_table(5, 4, seed) for seed in range(3)])
    for closed, general in zip(complete_errors(scores), incomplete_errors(scores, np.ones(scores.shape, bool))):
        assert closed == pytest.approx(general, rel=1e-9)
    two = random_table(2, 4)[None]
    assert complete_errors(two)[2] == pytest.approx(incomplete_errors(two, np.ones(two.shape, bool))[2], rel=1e-9)


def test_what_a_seed_does_to_all_arms_is_no_error():
    scores, shift = with_gaps(), np.array([0, 30, -9, 4, 80, -2])
    first, other = fit(scores), fit(scores + shift)
    assert other.errors.guarded == pytest.approx(first.errors.guarded)
    assert other.against.variance == pytest.approx(first.against.variance)
    assert other.against.estimate == pytest.approx(first.against.estimate)


def test_the_larger_variance_counts():
    """Own errors that follow base's with the sign turned are more than both variances together."""
    scores = random_table(5, 6)
    scores[0] = 80 + 9 * (scores[2] - scores[2].mean())
    scores[1] = 160 - scores[0]
    result = fit(scores).against
    assert result.own[0] > result.pooled[0]
    assert result.variance == pytest.approx(np.maximum(result.pooled, result.own))


def test_an_arm_out_of_the_pool_has_its_own_variance_alone_and_widens_no_other():
    scores = random_table(4, 5)
    scores[3, 2] -= 80
    pooled = np.ones(scores.shape, bool)
    pooled[3] = False
    result, without = fit(scores, pooled=pooled).against, fit(scores[:3]).against
    assert result.pooled[:2] == pytest.approx(without.pooled)
    assert np.isinf(result.pooled[2])
    assert np.isfinite(result.own[2])


def test_no_spread_is_no_certainty():
    scores = random_table(4, 5)
    scores[1] = scores[0] - 1.1
    assert np.isinf(fit(scores).against.own[0])
    assert np.isfinite(fit(scores).against.variance[0])
    assert fit(scores, floor=0.5).against.own[0] == pytest.approx(2 * 0.5**2 / 5)
    assert np.isinf(fit(np.tile(scores[0], (3, 1))).against.variance).all()


def test_a_correlation_needs_three_shared_seeds():
    scores = random_table(4, 5)
    scores[2, 2:] = np.nan
    result = fit(scores).correlation
    assert np.isnan(result).tolist() == [False, True, False]
    assert result[0] == pytest.approx(np.corrcoef(scores[:2])[0, 1])


def test_seeds_of_base_that_no_arm_has_count():
    scores = np.random.default_rng(0).standard_normal((3, 16))
    complete = fit(scores).against
    assert not complete.knows_more.any()
    assert (complete.paired == complete.estimate).all()
    scores[1:, 3:] = np.nan
    against = fit(scores).against
    assert against.base_seeds.tolist() == [16, 16]
    assert against.estimate == pytest.approx(np.nanmean(scores[1:], -1) - scores[0].mean())
    assert against.paired == pytest.approx(np.nanmean(scores[1:] - scores[0], -1))
    assert against.rho == pytest.approx(3 / 19)
    few = fit(scores[:, :7]).against
    assert not few.knows_more.any(), "of fewer than 8"


def test_an_arm_that_follows_a_known_base_is_compared_in_pairs():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((2, 16))
    scores[1] = scores[0] + 0.01 * rng.standard_normal(16)
    scores[1, 5:] = np.nan
    against = fit(scores).against
    half = against_base(against, None, 0.05, 1)
    assert against.estimate + half.shift == pytest.approx(against.paired)
    assert half.seeds < 0.1
