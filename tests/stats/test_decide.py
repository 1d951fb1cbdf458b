"""Verdicts of whole studies: properties that hold for all, odd cases one by one, and the tables."""

import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

import vitmods as vm
from vitmods.stats import tables
from vitmods.stats.sequential import interim_level, nominal_level
from vitmods.stats.verdict import Effect, Verdict, verdict_of
from vitmods.util.errors import UserError

STUDY = {"g": st.integers(2, 4), "n": st.integers(3, 6), "seed": st.integers(0, 10**6)}


def images_of(g, n, seed, m=40):
    """Right or wrong of m images."""
    rng = np.random.default_rng(seed)
    skill = rng.uniform(0.3, 0.9, m) + 0.3 * rng.standard_normal((g, 1, m))
    return (rng.random((g, n, m)) < skill).astype(float)


def as_scores(array):
    return {name: dict(enumerate(rows)) for name, rows in zip(("base", "a", "b", "c", "d", "e"), array)}


def normal(g, n, seed=0, sd=0.01):
    return as_scores(0.8 + sd * np.random.default_rng(seed).standard_normal((g, n)))


def numbers(effect):
    return [effect.effect, effect.low, effect.high, effect.seeds_low, effect.seeds_high]


def same(decision, other, exact=("verdict", "n")):
    for arm, effect in decision.effects.items():
        assert numbers(effect) == pytest.approx(numbers(other[arm]), nan_ok=True, abs=1e-9)
        assert all(getattr(effect, name) == getattr(other[arm], name) for name in exact)
    assert set(decision.best) == set(other.best)


@settings(max_examples=25, deadline=None)
@given(**STUDY)
def test_order_changes_nothing(g, n, seed):
    x, rng = images_of(g, n, seed), np.random.default_rng(seed)
    result = vm.decide(as_scores(x))
    arms = dict(reversed(as_scores(x).items()))
    same(result, vm.decide(arms))
    same(result, vm.decide(as_scores(x[:, rng.permutation(n)])))
    same(result, vm.decide(as_scores(x[..., rng.permutation(x.shape[-1])])))


@settings(max_examples=25, deadline=None)
@given(**STUDY)
def test_shifts_change_nothing_and_scales_scale(g, n, seed):
    x = np.random.default_rng(seed).standard_normal((g, n, 20))
    result = vm.decide(as_scores(x), margin=0.1, unit="nats")
    same(result, vm.decide(as_scores(x + 3), margin=0.1, unit="nats"))
    scaled = vm.decide(as_scores(4 * x), margin=0.4, unit="nats")
    for arm, effect in result.effects.items():
        assert [4 * value for value in numbers(effect)] == pytest.approx(numbers(scaled[arm]), nan_ok=True)
        assert effect.verdict == scaled[arm].verdict


@settings(max_examples=25, deadline=None)
@given(**STUDY)
def test_a_flipped_sign_swaps_helps_and_hurts(g, n, seed):
    x = np.random.default_rng(seed).standard_normal((g, n)) + 3 * np.arange(g)[:, None]
    result, flipped = (vm.decide(as_scores(sign * x), unit="nats") for sign in (1, -1))
    losses = vm.decide(as_scores(-x), unit="nats", higher_is_better=False)
    swap = {"helps": "hurts", "hurts": "helps", "no worse": "no gain", "no gain": "no worse"}
    for arm, effect in result.effects.items():
        assert flipped[arm].verdict == swap.get(effect.verdict, effect.verdict)
        assert losses[arm].verdict == effect.verdict
        assert losses[arm].effect == flipped[arm].effect == -effect.effect
        assert losses[arm].low == pytest.approx(-effect.high)


@settings(max_examples=40, deadline=None)
@given(**STUDY, margin=st.sampled_from([0.0, 0.5, 5.0, 40.0]))
def test_verdicts_follow_from_intervals_and_intervals_hold_one_another(g, n, seed, margin):
    result = vm.decide(as_scores(images_of(g, n, seed)), margin=margin, chance=None)
    seeds_only = vm.decide(as_scores(images_of(g, n, seed)), margin=margin, generalize="seeds")
    for arm, effect in result.effects.items():
        assume(not effect.failures)
        assert effect.low <= effect.seeds_low <= effect.effect <= effect.seeds_high <= effect.high
        assert effect.verdict == verdict_of(effect.low, effect.high, margin)
        assert seeds_only[arm].verdict == verdict_of(effect.seeds_low, effect.seeds_high, margin)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.1, 3, "helps"), (0.1, 0.2, "helps"), (-3, -0.1, "hurts"), (-0.2, -0.1, "hurts"), (-0.4, 0.4, "equivalent"),
        (-0.4, 0.6, "no worse"), (-0.6, 0.4, "no gain"), (-0.6, 0.6, "open"), (math.nan, math.nan, "open"),
    ],
)  # fmt: skip
def test_the_verdicts(low, high, expected):
    assert verdict_of(low, high, 0.5) == expected


def test_one_arm_has_the_paired_t_interval():
    scores = normal(2, 6)
    a, b = (100 * np.array(list(scores[arm].values())) for arm in ("a", "base"))
    expected, effect = stats.ttest_rel(a, b), vm.decide(scores)["a"]
    interval = expected.confidence_interval(0.95)
    assert (effect.low, effect.high) == pytest.approx((interval.low, interval.high))
    assert (effect.base_mean, effect.arm_mean) == pytest.approx((b.mean(), a.mean()))


def test_a_large_loss_on_every_seed_hurts():
    """... also with ten images, of which all trials get the same ones wrong."""
    for k in (1, 2, 4):
        for n in (3, 5):
            x = np.ones((k + 1, n, 10))
            x[1, :, :8] = 0
            assert vm.decide(as_scores(x))["a"].verdict == "hurts"


def test_a_seed_that_diverged_is_missing_and_counted():
    """One failure is no evidence that an arm fails more often than base: the verdict stays, with a mark."""
    scores = normal(3, 6)
    scores["a"] = {seed: value + 0.1 for seed, value in scores["a"].items()}
    assert vm.decide(scores)["a"].verdict == "helps"
    for lost in (math.nan, math.inf):
        scores["a"][2] = lost
        result = vm.decide(scores)
        assert (result["a"].verdict, result["a"].n, result["a"].failures) == ("helps", 5, 1)
        assert "1 of 6 a trials diverged" in result.notes[0]
        assert result.best == ("a",)
        assert tables.rows([result["a"]])[0][5] == "5 (−1)"
    del scores["a"][2]
    assert vm.decide(scores, failed={"a": {2: "diverged"}})["a"].failures == 1


def test_an_arm_that_fails_far_more_often_than_base_is_unstable():
    scores = normal(3, 10)
    scores["a"] = {seed: value + 0.1 for seed, value in scores["a"].items()} | dict.fromkeys(range(6), math.nan)
    result = vm.decide(scores)
    assert result["a"].verdict == "unstable"
    assert result["a"].stops
    assert "fails: 6 of 10, base 0 of 10" in result["a"].notes
    assert "a" not in result.best
    scores["a"] = {seed: value - 0.2 for seed, value in scores["a"].items()}
    assert vm.decide(scores)["a"].verdict == "hurts"
    scores = normal(3, 4)
    scores["a"] = dict.fromkeys(range(4), math.nan)
    assert vm.decide(scores)["a"].verdict == "hurts"
    assert math.isnan(vm.decide(scores)["a"].effect)
    assert vm.decide(normal(3, 3) | {"a": dict.fromkeys(range(3), math.nan)})["a"].verdict == "open"


def test_base_that_fails_comes_first_and_its_seed_is_left_out():
    scores = normal(3, 8)
    scores["base"] |= dict.fromkeys(range(1, 6), math.nan)
    result = vm.decide(scores)
    assert result.notes[0].startswith("5 trials of base failed")
    assert result["a"].n == 3
    assert "steadier than base" in result["a"].notes


def test_a_collapsed_run_is_found_and_leaves_the_other_arms_alone():
    scores = normal(4, 3)
    before = vm.decide({arm: seeds for arm, seeds in scores.items() if arm != "c"}, family=3)
    scores["c"][1] = 0.1
    result = vm.decide(scores)
    assert result["c"].verdict == "open"
    assert result["c"].failures == 1
    assert result["c"].effect < -20, "its score counts in the effect"
    assert "1 of 3 c trials collapsed" in result.notes
    assert any("count in the effect of their arm" in note for note in result.notes)
    for arm in ("a", "b"):
        assert result[arm].half == pytest.approx(before[arm].half, rel=0.25)
    assert result["c"].half > 5 * result["a"].half


def test_an_arm_outside_of_the_pool_has_all_of_its_level():
    """A trial of it failed, so that its own spread is all that is known of it."""
    scores = normal(4, 4, seed=2)
    scores["c"] = {0: 0.4, 1: 0.42, 2: 0.4, 3: 0.1}
    result = vm.decide(scores)["c"]
    assert result.failures == 1
    differences = 100 * (np.array(list(scores["c"].values())) - np.array(list(scores["base"].values())))
    error = differences.std(ddof=1) / 2
    assert result.half == pytest.approx(stats.t.ppf(1 - 0.05 / 3 / 2, 3) * error)
    assert result.verdict == "hurts"


def test_images_without_a_score_are_left_out_for_all():
    """... and no trial has diverged for them; one without any score has."""
    x = images_of(3, 4, 1)
    x[1] = np.maximum(x[1], x[0])
    full = vm.decide(as_scores(x[..., 3:]))
    undefined = x.copy()
    undefined[1, 2, :2] = undefined[0, 0, 2] = np.nan
    result = vm.decide(as_scores(undefined))
    same(result, full)
    assert result["a"].failures == 0
    assert result["a"].images == x.shape[-1] - 3
    assert "3 test images without a score in some trial are left out for all" in result.notes
    grouped = vm.decide(as_scores(undefined), groups=np.arange(x.shape[-1]))
    assert grouped["a"].images == x.shape[-1] - 3
    undefined[1, 2] = np.nan
    assert vm.decide(as_scores(undefined))["a"].failures == 1
    undefined = x.copy()
    undefined[1, :, ::2] = undefined[2, :, 1::2] = np.nan
    with pytest.raises(UserError, match="No test image has a score in every trial"):
        vm.decide(as_scores(undefined))
    folds = {arm: {seed: row[: 10 + seed] for seed, row in by_seed.items()} for arm, by_seed in as_scores(x).items()}
    folds["a"][1][0] = np.nan
    assert vm.decide(folds, resampled=(1, 4))["a"].n == 4


def test_a_collapse_of_base_is_left_out_for_all():
    scores = normal(4, 6)
    scores["base"][2] = scores["c"][4] = 0.1
    result = vm.decide(scores)
    assert result.notes[0].startswith("1 trial of base failed")
    assert {effect.n for effect in result.effects.values()} == {5}
    assert result["c"].verdict == "open"  # base fails as often
    assert result["a"].half < 5 < result["c"].half
    assert result.sd < 2


def test_two_seeds_beside_a_known_base_show_nothing_favorable():
    rng = np.random.default_rng(0)
    base = dict(enumerate(0.8 + 0.01 * rng.standard_normal(16)))
    arms = {"better": {0: 0.95, 1: 0.951}, "worse": {0: 0.60, 1: 0.601}}
    for scores in ({"base": base, **arms}, {"base": base, "better": arms["better"]}):
        decision = vm.decide(scores, margin=0.5)
        assert decision["better"].low > 0
        assert decision["better"].verdict == Verdict.OPEN
        assert "2 (base 16)" in repr(decision), "the table does not hide that base has more"
    assert vm.decide({"base": base, **arms})["worse"].verdict == Verdict.HURTS


def test_two_seeds_say_little():
    assert math.isnan(vm.decide(normal(3, 2))["a"].low)
    scores = normal(5, 2)
    scores["a"] = {seed: value + 0.15 for seed, value in scores["a"].items()}
    scores["b"] = {seed: value - 0.5 for seed, value in scores["b"].items()}
    result = vm.decide(scores)
    assert result["a"].low > 0
    assert (result["a"].verdict, result["b"].verdict) == ("open", "hurts")
    assert "the interval assumes that arms vary alike" in result["a"].notes
    assert "a, b, c and d: the interval assumes that arms vary alike" in result.summary()
    # They lie on a line: no spread is shown, in tables and in JSON. Of base and one arm the spread is one number.
    two, three, single = (vm.decide(normal(g, n))["a"] for g, n in ((5, 2), (5, 3), (2, 6)))
    assert math.isnan(two.correlation)
    assert math.isnan(two.spread_ratio)
    assert two.to_dict()["correlation"] is None
    assert tables.rows([two])[0][-2:] == ("2", "–")
    assert -1 < three.correlation < 1
    assert three.spread_ratio > 0
    assert math.isnan(single.spread_ratio)
    assert -1 < single.correlation < 1
    # As verdicts: without an interval nothing is best or beaten, however steady two seeds look.
    result = vm.decide({"base": {0: 0.370, 1: 0.372}, "a": {0: 0.470, 1: 0.4715}, "b": {0: 0.400, 1: 0.400}})
    assert (result.best, result.ruled_out, result.pairs) == ((), (), {})
    assert {effect.verdict for effect in result.effects.values()} == {"open"}


def test_one_seed_and_none_have_no_interval():
    result = vm.decide({"base": {0: 0.8}, "a": {0: 0.9}, "b": {1: 0.9}, "c": {}})
    assert [effect.n for effect in result.effects.values()] == [1, 0, 0]
    assert {effect.verdict for effect in result.effects.values()} == {"open"}
    assert result["a"].effect == pytest.approx(10)
    assert result.best == ()


def test_equal_differences_are_not_certainty_and_no_spread_is_not_called_too_few_seeds():
    scores = {"base": dict(enumerate([0.8, 0.7, 0.9])), "a": dict(enumerate([0.81, 0.71, 0.91]))}
    assert math.isnan(vm.decide(scores)["a"].low)
    assert vm.decide(scores)["a"].verdict == "open"
    equal = vm.decide({arm: {s: np.ones(500) for s in range(5)} for arm in ("base", "a", "b")})
    assert equal["a"].low < 0 < equal["a"].high  # half an image a trial
    scores = {"base": dict.fromkeys(range(3), 0.9), "a": dict.fromkeys(range(3), 0.95)}
    assert "scores do not vary" in repr(vm.decide(scores))
    assert "too few seeds" in repr(vm.decide({"base": {0: 0.9}, "a": {0: 0.95}}))


def test_arms_that_follow_base_at_few_seeds_are_said():
    rng = np.random.default_rng(0)
    x = 0.8 + 0.01 * rng.standard_normal((5, 4))
    x[1:3] = x[0] + 0.001 * rng.standard_normal((2, 4))
    assert any("a and b follow base from seed to seed" in note for note in vm.decide(as_scores(x)).notes)
    assert not vm.decide(as_scores(x[:3])).notes  # there is no other arm
    assert not vm.decide(as_scores(0.8 + 0.01 * rng.standard_normal((5, 6)))).notes


def test_an_arm_that_is_not_finished_counts_in_the_family():
    scores = normal(3, 5)
    alone = vm.decide({arm: scores[arm] for arm in ("base", "a")}, family=2)
    with_none = vm.decide(scores | {"b": dict.fromkeys(range(5))})
    assert with_none.family == 2
    assert numbers(with_none["a"]) == pytest.approx(numbers(alone["a"]))


def test_without_images_it_says_so():
    x = images_of(3, 5, 0)
    with_images, without = vm.decide(as_scores(x)), vm.decide(as_scores(x.mean(-1)))
    assert not with_images.without_images
    assert without.without_images
    assert "without per-image scores" in repr(without)
    assert math.isnan(without["a"].images_sd)
    assert without["a"].half < with_images["a"].half
    assert 0 < with_images["a"].images_share < 1


def test_images_that_belong_together():
    x = images_of(3, 5, 0)
    doubled, groups = np.repeat(x, 2, axis=-1), np.repeat(np.arange(x.shape[-1]), 2)
    grouped = vm.decide(as_scores(doubled), groups=groups)
    assert grouped["a"].images == x.shape[-1]
    assert grouped["a"].images_sd == pytest.approx(vm.decide(as_scores(x))["a"].images_sd)
    assert grouped["a"].half > vm.decide(as_scores(doubled))["a"].half
    number = np.arange(x.shape[-1])
    assert vm.decide(as_scores(x), groups=number % 2, generalize="seeds")["a"].half > 0
    assert any("7 groups" in note for note in vm.decide(as_scores(x), groups=number % 7).notes)
    assert not any("groups" in note for note in vm.decide(as_scores(x), groups=number % 8).notes)


def test_a_study_that_is_not_complete_is_read_at_the_level_of_looks():
    scores = normal(3, 5)
    scores["a"] = {seed: value + 0.1 for seed, value in scores["a"].items()}
    full = vm.decide(scores, planned=5)
    assert (full.provisional, full.alpha, full["a"].verdict) == (False, 0.05, "helps")
    scores["b"][4] = None
    part = vm.decide(scores, planned=5)
    assert (part.provisional, part.alpha, part["a"].provisional) == (True, interim_level(4, 5), True)
    assert part["a"].half > 1.2 * full["a"].half
    assert "helps, so far" in repr(part)
    assert "provisional" in repr(part)
    assert not vm.decide(scores).provisional  # nothing was planned


def test_a_reference_that_was_chosen_later_has_the_intervals_of_all_pairs():
    scores = normal(5, 5)
    chosen, before = vm.decide(scores, base="c", family="pairs"), vm.decide(scores, base="c")
    for arm in ("base", "a", "b", "d"):
        pair = before.pairs.get((arm, "c"), before.pairs.get(("c", arm)))
        assert chosen[arm].half == pytest.approx((pair.high - pair.low) / 2)
        assert chosen[arm].half > before[arm].half
    assert chosen["a"].family == 10
    assert "over all pairs of arms" in repr(chosen)
    assert "over all pairs of arms" not in repr(before)


def test_intervals_stay_in_the_possible_range_and_fractions_above_one_need_their_unit():
    scores = {"base": {0: 0.9, 1: 0.95, 2: 0.85}, "a": {0: 0.3, 1: 0.9, 2: 0.1}}
    effect = vm.decide(scores, chance=0.0)["a"]
    assert (effect.low, effect.seeds_low) == (-100.0, -100.0)
    assert effect.high > 0
    percent = {arm: {seed: 100 * score for seed, score in by_seed.items()} for arm, by_seed in scores.items()}
    assert vm.decide(percent, unit="points")["a"].low < -100  # no range is known of other units
    scores = {"base": {0: 1.1, 1: 1.2, 2: 1.0}, "a": {0: 1.3, 1: 1.2, 2: 1.3}}
    assert vm.decide(scores, unit="fraction")["a"].effect == pytest.approx(100 / 6)


def test_a_gain_below_the_margin_is_said():
    base = np.array([0.8, 0.81, 0.79, 0.8, 0.82, 0.81])
    gain = 0.001 + 1e-5 * np.arange(6)
    effect = vm.decide(as_scores(np.stack([base, base + gain])))["a"]
    assert (effect.verdict, effect.notes) == ("helps", ("helps by less than the margin",))


def test_the_best_and_head_to_head():
    x = 0.8 + 0.001 * np.random.default_rng(0).standard_normal((4, 5)) + np.array([[0], [0.05], [0.05], [-0.05]])
    result = vm.decide(as_scores(x))
    assert set(result.best) == {"a", "b"}
    assert set(result.ruled_out) == {"base", "c"}
    assert not result.pairs["b", "a"].differ
    assert result.pairs["c", "b"].high < 0
    assert len(result.pairs) == 6
    assert "best: a or b (no difference shown); ruled out: base, c" in repr(result)


def test_looks_use_complete_looks_alone():
    scores = normal(3, 7)
    result = vm.decide(scores, most_seeds=16)
    assert (result["a"].n, result.look, result.alpha) == (6, "look at 6 of at most 16 seeds", nominal_level(16, 6))
    assert "1 later seed of base not read: they wait for the next look" in result.notes
    del scores["base"][6]
    assert "1 seed of a not read: base lacks trials with them" in vm.decide(scores).notes
    early = vm.decide(normal(3, 3), most_seeds=16)
    assert early["a"].verdict == "open"
    assert math.isnan(early["a"].low)
    assert not early.pairs
    assert "first look is at 4 seeds" in repr(early)


def test_an_arm_that_stopped_keeps_its_verdict_and_stays_in_the_fit():
    scores = normal(4, 10)
    stopped = vm.decide({arm: dict(list(seeds.items())[:4]) for arm, seeds in scores.items()}, most_seeds=16)["a"]
    scores["a"] = dict(list(scores["a"].items())[:4])
    result = vm.decide(scores, most_seeds=16, frozen={"a": stopped})
    assert result["a"] == stopped
    assert result["b"].n == 10
    assert result.df > vm.decide({a: s for a, s in scores.items() if a != "a"}, most_seeds=16, family=3).df
    assert vm.decide(scores, most_seeds=16)["b"].n == 4  # not frozen: the look waits for it


@pytest.mark.parametrize(
    ("scores", "settings", "message"),
    [
        ({"a": {0: 1.0}}, {}, "Unknown arm base"),
        ({"base": {0: 1.0}}, {}, "only arm"),
        (normal(2, 3), {"margin": -1}, "margin must be 0 or more"),
        (normal(2, 3), {"margin": math.nan}, "margin must be 0 or more"),
        (normal(2, 3), {"generalize": "all"}, "generalize must be"),
        (normal(3, 3), {"family": 1}, "family must count all 2 arms"),
        (normal(2, 3), {"most_seeds": 99}, "4 to 32 seeds"),
        (normal(2, 3), {"failed": {"z": {}}}, "without scores: z"),
        ({"base": {0: 93.0}, "a": {0: 94.0}}, {}, "unit='points'"),
        ({"base": {0: 3.1, 1: 3.0}, "a": {0: 3.12, 1: 3.1}}, {}, "some are above 1"),
        ({"base": {0: 93.0}, "a": {0: 94.0}}, {"unit": "fraction"}, "unit='points'"),
        ({"base": {0: [1, 0]}, "a": {0: [1, 0, 1]}}, {}, "same test images"),
        ({"base": {0: [1, 0]}, "a": {0: 0.5}}, {}, "same test images"),
        (as_scores(images_of(3, 5, 0)), {"groups": [1, 2, 3]}, "one label for each"),
        (normal(3, 5), {"groups": [1, 2]}, "per-image scores"),
        (
            as_scores(images_of(3, 5, 0)),
            {"groups": [0, 1] * 20},
            "2 groups do not generalize to other groups: it takes 3",
        ),
        *(
            (scores, {"resampled": sizes}, message)
            for sizes in (None, (20, 80))
            for scores, message in (
                ({"base": [0.9, 0.91]}, "The scores of base must be a mapping"),
                ({"base": [0.9, 0.91], "a": [0.9, 0.92]}, "The scores of base must be a mapping"),
                ([0.9, 0.91], "Scores must be a mapping arm -> seed -> score"),
            )
        ),
        *((normal(3, 5), {"resampled": sizes}, "above 0") for sizes in ((0, 10), (10, 0), (-1, 10))),
        (normal(3, 5), {"resampled": (20, 80), "most_seeds": 8}, "resampled goes with"),
        (normal(3, 5), {"resampled": (20, 80), "generalize": "seeds"}, "resampled goes with"),
        (normal(3, 5), {"resampled": (20, 80), "groups": [0, 1]}, "resampled goes with"),
        # as strangers write them in Python
        ({0: {0: 0.9}, 1: {0: 0.9}}, {"base": 0}, "name of an arm is a text, not 0: write '0'"),
        ({"base": {0: 0.9}, "a": {"0": 0.9}}, {}, "name each seed in one way"),
        ({"base": {0: 0.9, 0.0001: 0.9}, "a": {np.int64(1): 0.9, torch.tensor(1): 0.9}}, {}, "two scores with seed 1"),
        ({"base": {0: 0.9}, "a": {0: "90%"}}, {}, "score of a with seed 0 is '90%', and not a number"),
        (normal(2, 3), {"base": 0}, "Unknown arm 0"),
        (normal(2, 3), {"margin": "0.5"}, "margin is a number, not '0.5'"),
        (normal(2, 3), {"chance": "0.1"}, "chance is a score, a number"),
        (normal(2, 3), {"level": 90.0}, "level of scores that are fractions is a fraction too"),
        (normal(2, 3), {"level": math.nan}, "level of scores that are fractions is a fraction too"),
        (normal(2, 3), {"planned": -1}, "planned is a number of seeds or arms, not -1"),
        (normal(2, 3), {"family": 2.5}, "family is a whole number, not 2.5"),
        (normal(2, 3), {"constant": {"z": [0]}}, "constant names an arm without scores: z"),
        (as_scores(images_of(3, 5, 0)), {"groups": [0, "a"] * 20}, "name all in one way"),
    ],
)
def test_what_cannot_be_compared(scores, settings, message):
    with pytest.raises(UserError, match=message):
        vm.decide(scores, **settings)


def test_scores_of_numpy_and_torch_are_those_of_python():
    scores = normal(3, 5)
    plain = repr(vm.decide(scores, family=4))
    for number in (np.int64, torch.tensor, float):
        others = {
            arm: {
                number(seed): torch.tensor(score, dtype=torch.float64, requires_grad=True) for seed, score in of.items()
            }
            for arm, of in scores.items()
        }
        assert repr(vm.decide(others, family=np.int64(4))) == plain


@pytest.mark.parametrize(
    ("more", "unit", "note"),
    [
        ({"A ": {9: 0.9}}, None, "'a' and 'A ' differ in case or spaces alone"),
        ({}, "points", "all scores are at most 1 points: if they are fractions"),
        ({"c": {9: 0.9}}, None, ""),
    ],
)
def test_likely_slips_are_named(more, unit, note):
    scores = {"base": {0: 0.9, 1: 0.91, 2: 0.9}, "a": {0: 0.92, 1: 0.92, 2: 0.93}, **more}
    notes = "; ".join(vm.decide(scores, unit=unit).notes)
    assert note in notes
    assert bool(note) == ("alone" in notes or "at most 1" in notes)


def test_effects_survive_json():
    for effect in vm.decide(normal(3, 5) | {"c": {0: 0.5}}).effects.values():
        again = Effect.from_dict(json.loads(json.dumps(effect.to_dict())))
        assert repr(again) == repr(effect)
        assert again.to_dict() == effect.to_dict()
        assert isinstance(again.verdict, Verdict)
    with pytest.raises(TypeError):
        Effect.from_dict(effect.to_dict() | {"mystery": 1})


def test_tables():
    scores = normal(3, 5)
    scores["a_1"] = {seed: value - 0.4 for seed, value in scores.pop("a").items()}
    result = vm.decide(scores)
    assert repr(result["a_1"]).startswith("Effect(-39.")
    assert repr(result["a_1"]).endswith("n=5, hurts)")
    text = repr(result).splitlines()
    assert text[0].split("  ")[0] == "arm"
    assert "−39." in repr(result)
    assert "| a_1 | −39." in result.to_markdown()
    assert re.search(r"a\\_1 & (\\raggedright\\hspace\{0pt\})?\$-\$39\.", result.to_latex())
    assert result.to_latex().count(r"\tabularnewline") == 3
    assert list(result.to_pandas().index) == list(result.effects)
    assert json.loads(json.dumps(result.to_dict()))["effects"]["a_1"]["verdict"] == "hurts"
    with pytest.raises(UserError, match="Did you mean 'a_1'"):
        result["a1"]
