"""Collapsed trials, and arms that fail more often than base."""

import numpy as np
import pytest

import vitmods as vm
from vitmods.stats.criteria import Criteria
from vitmods.stats.factorial import factorial
from vitmods.stats.gains import collapsed, less_stable, rate_bound
from vitmods.stats.read import Table
from vitmods.stats.runs import plan_factorial
from vitmods.stats.sequential import looks, nominal_level
from vitmods.stats.settings import over_settings
from vitmods.stats.verdict import Verdict

BASE, BETTER, WORSE = [90, 91, 92, 90], [91, 90, 90, 92], [90, 92, 91, 91]


@pytest.mark.parametrize(
    ("scores", "chance", "collapses"),
    [
        ([BASE, BETTER, [90, 12, 91, 91]], 10, [[2, 1]]),
        ([BASE, BETTER, [12, 92, 91, 10]], 10, [[2, 0], [2, 3]]),  # which do not hide one another
        ([BASE, BETTER, [12, 10, 14, 91]], 10, [[2, 0], [2, 1], [2, 2]]),
        ([[90, 91, 9, 90], BETTER, WORSE], 10, [[0, 2]]),
        ([BASE, [12, 12, 12, 12], [60, 92, 91, 91]], 10, []),  # a bad arm and a weak trial
        ([BASE, [95, 55, 90, 60], [44, 60, 52, 56]], 0, []),  # a low score among scattered ones
        ([BASE, [91, 52, 90, 92], WORSE], 0, []),
        ([BASE, [91, 52, 90, 92], WORSE], 50, [[1, 1]]),
        ([[-0.3, -0.31, -0.32], [-0.3, -0.31, -2.3]], -2.3, [[1, 2]]),  # losses
        ([[np.nan] * 3] * 2, 0, []),
        ([[90], [1]], 0, []),
    ],
)
def test_collapsed_trials(scores, chance, collapses):
    assert np.argwhere(collapsed(np.array(scores, dtype=float), float(chance))).tolist() == collapses


def test_less_stable_and_the_bound_without_a_failure():
    assert less_stable(6, 8, 0, 8, 0.05 / 4)
    assert not less_stable(2, 8, 0, 8, 0.05 / 4)
    assert less_stable(4, 4, 0, 4, 0.001)
    assert not less_stable(3, 3, 0, 3, 0.001)
    assert not less_stable(4, 4, 1, 4, 0.001)
    assert not less_stable(0, 0, 0, 4, 0.05)
    assert not any(less_stable(more, 5, more - 1, 5, 0.05 / 4) for more in range(1, 6)), "one failure is no evidence"
    assert rate_bound(5) == pytest.approx(0.45, abs=0.005)


def test_it_is_rarely_false_at_any_look():
    """Eight arms as unstable as base, and seven looks at up to 16 seeds."""
    rng, wrong = np.random.default_rng(0), []
    tables = {
        n: [[less_stable(a, n, b, n, nominal_level(16, n) / 8) for b in range(n + 1)] for a in range(n + 1)]
        for n in looks(16)
    }
    for rate in (0.3, 0.5, 0.7):
        failed = (rng.random((2000, 9, 16)) < rate).cumsum(-1)
        claims = [np.array(table)[failed[:, 1:, n - 1], failed[:, :1, n - 1]].any(1) for n, table in tables.items()]
        wrong.append(np.any(claims, axis=0).mean())
    assert max(wrong) <= 0.031 + 3 * np.sqrt(0.031 * 0.969 / 2000)


SCORES = {"base": [0.70, 0.71, 0.72, 0.73], "a": [0.80, 0.81, 0.82, 0.83], "b": [0.79, 0.82, 0.81, 0.84]}


@pytest.mark.parametrize(
    ("level", "margin", "is_withheld"),
    [
        (None, 0.5, False),
        (0.6, 0.5, False),
        (0.719, 0.5, False),
        (0.719, 0.0, True),
        (0.75, 0.5, True),
        (0.75, 9.0, True),
    ],
)
def test_no_verdict_where_base_is_below_the_level_of_its_weights(level, margin, is_withheld):
    """By more than the margin, which counts as at most half a point; the median of base is 71.5."""
    scores = {arm: dict(enumerate(values)) for arm, values in SCORES.items()}
    words = "base ends below the weights that it starts from: the median of its trials is 71.5"
    alone = vm.decide(scores, margin=margin, chance=0.1, level=level)
    tables = {"x": Table.of(scores, chance=0.1), "y": Table.of(scores, chance=0.1, level=level)}
    pair = over_settings(tables, Criteria(margin))
    for decision, notes in ((alone, alone.notes), (pair.decision, pair.decision.notes)):
        assert ({effect.verdict for effect in decision.effects.values()} == {Verdict.WITHHELD}) is is_withheld
        assert any(words in note for note in notes) is is_withheld
        assert not any("nan" in note for note in notes)
    design = plan_factorial(["a", "b", "c"])
    runs = {name: scores["a" if row else "base"] for name, row in design.arms.items()}
    effects = factorial(Table.of(runs, chance=0.1, level=level), design, Criteria(margin)).effects
    assert (effects["a"].verdict == Verdict.WITHHELD) is is_withheld
