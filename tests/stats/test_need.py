"""What it would take to decide an open arm."""

import dataclasses

import numpy as np
import pytest

import vitmods as vm
from vitmods.stats.plan import detectable, needed
from vitmods.stats.sequential import nominal_level
from vitmods.stats.verdict import Verdict


def study(shift, sd=0.02, n=5, arms=2):
    """Decided, with an effect of arm `a` of exactly `shift`."""
    scores = 0.8 + sd * np.random.default_rng(1).standard_normal((arms + 1, n))
    scores[1] += shift - (scores[1] - scores[0]).mean()
    return vm.decide({name: dict(enumerate(row)) for name, row in zip(("base", *"abcdefgh"), scores)})["a"]


def test_decided_arms_and_those_without_a_spread_need_nothing():
    assert needed(study(0.2)) is None
    assert needed(study(0.2, n=1)) is None


def test_seeds_for_the_effect_that_was_seen():
    """Never those for the margin under an effect ten times as large."""
    effect = study(-0.03, sd=0.02, n=4, arms=4)
    need = needed(effect)
    assert need.low <= need.seeds <= (need.high or 32)
    size = 3.0 / effect.sd
    assert detectable(4, need.seeds, nominal_level(need.seeds)).effect <= size
    assert detectable(4, need.seeds - 1, nominal_level(need.seeds - 1)).effect > size
    assert str(need).startswith(f"to find an effect of the size seen (3.00 points) takes about {need.seeds} seeds (")


@pytest.mark.parametrize(("sd", "says"), [(2.0, "takes more than 32 seeds: out of reach"), (0.4, "takes about")])
def test_within_the_margin_it_is_the_margin(sd, says):
    text = str(needed(dataclasses.replace(study(0.001), verdict=Verdict.OPEN, sd=sd)))
    assert text.startswith("to rule out a difference of 0.5 points")
    assert says in text


def test_where_only_more_images_would_do():
    x = np.ones((2, 8, 60))
    x[0, :, :9] = x[1, :, 9:15] = 0  # every trial of an arm gets the same images wrong
    x[:, range(8), range(20, 28)] = 0
    x[1, range(8), range(30, 38)] = np.arange(8) % 2
    found = vm.decide({name: dict(enumerate(row)) for name, row in zip(("base", "a"), x)})
    need = needed(found["a"])
    assert need.images > 60
    what = "to find an effect of the size seen (4.17 points)"
    assert str(need) == f"{what} takes about 1,100 test images instead of 60: more seeds cannot do it"
