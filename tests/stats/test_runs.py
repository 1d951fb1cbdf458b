"""Plans: factorial designs against brute force, and what can be found against simulations."""

import math
import re
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitmods.stats import sample_size
from vitmods.stats.decide import decide
from vitmods.stats.fit import fit
from vitmods.stats.runs import _GENERATORS, exchange, fraction, plan_factorial, resolution
from vitmods.stats.sample_size import (
    SIMULATED_SEEDS,
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

# (changes, runs) -> resolution; 0 stands for all combinations
DESIGNS = {
    **{(2, 4): 0, (3, 8): 0, (4, 8): 4, (4, 16): 0, (5, 8): 3, (5, 16): 5, (5, 32): 0, (6, 8): 3, (6, 16): 4},
    **{(6, 32): 6, (7, 8): 3, (7, 16): 4, (8, 16): 4, (8, 64): 5},
}


def names(k):
    return list("ABCDEFGH"[:k])


@pytest.mark.parametrize(("k", "runs"), DESIGNS)
def test_a_design_has_base_half_of_the_runs_for_each_change_and_its_resolution(k, runs):
    design = plan_factorial(names(k), runs=runs)
    assert len(set(design.runs)) == len(design.runs) == runs
    assert design.runs[0] == frozenset()
    assert next(iter(design.arms)) == "base"
    # By words over GF(2): no sum of fewer columns than the resolution says is the same in all runs.
    words = [
        word
        for size in range(1, k + 1)
        for word in combinations(names(k), size)
        if len({sum(change in run for change in word) % 2 for run in design.runs}) == 1
    ]
    assert min(map(len, words), default=0) == DESIGNS[k, runs] == (design.resolution or 0)
    assert design.is_orthogonal
    np.testing.assert_allclose(design.relative_variance, 1)
    np.testing.assert_allclose(design.weights, np.where(design.on.T, 2, -2) / runs, atol=1e-12)


@pytest.mark.parametrize(("k", "runs"), DESIGNS)
def test_effects_that_share_a_contrast_are_aliases_and_no_others(k, runs):
    design = plan_factorial(names(k), runs=runs)
    effects = [(name,) for name in design.changes] + list(combinations(design.changes, 2))
    shared = {frozenset(pair) for words in design.aliases for pair in combinations(words, 2)}
    for first, other in combinations(effects, 2):
        # A response that is the one effect alone, read with the contrast of the other.
        response = np.array([(-1) ** len(run & set(first)) for run in design.runs])
        contrast = np.array([(-1) ** len(run & set(other)) for run in design.runs])
        assert (frozenset((first, other)) in shared) == (abs(response @ contrast) == runs), (first, other)


@pytest.mark.parametrize(("k", "pairs", "aliased"), [(3, 3, 0), (4, 3, 3), (5, 10, 0), (6, 7, 7), (7, 7, 7), (8, 7, 7)])
def test_default_designs_give_the_pairs_that_they_are_listed_with(k, pairs, aliased):
    design = plan_factorial(names(k))
    assert (len(design.pairs), len(design.aliases)) == (pairs, aliased)
    assert design.warnings == ()
    assert len(plan_factorial(names(6), runs=32).pairs) == 15
    assert len(plan_factorial(names(8), runs=64).pairs) == 28


def test_aliased_pairs_add_with_the_same_sign():
    design = plan_factorial(names(8))
    for words, weights in zip(design.pairs, design.pair_weights, strict=True):
        for pair in words:
            response = np.array([1 if set(pair) <= run else 0 for run in design.runs])
            assert weights @ response == pytest.approx(0.5)


@pytest.mark.parametrize(("k", "runs"), [key for key in DESIGNS if DESIGNS[key]])
def test_fractions_are_those_of_pydoe(k, runs):
    pydoe = pytest.importorskip("pydoe", reason="compares with the package pydoe")
    words = _GENERATORS[k, runs]
    letters = names(k - len(words))
    signed = [("" if len(word) % 2 else "-") + word.lower() for word in words]
    coded = pydoe.fracfact(" ".join([*(letter.lower() for letter in letters), *signed]))
    assert {tuple(row > 0) for row in coded} == {tuple(row) for row in fraction(k, runs)}


def test_resolution_three_is_asked_for_and_warned_of():
    design = plan_factorial(names(5), runs=8)
    assert "A with B x D and C x E" in design.warnings[0]
    assert design.pairs == ((("B", "C"), ("D", "E")), (("B", "E"), ("C", "D")))  # what is mixed with no change


# conflicts, runs -> variances of effects, 1 = orthogonal
EXCHANGED = [
    (4, ["AB"], 8, [2.0, 1.5, 1, 1]),
    (5, ["AB"], 8, [1.5, 1.5, 1, 1, 1]),
    (6, ["AB", "BC", "AC"], 12, [3.0, 2.25, 2.25, 1, 1, 1]),
    (7, ["AB"], 16, [5 / 3, 4 / 3, 1, 1, 1, 1, 1]),
]


@pytest.mark.parametrize(("k", "conflicts", "runs", "variances"), EXCHANGED)
def test_exchange_reaches_the_known_variances_without_a_conflict(k, conflicts, runs, variances):
    design = plan_factorial(names(k), conflicts)
    assert len(design.runs) == len(set(design.runs)) == runs
    assert design.runs[0] == frozenset()
    assert not any(set(pair) <= run for pair in conflicts for run in design.runs)
    assert (np.sort(design.relative_variance)[::-1] <= np.array(variances) * 1.02).all()
    assert design.relative_variance[0] > 1.02
    assert (design.resolution, design.pairs, design.aliases) == (None, (), ())
    assert "A with B" in design.warnings[0]


def test_exchange_finds_the_largest_determinant_of_all_choices():
    rows = np.array([row for row in product((False, True), repeat=4) if not (row[0] and row[1])])
    rows = rows[np.argsort(rows.sum(1), kind="stable")]

    def determinant(chosen):
        x = np.column_stack([np.ones(len(chosen)), chosen])
        return np.linalg.det(x.T @ x)

    for runs in (5, 6, 8):
        best = max(determinant(rows[[0, *others]]) for others in combinations(range(1, len(rows)), runs - 1))
        assert determinant(exchange(rows, runs)) == pytest.approx(best)


@settings(deadline=None, max_examples=40)
@given(
    k=st.integers(3, 8),
    conflicts=st.sets(st.sampled_from(list(combinations("ABCDEFGH", 2))), max_size=4),
    extra=st.integers(0, 5),
)
def test_any_conflicts_and_sizes_give_a_design_that_can_be_estimated(k, conflicts, extra):
    conflicts = [pair for pair in conflicts if set(pair) <= set(names(k))]
    default = plan_factorial(names(k), conflicts)
    assert set(default.changes) | set(default.left_out) == set(names(k))
    if not default.conflicts:
        return
    possible = sum(
        not any(set(pair) <= set(run) for pair in default.conflicts)
        for size in range(len(default.changes) + 1)
        for run in combinations(default.changes, size)
    )
    design = plan_factorial(default.changes, default.conflicts, min(possible, len(default.changes) + 1 + extra))
    assert not any(set(pair) <= run for pair in design.conflicts for run in design.runs)
    effects = np.random.default_rng(0).normal(size=len(design.changes))
    np.testing.assert_allclose(design.weights @ (3 + design.on @ effects), effects, atol=1e-9)


def test_conflicts_that_are_the_same_or_that_exclude_most_changes():
    assert plan_factorial(names(6), ["AB"]).runs == plan_factorial(names(6), ["BA"]).runs
    design = plan_factorial(names(5), ["EA", "EB", "EC"])
    assert (design.changes, design.left_out) == (("A", "B", "C", "D"), ("E",))
    assert len(design.runs) == 8
    assert design.is_orthogonal
    assert design.warnings[0].startswith("E excludes most")
    on = np.array([[0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=bool)
    assert resolution(on) == 3
    assert resolution(on[:, :2]) is None


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((["A"],), "two or more"),
        ((["A", "B"], ["AB"]), "one at a time"),
        ((["A", "A", "B"],), "twice"),
        ((list("ABCDEFGHI"),), "up to 8"),
        ((["A", "B", "C"], ["AX"]), "not A and X"),
        ((["A", "B", "C"], (), 6), "8 runs, not of 6"),
        ((list("ABCDE"), (), 12), "8, 16 or 32 runs"),
        ((list("ABCD"), ["AB"], 4), "5 to 12 runs, not of 4"),
        ((list("ABCD"), ["AB"], 13), "5 to 12 runs, not of 13"),
        ((["A", "B", "A+B"],), "without +"),
    ],
)
def test_what_has_no_design_is_an_error(arguments, match):
    with pytest.raises(UserError, match=match):
        plan_factorial(*arguments)


SEEDS = (3, 4, 5, 6, 8, 12, 16, 32)
# (arms, level): half-width and detectable effect for each number of seeds, in sd of one trial
TABLE = {
    (1, 0.05): "2.93 4.60 2.00 3.01 1.61 2.37 1.38 2.02 1.13 1.64 0.87 1.26 0.74 1.06 0.50 0.72",
    (2, 0.05): "3.11 4.50 2.28 3.22 1.84 2.60 1.60 2.23 1.30 1.83 1.01 1.41 0.86 1.19 0.59 0.81",
    (4, 0.05): "2.99 4.49 2.33 3.34 1.89 2.62 1.70 2.32 1.43 1.94 1.13 1.53 0.96 1.29 0.66 0.89",
    (8, 0.05): "3.13 4.83 2.56 3.62 2.08 2.83 1.86 2.52 1.57 2.08 1.24 1.64 1.05 1.39 0.72 0.94",
    (4, 0.01): "4.23 6.65 3.16 4.49 2.44 3.29 2.17 2.88 1.81 2.38 1.41 1.82 1.19 1.54 0.81 1.04",
}


ALWAYS = ((1, 0.05), (4, 0.01))


@pytest.mark.parametrize(
    ("k", "alpha"), [*ALWAYS, *(pytest.param(*row, marks=pytest.mark.long) for row in sorted(TABLE.keys() - ALWAYS))]
)
def test_the_table(k, alpha):
    expected = iter(map(float, TABLE[k, alpha].split()))
    for n in SEEDS:
        result = detectable(k, n, alpha)
        assert result.half == pytest.approx(next(expected), rel=0.03)
        assert result.effect == pytest.approx(next(expected), rel=0.03)


def test_detectable_effects_are_detected():
    scores = np.random.default_rng(5).standard_normal((10_000, 5, 5))
    scores[:, 1] += detectable(4, 5).effect
    result = fit(scores).against
    assert (result.estimate > against_base(result, None, 0.05, 4).seeds)[:, 0].mean() == pytest.approx(0.8, abs=0.03)
    scores = np.random.default_rng(0).standard_normal((10_000, 5, 3))
    scores[:, 1] -= 4.6
    result = fit(scores).against
    assert (result.estimate < -against_base(result, None, 0.05, 4).seeds)[:, 0].mean() >= 0.8


def test_beyond_what_is_simulated_and_with_images():
    before, after = detectable(4, SIMULATED_SEEDS), detectable(4, SIMULATED_SEEDS + 1)
    assert 0.97 < after.effect / before.effect < 1
    assert detectable(4, 4 * SIMULATED_SEEDS).effect == pytest.approx(before.effect / 2)
    assert detectable(4, 10_000, images=0.5).effect > 0.5 * 2.4
    assert detectable(4, 8, images=0.5).effect > detectable(4, 8).effect
    assert detectable(1, 1) == Findable(math.inf, math.inf, math.inf)


def test_seeds_for_is_the_least_number_and_what_images_resolve():
    n = seeds_for(1.8, 4)
    assert detectable(4, n).equivalent <= 1.8 < detectable(4, n - 1).equivalent
    assert seeds_for(0.0, 4) is None
    assert finest(0.5, 4) == pytest.approx(0.5 * 2.442, abs=1e-3), "the critical value of four arms and endless seeds"
    enough = images_for(1.0, sd=0.6, images_sd=0.5, m=300, k=4)
    assert enough == 2400
    assert detectable(4, 32, 0.028, 0.18).equivalent * 0.6 <= 1.0
    assert images_for(1.0, sd=1.5, images_sd=0.5, m=300, k=4) is None, "endless images and 32 seeds do not either"


@pytest.mark.parametrize(("images", "disagree", "k", "n"), [(300, 0.1, 4, 5), (300, 0.3, 4, 5), (1000, 0.2, 1, 5)])
def test_the_number_before_training_is_near_the_interval_after_it(images, disagree, k, n):
    """Trainings that disagree on so many of the images, and an arm and base on a sixth of that for every seed: the
    median interval is within 1.5 times what `vitmods data`, the dry run and a budget promise."""
    promised = float(re.search(r"±([\d.]+)", sample_size.resolution(images, k=k, n=n))[1])
    rng, halves = np.random.default_rng(0), []
    for _ in range(60):
        uncertain = rng.random((1, 1, images)) < 2 * disagree
        own = rng.random((k + 1, 1, images)) < disagree / 12
        right = np.where(uncertain, rng.random((k + 1, n, images)) < 0.5, True) & ~own
        scores = {f"{a}": dict(enumerate(right[a] * 1.0)) for a in range(k + 1)}
        halves += [effect.half for effect in decide(scores, base="0").effects.values()]
    assert promised / 1.5 < np.median(halves) < promised * 1.5


def test_ranges_and_budgets():
    assert sd_range(1, 3) == pytest.approx((0.7, 2.3), abs=0.05)
    assert sd_range(1, 1) == pytest.approx((0.6, 8.0), abs=0.05)
    assert sd_range(2, 12) == pytest.approx((1.6, 2.8), abs=0.05)
    assert images_at_worst(0.04, 400) == 1.0
    assert seeds_within(3600, 100, 120, 4) == 6
    with pytest.raises(
        UserError, match=r"7 arms and base x 3 seeds take 42 min, more than 18 min; 2 arms x 3 seeds fit"
    ):
        seeds_within(18 * 60, 100, 105, 7)
    with pytest.raises(UserError, match="not even one arm"):
        seeds_within(10, 100, 100, 7)
    with pytest.raises(UserError, match="take 10 min, more than the budget leaves for trials"):
        seeds_within(-3, 100, 100, 1)
