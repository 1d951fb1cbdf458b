"""One interval from several studies: the formulas, and how often it misses an effect that differs between data sets."""

import numpy as np
import pytest
from scipy import stats

from vitmods.stats.across import across_studies


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


@pytest.mark.parametrize(("sets", "spread"), [(3, 0.0), (3, 2.0), (5, 1.0), (8, 2.0)])
def test_at_most_five_percent_are_false_of_other_data_sets(sets, spread):
    """Effects of data sets vary around zero by `spread` standard errors of a study."""
    rng, misses, studies = np.random.default_rng(0), 0, 2000
    effects = rng.normal(0, spread, (studies, sets)) + rng.normal(0, 1, (studies, sets))
    for row in effects:
        _, low, high = across_studies([around((effect, 1.96)) for effect in row])
        misses += low > 0 or high < 0
    assert misses / studies <= 0.05 + 3 * (0.05 * 0.95 / studies) ** 0.5
