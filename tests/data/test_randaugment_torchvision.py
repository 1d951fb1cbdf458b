"""torchvision's operations at torchvision's strengths."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from vitmods.data.randaugment import SPACES

OPERATIONS, SIGNED, change = SPACES["torchvision"]
REFERENCE = v2.RandAugment()


def images(n=4, channels=3):
    """Smooth images with an edge, so that every operation has something to change."""
    rows, columns = np.mgrid[:24, :20]
    base = 60 + 5 * rows + 3 * columns + 40 * (rows > 12)
    noise = np.random.default_rng(0).integers(0, 30, (n, channels, 24, 20))
    return torch.from_numpy((base + noise).clip(20, 240).astype(np.uint8))


def test_the_operations_are_torchvisions():
    space = REFERENCE._AUGMENTATION_SPACE
    assert tuple(space) == OPERATIONS
    assert set(SIGNED) == {name for name, (_, signed) in space.items() if signed}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("magnitude", [0, 9, 15, 30])
def test_each_operation_is_torchvisions(name, magnitude):
    batch = images()
    magnitudes = REFERENCE._AUGMENTATION_SPACE[name][0](31, 24, 20)
    level = 0.0 if magnitudes is None else float(magnitudes[magnitude])
    for sign in (1, -1) if name in SIGNED else (1,):
        actual = torch.from_numpy(change(batch.numpy(), name, sign * magnitude, lambda _: np.zeros(4)))
        for i in range(4):
            reference = REFERENCE._apply_image_or_video_transform(
                batch[i], name, sign * level, REFERENCE.interpolation, REFERENCE._fill
            )
            # The reference has its strengths in single precision.
            torch.testing.assert_close(actual[i], reference, atol=1, rtol=0)
