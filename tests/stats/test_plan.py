"""What can be found, against a table from separate simulations, and the sentences on what to do next."""

import math

import numpy as np
import pytest

from vitmods.stats.fit import fit
from vitmods.stats.plan import (
    SIMULATED,
    Findable,
    detectable,
    finest,
    images_at_worst,
    images_for,
    sd_range,
    seeds_for,
    seeds_within,
)  # fmt: skip
from vitmods.stats.width import against_base
from vitmods.util.errors import UserError

SEEDS = (3, 4, 5, 6, 8, 12, 16, 32)
# (arms, level): half-width and detectable effect for each number of seeds, in sd of one trial
TABLE = {
    (1, 0.05): "2.93 4.60 2.00 3.01 1.61 2.37 1.38 2.02 1.13 1.64 0.87 1.26 0.74 1.06 0.50 0.72",
    (2, 0.05): "3.11 4.50 2.28 3.22 1.84 2.60 1.60 2.23 1.30 1.83 1.01 1.41 0.86 1.19 0.59 0.81",
    (4, 0.05): "2.99 4.49 2.33 3.34 1.89 2.62 1.70 2.32 1.43 1.94 1.13 1.53 0.96 1.29 0.66 0.89",
    (8, 0.05): "3.13 4.83 2.56 3.62 2.08 2.83 1.86 2.52 1.57 2.08 1.24 1.64 1.05 1.39 0.72 0.94",
    (4, 0.01): "4.23 6.65 3.16 4.49 2.44 3.29 2.17 2.88 1.81 2.38 1.41 1.82 1.19 1.54 0.81 1.04",
}


@pytest.mark.parametrize(("k", "alpha"), TABLE)
def test_the_table(k, alpha):
    expected = iter(map(float, TABLE[k, alpha].split()))
    for n in SEEDS:
        result = detectable(k, n, alpha)
        assert result.half == pytest.approx(next(expected), rel=0.03)
        assert result.effect == pytest.approx(next(expected), rel=0.03)


def test_a_detectable_effect_is_detected():
    scores = np.random.default_rng(5).standard_normal((10_000, 5, 5))
    scores[:, 1] += detectable(4, 5).effect
    result = fit(scores).against
    assert (result.estimate > against_base(result, None, 0.05, 4).seeds)[:, 0].mean() == pytest.approx(0.8, abs=0.03)


def test_a_large_loss_is_found_with_three_seeds():
    scores = np.random.default_rng(0).standard_normal((10_000, 5, 3))
    scores[:, 1] -= 4.6
    result = fit(scores).against
    assert (result.estimate < -against_base(result, None, 0.05, 4).seeds)[:, 0].mean() >= 0.8


def test_beyond_what_is_simulated_and_with_images():
    before, after = detectable(4, SIMULATED), detectable(4, SIMULATED + 1)
    assert 0.97 < after.effect / before.effect < 1
    assert detectable(4, 4 * SIMULATED).effect == pytest.approx(before.effect / 2)
    assert detectable(4, 10_000, images=0.5).effect > 0.5 * 2.4
    assert detectable(4, 8, images=0.5).effect > detectable(4, 8).effect
    assert detectable(1, 1) == Findable(math.inf, math.inf, math.inf)


def test_seeds_for_is_the_least_number_and_what_images_resolve():
    n = seeds_for(1.8, 4)
    assert detectable(4, n).equivalent <= 1.8 < detectable(4, n - 1).equivalent
    assert seeds_for(0.0, 4) is None
    assert finest(0.5, 4) == pytest.approx(0.5 * 2.442, abs=1e-3), "the critical value of four arms and endless seeds"
    enough = images_for(1.0, sd=0.6, images_sd=0.5, m=300, k=4)
    assert enough == 3400
    assert detectable(4, 32, 0.0075, 0.15).equivalent * 0.6 <= 1.0
    assert images_for(1.0, sd=1.5, images_sd=0.5, m=300, k=4) is None, "endless images and 32 seeds do not either"


def test_ranges_and_worst_cases():
    assert sd_range(1, 3) == pytest.approx((0.7, 2.3), abs=0.05)
    assert sd_range(1, 1) == pytest.approx((0.6, 8.0), abs=0.05)
    assert sd_range(2, 12) == pytest.approx((1.6, 2.8), abs=0.05)
    assert images_at_worst(0.04, 400) == 1.0


def test_a_budget():
    assert seeds_within(3600, 100, 120, 4) == 6
    with pytest.raises(
        UserError, match=r"7 arms and base x 3 seeds take 42 min, more than 18 min; 2 arms x 3 seeds fit"
    ):
        seeds_within(18 * 60, 100, 105, 7)
    with pytest.raises(UserError, match="not even one arm"):
        seeds_within(10, 100, 100, 7)
