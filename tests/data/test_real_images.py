"""The real sets: found, read and turned into batches as they should be."""

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from vitmods import data
from vitmods.recipes import default


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
