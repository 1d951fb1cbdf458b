"""How likely more trials are to decide an open arm, against what simulated studies do."""

import dataclasses

import numpy as np
import pytest

import vitmods as vm
from vitmods.stats.fit import fit
from vitmods.stats.sample_size import FEASIBLE_CHANCE, FORECAST_SEEDS, chance, detectable, forecast
from vitmods.stats.sequential import decided, futile, looks, nominal_level
from vitmods.stats.verdict import Verdict
from vitmods.stats.width import against_base

SIZES = [(1.5, 2_000), *(pytest.param(tau, 40_000, marks=pytest.mark.long) for tau in (1.0, 1.5))]


def study(shift, sd=0.02, n=5, arms=2):
    """Decided, with an effect of arm `a` of exactly `shift`."""
    scores = 0.8 + sd * np.random.default_rng(1).standard_normal((arms + 1, n))
    scores[1] += shift - (scores[1] - scores[0]).mean()
    return vm.decide({name: dict(enumerate(row)) for name, row in zip(("base", *"abcdefgh"), scores)})["a"]


def opened(shift, **values):
    return dataclasses.replace(study(shift), verdict=Verdict.OPEN, **values)


def test_decided_arms_and_those_without_a_spread_need_nothing():
    assert forecast(study(0.15)) is None
    assert forecast(study(0.15, n=1)) is None
    assert forecast(dataclasses.replace(study(-0.03), overlap=0.2)) is None


def test_more_seeds_and_larger_effects_make_a_verdict_likelier():
    chances = [list(forecast(opened(shift)).chances.values()) for shift in (0.01, 0.02, 0.04)]
    assert np.all(np.diff(chances, axis=0) > 0), "a larger effect"
    assert np.all(np.diff(chances, axis=1) > 0), "more seeds"
    assert list(forecast(opened(0.02, n=8)).chances) == [16, 32]


@pytest.mark.parametrize(
    ("effect", "seeds", "says"),
    [
        (opened(0.04, sd=2.0), 8, "chance of a verdict 80 % with 8 seeds, 90 % with 16, 95 % with 32"),
        (opened(0.01, sd=2.0), 32, "chance of a verdict 5 % with 8 seeds, 15 % with 16, 40 % with 32"),
        (opened(0.001, sd=0.3), 16, "chance of a verdict 25 % with 8 seeds, 75 % with 16, 95 % with 32"),
        (opened(0.002, n=16, df=48.0), 0, "a verdict is not feasible with up to 32 seeds (chance below 10 %)"),
        (opened(0.02, n=32), 0, "a verdict is not feasible with up to 32 seeds (chance below 10 %)"),
    ],
)
def test_what_is_said(effect, seeds, says):
    assert str(forecast(effect)) == says
    assert forecast(effect).seeds == seeds


def test_a_verdict_at_any_look_counts_and_a_futile_arm_ends():
    effect = opened(0.01)
    wide, narrow = 9.0, 0.01
    assert chance(effect, {6: wide, 16: wide}) == 0
    assert chance(effect, {6: narrow, 16: wide}) > 0.99
    assert chance(effect, {6: wide, 16: narrow}) > 0.99
    alone, given_up = chance(effect, {8: 1.9, 16: 1.2}), chance(effect, {8: 1.9, 16: 1.2}, gives_up=True)
    assert 0 < given_up < alone < 0.5


def outcomes(size, k, n, tau, margin=0.3):
    """(forecast, whether it was decided, maximum) of each open arm of simulated studies that go on, whose effects are
    N(0, tau) in sd of one trial."""
    rng, most = np.random.default_rng(3), FORECAST_SEEDS[-1]
    scores = rng.standard_normal((size // (12 * k), k + 1, most))
    scores[:, 1:] += tau * rng.standard_normal((len(scores), k, 1))
    scores = 0.8 + scores / 100
    first = [vm.decide({str(a): dict(enumerate(row[:n])) for a, row in enumerate(s)}, "0", margin) for s in scores]
    chances = [[forecast(effect) for effect in decision.effects.values()] for decision in first]
    ended = []
    for last in (m for m in FORECAST_SEEDS if m > n):
        ever = np.zeros((len(scores), k), bool)
        running = ~ever
        for now in (m for m in looks(last) if m > n):
            against = fit(100 * scores[..., :now]).against
            half = against_base(against, None, nominal_level(last, now), k).seeds
            ever |= running & decided(against.estimate, half, margin)
            running &= ~ever & ~futile(against, None, "seeds", margin, k, last)
        ended += [(chances[s][a].chances[last], e, last) for (s, a), e in np.ndenumerate(ever) if chances[s][a]]
    return np.array(ended)


@pytest.mark.parametrize(("tau", "size"), SIZES)
def test_chances_are_calibrated(tau, size):
    ended = np.concatenate([outcomes(size, k, n, tau) for k, n in ((1, 5), (4, 5), (2, 8))])
    predicted, was_decided, most = ended.T
    for low in np.arange(0, 1, 0.2):
        inside = (predicted >= low) & (predicted < low + 0.2)
        if inside.sum() > 20:
            error = 3 * np.sqrt(0.25 / inside.sum())
            assert abs(was_decided[inside].mean() - predicted[inside].mean()) < 0.07 + error, low
    hopeless = (predicted < FEASIBLE_CHANCE) & (most == FORECAST_SEEDS[-1])
    assert not hopeless.any() or was_decided[hopeless].mean() < 0.2


@pytest.mark.parametrize(("sd", "images"), [(0.83, 680), (20.0, 0)])
def test_more_images_are_recommended_only_where_they_decide(sd, images):
    x = np.ones((2, 8, 60))
    x[0, :, :9] = x[1, :, 9:15] = 0  # every trial of an arm gets the same images wrong
    x[:, range(8), range(20, 28)] = 0
    x[1, range(8), range(30, 38)] = np.arange(8) % 2
    effect = dataclasses.replace(vm.decide({name: dict(enumerate(row)) for name, row in zip("ba", x)}, "b")["a"], sd=sd)
    text = "a verdict is not feasible with up to 32 seeds (chance below 10 %)"
    more = f"{text} and 60 test images; about {images} test images would make it feasible"
    assert str(forecast(effect)) == (more if images else text)


def test_half_widths_with_images_are_those_of_the_intervals():
    for n, images in ((8, 0.2), (16, 0.5), (32, 1.0)):
        seeds, both = detectable(4, n).half, detectable(4, n, images=images).half
        assert seeds * np.sqrt(1 + n * images**2 / 2) == pytest.approx(both, rel=0.1)
