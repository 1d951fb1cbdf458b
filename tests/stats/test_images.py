"""Metrics over a set of images as scores of single images."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from vitmods.stats.images import jackknife, mean_ratio, precision


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
