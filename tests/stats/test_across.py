"""One interval from several studies: the formulas, and how often it misses an effect that differs between data sets."""

import numpy as np
import pytest
from scipy import stats

from vitmods.stats.across import across_studies, other_sets


def around(*pairs):
    return [(effect, effect - half, effect + half) for effect, half in pairs]


CASES = [  # data sets, each with (effect, half-width) of its studies -> effect and half-width together
    ([[(1.0, 2.0)]], (1.0, 2.0)),
    ([[(1.0, 2.0), (1.0, 2.0)]], (1.0, 2.0)),  # the same trials twice
    ([[(0.0, 1.0), (5.0, 2.0)]], (1.0, 1.2)),  # weights 0.8 and 0.2
    ([[(0.0, 3.0)], [(3.0, 3.0)]], (1.5, 3 / 2**0.5)),
    ([[(0.0, 1.0)], [(5.0, 2.0)]], (1.0, 0.8**0.5)),
    ([[(1.0, 9.0)], [(2.0, 9.0)], [(3.0, 9.0)]], (2.0, 9 / 3**0.5)),  # alike by chance
    ([[(0.0, 0.1)], [(2.0, 0.1)], [(4.0, 0.1)]], (2.0, 4.302653 * 2 / 3**0.5)),
    ([[(1.0, 2.0)], [(1.0, 2.0)], [(3.0, 1e9)]], (1.0, 2 / 2**0.5)),  # the third says nothing
]


@pytest.mark.parametrize(("sets", "expected"), CASES)
def test_the_interval(sets, expected):
    effect, low, high = across_studies([around(*studies) for studies in sets])
    assert (effect, (high - low) / 2) == pytest.approx(expected, rel=1e-6)
    assert (low + high) / 2 == pytest.approx(effect)


def test_an_interval_that_is_not_symmetric_stays_as_it_is_alone():
    assert across_studies([[(1.0, -0.5, 4.0)]]) == (1.0, -0.5, 4.0)


def test_several_arms_divide_the_level():
    sets = [around((effect, 0.1)) for effect in (0.0, 2.0, 4.0)]
    one, four = (across_studies(sets, arms) for arms in (1, 4))
    assert (four[2] - four[0]) / (one[2] - one[0]) == pytest.approx(
        stats.t.ppf(1 - 0.05 / 8, 2) / stats.t.ppf(0.975, 2)
    )


def test_the_spread_and_the_weights_of_data_sets_are_those_of_a_slow_search():
    effects, halves = np.array([0.3, 2.0, 4.5, 1.0]), np.array([0.4, 1.0, 3.0, 0.8])
    errors, tried = halves / 2, np.linspace(0, 4, 40001)

    def excess(variance):
        weights = 1 / (variance + errors**2)
        mean = np.average(effects, weights=weights)
        return weights @ (effects - mean) ** 2 - 3

    variance = tried[np.argmin([abs(excess(one)) for one in tried])]
    weights = 1 / (variance + errors**2)
    found = other_sets([around(pair) for pair in zip(effects, halves)])
    assert found.spread == pytest.approx(variance**0.5, abs=1e-3)
    assert found.effect == pytest.approx(np.average(effects, weights=weights), abs=1e-3)
    assert (found.high - found.low) / 2 == pytest.approx(stats.t.ppf(0.975, 3) * weights.sum() ** -0.5, rel=1e-3)


def test_of_equal_studies_the_next_is_an_exact_prediction_interval():
    effects = np.array([0.0, 2.0, 4.0, -3.0, 7.0])
    found = other_sets([around((effect, 1.0)) for effect in effects])
    half = stats.t.ppf(0.975, 4) * effects.std(ddof=1) * (1 + 1 / 5) ** 0.5
    assert (found.next_low, found.next_high) == pytest.approx((2 - half, 2 + half))
    alike = other_sets([around((1.0, 1.0))] * 3)
    assert alike.spread == 0
    assert alike[3:5] == alike[1:3] == pytest.approx((1 - 3**-0.5, 1 + 3**-0.5))


LONG = pytest.mark.long


@pytest.mark.parametrize("spread", [1.0, *(pytest.param(one, marks=LONG) for one in (0.0, 0.5, 2.0))])
@pytest.mark.parametrize("sets", [5, *(pytest.param(one, marks=LONG) for one in (8, 15))])
def test_a_further_data_set_is_covered(sets, spread):
    """Of studies whose errors differ and are estimated from nine seeds; `spread` in standard errors of a study."""
    rng, covered, studies = np.random.default_rng(sets), 0, 500
    for _ in range(studies):
        errors = np.exp(rng.normal(0, 0.35, sets + 1))
        effects = rng.normal(0, spread, sets + 1) + errors * rng.normal(size=sets + 1)
        halves = stats.t.ppf(0.975, 8) * errors * np.sqrt(rng.chisquare(8, sets + 1) / 8)
        found = other_sets([around(pair) for pair in zip(effects[1:], halves[1:])])
        covered += found.next_low <= effects[0] <= found.next_high
    assert covered / studies == pytest.approx(0.955, abs=3 * (0.05 * 0.95 / studies) ** 0.5)


@pytest.mark.parametrize(
    ("sets", "spread"), [(3, 2.0), *(pytest.param(*one, marks=LONG) for one in ((3, 0.0), (5, 1.0), (8, 2.0)))]
)
def test_at_most_five_percent_are_false_of_other_data_sets(sets, spread):
    """Effects of data sets vary around zero by `spread` standard errors of a study."""
    rng, misses, studies = np.random.default_rng(0), 0, 2000
    effects = rng.normal(0, spread, (studies, sets)) + rng.normal(0, 1, (studies, sets))
    for row in effects:
        _, low, high = across_studies([around((effect, 1.96)) for effect in row])
        misses += low > 0 or high < 0
    assert misses / studies <= 0.05 + 3 * (0.05 * 0.95 / studies) ** 0.5
