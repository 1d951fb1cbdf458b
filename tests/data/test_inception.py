"""Boxes of TensorFlow's Inception crop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitmods.data.augment import inception_boxes

SCALE, RATIO = (0.05, 1.0), (0.75, 1.33)


def boxes(n: int, height: int, width: int, scale=SCALE, ratio=RATIO, seed: int = 0) -> np.ndarray:
    return inception_boxes(seed, 0, np.arange(n), np.tile([height, width], (n, 1)), scale, ratio)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 2**32))
def test_boxes_lie_inside(height: int, width: int, seed: int) -> None:
    top, left, box_h, box_w = boxes(50, height, width, seed=seed).T
    assert (np.minimum(box_h, box_w) >= 1).all()
    assert (np.minimum(top, left) >= 0).all()
    assert (top + box_h <= height).all()
    assert (left + box_w <= width).all()


# Means and deviations of top, left, height and width in 4,000 draws of tf.image.sample_distorted_bounding_box.
TENSORFLOW = {
    (375, 500): ((69.9, 126.6, 234.8, 244.1), (61.4, 91.8, 80.9, 93.2)),
    (300, 120): ((109.7, 18.2, 80.7, 81.8), (65.1, 16.7, 25.3, 22.3)),
    (40, 32): ((9.6, 5.5, 19.7, 20.0), (7.4, 5.3, 7.8, 7.2)),
}


@pytest.mark.parametrize("size", TENSORFLOW)
def test_boxes_are_distributed_as_tensorflows(size: tuple[int, int]) -> None:
    drawn, (means, deviations) = boxes(4000, *size), TENSORFLOW[size]
    for column, mean, deviation in zip(drawn.T, means, deviations, strict=True):
        assert abs(column.mean() - mean) < 4 * deviation * (2 / 4000) ** 0.5
        assert column.std() == pytest.approx(deviation, rel=0.08)


def test_area_and_aspect_are_in_their_ranges() -> None:
    _, _, box_h, box_w = boxes(3000, 400, 300, scale=(0.2, 0.3)).T
    assert (box_h * box_w >= 0.2 * 400 * 300).all()
    assert (box_h * box_w <= 0.3 * 400 * 300).all()
    assert (np.abs(np.log(box_w / box_h) - np.log(RATIO).mean()) <= np.log(RATIO[1] / RATIO[0]) / 2 + 0.02).all()


def test_the_aspect_is_uniform_itself() -> None:
    _, _, box_h, box_w = boxes(4000, 900, 900, scale=(0.01, 0.02), ratio=(0.25, 4.0)).T
    assert stats.kstest(box_w / box_h, stats.uniform(0.25, 3.75).cdf).statistic < 0.03


def test_the_last_row_and_column_are_left_to_boxes_that_span_the_image() -> None:
    top, left, box_h, box_w = boxes(4000, 30, 20).T
    assert ((top + box_h < 30) | (box_h == 30)).all()
    assert ((left + box_w < 20) | (box_w == 20)).all()
    assert (top + box_h == 29).any()
    assert (box_h == 30).any() or (box_w == 20).any()


def test_the_whole_image_where_no_box_fits() -> None:
    assert boxes(2, 10, 1000, scale=(0.9, 1.0)).tolist() == [[0, 0, 10, 1000]] * 2


def test_a_box_does_not_depend_on_its_batch() -> None:
    sizes = np.array([[40, 30], [10, 1000], [7, 9], [300, 200]])
    together = inception_boxes(3, 2, np.arange(4), sizes, SCALE, RATIO)
    for i in range(4):
        alone = inception_boxes(3, 2, np.array([i]), sizes[i : i + 1], SCALE, RATIO)
        assert alone.tolist() == together[i : i + 1].tolist()
