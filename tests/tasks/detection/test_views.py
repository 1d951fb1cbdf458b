"""Images, boxes and masks move together, and are a function of seed, epoch and view."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitmods.data.dataset import Annotated, Draw
from vitmods.recipes import Recipe, small_detection
from vitmods.tasks.detection.objects import Objects, evaluation_views, training_views, view_size

AUGMENT = small_detection().augment
Size = st.tuples(st.integers(20, 90), st.integers(20, 90))


def example(native, box):
    """A black image with a white box, and what is said of it: that box, and a crowd."""
    left, top, right, bottom = box
    image = np.zeros((3, *native), dtype=np.uint8)
    image[:, top:bottom, left:right] = 255
    corners = [left, top, right, top, right, bottom, left, bottom]
    boxes = np.array([box, [0, 0, 3, 3]], dtype=np.float32)
    crowd, area = np.array([False, True]), np.array([1, 1], dtype=np.float32)
    segments = ([[float(v) for v in corners]], [[0.0, 0, 3, 0, 3, 3, 0, 3]])
    objects = Objects(boxes, np.array([1, 0]), crowd, area, native, segments)
    return image, Annotated(objects, native)


def draw(index, flip=0.5, seed=0, epoch=0, img_size=(40, 40)):
    augment = Recipe().with_(flip=flip, resample="bilinear").augment
    return Draw(seed, epoch, np.array(index), np.array(index), augment, img_size)


@pytest.mark.parametrize(
    ("native", "img_size", "expected"),
    [
        ((480, 640), (800, 1333), (800, 1067)),
        ((480, 640), (320, 320), (240, 320)),
        ((200, 1000), (800, 1333), (267, 1333)),
        ((1, 300), (32, 32), (1, 32)),
    ],
)
def test_the_short_side_fits_unless_the_long_one_is_too_long(native, img_size, expected):
    assert view_size(native, img_size) == expected


@settings(max_examples=25, deadline=None)
@given(native=Size, flip=st.booleans(), data=st.data())
def test_pixels_boxes_and_masks_move_together(native, flip, data):
    height, width = native
    left, top = data.draw(st.integers(0, width - 9)), data.draw(st.integers(0, height - 9))
    right, bottom = data.draw(st.integers(left + 8, width)), data.draw(st.integers(top + 8, height))
    image, annotated = example(native, (left, top, right, bottom))
    views, (target,) = training_views([image], [annotated], draw([3], flip=float(flip)), masks=True)
    size = view_size(native, (40, 40))
    assert (target["size"], target["native"]) == (size, native)
    assert target["labels"].tolist() == [1]  # the crowd is no target
    x = np.array([left, right]) * size[1] / width
    x = size[1] - x[::-1] if flip else x
    y = np.array([top, bottom]) * size[0] / height
    np.testing.assert_allclose(target["boxes"][0], [x[0], y[0], x[1], y[1]], atol=1e-3)
    white, mask = (views[0][0, 0] > 127).float(), target["masks"][0].float()
    assert 2 * (white * mask).sum() / (white.sum() + mask.sum()) > 0.75


SCENES = [example((30, 50), (5, 5, 20, 20)), example((50, 30), (5, 5, 20, 20))]


def test_a_view_is_a_function_of_seed_epoch_and_image_alone():
    def boxes_of(positions, **how):
        stored, annotated = zip(*(SCENES[i % 2] for i in positions), strict=True)
        return [target["boxes"] for target in training_views(stored, annotated, draw(positions, **how))[1]]

    def changed(others):
        return sum(not torch.equal(a, b) for a, b in zip(together, others, strict=True))

    together = boxes_of(range(32))
    assert changed([boxes_of([i])[0] for i in range(32)]) == 0
    assert 0 < changed([together[i % 2] for i in range(32)]) < 32
    assert changed(boxes_of(range(32), seed=1))
    assert changed(boxes_of(range(32), epoch=1))


def test_a_batch_is_padded_by_the_mean_color_and_evaluation_never_flips():
    stored, annotated = zip(*SCENES, strict=True)
    views, targets = evaluation_views(stored, annotated, (40, 40), AUGMENT, masks=True)
    assert views.shape == (2, 3, 40, 40)
    assert [target["size"] for target in targets] == [(24, 40), (40, 24)]
    assert (views[0, :, 24:] == 128).all()
    assert (views[1, :, :, 24:] == 128).all()
    assert targets[0]["masks"].shape == (1, 40, 40)
    assert not targets[0]["masks"][:, 24:].any()
    np.testing.assert_allclose(targets[0]["boxes"], [[4, 4, 16, 16]], atol=1e-4)
    assert targets[0]["truth"].crowd.tolist() == [False, True]
    _, (unknown,) = evaluation_views(stored[:1], [Annotated(None, (30, 50))], (40, 40), AUGMENT, masks=True)
    assert unknown == {"size": (24, 40), "native": (30, 50)}
    image, annotated = example((60, 100), (10, 10, 40, 40))
    full, small = (evaluation_views([x], [annotated], (40, 40), AUGMENT) for x in (image, image[:, ::2, ::2]))
    assert full[0].shape == small[0].shape
    assert torch.equal(full[1][0]["boxes"], small[1][0]["boxes"])
