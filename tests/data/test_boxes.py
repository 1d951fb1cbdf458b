"""Random boxes: inside the image, of the asked area and shape, distributed as torchvision's."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import v2

from vitmods.data.augment import crop_boxes, cutmix_box, erase_boxes

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 2**32))
def test_crop_boxes_lie_inside(height: int, width: int, seed: int) -> None:
    index = np.arange(50)
    boxes = crop_boxes(seed, 0, index, np.tile([height, width], (50, 1)), SCALE, RATIO)
    top, left, box_h, box_w = boxes.T
    assert (box_h >= 1).all()
    assert (box_w >= 1).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + box_h <= height).all()
    assert (left + box_w <= width).all()


def test_crop_boxes_are_distributed_as_torchvisions() -> None:
    n, height, width = 3000, 200, 300
    ours = crop_boxes(0, 0, np.arange(n), np.tile([height, width], (n, 1)), SCALE, RATIO)
    torch.manual_seed(0)
    crop = v2.RandomResizedCrop(8, SCALE, RATIO)
    image = torch.empty(3, height, width)
    theirs = [crop.make_params([image]) for _ in range(n)]
    for column, name in enumerate(("top", "left", "height", "width")):
        assert stats.ks_2samp(ours[:, column], [box[name] for box in theirs]).pvalue > 1e-3


def test_the_corner_coordinates_are_independent() -> None:
    sizes = np.tile([100, 100], (2000, 1))
    boxes = crop_boxes(0, 0, np.arange(2000), sizes, (0.04, 0.04), (1.0, 1.0))
    assert stats.pearsonr(boxes[:, 0], boxes[:, 1]).pvalue > 1e-3
    erased = erase_boxes(0, 0, np.arange(2000), (100, 100), 1.0)[1]
    assert stats.pearsonr(erased[:, 0] / (100 - erased[:, 2]), erased[:, 1] / (100 - erased[:, 3])).pvalue > 1e-3


def test_an_image_too_long_for_the_shape_gives_its_centre() -> None:
    boxes = crop_boxes(0, 0, np.arange(2), np.array([[10, 1000], [1000, 10]]), (1.0, 1.0), RATIO)
    assert boxes.tolist() == [[0, 493, 10, 13], [493, 0, 13, 10]]


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 2**32))
def test_erase_boxes_lie_inside(height: int, width: int, seed: int) -> None:
    positions, boxes = erase_boxes(seed, 0, np.arange(40), (height, width), 1.0)
    assert len(positions) == len(boxes)
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= [height, width]).all()


def test_erase_boxes_are_distributed_as_torchvisions() -> None:
    n, height, width = 3000, 60, 80
    positions, ours = erase_boxes(1, 0, np.arange(n), (height, width), 0.25)
    assert abs(len(positions) / n - 0.25) < 0.03
    assert len(erase_boxes(1, 0, np.arange(n), (height, width), 0.0)[0]) == 0
    torch.manual_seed(0)
    erasing = v2.RandomErasing(1.0)
    theirs = [erasing.make_params([torch.empty(3, height, width)]) for _ in range(n)]
    for column, name in enumerate(("i", "j", "h", "w")):
        assert stats.ks_2samp(ours[:, column], [box[name] for box in theirs]).pvalue > 1e-3


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.floats(0, 0.999), st.floats(0, 0.999))
def test_cutmix_boxes_lie_inside_and_take_at_most_their_area(height, width, kept, down, right) -> None:
    top, left, box_h, box_w = cutmix_box((height, width), kept, (down, right))
    assert top >= 0
    assert left >= 0
    assert top + box_h <= height
    assert left + box_w <= width
    assert box_h * box_w <= (1 - kept) * height * width + 1e-9


def test_cutmix_box_in_the_middle() -> None:
    assert cutmix_box((32, 32), 0.75, (0.5, 0.5)) == (8, 8, 16, 16)
    assert cutmix_box((32, 32), 0.75, (0.0, 0.0)) == (0, 0, 8, 8)
