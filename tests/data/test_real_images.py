"""The real sets: found, read and turned into batches as they should be."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from vitmods import data
from vitmods.recipes import default, small_images


@pytest.mark.parametrize(
    ("name", "classes", "splits"),
    [
        ("cifar10", 10, {"train": 110, "val": 10, "test": 120}),
        ("clothing10", 10, {"train": 120, "val": 120, "test": 120}),
        ("sign_digits", 10, {"train": 110, "val": 10, "test": 120}),
    ],
)
def test_splits_and_sizes(real_sets, name, classes, splits):
    checked = data.check(real_sets / name)
    assert checked.fit
    assert len(checked.summary["classes"]) == classes
    assert {split: part["count"] for split, part in checked.summary["splits"].items()} == splits


def test_32_px_images_are_kept_as_they_are(real_sets):
    dataset = data.load(real_sets / "cifar10", img_size=32, augment=small_images().augment)
    split = dataset.splits["train"]
    for i in (0, 57, 109):
        expected = np.asarray(Image.open(real_sets / "cifar10" / split.ids[i])).transpose(2, 0, 1)
        np.testing.assert_array_equal(split.store.image(i), expected)
        assert dataset.classes[split.labels[i]] == split.ids[i].split("/")[1]


def test_224_px_evaluation_is_what_torchvision_shows(real_sets):
    dataset = data.load(real_sets / "clothing10", img_size=160, augment=default().augment, limit_train=20)
    pixels = torch.cat([batch.inputs for batch in dataset.eval_batches("test", 16)])
    transform = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(int(160 / 0.875), v2.InterpolationMode.BICUBIC, antialias=True),
            v2.CenterCrop(160),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    for i in (0, 40, len(pixels) - 1):
        path = real_sets / "clothing10" / dataset.splits["test"].ids[i]
        assert torch.equal(pixels[i], transform(Image.open(path)))


def test_large_crops_see_the_whole_image(real_sets):
    dataset = data.load(real_sets / "clothing10", img_size=112, augment=default().augment, limit_train=30)
    shapes = dataset.splits["train"].store.index.shapes
    assert (shapes[:, 1:].min(axis=1) == 128).all()
    assert (shapes[:, 1:].max(axis=1) > 150).any()
    batch = next(dataset.train_batches(seed=0, epoch=0, batch_size=8))
    assert batch.inputs.shape == (8, 3, 112, 112)
    assert batch.inputs.isfinite().all()
