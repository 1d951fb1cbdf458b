"""Augmentation of images with masks: both move together, and nothing but (seed, epoch, view) decides how."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitmods.data.dataset import Annotated, Draw
from vitmods.recipes import Augment, Recipe
from vitmods.tasks.segmentation.masks import IGNORE, evaluation_views, labelled_pixels, training_views
from vitmods.tasks.segmentation.recipes import SegmentationPart


@dataclass
class Mask:
    labels: np.ndarray

    def read(self):
        return self.labels


def scene(seed, size, classes=4):
    """An image whose gray level is 40 times the class of the pixel, in blocks of 4 pixels, and its mask."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, classes, [-(-side // 4) for side in size])
    labels = np.kron(blocks, np.ones((4, 4), int))[: size[0], : size[1]].astype(np.uint8)
    return np.repeat(40 * labels[None], 3, axis=0), Annotated(Mask(labels), size)


def views(scenes, index, *, seed=0, epoch=0, size=(16, 16), **fields):
    recipe = Recipe().with_(**{"resample": "bilinear", "mean": (0.0,), "most_of_class": 1.0, **fields})
    draw = Draw(seed, epoch, np.array(index), np.array(index), recipe.augment, size)
    part, images, annotated = recipe.part(SegmentationPart), *zip(*scenes, strict=True)
    (inputs,), (masks, pixels) = training_views(part, images, annotated, draw)
    assert torch.equal(pixels, labelled_pixels(masks))
    return inputs, masks


sides = st.integers(12, 40)


@settings(max_examples=25, deadline=None)
@given(sides, sides, st.integers(0, 2**31), st.integers(0, 99), st.sampled_from([None, (0.5, 2.0)]))
def test_image_and_mask_move_together(height, width, seed, view, resize_range):
    image, mask = views([scene(seed, (height, width))], [view], seed=seed, resize_range=resize_range)
    labeled = mask[0] != IGNORE
    # Bilinear interpolation shows other levels near edges only: inside of a class both say the same.
    labels = torch.nn.functional.pad(torch.where(labeled, mask[0], -9), (4, 4, 4, 4), value=-9).float()[None]
    least, most = (sign * torch.nn.functional.max_pool2d(sign * labels, 9, 1)[0] for sign in (-1, 1))
    flat = labeled & (least == most)
    assert (image[0, 0][flat] == 40 * mask[0][flat]).all()
    assert (image[0, :, ~labeled] == 0).all(), "the mean color, where there is no image"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.permutations(range(4)))
def test_a_view_depends_on_seed_epoch_and_view_alone(seed, order):
    scenes = [scene(i, (30, 24 + i)) for i in range(4)]
    options = {"seed": seed, "resize_range": (0.5, 2.0), "photometric": 1.0}
    images, masks = views(scenes, [3, 1, 4, 5], **options)
    again, same = views([scenes[i] for i in order], [[3, 1, 4, 5][i] for i in order], **options)
    assert torch.equal(again, images[list(order)])
    assert torch.equal(same, masks[list(order)])
    other, _ = views(scenes, [3, 1, 4, 5], epoch=1, **options)
    assert not torch.equal(other, images)


def test_flip_mirrors_both_and_missing_rows_are_ignored_and_in_the_mean_color():
    images, masks = views([scene(0, (10, 40))], [0], size=(20, 20), resize_range=(0.5, 0.5), mean=(0.5,))
    assert (masks[0, :10] != IGNORE).all()
    assert (masks[0, 10:] == IGNORE).all()
    assert (images[0, :, 10:] == 128).all()
    plain, mask = views([scene(1, (16, 16))], [0], flip=0.0)
    mirrored, mirrored_mask = views([scene(1, (16, 16))], [0], flip=1.0)
    assert torch.equal(mirrored, plain.flip(-1))
    assert torch.equal(mirrored_mask, mask.flip(-1))
    assert (plain[0, 0] == 40 * mask[0]).all()
    image, annotated = scene(0, (32, 48))
    small, mask = views([(image[:, 1::2, 1::2].copy(), annotated)], [0], size=(32, 48), flip=0.0)  # stored smaller
    assert (mask[0] == torch.from_numpy(annotated.annotation.labels)).float().mean() > 0.99
    assert (small[0, 0].float() - 40 * mask[0]).abs().mean() < 15


def test_crops_of_one_class_are_drawn_again():
    labels = np.zeros((16, 64), np.uint8)
    labels[:, 60:] = 1
    annotated = Annotated(Mask(labels), (16, 64))
    scenes = [(np.zeros((3, 16, 64), np.uint8), annotated)] * 200
    seen = {}
    for most in (0.8, 1.0):
        _, masks = views(scenes, range(200), most_of_class=most)
        seen[most] = (masks == 1).flatten(1).any(1).float().mean().item()
    assert seen[1.0] < 0.2
    assert seen[0.8] > 2 * seen[1.0]


def test_photometric_distortion_changes_colors_by_its_strength():
    scenes = [scene(i, (16, 16)) for i in range(64)]
    plain, masks = views(scenes, range(64))
    changes = []
    for strength in (0.25, 1.0):
        images, same = views(scenes, range(64), photometric=strength)
        assert torch.equal(same, masks)
        changes.append((images.float() - plain.float()).abs().mean().item())
    assert 0 < 2 * changes[0] < changes[1]


@pytest.mark.parametrize("size", [(16, 16), (16, 24)])
def test_evaluation_sees_whole_images_padded_to_one_size(size):
    scenes = [scene(0, (32, 32)), scene(1, (20, 40))]
    annotated = [scenes[0][1], Annotated(None, (20, 40))]
    augment = Augment(mean=(0.0,), resample="bilinear")
    images, targets = evaluation_views([image for image, _ in scenes], annotated, size, augment)
    covering = [(16, 16), (16, 32)] if size == (16, 16) else [(24, 24), (16, 32)]
    assert targets["size"].tolist() == [list(first) for first in covering]
    assert targets["native"].tolist() == [[32, 32], [20, 40]]
    assert targets["window"].tolist() == [list(size)] * 2
    assert images.shape == (2, 3, max(first[0] for first in covering), 32)
    assert (images[0, :, :, covering[0][1] :] == 0).all()
    assert targets["mask"][1] is None
    assert torch.equal(targets["mask"][0], torch.from_numpy(scenes[0][1].annotation.labels))
