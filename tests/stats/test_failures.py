"""Collapsed trials, and arms that fail more often than base."""

import numpy as np
import pytest

from vitmods.stats.gains import collapsed, less_stable, rate_bound

STEADY = np.array([[90.0, 91, 92, 90], [91.0, 90, 90, 92], [90.0, 92, 91, 91]])


@pytest.mark.parametrize("seeds", [[1], [0, 3], [0, 1, 2]])
def test_collapses_are_found_and_do_not_hide_one_another(seeds):
    scores = STEADY.copy()
    scores[2, seeds] = [12, 10, 14][: len(seeds)]
    assert np.argwhere(collapsed(scores, 10.0)).tolist() == [[2, seed] for seed in seeds]


def test_a_bad_arm_and_a_weak_trial_have_not_collapsed():
    scores = STEADY.copy()
    scores[1], scores[2, 0] = 12, 60
    assert not collapsed(scores, 10.0).any()


def test_a_low_score_among_scattered_ones_has_not_collapsed():
    scores = STEADY.copy()
    scores[1], scores[2] = [95, 55, 90, 60], [44, 60, 52, 56]
    assert not collapsed(scores, 0.0).any()


def test_base_can_collapse():
    scores = STEADY.copy()
    scores[0, 2] = 9
    assert np.argwhere(collapsed(scores, 10.0)).tolist() == [[0, 2]]


def test_chance_decides_what_a_collapse_is():
    scores = STEADY.copy()
    scores[1, 1] = 52
    assert not collapsed(scores, 0.0).any()
    assert collapsed(scores, 50.0)[1, 1]


def test_losses_have_signs_turned():
    scores = -np.array([[0.3, 0.31, 0.32], [0.3, 0.31, 2.3]])
    assert np.argwhere(collapsed(scores, -2.3)).tolist() == [[1, 2]]


def test_without_scores_there_is_no_collapse():
    assert not collapsed(np.full((2, 3), np.nan), 0.0).any()
    assert not collapsed(np.array([[90.0], [1.0]]), 0.0).any()


def test_less_stable():
    assert less_stable(6, 8, 0, 8, 0.05 / 4)
    assert not less_stable(2, 8, 0, 8, 0.05 / 4)
    assert less_stable(4, 4, 0, 4, 0.001)
    assert not less_stable(3, 3, 0, 3, 0.001)
    assert not less_stable(4, 4, 1, 4, 0.001)
    assert not less_stable(0, 0, 0, 4, 0.05)


def test_it_is_rarely_false_at_any_rate_of_divergence():
    """Four arms as unstable as base, over many rates."""
    rng, wrong = np.random.default_rng(0), []
    for rate in (0.2, 0.5, 0.8):
        for n in (4, 8):
            failed = rng.binomial(n, rate, (1000, 5))
            table = {(a, b): less_stable(a, n, b, n, 0.05 / 4) for a in range(n + 1) for b in range(n + 1)}
            wrong.append(np.mean([any(table[int(a), int(row[0])] for a in row[1:]) for row in failed]))
    assert max(wrong) <= 0.028 + 3 * np.sqrt(0.028 * 0.972 / 1000)


def test_no_failure_yet():
    assert rate_bound(5) == pytest.approx(0.45, abs=0.005)
