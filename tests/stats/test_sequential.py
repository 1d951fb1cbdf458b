"""Looks, levels, and the order of trials. That the levels hold is in test_error_rates.py."""

import numpy as np
import pytest

import vitmods as vm
from vitmods.stats.fit import fit
from vitmods.stats.sequential import decided, extended, futile, looks, nominal_level
from vitmods.util.errors import UserError


def test_looks_and_levels():
    assert looks(16) == (4, 5, 6, 8, 10, 12, 16)
    assert looks(7) == (4, 5, 6, 7)
    assert looks(4) == (4,)
    assert [nominal_level(most) for most in (4, 8, 9, 16, 32)] == [0.017, 0.017, 0.010, 0.010, 0.0075]
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
    assert futile(result, None, "seeds", 0.05, 0.010, 4, 16).tolist() == [True, True, False, False]
    assert futile(result, None, "seeds", 1.5, 0.010, 4, 16).tolist() == [False, False, False, False]
    for n, hopeless in ((5, False), (6, True)):  # not before 6 seeds
        few = fit(scores[:, :n] - scores[:, :n].mean(-1, keepdims=True)).against
        assert futile(few, None, "seeds", 0.05, 0.017, 4, 8).all() == hopeless
    assert not futile(result, None, "seeds", 0.05, 0.017, 4, 8).any()  # no seeds are left
    study = {name: dict(enumerate(row)) for name, row in zip(("base", "a", "b", "c", "d"), scores)}
    decision = vm.decide(study, unit="nats", margin=0.05, most_seeds=16)
    assert [effect.futile for effect in decision.effects.values()] == [True, True, False, False]
