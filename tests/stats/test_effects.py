"""Effects and verdicts against scipy and statsmodels, as properties, and by simulated studies."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

from vitmods.stats.effects import CANNOT_TELL, HELPS, HURTS, NO_WORSE, Effect, effects, holm, noise_floor
from vitmods.stats.power import detectable_effect, power_of, seeds_needed
from vitmods.util.errors import UserError


def scores(values):
    return dict(enumerate(values))


def example(n=5, arms=4, seed=0, shift=0.0):
    rng = np.random.default_rng(seed)
    base = 0.8 + 0.01 * rng.standard_normal(n)
    return scores(base), {f"arm{i}": scores(base + 0.004 * rng.standard_normal(n) + shift) for i in range(arms)}


def test_repr_is_the_documented_one():
    effect = Effect("dpn", 0.42, 0.11, 0.73, 0.01, 0.02, 5, HELPS, 0.5, 80, 80.42, 0.25, 0.4)
    assert repr(effect) == "Effect(+0.42 [+0.11, +0.73], n=5 paired, helps)"


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_interval_and_p_equal_scipys(n):
    base, arms = example(n)
    found = effects(base, arms, margin=0.5)
    for arm, values in arms.items():
        a, b = 100 * np.array(list(values.values())), 100 * np.array(list(base.values()))
        paired = scipy_stats.ttest_rel(a, b)
        interval = paired.confidence_interval(0.95)
        effect = found[arm]
        assert effect.p == pytest.approx(paired.pvalue, rel=1e-9)
        assert (effect.low, effect.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
        assert effect.mean == pytest.approx(effect.arm_mean - effect.base_mean)
        assert effect.sd == pytest.approx(np.std(a - b, ddof=1))


def test_no_worse_p_equals_scipys_one_sided_test():
    base, arms = example(8, arms=1)
    a, b = (100 * np.array(list(v.values())) for v in (arms["arm0"], base))
    expected = scipy_stats.ttest_rel(a + 0.5, b, alternative="greater").pvalue
    assert effects(base, arms, margin=0.5)["arm0"].p_no_worse == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("tests", [1, 2, 5, 12])
def test_holm_equals_statsmodels(tests):
    p_values = np.random.default_rng(tests).uniform(0, 0.1, tests).round(2)  # rounded: some are equal
    assert holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1], abs=1e-12)


def test_an_arm_without_p_value_counts_for_the_correction():
    corrected = holm([0.01, math.nan, 0.04])
    assert corrected[0] == pytest.approx(0.03)
    assert math.isnan(corrected[1])
    assert corrected[2] == pytest.approx(0.08)
    assert holm([]) == []


@pytest.mark.parametrize("alpha", [0.05, 0.005])
@pytest.mark.parametrize("n", [2, 3, 5, 10, 50])
def test_power_and_detectable_effect_equal_statsmodels(n, alpha):
    def reference(standard):
        both = TTestPower().power(standard, n, alpha)
        # Where the wrong tail is too small for the series, statsmodels' two-sided power is NaN.
        return TTestPower().power(standard, n, alpha / 2, alternative="larger") if math.isnan(both) else both

    for standard in (0.3, 1.0, 3.0):
        assert power_of(2 * standard, 2.0, n, alpha) == pytest.approx(reference(standard), abs=2e-5)
    assert reference(detectable_effect(2.0, n, 0.8, alpha) / 2.0) == pytest.approx(0.8, abs=1e-4)


@pytest.mark.parametrize("standard", [0.02, 0.2, 0.5, 1.0, 2.0])
def test_seeds_needed_equals_statsmodels(standard):
    expected = math.ceil(TTestPower().solve_power(effect_size=standard, power=0.8, alpha=0.05) - 1e-6)
    assert seeds_needed(-standard * 3, 3.0) == expected


def test_seeds_needed_is_the_smallest_number_also_where_two_are_enough():
    assert seeds_needed(1000.0, 1.0) == 2
    for effect in (0.7, 1.5, 4.0, 8.0):
        n = seeds_needed(effect, 1.0, alpha=0.01)
        assert power_of(effect, 1.0, n, 0.01) >= 0.8
        assert n == 2 or power_of(effect, 1.0, n - 1, 0.01) < 0.8


def test_effect_asks_for_more_seeds_when_there_are_more_arms():
    base, arms = example(6, arms=8)
    together, alone = effects(base, arms, 0.5)["arm0"], effects(base, {"arm0": arms["arm0"]}, 0.5)["arm0"]
    assert together.seeds_needed(0.5) > alone.seeds_needed(0.5)
    assert together.detectable > alone.detectable
    assert together.seeds_needed(together.detectable * 1.0001) == together.n


@pytest.mark.parametrize("effect", [0.0, math.nan, math.inf])
def test_seeds_needed_refuses_effects_that_no_number_of_seeds_finds(effect):
    with pytest.raises(UserError, match="other than zero"):
        seeds_needed(effect, 1.0)


def test_one_pair_has_a_mean_but_no_interval():
    effect = effects({0: 0.8}, {"a": {0: 0.9}}, 0.5)["a"]
    assert effect.mean == pytest.approx(10)
    assert math.isnan(effect.low)
    assert math.isnan(effect.p)
    assert not effect.has_interval
    assert effect.verdict == CANNOT_TELL
    assert repr(effect) == "Effect(+10.00, n=1 paired, cannot tell)"
    with pytest.raises(UserError, match="more seeds"):
        effect.seeds_needed(1.0)


def test_no_pair_at_all():
    effect = effects({0: 0.8, 1: None}, {"a": {1: 0.9}, "b": {}}, 0.5, diverged={"b": 2})
    assert (effect["a"].n, effect["a"].verdict) == (0, CANNOT_TELL)
    assert repr(effect["b"]) == "Effect(n=0 paired, cannot tell, 2 diverged)"


def test_only_seeds_that_both_finished_are_paired():
    base = {0: 0.5, 1: 0.6, 2: None, 3: 0.1}
    effect = effects(base, {"a": {0: 0.52, 1: 0.61, 2: 0.9, 3: math.nan}}, 0.5)["a"]
    assert effect.n == 2
    assert effect.base_mean == pytest.approx(55)
    assert effect.mean == pytest.approx(1.5)


@pytest.mark.parametrize("difference", [0.0, 0.01, -0.2])
def test_equal_differences_are_no_certainty(difference):
    """0.1 + 0.2 style rounding must not turn a coarse metric into p = 0."""
    base = {0: 0.7, 1: 0.3, 2: 0.6, 3: 0.61}
    effect = effects(base, {"a": {seed: value + difference for seed, value in base.items()}}, 0.5)["a"]
    assert effect.verdict == CANNOT_TELL
    assert effect.sd == 0
    assert math.isnan(effect.p)
    assert math.isnan(effect.detectable)


def test_diverged_trials_forbid_a_favorable_verdict_only():
    base, arms = example(6, arms=1, shift=0.05)
    assert effects(base, arms, 0.5)["arm0"].verdict == HELPS
    assert effects(base, arms, 0.5, diverged={"arm0": 1})["arm0"].verdict == CANNOT_TELL
    base, arms = example(6, arms=1, shift=-0.05)
    assert effects(base, arms, 0.5, diverged={"arm0": 1})["arm0"].verdict == HURTS
    base, arms = example(6, arms=1)
    assert effects(base, arms, 5.0)["arm0"].verdict == NO_WORSE
    assert effects(base, arms, 5.0, diverged={"arm0": 1})["arm0"].verdict == CANNOT_TELL


def test_a_small_but_certain_loss_hurts_even_within_the_margin():
    base = scores([0.8, 0.81, 0.79, 0.8])
    arm = scores([0.799, 0.8089, 0.7891, 0.799])
    assert effects(base, {"a": arm}, 0.5)["a"].verdict == HURTS


@pytest.mark.parametrize("margin", [-0.1, math.nan, math.inf])
def test_margin_must_be_a_number_of_points(margin):
    with pytest.raises(UserError, match="margin"):
        effects({}, {}, margin)


@pytest.mark.parametrize("alpha", [0, 1, -1])
def test_alpha_must_be_a_probability(alpha):
    with pytest.raises(UserError, match="alpha"):
        effects({}, {}, 0.5, alpha=alpha)


def test_scores_in_percent_are_refused():
    with pytest.raises(UserError, match="fractions"):
        effects({0: 93.0}, {"a": {0: 94.0}}, 0.5)


def test_json_round_trip_has_no_nan():
    base, arms = example()
    arms["one"] = {0: 0.5}
    for effect in effects(base, arms, 0.5, diverged={"one": 4}).values():
        text = json.dumps(effect.to_dict(), allow_nan=False)
        assert repr(Effect.from_dict(json.loads(text)).to_dict()) == repr(effect.to_dict())


def test_noise_floor_equals_scipys_welch_interval():
    first, other = [0.80, 0.81, 0.79, 0.805], [0.80, 0.82, 0.81]
    floor = noise_floor(scores(first), {seed + 100: value for seed, value in scores(other).items()})
    welch = scipy_stats.ttest_ind(np.array(other) * 100, np.array(first) * 100, equal_var=False)
    interval = welch.confidence_interval()
    assert (floor.low, floor.high) == pytest.approx((interval.low, interval.high))
    assert floor.n == 7
    assert floor.sd == pytest.approx(100 * math.sqrt((3 * np.var(first, ddof=1) + 2 * np.var(other, ddof=1)) / 5))


def test_noise_floor_covers_the_difference_of_two_runs():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(2000):
        x = 0.5 + 0.01 * rng.standard_normal(8)
        a, b = 0.5 + 0.01 * rng.standard_normal(2)
        inside += abs(a - b) * 100 < noise_floor(scores(x[:4]), scores(x[4:])).single_run
    assert inside / 2000 == pytest.approx(0.95, abs=0.025)


def test_noise_floor_of_single_runs_is_unknown_not_zero():
    floor = noise_floor({0: 0.5}, {1: 0.6})
    assert math.isnan(floor.sd)
    assert floor.to_dict()["low"] is None
    equal = noise_floor({0: 0.5, 1: 0.5}, {2: 0.5, 3: 0.5})
    assert equal.sd == 0
    assert math.isnan(equal.low)


fractions = st.floats(0, 1).map(lambda x: round(x, 4))
paired_scores = st.integers(0, 8).flatmap(
    lambda n: st.tuples(
        st.lists(fractions, min_size=n, max_size=n),
        st.lists(st.lists(st.one_of(fractions, st.none()), min_size=n, max_size=n), min_size=1, max_size=5),
    )
)


@settings(max_examples=300, deadline=None)
@given(paired_scores, st.floats(0, 20))
def test_a_verdict_never_says_more_than_its_interval(values, margin):
    base, arms = values
    for effect in effects(scores(base), {str(i): scores(arm) for i, arm in enumerate(arms)}, margin).values():
        if effect.verdict == HELPS:
            assert effect.low > 0
        if effect.verdict == HURTS:
            assert effect.high < 0
        if effect.verdict == NO_WORSE:
            assert effect.low > -margin - 1e-9
        if not effect.has_interval:
            assert effect.verdict == CANNOT_TELL
        else:
            assert effect.low <= effect.mean <= effect.high
            assert effect.p_holm >= effect.p


@settings(max_examples=100, deadline=None)
@given(paired_scores)
def test_swapping_base_and_arm_swaps_the_verdict(values):
    base, arms = scores(values[0]), scores(values[1][0])
    there, back = effects(base, {"a": arms}, 0.0)["a"], effects(arms, {"a": base}, 0.0)["a"]
    opposite = {HELPS: {HURTS}, HURTS: {HELPS, NO_WORSE}, CANNOT_TELL: {CANNOT_TELL}, NO_WORSE: {HURTS, HELPS}}
    assert back.verdict in opposite[there.verdict]
    if there.n:
        assert back.mean == pytest.approx(-there.mean, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_seeds_in_another_order_change_nothing(seed):
    base, arms = example(7, seed=seed)
    order = np.random.default_rng(seed).permutation(7)
    shuffled = {arm: {int(s): values[int(s)] for s in order} for arm, values in arms.items()}
    there, back = effects(base, arms, 0.5), effects({int(s): base[int(s)] for s in order}, shuffled, 0.5)
    assert [e.verdict for e in there.values()] == [e.verdict for e in back.values()]
    assert [e.mean for e in there.values()] == pytest.approx([e.mean for e in back.values()])


# 2,000 simulated studies: the Monte-Carlo standard error of a 5 % rate is 0.49 points, and three of them are allowed.
STUDIES = 2000
ALLOWED = 0.05 + 3 * math.sqrt(0.05 * 0.95 / STUDIES)


def simulate(rng, true_effects, n, sd_seed=0.8, sd_arm=0.4):
    """One study: base is shared by all arms, and a seed moves base and arms together (all in points)."""
    seed_part = rng.normal(0, sd_seed, n)
    base = 80 + seed_part + rng.normal(0, sd_arm, n)
    arms = {f"arm{i}": 80 + seed_part + true + rng.normal(0, sd_arm, n) for i, true in enumerate(true_effects)}
    return scores(base / 100), {arm: scores(values / 100) for arm, values in arms.items()}


def rate_of(verdicts, rng, true_effects, n, margin=0.5, make=simulate):
    """Fraction of the studies in which any arm gets one of these verdicts."""
    hits = 0
    for _ in range(STUDIES):
        found = effects(*make(rng, true_effects, n), margin)
        hits += any(effect.verdict in verdicts for effect in found.values())
    return hits / STUDIES


@pytest.mark.parametrize(("arms", "n"), [(1, 3), (4, 3), (4, 5), (10, 5)])
def test_without_effect_any_arm_helps_or_hurts_in_at_most_five_percent_of_studies(arms, n):
    rate = rate_of({HELPS, HURTS}, np.random.default_rng(arms * 100 + n), [0.0] * arms, n)
    assert rate <= ALLOWED
    assert rate >= 0.01  # a rule that never speaks would pass the line above


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_coarse_metric_raises_no_false_verdicts(n):
    """Top-1 on 100 test images: scores are whole points, so equal differences are common."""

    def coarse(rng, true_effects, n):
        base, arms = simulate(rng, true_effects, n, sd_arm=1.0)
        return {s: round(v, 2) for s, v in base.items()}, {
            arm: {s: round(v, 2) for s, v in values.items()} for arm, values in arms.items()
        }

    assert rate_of({HELPS, HURTS}, np.random.default_rng(n), [0.0] * 4, n, make=coarse) <= ALLOWED


@pytest.mark.parametrize("arms", [1, 6])
def test_arms_that_lose_the_margin_are_seldom_called_no_worse(arms):
    rng = np.random.default_rng(arms)
    rate = rate_of({NO_WORSE, HELPS}, rng, [-0.5] * arms, n=8, margin=0.5)
    assert 0.005 <= rate <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / STUDIES)


def test_the_detectable_effect_is_found_in_four_of_five_studies():
    n, sd = 5, 0.4 * math.sqrt(2)
    true = detectable_effect(sd, n)
    rate = rate_of({HELPS}, np.random.default_rng(7), [true], n)
    assert rate == pytest.approx(0.8, abs=3 * math.sqrt(0.8 * 0.2 / STUDIES))


def test_the_detectable_effect_holds_for_one_good_arm_among_many():
    n, sd = 5, 0.4 * math.sqrt(2)
    true = detectable_effect(sd, n, alpha=0.05 / 6)
    rate = rate_of({HELPS}, np.random.default_rng(8), [true] + [0.0] * 5, n)
    assert 0.8 - 0.03 <= rate <= 0.8 + 0.05
