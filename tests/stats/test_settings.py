"""Arms in several settings: against intervals of scipy, and how often simulated studies claim what is not so."""

import math

import numpy as np
import pytest
from scipy import stats

from vitmods.stats.across import other_sets
from vitmods.stats.criteria import Criteria
from vitmods.stats.decide import decide
from vitmods.stats.images import images_part
from vitmods.stats.read import Table
from vitmods.stats.settings import over_settings
from vitmods.stats.verdict import Verdict
from vitmods.util.errors import UserError


def scores_of(effects, n=4, noise=0.2, seed=0):
    """Scores in points; `effects`: setting -> arm -> effect."""
    rng = np.random.default_rng(seed)
    return {
        setting: {
            arm: {s: float(70 + 5 * b + effect + 0.3 * s + noise * rng.standard_normal()) for s in range(n)}
            for arm, effect in {"base": 0.0, **arms}.items()
        }
        for b, (setting, arms) in enumerate(effects.items())
    }


def averaged(scores, shared_images=True, failed=None, chance=None, **criteria):
    """Of scores: setting -> arm -> seed -> score; `failed` and `chance` may differ by setting."""
    chances = chance if isinstance(chance, dict) else dict.fromkeys(scores, chance)
    tables = {b: Table.of(arms, failed=(failed or {}).get(b), chance=chances[b]) for b, arms in scores.items()}
    return over_settings(tables, Criteria(**criteria), shared_images=shared_images)


def points(scores, **options):
    return averaged(scores, **{"unit": "points", "chance": 0.0} | options)


def differences(scores, setting, arm):
    return np.array([scores[setting][arm][s] - scores[setting]["base"][s] for s in scores[setting][arm]])


def test_one_arm_in_two_settings_has_the_intervals_of_scipy():
    scores = scores_of({"S/16": {"dpn": 1.0}, "Ti/16": {"dpn": 2.0}}, noise=1.0)
    small, tiny = (differences(scores, setting, "dpn") for setting in scores)
    result = points(scores)
    single = 1 - (1 - 0.05) ** (1 / 2)
    for setting, values in (("S/16", small), ("Ti/16", tiny)):
        expected = stats.ttest_1samp(values, 0).confidence_interval(1 - single)
        effect = result.each["dpn"][setting]
        assert (effect.low, effect.high) == pytest.approx(tuple(expected))
    # Half of the difference between the settings, seed by seed: they share their seeds.
    expected = stats.ttest_1samp((small - tiny) / 2, 0).confidence_interval(0.95)
    effect = result.departures["dpn"]["S/16"]
    assert (effect.low, effect.high) == pytest.approx(tuple(expected))
    expected = stats.ttest_1samp((small + tiny) / 2, 0).confidence_interval(0.95)
    assert (result["dpn"].low, result["dpn"].high) == pytest.approx(tuple(expected))
    assert result["dpn"].effect == pytest.approx((small.mean() + tiny.mean()) / 2)


def test_the_average_is_the_study_of_averaged_scores():
    scores = scores_of({b: {"dpn": 1.0, "rms": 0.0} for b in ("S/16", "B/16", "Ti/16")}, noise=1.0)
    means = {
        arm: {s: np.mean([setting[arm][s] for setting in scores.values()]) for s in range(4)} for arm in scores["S/16"]
    }
    expected, result = decide(means, unit="points", chance=0.0), points(scores)
    for arm in ("dpn", "rms"):
        assert (result[arm].low, result[arm].high) == pytest.approx((expected[arm].low, expected[arm].high))
        alone = decide(scores["B/16"], unit="points", chance=0.0)[arm]
        assert result.each[arm]["B/16"].effect == pytest.approx(alone.effect)
        assert result.each[arm]["B/16"].half > alone.half  # one of three settings
    assert result.decision.best == expected.best


def images_of(settings=("S/16", "Ti/16"), arms=("base", "dpn", "rms"), n=3, m=60, seed=0):
    rng = np.random.default_rng(seed)
    noise = {arm: 0.5 * rng.standard_normal(m) for arm in arms}
    shared = rng.standard_normal(m)
    return {
        setting: {
            arm: {s: (1 + shared + noise[arm] + 0.5 * rng.standard_normal(m) > 0).astype(float) for s in range(n)}
            for arm in arms
        }
        for setting in settings
    }


def test_the_images_part_is_that_of_the_sum_averaged():
    scores = images_of()
    gains = [
        np.array([100 * (scores[b]["dpn"][s] - scores[b]["base"][s]) for s in range(3)]) for b in ("S/16", "Ti/16")
    ]
    result = averaged(scores)
    assert result["dpn"].images_sd ** 2 == pytest.approx(float(images_part(sum(gains) / 2, 0.0).variance))
    departure = result.departures["dpn"]["S/16"]
    assert departure.images_sd**2 == pytest.approx(float(images_part((gains[0] - gains[1]) / 2, 0.0).variance))
    assert result.each["dpn"]["S/16"].images_sd ** 2 == pytest.approx(float(images_part(gains[0], 0.0).variance))
    assert result["dpn"].low <= result["dpn"].seeds_low
    assert not result.decision.without_images


def test_images_without_a_score_in_one_setting_are_left_out_in_all():
    """Each setting lacks other images: what is averaged must be the same image in all of them."""
    scores = images_of(n=4, m=80)
    lacking = {"S/16": (0, 30), "Ti/16": (79,)}

    def picked(images):
        return {
            setting: {arm: {seed: x[images] for seed, x in seeds.items()} for arm, seeds in arms.items()}
            for setting, arms in scores.items()
        }

    incomplete, fewer = picked(np.arange(80)), picked(np.setdiff1d(np.arange(80), [0, 30, 79]))
    for setting, images in lacking.items():
        incomplete[setting]["rms"][0][list(images)] = np.nan
    effect, expected = (averaged(scores)["dpn"] for scores in (incomplete, fewer))
    assert effect.effect == pytest.approx(expected.effect)
    assert effect.interval == pytest.approx(expected.interval)


def test_an_effect_that_depends_on_the_setting_is_said_to():
    effects = {"S/16": {"dpn": 0.5, "rms": 1.0}, "B/16": {"dpn": 1.0, "rms": 1.0}, "Ti/16": {"dpn": 3.0, "rms": 1.0}}
    result = points(scores_of(effects, seed=1))
    assert result.depends("dpn")
    assert not result.depends("rms")
    assert result["rms"].verdict == Verdict.HELPS
    assert result.range("dpn").startswith("on average; from +0.")
    assert "(S/16) to +" in result.range("dpn")
    assert result.range("dpn").endswith("(Ti/16)")
    assert "dpn: on average; from" in repr(result)
    assert "rms: on average" not in repr(result)
    assert list(result.each["dpn"]) == ["S/16", "B/16", "Ti/16"]


def test_the_order_of_settings_and_seeds_changes_nothing():
    scores = scores_of({"S/16": {"dpn": 1.0, "rms": 0.0}, "Ti/16": {"rms": 0.0, "dpn": 1.5}}, noise=1.0)
    turned = {
        setting: {arm: dict(reversed(seeds.items())) for arm, seeds in reversed(arms.items())}
        for setting, arms in reversed(scores.items())
    }
    first, other = points(scores), points(turned)
    for arm in ("dpn", "rms"):
        assert first[arm].low == pytest.approx(other[arm].low)
        assert first.each[arm]["S/16"].low == pytest.approx(other.each[arm]["S/16"].low)


def test_an_arm_without_trials_in_one_setting_has_no_average_yet():
    scores = images_of(n=4)
    full = averaged(scores)
    scores["Ti/16"]["rms"] = {}
    result = averaged(scores)
    assert math.isnan(result["rms"].low)
    assert result["rms"].verdict == Verdict.OPEN
    assert math.isnan(result.each["rms"]["Ti/16"].effect)
    assert result.each["rms"]["S/16"].low == pytest.approx(full.each["rms"]["S/16"].low)
    assert not math.isnan(result["dpn"].low)


def test_trials_that_fail_are_counted_in_their_setting_and_on_average():
    scores = scores_of({"S/16": {"dpn": 2.0, "rms": 0.5}, "Ti/16": {"dpn": 2.0, "rms": 0.5}})
    scores["Ti/16"]["dpn"][1] = math.nan
    result = points(scores)
    assert result["dpn"].verdict == Verdict.HELPS
    assert result.each["dpn"]["S/16"].verdict == Verdict.HELPS
    assert result["dpn"].failures == 1
    assert result["rms"].failures == 0
    assert "under Ti/16: 1 of 4 dpn trials diverged" in result.decision.notes
    assert result["dpn"].effect == pytest.approx(2.0, abs=0.4)
    named = points(scores_of({"S/16": {"dpn": 2.0}, "Ti/16": {"dpn": 2.0}}), failed={"S/16": {"dpn": {0: "inf"}}})
    assert named["dpn"].failures == 1


def test_a_trial_that_failed_in_one_setting_has_failed_before_it_ends_in_all():
    scores = scores_of({"S/16": {"dpn": 2.0}, "Ti/16": {"dpn": 2.0}})
    scores["Ti/16"]["dpn"] = dict.fromkeys(range(4), math.nan)
    scores["S/16"] = {arm: {0: seeds[0]} for arm, seeds in scores["S/16"].items()}
    result = points(scores)
    assert result["dpn"].failures == 4
    assert "4 of 4 dpn trials diverged" in result.decision.notes


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda scores: scores.pop("Ti/16"), "two settings or more"),
        (lambda scores: scores["Ti/16"].pop("dpn"), "Ti/16 has other arms"),
    ],
)
def test_what_cannot_be_compared_is_an_error(change, match):
    scores = scores_of({"S/16": {"dpn": 1.0, "rms": 0.0}, "Ti/16": {"dpn": 1.0, "rms": 0.0}})
    change(scores)
    with pytest.raises(UserError, match=match):
        points(scores)


def test_data_sets_on_which_few_images_differ_keep_that_when_they_are_averaged():
    """In each of two sets, six or fewer of 280 images are wrong in some trial."""
    rng = np.random.default_rng(0)
    scores = {name: {arm: {seed: np.ones(280) for seed in range(5)} for arm in ("base", "dpn")} for name in "ab"}
    for arms in scores.values():
        for seed in range(5):
            arms["base"][seed][rng.choice(3)] = 0.0
            arms["dpn"][seed][3 + rng.choice(3, 2, replace=False)] = 0.0
    over = averaged(scores, shared_images=False)
    single = [decide(scores[name])["dpn"] for name in "ab"]
    assert over["dpn"].images_sd == pytest.approx(math.hypot(*(one.images_sd for one in single)) / 2, rel=0.01)


def test_data_sets_have_other_images_even_if_as_many():
    """The images' part of an average is a quarter of the sum of both, and each set has its own chance."""
    rng = np.random.default_rng(3)
    scores = {
        name: {arm: {seed: (rng.random(400) < 0.8).astype(float) for seed in range(4)} for arm in ("base", "dpn")}
        for name in "ab"
    }
    over = averaged(scores, shared_images=False, chance={"a": 0.1, "b": 0.5})
    single = [decide(scores[name], chance=0.1)["dpn"] for name in "ab"]
    assert over["dpn"].images == 800
    assert over["dpn"].images_sd == pytest.approx(math.hypot(*(one.images_sd for one in single)) / 2, rel=0.02)
    for name, one in zip("ab", single, strict=True):
        assert over.each["dpn"][name].effect == pytest.approx(one.effect)
    lost = averaged(scores, shared_images=False, chance={"a": 0.1, "b": 0.85})
    assert lost.each["dpn"]["b"].verdict == lost["dpn"].verdict == Verdict.WITHHELD != lost.each["dpn"]["a"].verdict


def test_three_data_sets_are_a_sample_of_others():
    """A change that helps on each by another amount: that it does on average is shown, of other sets it is open."""
    effects = {"a": {"dpn": 1.0, "rms": 2.0}, "b": {"dpn": 5.0, "rms": 2.2}, "c": {"dpn": 3.0, "rms": 1.8}}
    scores = scores_of(effects, n=6)
    over = averaged(scores, unit="points", chance=0.0, shared_images=False)
    assert over["dpn"].verdict == over["rms"].verdict == over.on_others("rms") == Verdict.HELPS
    assert over.on_others("dpn") == Verdict.OPEN
    alone = [decide(of_set, unit="points", chance=0.0) for of_set in scores.values()]  # as `vitmods evidence` has them
    for arm, other in over.others.items():
        intervals = [(study[arm].effect, *study[arm].interval) for study in alone]
        assert other == pytest.approx(other_sets([[interval] for interval in intervals], arms=2))
    assert over.others["dpn"].spread == pytest.approx(2.0, abs=0.3)
    assert "dpn on data sets like these: +2.9" in repr(over)
    assert over.to_dict()["other_sets"]["dpn"]["verdict"] == "open"
    down = averaged(scores, unit="nats", chance=None, shared_images=False, higher_is_better=False)
    assert down.on_others("rms") == Verdict.HURTS
    for fewer in (averaged(scores, unit="points", chance=0.0), points(scores_of({"a": {"x": 1.0}, "b": {"x": 2.0}}))):
        assert not fewer.others, "settings are not a sample, and two data sets are too few"
        assert "other_sets" not in fewer.to_dict()
    lost = averaged(scores, unit="points", chance={"a": 0.0, "b": 0.0, "c": 90.0}, shared_images=False)
    assert (lost.others, lost.left_out) == ({}, ("c",)), "two are left"


@pytest.mark.parametrize("gain", [0.0, 30.0], ids=["nothing learned", "an arm alone learned"])
def test_a_data_set_on_which_base_has_not_learned_is_part_of_no_average(gain):
    scores = scores_of({name: {"dpn": 1.0 + b} for b, name in enumerate("abc")})
    scores["bad"] = {arm: {s: 10 + g + 0.01 * s for s in range(4)} for arm, g in {"base": 0.0, "dpn": gain}.items()}
    chance, options = dict.fromkeys(scores, 0.0) | {"bad": 10.0}, {"unit": "points", "shared_images": False}
    every = averaged(scores, chance=chance, **options)
    alone = averaged({name: scores[name] for name in "abc"}, chance=0.0, **options)
    assert every.left_out == ("bad",)
    assert every.to_dict()["left_out"] == ["bad"]
    assert set(every.each["dpn"]) == {*"abc", "bad"}
    assert (every["dpn"].effect, every["dpn"].low) == (alone["dpn"].effect, alone["dpn"].low)
    assert every["dpn"].verdict == Verdict.HELPS
    assert every.others["dpn"].effect == pytest.approx(alone.others["dpn"].effect, rel=0.05)
    assert "bad" not in every.range("dpn")
    assert any(note.startswith("without bad, where base has not learned") for note in every.decision.notes)
    one = averaged({name: scores[name] for name in ("a", "bad")}, chance=chance, **options)
    assert one["dpn"].verdict == Verdict.WITHHELD
    assert math.isnan(one["dpn"].effect)
    assert not one.depends("dpn")
    assert "fewer than two data sets: there is no average" in str(one)
