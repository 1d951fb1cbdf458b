"""Effects of a factorial design: against formulas written out, and how often simulated studies claim what is not so."""

import math

import numpy as np
import pytest
from scipy import special

from vitmods.stats.criteria import Criteria
from vitmods.stats.decide import decide
from vitmods.stats.factorial import LOOK_LEVEL, detectable, factorial, intervals, misfit
from vitmods.stats.fit import fit
from vitmods.stats.read import Table
from vitmods.stats.runs import plan_factorial
from vitmods.stats.verdict import Verdict
from vitmods.stats.width import against_base, critical_value
from vitmods.util.errors import UserError

STUDIES = 2_000
NAMES = ["dpn", "rms", "dtn", "qknorm", "swiglu", "subln", "dropkey", "gpsa"]


def scores_of(design, effects, n=3, noise=0.2, acting=0.0, seed=0):
    """Scores in points of trials whose changes add up, but for the first two together."""
    rng = np.random.default_rng(seed)
    scores = {}
    for name, row in design.arms.items():
        mean = 70 + sum(effects.get(change, 0.0) for change in row) + acting * (set(design.changes[:2]) <= set(row))
        scores[name] = {s: float(mean + 0.3 * s + noise * rng.standard_normal()) for s in range(n)}
    return scores


def decided(scores, design, failed=None, chance=None, level=None, groups=None, **criteria):
    """Of the runs of a design; those without scores have not begun."""
    runs = {run: scores.get(run, {}) for run in design.arms} | scores
    table = Table.of(runs, failed=failed, chance=chance, level=level, groups=groups)
    return factorial(table, design, Criteria(**criteria))


def points(scores, design, **options):
    return decided(scores, design, **{"unit": "points", "chance": 0.0} | options)


def test_an_effect_is_the_difference_of_means_with_the_variance_of_its_runs():
    design = plan_factorial(NAMES[:4])
    scores = scores_of(design, {"dpn": 1.0}, noise=1.0)
    y = np.array([list(seeds.values()) for seeds in scores.values()])
    (g, n), d0 = y.shape, 4
    residual = y - y.mean(1, keepdims=True) - y.mean(0) + y.mean()
    df_error = (g - 1) * (n - 1)
    mse = (residual**2).sum() / df_error
    v = np.maximum(((residual**2).sum(1) / (n - 1) - mse / g) / (1 - 2 / g), 0)
    w = np.maximum((d0 * mse + (n - 1) * v) / (d0 + n - 1), v)
    study = points(scores, design)
    for change in design.changes:
        has = np.array([change in run for run in design.runs])
        weights = np.where(has, 2 / g, -2 / g)
        terms = weights**2 * w / n
        df = min(df_error, terms.sum() ** 2 / (terms**2 / (d0 + n - 1)).sum())
        variance = max(terms.sum(), (weights @ y).var(ddof=1) / n)
        half = critical_value(4, df, 0.05, 0.0) * math.sqrt(variance)
        effect = study[change]
        assert effect.effect == pytest.approx(y[has].mean() - y[~has].mean())
        assert (effect.high - effect.low) / 2 == pytest.approx(float(half))
        assert (effect.base_mean, effect.arm_mean) == pytest.approx((y[~has].mean(), y[has].mean()))
        assert (effect.family, effect.n) == (4, n)


def test_what_changes_do_to_each_other_is_no_noise():
    design = plan_factorial(NAMES[:5])
    alone, acting = (points(scores_of(design, {}, acting=size), design) for size in (0.0, 8.0))
    for change in design.changes:
        halves = [(study[change].high - study[change].low) / 2 for study in (alone, acting)]
        assert halves[0] == pytest.approx(halves[1])
    assert acting["dpn"].effect == pytest.approx(alone["dpn"].effect + 4)  # half of the time with rms
    assert acting.pairs["dpn x rms"].effect == pytest.approx(alone.pairs["dpn x rms"].effect + 4)


def test_the_images_part_is_that_of_the_contrast_of_images():
    design, n, m = plan_factorial(NAMES[:3]), 3, 50
    rng = np.random.default_rng(0)
    images = (rng.standard_normal((8, n, m)) + rng.standard_normal(m) > 0).astype(float)
    scores = {name: dict(enumerate(images[i])) for i, name in enumerate(design.arms)}
    study = decided(scores, design)
    contrast = 100 * sum(w * x for w, x in zip(design.weights[1], images, strict=True))  # (n, m)
    by_image, by_seed = contrast.mean(0), contrast.mean(1)
    residual = contrast - by_image - by_seed[:, None] + contrast.mean()
    expected = by_image.var(ddof=1) / m - (residual**2).sum() / ((n - 1) * (m - 1)) / (n * m)
    assert study["rms"].images_sd ** 2 == pytest.approx(max(expected, 0))
    assert study["rms"].low <= study["rms"].seeds_low
    assert study["rms"].images == m
    assert not study.without_images
    assert points(scores_of(design, {}), design).without_images


@pytest.mark.parametrize(("right", "differing"), [(1.0, 0), (0.98, 1), (0.5, 4)])
def test_few_images_that_differ_are_as_uncertain_as_between_two_arms(right, differing):
    """The first change breaks a few of 60 images, in every run that has it; no trial has noise of its own."""
    design, m = plan_factorial(NAMES[:2]), 60
    of_base = np.arange(m) < right * m
    broken = of_base & (np.arange(m) >= differing)
    images = {run: (broken if NAMES[0] in row else of_base) * 1.0 for run, row in design.arms.items()}
    study = decided({run: dict.fromkeys(range(3), scores) for run, scores in images.items()}, design)
    plain = decide({"base": dict.fromkeys(range(3), of_base * 1.0), "dpn": dict.fromkeys(range(3), broken * 1.0)})
    for effect in (study["dpn"], study.pairs["dpn x rms"]):
        assert effect.images_sd > 0.99 * 100 / m
    assert study["dpn"].images_sd == pytest.approx(plain["dpn"].images_sd)
    below, plain_below = (effect.effect - effect.low for effect in (study["dpn"], plain["dpn"]))
    above, plain_above = (effect.high - effect.effect for effect in (study["dpn"], plain["dpn"]))
    assert below / above == pytest.approx(plain_below / plain_above, rel=0.2), "skewed alike"
    assert (below == above) == (right < 0.9 or differing == 0)


@pytest.mark.parametrize(("k", "r", "times"), [(3, 3, 1.5), (5, 2, 1.8), (8, 3, 2.5)])
def test_it_takes_fewer_trials_than_one_change_at_a_time(k, r, times):
    """For intervals of one width, against base and k arms with `times` as many trials."""
    design, rng = plan_factorial(NAMES[:k]), np.random.default_rng(0)
    half = np.median(intervals(rng.standard_normal((STUDIES, len(design.runs), r)), design.weights, 0.05).half.total)
    n = round(times * len(design.runs) * r / (k + 1))
    ordinary = np.random.default_rng(0).standard_normal((STUDIES, k + 1, n))
    assert half < np.median(against_base(fit(ordinary).against, None, 0.05, k).total)


@pytest.mark.parametrize("design", [plan_factorial(NAMES[:4]), plan_factorial(NAMES[:4], [("dpn", "rms")])])
def test_a_detectable_effect_is_found_in_four_of_five_studies(design):
    size = detectable(design, 3).effect
    least = int(design.relative_variance.argmax())
    scores = np.random.default_rng(5).standard_normal((STUDIES, len(design.runs), 3))
    scores += size * design.on[:, least, None]
    study, half, _ = intervals(scores, design.weights, 0.05)
    assert (study.estimate > half.total)[:, least].mean() == pytest.approx(0.8, abs=0.03)


def test_more_seeds_find_smaller_effects():
    design = plan_factorial(NAMES[:5])
    study = [detectable(design, n) for n in (2, 3, 5, 8)]
    assert sorted(study, key=lambda one: -one.effect) == study
    assert sorted(study, key=lambda one: -one.half) == study
    assert detectable(design, 1).effect == math.inf
    assert detectable(plan_factorial(NAMES[:2]), 2).effect == math.inf


def test_the_best_combination_has_the_signs_of_the_effects():
    design = plan_factorial(NAMES[:5])
    study = points(scores_of(design, {"dpn": 2, "rms": -1, "dtn": 0.5, "qknorm": 1, "swiglu": -2}), design)
    assert study.best == ("dpn", "dtn", "qknorm")
    assert "by the signs of the effects: dpn+dtn+qknorm; confirm it" in study.prediction
    assert [study[change].verdict for change in ("dpn", "swiglu")] == [Verdict.HELPS, Verdict.HURTS]
    worse = points(scores_of(design, {"dpn": 2, "swiglu": -2}), design, higher_is_better=False, chance=None)
    assert worse["dpn"].verdict == Verdict.HURTS
    assert worse["dpn"].effect == pytest.approx(study["dpn"].effect, abs=0.5)
    assert worse["dpn"].low < worse["dpn"].effect < worse["dpn"].high
    assert "swiglu" in worse.best
    assert "dpn" not in worse.best


def test_where_changes_act_on_each_other_it_is_the_best_run():
    design = plan_factorial(NAMES[:4])
    study = points(scores_of(design, {"dpn": 3, "rms": 2.5, "dtn": 1}, acting=-4.5), design)
    assert study.pairs["dpn x rms or dtn x qknorm"].verdict == Verdict.HURTS
    assert all(study[change].effect > 0 for change in ("dpn", "rms", "dtn"))  # by their signs it would be all three
    assert study.best == ("dpn", "dtn")
    assert "the best run seen" in study.prediction


def test_the_best_combination_has_no_conflict():
    design = plan_factorial(NAMES[:4], [("dpn", "rms")])
    study = points(scores_of(design, {"dpn": 1, "rms": 3, "dtn": 1, "qknorm": -1}), design)
    assert study.best == ("rms", "dtn")
    assert study.pairs == {}
    assert "No run can have dpn with rms" in study.notes[0]


def test_whether_changes_add_up_is_an_f_test_of_what_their_sum_leaves():
    design = plan_factorial(NAMES[:5], [("dpn", "rms")])
    scores = scores_of(design, {"dpn": 1}, noise=1.0)
    y = np.array([list(seeds.values()) for seeds in scores.values()])
    (g, n), runs = y.shape, np.repeat(np.eye(len(y)), y.shape[1], 0)
    seeds = np.tile(np.eye(n), (g, 1))
    added = runs @ np.column_stack([np.ones(g), design.on])
    left = [
        y.ravel() - x @ np.linalg.lstsq(x, y.ravel(), rcond=None)[0]
        for x in map(np.hstack, ([added, seeds], [runs, seeds]))
    ]
    squares, df = [float(r @ r) for r in left], (g - 6, (g - 1) * (n - 1))
    expected = special.fdtrc(*df, (squares[0] - squares[1]) / df[0] / (squares[1] / df[1]))
    assert misfit(y, design.on) == pytest.approx(expected)
    random = np.random.default_rng(0)
    false = np.mean([misfit(random.standard_normal((g, 2)), design.on) < 0.05 for _ in range(STUDIES)])
    assert false == pytest.approx(0.05, abs=0.015)
    assert math.isnan(misfit(y[:, :1], design.on))
    assert math.isnan(misfit(y[:3], design.on[:3]))
    design = plan_factorial(NAMES[:5], [("dtn", "rms")])  # dpn and rms, which act on each other, go together
    for acting in (0.0, 4.0):
        notes = " ".join(points(scores_of(design, {"dpn": 2}, acting=acting), design).notes)
        assert ("changes do not add up (p = " in notes) == (acting > 0)


def test_a_run_that_failed_is_left_out_and_counted_for_its_changes():
    design, effects = plan_factorial(NAMES[:5]), {"dpn": 2.0, "dtn": 3.0, "qknorm": -0.5, "swiglu": -1.0}
    scores = scores_of(design, effects, noise=0.0)
    scores["dpn+rms"][1] = math.nan
    study = points(scores, design)
    assert {name: effect.effect for name, effect in study.effects.items()} == pytest.approx(
        {name: effects.get(name, 0.0) for name in design.changes}, abs=1e-9
    )
    assert [name for name, effect in study.effects.items() if effect.failures] == ["dpn", "rms"]
    assert study.best == ("dtn",)
    assert study.pairs == {}
    assert study.n == 3
    assert "1 of 3 dpn+rms trials diverged" in study.notes[0]
    named = points(scores_of(design, effects, noise=0.0), design, failed={"dpn+rms": {1: "loss is inf"}})
    assert named["dpn"].failures == 1


def test_a_change_whose_runs_all_fail_takes_no_other_with_it():
    design, effects = plan_factorial(NAMES[:4]), {"dpn": 2.0, "rms": 1.0, "dtn": -1.0}
    scores = scores_of(design, effects, noise=0.0)
    bad = NAMES[3]
    for run, words in design.arms.items():
        if bad in words:
            scores[run] |= dict.fromkeys(scores[run], math.nan)
    study = points(scores, design)
    assert study.best == ("dpn", "rms")
    (other,) = [run for run, words in design.arms.items() if words == ("dpn",)] or [
        next(run for run, words in design.arms.items() if "dpn" in words and bad not in words)
    ]
    scores[other][1] = math.nan
    assert "dpn" not in points(scores, design).best


def test_a_run_that_collapsed_has_failed():
    design = plan_factorial(NAMES[:3])
    scores = scores_of(design, {})
    scores["dtn"][0] = 10.0
    study = points(scores, design)
    assert study["dtn"].failures == 1
    for run in scores:
        scores[run] |= dict.fromkeys(range(3) if "dtn" in run else (), math.nan)
    without = points(scores, design)
    assert without["dtn"].verdict == Verdict.HURTS, "all runs with it fail"
    assert math.isnan(without["dtn"].effect)
    assert math.isnan(without["dtn"].low)
    for result in (without, study):
        assert abs(result["dpn"].effect) < 1


def test_seeds_of_a_base_that_failed_or_that_not_all_runs_have_ended_are_left_out():
    design = plan_factorial(NAMES[:3])
    scores = scores_of(design, {"dpn": 2.0}, n=4)
    scores["base"][2] = math.nan
    study = points(scores, design)
    assert study.n == 3
    assert study["dpn"].verdict == Verdict.HELPS
    assert "of base failed" in study.notes[0]
    design = plan_factorial(NAMES[:3])
    scores = scores_of(design, {"dpn": 2.0}, n=3)
    full = points({name: dict(list(seeds.items())[:2]) for name, seeds in scores.items()}, design)
    scores["dpn+rms+dtn"][2] = None
    assert points(scores, design)["dpn"].to_dict() == full["dpn"].to_dict()
    assert full["dpn"].n == 2
    first = points({name: {0: seeds[0]} for name, seeds in scores.items()}, design)
    assert math.isnan(first["dpn"].low)
    assert first["dpn"].verdict == Verdict.OPEN
    assert first["dpn"].effect == pytest.approx(2, abs=0.5)
    none = points({}, design)
    assert none.n == 0
    assert none.best == ()
    assert none["dpn"].verdict == Verdict.OPEN


def test_looks_use_their_own_level_and_whole_looks_alone():
    design = plan_factorial(NAMES[:3])
    scores = scores_of(design, {"dpn": 2.0}, n=5)
    study = points(scores, design, most_seeds=8)
    assert (study.n, study["dpn"].alpha) == (4, LOOK_LEVEL)
    assert "look at 4 of at most 8 seeds" in study.look
    fixed = points({name: dict(list(seeds.items())[:4]) for name, seeds in scores.items()}, design)
    assert study["dpn"].low < fixed["dpn"].low
    assert points({name: {0: seeds[0]} for name, seeds in scores.items()}, design, most_seeds=8).n == 0
    with pytest.raises(UserError, match="at most 2 to 8 seeds, not 16"):
        points(scores, design, most_seeds=16)


def test_a_study_until_decided_ends_when_every_effect_is():
    design = plan_factorial(NAMES[:3])
    effects = {"dpn": 2.0, "rms": -2.0}
    assert points(scores_of(design, effects, n=8, noise=0.05), design, most_seeds=8).is_decided
    assert not points(scores_of(design, effects, n=8, noise=1.0), design, most_seeds=8).is_decided


def test_a_run_that_the_design_does_not_have_is_an_error():
    design = plan_factorial(NAMES[:3])
    with pytest.raises(UserError, match=r"does not have a run subln: its runs are base, dpn, rms, dpn\+rms"):
        points({**scores_of(design, {}), "subln": {0: 70.0}}, design)
