"""How often studies claim what is not so: simulated studies through the code that decides real ones.

A bound is the promised rate and three standard errors of the simulation. Where the rate is known to be above the
promise, it is pinned between two bounds.
"""

import numpy as np
import pytest

from vitmods.stats.decide import head_to_head, may_be_best
from vitmods.stats.fit import fit
from vitmods.stats.images import images_part
from vitmods.stats.sequential import decided, futile, looks, nominal_level
from vitmods.stats.width import against_base

MANY = 20_000  # studies of which each takes microseconds
FAST = [pytest.param(2_000, id="2000"), pytest.param(20_000, id="20000", marks=pytest.mark.long)]


def bound(promised, studies):
    return promised + 3 * np.sqrt(promised * (1 - promised) / studies)


def gaussian(studies, k, n, seed=0, base_sd=1.0):
    scores = np.random.default_rng(seed).standard_normal((studies, k + 1, n))
    scores[:, 0] *= base_sd
    return scores


def false_claims(scores, alpha=0.05):
    found = fit(scores).against
    half = against_base(found, None, alpha, scores.shape[1] - 1).seeds
    return (np.abs(found.estimate) > half).any(-1).mean()


@pytest.mark.parametrize("n", [4, 5, 8])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_fixed_seeds(k, n):
    assert false_claims(gaussian(MANY, k, n)) <= bound(0.05, MANY)


@pytest.mark.parametrize(("n", "low", "high"), [(3, 0.065, 0.09), (5, 0.04, 0.06)])
def test_a_noisy_base_at_few_seeds_is_a_known_excess(n, low, high):
    assert low < false_claims(gaussian(MANY, 4, n, base_sd=3.0)) < high


@pytest.mark.parametrize("n", [4, 5, 8])
def test_an_arm_that_follows_base_is_a_known_excess(n):
    scores = gaussian(MANY, 4, n)
    scores[:, 1] = 0.97 * scores[:, 0] + np.sqrt(1 - 0.97**2) * scores[:, 1]
    assert 0.025 < false_claims(scores) < 0.065


def latent(studies, k, n, m, seed):
    """Right or wrong on new images: an image is difficult for all arms alike, and for each arm in its own way."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((studies, 1, 1, m))
    own = 0.6 * rng.standard_normal((studies, k + 1, 1, m))
    trial = rng.standard_normal((studies, k + 1, n, m), dtype=np.float32)
    trial += 0.05 * rng.standard_normal((studies, k + 1, n, 1))
    return (1.3 + shared + own + 0.7 * trial > 0) * 100.0


@pytest.mark.parametrize("n", [4, 10])
@pytest.mark.parametrize("studies", FAST)
def test_new_seeds_and_new_images(n, studies):
    k, m, chunk, wrong, seeds_only = 4, 300, 100, 0, 0
    for part in range(studies // chunk):
        x = latent(chunk, k, n, m, part)
        found = fit(x.mean(-1), floor=50 / m).against
        half = against_base(found, images_part(x[:, 1:] - x[:, :1]), 0.05, k)
        d = np.abs(found.estimate)
        wrong += (d > half.total).any(-1).sum()
        seeds_only += (d > half.seeds).any(-1).sum()
    assert wrong / studies <= 0.06
    assert seeds_only > wrong
    if n == 10:
        assert seeds_only / studies > 0.10  # what a test set of 300 images does to those who forget it


def until_decided(studies, k, most, seed=0, rho=0.0, base_sd=1.0, margin=1.0):
    """Which studies make a false claim, with arms that stop, futile ones too, and the tables that this leaves."""
    rng = np.random.default_rng(seed)
    scores = np.sqrt(1 - rho) * rng.standard_normal((studies, k + 1, most))
    scores[:, 0] *= base_sd
    scores += np.sqrt(rho) * rng.standard_normal((studies, 1, most))
    alpha, wrong, running = nominal_level(most), np.zeros(studies, bool), np.ones((studies, k), bool)
    for n in looks(most):
        rows = np.flatnonzero(running.any(-1))
        found = fit(scores[rows, :, :n]).against
        half = against_base(found, None, alpha, k).seeds
        live = running[rows]
        wrong[rows] |= (live & (np.abs(found.estimate) > half)).any(-1)
        hopeless = futile(found, None, "seeds", margin, alpha, k, most)
        stopped = live & (decided(found.estimate, half, margin) | hopeless)
        running[rows] &= ~stopped
        gone = np.zeros((studies, k + 1), bool)
        gone[rows, 1:] = stopped
        scores[..., n:][gone] = np.nan
    return wrong


@pytest.mark.parametrize("studies", FAST)
@pytest.mark.parametrize(("k", "rho"), [(1, 0.0), (4, 0.0), (4, 0.6)])
def test_seeds_until_decided(k, rho, studies):
    assert until_decided(studies, k, 16, rho=rho).mean() <= bound(0.05, studies)


def test_a_noisy_base_until_decided_is_a_known_excess():
    assert 0.03 < until_decided(2_000, 4, 16, base_sd=3.0).mean() < 0.075


def test_tuned_studies_on_fresh_seeds():
    """The best of six points on validation, then fresh seeds; on the same seeds every score would be too good."""
    rng, studies, k, n, points = np.random.default_rng(0), MANY // 2, 2, 5, 6
    tuned = rng.standard_normal((studies, k + 1, points, 1))
    validation = 0.8 * tuned[..., 0] + 0.6 * rng.standard_normal((studies, k + 1, points))
    chosen = validation.argmax(-1)[..., None, None]
    same = np.take_along_axis(tuned, chosen, 2)[..., 0, 0]
    fresh = rng.standard_normal((studies, k + 1, points, n))
    report = np.take_along_axis(fresh, np.broadcast_to(chosen, (studies, k + 1, 1, n)), 2)[..., 0, :]
    assert abs(report.mean()) < 0.02
    assert same.mean() > 0.4
    assert false_claims(report) <= bound(0.05, studies)


@pytest.mark.parametrize(("k", "n"), [(1, 5), (4, 5), (4, 10)])
def test_false_equivalence_at_the_margin(k, n):
    """Where every arm is worse by just the margin, `equivalent` and `no worse` are false."""
    margin = 2.0
    scores = gaussian(MANY, k, n)
    scores[:, 1:] -= margin
    found = fit(scores).against
    half = against_base(found, None, 0.05, k).seeds
    no_worse = (found.estimate - half > -margin).any(-1)
    assert no_worse.mean() <= bound(0.025, MANY)
    assert (no_worse & (found.estimate + half < margin).any(-1)).mean() <= bound(0.025, MANY)


@pytest.mark.parametrize("noisy", [1.0, 3.0])
@pytest.mark.parametrize("lead", [0.0, 1.0])
@pytest.mark.parametrize(("k", "n"), [(2, 5), (4, 5), (8, 4)])
def test_the_best_set_holds_the_best(k, n, lead, noisy):
    scores = gaussian(MANY // 4, k, n)
    scores[:, 2] *= noisy
    scores[:, 1] += lead
    errors = fit(scores).errors
    found = head_to_head(scores, errors)
    best = may_be_best(found.estimate, found.variance, found.pooled_df, k + 1, 0.05)
    assert best[:, 1].mean() >= 0.94
    assert lead == 0 or best.mean() < 0.99


def test_one_arm_beats_another_at_the_one_sided_value():
    for d, best in ((1.6, [True, True]), (1.7, [False, True]), (-1.7, [True, False])):
        assert may_be_best(np.array([d]), np.ones(1), np.array([np.inf]), 2, 0.05).tolist() == best
    assert may_be_best(np.array([9.0]), np.array([np.nan]), np.ones(1), 2, 0.05).all()
