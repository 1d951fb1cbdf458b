"""The images' part against the two-way analysis of variance, and what is known of simulated images."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf

from vitmods.stats.images import clusters, images_part


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
    result = images_part(differences)
    assert result.s2_images == pytest.approx(mean_square["C(image)"] / n, rel=1e-9)
    assert result.s2_residual == pytest.approx(mean_square["Residual"], rel=1e-9)


def test_it_is_unbiased():
    result = images_part(crossed(5, 40, (6000,)))
    assert result.unclipped.mean() == pytest.approx(2.0**2 / 40, rel=0.03)


def test_batches_single_images_and_single_seeds():
    differences = crossed(3, 9, (2, 2))
    assert images_part(differences).variance[1, 0] == pytest.approx(images_part(differences[1, 0]).variance)
    assert images_part(crossed(4, 1)).variance == 0
    one = crossed(1, 9)
    assert images_part(one).variance == pytest.approx(one.var(ddof=1) / 9)


def test_clusters_keep_the_mean_and_count_as_one_image():
    x = crossed(4, 6)
    assert np.array_equal(clusters(x, np.arange(6)), x)
    result = clusters(x, ["b", "a", "b", "c", "a", "b"])
    assert result.shape == (4, 3)
    assert result.mean(-1) == pytest.approx(x.mean(-1))
    assert result[:, 1] == pytest.approx(3 / 6 * x[:, [0, 2, 5]].sum(-1))
    doubled = np.repeat(x, 2, axis=-1)
    assert images_part(clusters(doubled, np.repeat(np.arange(6), 2))).variance == pytest.approx(images_part(x).variance)
