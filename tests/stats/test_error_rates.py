"""How often studies claim what is not so: simulated studies through the code that decides real ones.

A bound is the promised rate and three standard errors of the simulation. Where the rate is known to be above the
promise, it is pinned between two bounds.
"""

from itertools import product

import numpy as np
import pytest

from vitmods.stats.decide import decide, head_to_head, may_be_best
from vitmods.stats.expected import expected
from vitmods.stats.fit import fit
from vitmods.stats.images import clusters, images_part
from vitmods.stats.sequential import (
    INTERIM_LEVEL,
    decided,
    futile,
    interim_level,
    looks,
    next_maximum,
    nominal_level,
    steps_of,
)
from vitmods.stats.width import against_base, bounds, half_width

MANY = 20_000  # studies of which each takes microseconds
FAST = [pytest.param(2_000, id="2000"), pytest.param(20_000, id="20000", marks=pytest.mark.long)]


def bound(promised, studies):
    return promised + 3 * np.sqrt(promised * (1 - promised) / studies)


def gaussian(studies, k, n, seed=0, base_sd=1.0):
    scores = np.random.default_rng(seed).standard_normal((studies, k + 1, n))
    scores[:, 0] *= base_sd
    return scores


def claims(scores, alpha=0.05, family=None):
    """Which studies claim a difference."""
    result = fit(scores).against
    half = against_base(result, None, alpha, family or scores.shape[1] - 1).seeds
    return (np.abs(result.estimate) > half).any(-1)


@pytest.mark.parametrize(
    ("base_sd", "n", "k", "rate"),
    [
        *((1.0, n, k, 0.05) for n in (4, 8) for k in (1, 4, 8)),
        *((sd, n, k, 0.055) for sd in (2.0, 3.0) for n, k in ((3, 4), (3, 8), (5, 4), (5, 8))),
    ],
)
def test_fixed_seeds(base_sd, n, k, rate):
    assert claims(gaussian(MANY, k, n, base_sd=base_sd)).mean() <= bound(rate, MANY)


@pytest.mark.parametrize(
    ("followers", "n", "base_sd", "low", "high"),
    [
        *((2, n, base_sd, *rates) for n, base_sd, rates in ((3, 1, (0.06, 0.08)), (3, 3, (0.09, 0.12)))),
        (2, 5, 3, 0.06, 0.085),
        *((1, n, 1, 0.025, 0.065) for n in (4, 5, 8)),
    ],
)
def test_arms_that_follow_base_are_a_known_excess(followers, n, base_sd, low, high):
    scores = gaussian(MANY, 4, n, base_sd=base_sd)
    following = slice(1, 1 + followers)
    scores[:, following] = 0.97 * scores[:, :1] + np.sqrt(1 - 0.97**2) * scores[:, following]
    assert low < claims(scores).mean() < high


@pytest.mark.parametrize("studies", FAST)
@pytest.mark.parametrize(("k", "n"), [(2, 5), (4, 3), (4, 5)])
def test_a_reference_that_is_chosen_after_the_scores(k, n, studies):
    """All arms are tried as the reference: the family of k arms is false too often, that of all pairs is not."""
    scores, chosen, pairs = gaussian(studies, k, n), np.zeros(studies, bool), np.zeros(studies, bool)
    for reference in range(k + 1):
        result = fit(scores, reference).against
        d = np.abs(result.estimate)
        chosen |= (d > against_base(result, None, 0.05, k).seeds).any(-1)
        pairs |= (d > half_width(result.variance, result.pooled_df, None, 0.05, k * (k + 1) // 2).seeds).any(-1)
    assert pairs.mean() <= bound(0.05, studies)
    assert k == 2 or chosen.mean() > 0.07


def test_arms_that_are_added_later():
    """Ever a false claim, where intervals are read at 2, 4 and 8 arms: a known excess, and none in a family of 8."""
    scores = gaussian(MANY // 2, 8, 5)
    grown, planned = (
        np.any([claims(scores[:, : k + 1], family=family) for k in (2, 4, 8)], 0).mean() for family in (None, 8)
    )
    assert 0.055 < grown < 0.08
    assert planned <= bound(0.05, MANY // 2)


@pytest.mark.parametrize(("k", "n"), [(1, 5), (4, 5)])
def test_a_study_that_is_read_after_each_trial(k, n):
    studies = 2_000
    scores = gaussian(studies, k, n)
    so_far, ever = np.full(scores.shape, np.nan), np.zeros(studies, bool)
    for seed in range(n):
        for arm in range(k + 1):
            so_far[:, arm, seed] = scores[:, arm, seed]
            complete = seed == n - 1 and arm == k
            if seed > 1:
                ever |= claims(so_far, 0.05 if complete else interim_level(seed + (arm == k), n))
    assert ever.mean() <= bound(0.06, studies)


def test_seeds_that_are_added_to_a_fixed_study_are_a_known_excess():
    """5 seeds, and then more, one at a time: read at the looks of the next calibrated maximum."""
    scores = gaussian(4_000, 4, 16)
    ever = claims(scores[..., :5], 0.05)
    for n in (6, 8, 10, 12, 16):
        ever |= claims(scores[..., :n], nominal_level(next_maximum(n), n, INTERIM_LEVEL))
    assert 0.055 < ever.mean() < 0.08


@pytest.mark.parametrize("groups", [3, 8, 20])
def test_few_groups_of_images(groups):
    studies = 1_000
    labels, n, wrong = np.repeat(np.arange(groups), 12), 5, 0
    rng = np.random.default_rng(0)
    for _ in range(studies // 100):
        noise = 0.6 * rng.standard_normal((100, 2, 1, len(labels)))
        noise += 0.5 * rng.standard_normal((100, 2, 1, groups))[..., labels]
        latent = 1.3 + rng.standard_normal((100, 1, 1, len(labels))) + noise
        x = (latent + 0.7 * rng.standard_normal((100, 2, n, len(labels))) > 0) * 100.0
        grouped = clusters(x, labels)
        result = fit(x.mean(-1), floor=50 / len(labels)).against
        part = images_part(grouped[:, 1:] - grouped[:, :1])
        wrong += (np.abs(result.estimate) > against_base(result, part, 0.05, 1).total).any(-1).sum()
    assert wrong / studies <= 0.06


def test_near_a_hundred_percent():
    """An arm that is worse by 0.4 points is called `no worse` by 0.39 where few images happen to differ."""
    rng, studies, n, m, margin = np.random.default_rng(0), 2_000, 5, 280, 0.39
    wrong = {0.0: 0, 100.0: 0}
    base, arm = rng.random((2, studies, 1, m)) < np.array([0.001, 0.005])[:, None, None, None]
    noise = rng.random((2, studies, n, m)) < 0.8
    x = np.stack([~(base & noise[0]), ~((base | arm) & noise[1])], 1) * 100.0
    result = fit(x.mean(-1), floor=50 / m).against
    for step in wrong:
        half = against_base(result, images_part(x[:, 1:] - x[:, :1], step), 0.05, 1).total
        wrong[step] = (result.estimate - half > -margin).mean()
    assert wrong[100.0] <= 0.04
    assert wrong[0.0] > 0.1


@pytest.mark.parametrize("studies", FAST)
@pytest.mark.parametrize(
    ("k", "hard"), [(1, (0.001, 0.005)), (4, (0.001, 0.005)), (1, (0.005, 0.02)), (4, (0.005, 0.02))]
)
def test_ends_near_a_hundred_percent(k, hard, studies):
    """99.92 against 99.60 % of 1,000 images, and 99.6 against 98.4: each end misses the truth in 3 % of studies, and
    intervals are hardly wider."""
    rng, n, m, chunk, wrong, old, width = np.random.default_rng(0), 5, 1000, 100, np.zeros(2), 0, np.zeros(2)
    of_base, more = hard[0], hard[1] - hard[0]
    truth = -80 * (1 - of_base) * more
    for _ in range(studies // chunk):
        base, arm = rng.random((chunk, 1, 1, m)) < of_base, rng.random((chunk, k, 1, m)) < more
        missed = rng.random((chunk, k + 1, n, m), dtype=np.float32) < 0.8
        x = ~(np.concatenate([base, base | arm], 1) & missed) * 100.0
        result = fit(x.mean(-1), floor=50 / m).against
        part = images_part(x[:, 1:] - x[:, :1], 100.0)
        half = against_base(result, part, 0.05, k)
        low, high = bounds(result.estimate, half, part)
        wrong += [(low > truth).any(-1).sum(), (high < truth).any(-1).sum()]
        old += (result.estimate - half.total > truth).any(-1).sum()
        width += [(high - low).mean(), 2 * half.total.mean()]
    assert (wrong / studies).max() <= bound(0.03, studies)
    assert old / studies > 0.037
    assert width[0] < 1.2 * width[1]


def test_far_from_a_hundred_percent_ends_are_as_far_from_the_effect():
    """An arm that follows base: 2 % of the images differ, all in one direction. So they do at 98 %, but for a skew."""
    rng = np.random.default_rng(0)

    def ends(accuracy):
        right = rng.permutation(1000) < 1000 * accuracy
        scores = {"base": {}, "a": {}}
        for seed in range(5):
            flips = rng.random(1000) < 0.002
            scores["base"][seed] = (right & ~flips) * 1.0
            scores["a"][seed] = (right & ~flips & (np.arange(1000) > 15)) * 1.0
        effect = decide(scores)["a"]
        return (effect.high - effect.effect) / (effect.effect - effect.low)

    assert ends(0.6) == pytest.approx(1)
    assert ends(0.99) < 0.9


def test_ordinary_images_have_ends_as_before():
    """Where 5 % of the images or more differ, an interval is as wide on both sides."""
    x = latent(20, 1, 5, 300, 0)
    part = images_part(x[:, 1:] - x[:, :1], 100.0)
    result = fit(x.mean(-1)).against
    half = against_base(result, part, 0.05, 1)
    np.testing.assert_array_equal(bounds(result.estimate, half, part)[1], result.estimate + half.total)


def latent(studies, k, n, m, seed):
    """Right or wrong on new images: an image is difficult for all arms alike, and for each arm in its own way."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((studies, 1, 1, m))
    noise = 0.6 * rng.standard_normal((studies, k + 1, 1, m))
    trial = rng.standard_normal((studies, k + 1, n, m), dtype=np.float32)
    trial += 0.05 * rng.standard_normal((studies, k + 1, n, 1))
    return (1.3 + shared + noise + 0.7 * trial > 0) * 100.0


@pytest.mark.parametrize("n", [4, 10])
@pytest.mark.parametrize("studies", FAST)
def test_new_seeds_and_new_images(n, studies):
    k, m, chunk, wrong, seeds_only = 4, 300, 100, 0, 0
    for part in range(studies // chunk):
        x = latent(chunk, k, n, m, part)
        result = fit(x.mean(-1), floor=50 / m).against
        half = against_base(result, images_part(x[:, 1:] - x[:, :1]), 0.05, k)
        d = np.abs(result.estimate)
        wrong += (d > half.total).any(-1).sum()
        seeds_only += (d > half.seeds).any(-1).sum()
    assert wrong / studies <= 0.06
    assert seeds_only > wrong
    if n == 10:
        assert seeds_only / studies > 0.10  # what a test set of 300 images does to those who forget it


def until_decided(
    studies, k, most, effect=0.0, seed=0, rho=0.0, base_sd=1.0, margin=1.0, level=nominal_level, known=0, arm_sd=1.0
):
    """Which studies make a false claim, which detect the effect of the first arm, and how many trials they take: with
    arms that stop, futile ones too, and the tables that this leaves. Base's `known` trials are not counted."""
    rng = np.random.default_rng(seed)
    scores = np.sqrt(1 - rho) * rng.standard_normal((studies, k + 1, max(most, known)))
    scores[:, 0] *= base_sd
    scores[:, 1] *= arm_sd
    scores += np.sqrt(rho) * rng.standard_normal((studies, 1, max(most, known)))
    truth = np.array([effect, *[0] * (k - 1)])
    scores[:, 1:] += truth[:, None]
    wrong, detected, trials = np.zeros(studies, bool), np.zeros(studies, bool), np.zeros(studies)
    running, before = np.ones((studies, k), bool), 0
    for n in looks(most, steps_of(known)):
        rows = np.flatnonzero(running.any(-1))
        live = running[rows]
        trials[rows] += (n - before) * live.sum(-1) + max(n, known) - max(before, known)
        until_now = scores[rows, :, : max(n, known)]
        until_now[:, 1:, n:] = np.nan
        result = fit(until_now).against
        width = against_base(result, None, level(most, n), k)
        estimate, half = result.estimate + width.shift, width.seeds
        may = (n > 2) | (estimate < 0)  # two seeds show nothing favorable
        claimed = live & (np.abs(estimate) > half) & may
        wrong[rows] |= (claimed & (np.sign(estimate) != np.sign(truth))).any(-1)
        detected[rows] |= claimed[:, 0] & (estimate[:, 0] * effect > 0)
        stopped = live & ((decided(estimate, half, margin) & may) | futile(result, None, "seeds", margin, k, most))
        running[rows] &= ~stopped
        gone = np.zeros((studies, k + 1), bool)
        gone[rows, 1:] = stopped
        gone = gone[..., None] & (np.arange(scores.shape[-1]) >= n)
        scores[gone] = np.nan
        before = n
    return wrong, detected, trials


@pytest.mark.parametrize("studies", FAST)
@pytest.mark.parametrize(("k", "rho"), [(1, 0.0), (4, 0.0), (4, 0.6)])
def test_seeds_until_decided(k, rho, studies):
    wrong, _, _ = until_decided(studies, k, 16, rho=rho)
    assert wrong.mean() <= bound(0.05, studies)


@pytest.mark.parametrize("studies", FAST)
@pytest.mark.parametrize("k", [1, 4])
def test_a_noisy_base_until_decided(k, studies):
    wrong, _, _ = until_decided(studies, k, 16, base_sd=3.0)
    assert wrong.mean() <= bound(0.05, studies)


@pytest.mark.parametrize("studies", FAST)
@pytest.mark.parametrize("base_sd", [1.0, 3.0])
@pytest.mark.parametrize(("k", "most"), [*product((1, 2, 4, 8), (6, 8, 12)), (1, 24), (2, 24), (4, 32)])
def test_every_look_of_any_maximum(k, most, base_sd, studies):
    """Ever a false claim, if no arm stops."""
    scores = gaussian(studies, k, most, base_sd=base_sd)
    ever = np.any([claims(scores[..., :n], nominal_level(most, n)) for n in looks(most)], 0)
    assert ever.mean() <= bound(0.05, studies)


@pytest.mark.parametrize(("k", "power"), [(1, 0.91), (4, 0.78)])
def test_rising_levels_detect_more_than_a_constant_one(k, power):
    """An effect of 1.4 sd, in at most 10 % more trials; the constant level has the same rate of false claims."""
    _, detected, trials = until_decided(2_000, k, 16, 1.4, margin=0.3)
    _, before, fewer = until_decided(2_000, k, 16, 1.4, margin=0.3, level=lambda most, n: 0.010)
    assert detected.mean() >= power > before.mean() + 0.05
    assert trials.mean() < 1.1 * fewer.mean()


SPREADS = [{}, {"base_sd": 3.0}, {"base_sd": 1 / 3}, {"arm_sd": 3.0}, {"rho": 0.6}]
KNOWN = [
    pytest.param(
        k, known, spread, id=f"{k}-{known}-{spread}", marks=[pytest.mark.long] * bool(spread and (k, known) != (4, 16))
    )
    for k in (1, 4)
    for known in (8, 16, 32)
    for spread in SPREADS
]


@pytest.mark.parametrize("studies", FAST)
@pytest.mark.parametrize(("k", "known", "spread"), KNOWN)
def test_a_known_base(k, known, spread, studies):
    """Looks from 2 new seeds on. An arm or a base that is 3 times as noisy as the other is a small excess."""
    wrong, _, _ = until_decided(studies, k, 16, known=known, **spread)
    assert wrong.mean() <= bound(
        0.056 if {"arm_sd", "base_sd"} & {*spread} and spread.get("base_sd") != 3.0 else 0.05, studies
    )


@pytest.mark.parametrize(("k", "times", "power"), [(1, 2.2, 0.89), (4, 1.6, 0.72)])
def test_a_known_base_saves_trials(k, times, power):
    """An effect of 1.4 sd, with 16 known trials of base."""
    _, _, before = until_decided(1_000, k, 16, 1.4, margin=0.3)
    _, detected, trials = until_decided(1_000, k, 16, 1.4, margin=0.3, known=16)
    assert detected.mean() >= power
    assert times * trials.mean() <= before.mean()


def test_tuned_studies_on_fresh_seeds():
    """The best of six points on validation, then fresh seeds; on the same seeds every score would be too good."""
    rng, studies, k, n, points = np.random.default_rng(0), MANY // 2, 2, 5, 6
    tuned = rng.standard_normal((studies, k + 1, points, 1))
    validation = 0.8 * tuned[..., 0] + 0.6 * rng.standard_normal((studies, k + 1, points))
    chosen = validation.argmax(-1)[..., None, None]
    same = np.take_along_axis(tuned, chosen, 2)[..., 0, 0]
    fresh = rng.standard_normal((studies, k + 1, points, n))
    report = np.take_along_axis(fresh, np.broadcast_to(chosen, (studies, k + 1, 1, n)), 2)[..., 0, :]
    assert abs(report.mean()) < 0.02
    assert same.mean() > 0.4
    assert claims(report).mean() <= bound(0.05, studies)


def tuned(studies, k, n, effect=0.0, apart=1.0, points=3):
    """Studies of a change that does nothing at any point, or as much at every one: what helps against base as it was
    tuned, and against base at both points. Points differ by `apart`, and validation errs by 1.3 sd."""
    rng = np.random.default_rng(0)
    worth = np.repeat(apart * rng.standard_normal((studies, 1, points)), k + 1, 1)
    worth[:, 1] += effect
    chosen = (worth + 1.3 * rng.standard_normal(worth.shape)).argmax(-1)[..., None, None]
    fresh = worth[..., None] + rng.standard_normal((*worth.shape, n))
    scores = np.take_along_axis(fresh, chosen, 2)[:, :, 0]

    def helps(scores):
        result = fit(scores).against
        return result.estimate > against_base(result, None, 0.05, k).total

    once = helps(scores)
    both = once.copy()
    for arm in range(k):
        scores[:, 0] = np.take_along_axis(fresh[:, 0], chosen[:, 1 + arm], 1)[:, 0]
        both[:, arm] &= helps(scores)[:, arm]
    return once, both


@pytest.mark.parametrize("studies", FAST)
@pytest.mark.parametrize("apart", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("k", "n"), [(1, 5), (1, 10), (4, 5)])
def test_a_tuned_arm_that_beats_base_at_both_points(k, n, apart, studies):
    once, both = tuned(studies, k, n, apart=apart)
    assert both.any(-1).mean() <= bound(0.025, studies)
    assert apart == 0.5 or once.any(-1).mean() > 0.04, "without the second comparison"


@pytest.mark.parametrize(("n", "low", "high"), [(5, 0.5, 0.63), (10, 0.87, 0.95)])
def test_what_tuned_studies_find(n, low, high):
    once, both = tuned(4_000, 1, n, effect=2.0)
    assert low < both.mean() <= once.mean() + 0.02
    assert once.mean() < high + 0.05


def shown_of_true(studies, k, tau, looked, seed=0):
    """Of arms that help, with effects N(0, tau): their estimates over their true effects, and the effects to expect.
    `looked`: seeds of each look -> its level; arms stop where they are decided or futile."""
    rng, most = np.random.default_rng(seed), max(looked)
    scores, effects = rng.standard_normal((studies, k + 1, most)), tau * rng.standard_normal((studies, k))
    scores[:, 1:] += effects[..., None]
    running, sums, now = np.ones((studies, k), bool), np.zeros(3), [np.ones((studies, k)) for _ in range(4)]
    for n, level in looked.items():
        rows = np.flatnonzero(running.any(-1))
        live = running[rows]
        result = fit(scores[rows, :, :n]).against
        half = against_base(result, None, level, k)
        sd = np.sqrt(half.variance * n / 2)
        for kept, new in zip(now, (result.estimate, sd, half.df, np.full(live.shape, 1 / n)), strict=True):
            kept[rows] = np.where(live, new, kept[rows])
        helps = live & (result.estimate > half.seeds)
        d, *known, share = (kept[rows][helps.any(-1)] for kept in now)
        mean = expected(d, *known, share, share, np.zeros_like(d))
        chosen = helps[helps.any(-1)]
        sums += d[chosen].sum(), mean[chosen].sum(), effects[rows][helps].sum()
        stopped = decided(result.estimate, half.seeds, 0.35) | futile(result, None, "seeds", 0.35, k, most)
        running[rows] &= ~stopped
        gone = np.zeros((studies, k + 1), bool)
        gone[rows, 1:] = live & stopped
        scores[gone[..., None] & (np.arange(most) >= n)] = np.nan
    return sums[:2] / sums[2]


UNTIL_16 = {n: nominal_level(16, n) for n in looks(16)}
EXPECTED = [
    *(((k, {5: 0.05}, tau), (0.88, 1.1)) for k in (4, 8) for tau in (0.7, 1.0, 2.0)),
    *(((k, UNTIL_16, tau), (0.88, 1.1)) for k in (1, 4, 8) for tau in (0.7, 1.0, 2.0)),
    *(((4, {3: 0.05}, tau), (0.85, 1.15)) for tau in (0.7, 1.0, 2.0)),
    # One arm and few seeds do not tell a small tau from a large one.
    *(((1, {5: 0.05}, tau), ends) for tau, ends in ((0.5, (1.4, 2.0)), (1.0, (0.88, 1.1)), (2.0, (0.8, 0.95)))),
    *(((1, {3: 0.05}, tau), ends) for tau, ends in ((0.5, (1.8, 3.0)), (1.0, (0.9, 1.25)), (2.0, (0.7, 0.85)))),
]


@pytest.mark.parametrize("studies", FAST)
@pytest.mark.parametrize(("study", "ends"), EXPECTED)
def test_the_effect_to_expect_of_an_arm_that_helps(study, ends, studies):
    k, looked, tau = study
    studies *= 4 if len(looked) == 1 else 1
    shown, mean = shown_of_true(studies // k, k, tau, looked)
    assert ends[0] - 0.03 < mean < ends[1] + 0.03
    assert abs(np.log(mean)) < abs(np.log(shown)) or tau == 2.0


@pytest.mark.parametrize(("k", "n"), [(1, 5), (4, 5), (4, 10)])
def test_false_equivalence_at_the_margin(k, n):
    """Where every arm is worse by just the margin, `equivalent` and `no worse` are false."""
    margin = 2.0
    scores = gaussian(MANY, k, n)
    scores[:, 1:] -= margin
    result = fit(scores).against
    half = against_base(result, None, 0.05, k).seeds
    no_worse = (result.estimate - half > -margin).any(-1)
    assert no_worse.mean() <= bound(0.025, MANY)
    assert (no_worse & (result.estimate + half < margin).any(-1)).mean() <= bound(0.025, MANY)


@pytest.mark.parametrize("noisy", [1.0, 3.0])
@pytest.mark.parametrize("lead", [0.0, 1.0])
@pytest.mark.parametrize(("k", "n"), [(2, 5), (4, 5), (8, 4)])
def test_the_best_set_holds_the_best(k, n, lead, noisy):
    scores = gaussian(MANY // 4, k, n)
    scores[:, 2] *= noisy
    scores[:, 1] += lead
    errors = fit(scores).errors
    result = head_to_head(scores, errors)
    best = may_be_best(result.estimate, result.variance, result.pooled_df, k + 1, 0.05)
    assert best[:, 1].mean() >= 0.94
    assert lead == 0 or best.mean() < 0.99


def test_one_arm_beats_another_at_the_one_sided_value():
    for d, best in ((1.6, [True, True]), (1.7, [False, True]), (-1.7, [True, False])):
        assert may_be_best(np.array([d]), np.ones(1), np.array([np.inf]), 2, 0.05).tolist() == best
    assert may_be_best(np.array([9.0]), np.array([np.nan]), np.ones(1), 2, 0.05).all()
