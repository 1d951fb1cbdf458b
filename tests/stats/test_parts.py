"""Effects over images and over seeds that are tested on other parts of them; metrics over images, image by image."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from scipy import stats
from sklearn.metrics import average_precision_score

import vitmods as vm
from vitmods.stats.fit import fit
from vitmods.stats.images import clusters, images_part, jackknife, mean_ratio, precision
from vitmods.stats.width import over_parts, overlap_of


def scores_of(array):
    return {name: dict(enumerate(map(float, row))) for name, row in zip(("base", "a", "b", "c", "d"), array)}


def table(g=3, n=5, seed=0):
    return 0.8 + 0.01 * np.random.default_rng(seed).standard_normal((g, n))


def test_the_variance_is_that_of_nadeau_and_bengio():
    x = table()
    result = over_parts(fit(x).against, overlap_of(20, 80))
    assert result.own == pytest.approx((x[1:] - x[0]).var(-1, ddof=1) * (1 / 5 + 20 / 80))
    assert result.pooled == pytest.approx(fit(x).against.pooled * (1 + 5 / 4))
    assert over_parts(fit(x).against, 0.0).own == pytest.approx(fit(x).against.own)


@pytest.mark.parametrize(("n_test", "n_train", "parts"), [(1, 4, 5), (1, 9, 10), (10, 90, 15)])
def test_the_variance_is_right_where_parts_resemble_each_other_as_it_assumes(n_test, n_train, parts):
    rng, rho, studies = np.random.default_rng(0), n_test / (n_test + n_train), 40_000
    shared, by_seed = rng.normal(size=(studies, 1, 1)), rng.normal(size=(studies, 1, parts))
    values = np.sqrt(rho) * shared + np.sqrt(1 - rho) * by_seed
    true = values.mean(-1).var()
    result = fit(np.concatenate([np.zeros_like(values), values], 1)).against
    assert over_parts(result, overlap_of(n_test, n_train)).own.mean() == pytest.approx(true, rel=0.03)
    assert result.own.mean() < 0.7 * true


def test_one_arm_has_the_corrected_t_interval():
    x = table(g=2)
    effect = vm.decide(scores_of(x), resampled=(20, 80))["a"]
    d = 100 * (x[1] - x[0])
    half = stats.t.ppf(0.975, 4) * np.sqrt(d.var(ddof=1) * (1 / 5 + 20 / 80))
    assert [effect.low, effect.high] == pytest.approx([d.mean() - half, d.mean() + half])
    inner = stats.ttest_1samp(d, 0).confidence_interval(0.95)
    assert [effect.seeds_low, effect.seeds_high] == pytest.approx(list(inner))


def test_arms_pairs_and_the_best_set_are_wider_too():
    x = table(g=4)
    x[1] += 0.012
    plain, wide = vm.decide(scores_of(x)), vm.decide(scores_of(x), resampled=(20, 80))
    for arm, effect in wide.effects.items():
        assert effect.half == pytest.approx(plain[arm].half * np.sqrt(1 + 5 / 4))
        assert effect.seeds_high == pytest.approx(plain[arm].seeds_high)
        assert effect.sd == pytest.approx(plain[arm].sd)
    for pair, result in wide.pairs.items():
        assert result.high - result.effect == pytest.approx(1.5 * (plain.pairs[pair].high - plain.pairs[pair].effect))
    assert set(plain.best) < set(wide.best)


def test_the_claim_is_said():
    result = vm.decide(scores_of(table()), resampled=(20, 80))
    assert "other training sets and other images too" in repr(result)
    assert "without per-image scores" not in repr(result)
    assert result.to_dict()["overlap"] == 0.25
    assert "training sets" not in repr(vm.decide(scores_of(table())))


def test_images_of_each_part_count_by_their_mean():
    rng = np.random.default_rng(0)
    results = {arm: {s: (rng.random(20 + s) < 0.8).astype(float) for s in range(4)} for arm in ("base", "a")}
    means = {arm: {s: x.mean() for s, x in by_seed.items()} for arm, by_seed in results.items()}
    assert vm.decide(results, resampled=(20, 80)).to_dict() == vm.decide(means, resampled=(20, 80)).to_dict()
    assert vm.decide({**means, "b": {0: None}}, resampled=(20, 80))["b"].n == 0


def crossed(n, m, studies=(), seed=0, sds=(1.0, 2.0, 3.0)):
    """Differences with an effect of the seed, of the image, and of both."""
    rng = np.random.default_rng(seed)
    by_seed, by_image = rng.standard_normal((*studies, n, 1)), rng.standard_normal((*studies, 1, m))
    return sds[0] * by_seed + sds[1] * by_image + sds[2] * rng.standard_normal((*studies, n, m))


def test_it_equals_the_analysis_of_variance():
    n, m = 4, 7
    differences = crossed(n, m)
    seeds, images = np.indices((n, m)).reshape(2, -1)
    frame = pd.DataFrame({"d": differences.ravel(), "seed": seeds, "image": images})
    table = sm.stats.anova_lm(smf.ols("d ~ C(seed) + C(image)", frame).fit())
    mean_square = table["sum_sq"] / table["df"]
    result = images_part(differences, 0.0)
    assert result.s2_images == pytest.approx(mean_square["C(image)"] / n, rel=1e-9)
    assert result.s2_residual == pytest.approx(mean_square["Residual"], rel=1e-9)


def test_it_is_unbiased():
    result = images_part(crossed(5, 40, (6000,)), 0.0)
    assert result.unclipped.mean() == pytest.approx(2.0**2 / 40, rel=0.03)


def test_batches_single_images_and_single_seeds():
    differences = crossed(3, 9, (2, 2))
    assert images_part(differences, 0.0).variance[1, 0] == pytest.approx(images_part(differences[1, 0], 0.0).variance)
    assert images_part(crossed(4, 1), 0.0).variance == 0
    first = crossed(1, 9)
    assert images_part(first, 0.0).variance == pytest.approx(first.var(ddof=1) / 9)


def test_clusters_keep_the_mean_and_count_as_one_image():
    x = crossed(4, 6)
    assert np.array_equal(clusters(x, np.arange(6)), x)
    result = clusters(x, ["b", "a", "b", "c", "a", "b"])
    assert result.shape == (4, 3)
    assert result.mean(-1) == pytest.approx(x.mean(-1))
    assert result[:, 1] == pytest.approx(3 / 6 * x[:, [0, 2, 5]].sum(-1))
    doubled = np.repeat(x, 2, axis=-1)
    assert images_part(clusters(doubled, np.repeat(np.arange(6), 2)), 0.0).variance == pytest.approx(
        images_part(x, 0.0).variance
    )


def without(metric, m):
    """The metric without each image, computed anew: its jackknife form."""
    every = np.arange(m)
    left = np.array([metric(every[every != i]) for i in every])
    return metric(every) + (m - 1) * (left.mean() - left)


def test_a_mean_of_ratios_is_that_without_each_image():
    rng = np.random.default_rng(0)
    below = rng.random((12, 4)) * (rng.random((12, 4)) < 0.6)
    below[:2], below[:, 3] = 1, 0  # a class that does not occur
    above = below * rng.random((12, 4))
    form = mean_ratio(above, below)
    seen = below.sum(0) > 0
    assert form == pytest.approx(without(lambda i: (above[i].sum(0)[seen] / below[i].sum(0)[seen]).mean(), 12))
    alone = np.array([[0.0], [2.0], [0.0]])
    assert mean_ratio(alone / 2, alone).tolist() == [0.5] * 3  # of one image nothing is known about others


@pytest.mark.parametrize("interpolated", [False, True])
def test_average_precision_is_nearly_that_without_each_image(interpolated):
    rng, m = np.random.default_rng(1), 150
    image = rng.integers(m, size=600)
    right, objects = rng.random(600) < 0.4, np.zeros(m, int)
    np.add.at(objects, image[right], 1)
    objects += rng.integers(2, size=m)  # some are not found
    scores = right + rng.normal(0, 1, 600)

    def average(kept):
        own = np.isin(image, kept)
        return precision(scores[own], right[own], image[own], objects * np.isin(np.arange(m), kept), interpolated)[0]

    value, changes = precision(scores, right, image, objects, interpolated)
    if not interpolated:
        expected = average_precision_score(right, scores) * right.sum() / objects.sum()
        assert value == pytest.approx(expected)
    form, exact = jackknife(value, changes), without(average, m)
    assert form.mean() == pytest.approx(value)
    assert np.corrcoef(form, exact)[0, 1] > 0.995
    assert form.std() == pytest.approx(exact.std(), rel=0.03)


def test_without_a_detection_average_precision_is_0():
    none = np.zeros(0, int)
    assert precision(none, none, none, [1, 0, 2], interpolated=True)[1].tolist() == [0, 0, 0]
