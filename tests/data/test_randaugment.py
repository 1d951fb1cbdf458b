"""RandAugment: torchvision's operations at torchvision's strengths, the same for a picture in any company."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from vitmods.data.randaugment import OPERATIONS, SIGNED, randaugment, strength

REFERENCE = v2.RandAugment()


def pictures(n: int = 32, channels: int = 3) -> torch.Tensor:
    """Smooth pictures with an edge, so that every operation has something to change."""
    rows, columns = np.mgrid[:24, :20]
    base = 60 + 5 * rows + 3 * columns + 40 * (rows > 12)
    noise = np.random.default_rng(0).integers(0, 30, (n, channels, 24, 20))
    return torch.from_numpy((base + noise).clip(20, 240).astype(np.uint8))


def test_the_operations_are_torchvisions() -> None:
    space = REFERENCE._AUGMENTATION_SPACE
    assert tuple(OPERATIONS) == tuple(space)
    assert set(SIGNED) == {name for name, (_, signed) in space.items() if signed}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("magnitude", [0, 9, 15, 30])
def test_each_operation_is_torchvisions(name: str, magnitude: int) -> None:
    batch = pictures(4)
    magnitudes = REFERENCE._AUGMENTATION_SPACE[name][0](31, 24, 20)
    level = 0.0 if magnitudes is None else float(magnitudes[magnitude])
    if magnitudes is not None:
        assert strength(name, magnitude, (24, 20)) == pytest.approx(level, abs=1e-6, rel=1e-6)
    for sign in (1, -1) if name in SIGNED else (1,):
        ours = OPERATIONS[name](batch, sign * level)
        for i in range(4):
            theirs = REFERENCE._apply_image_or_video_transform(
                batch[i], name, sign * level, REFERENCE.interpolation, REFERENCE._fill
            )
            assert torch.equal(ours[i], theirs)


def test_a_picture_is_changed_alike_in_any_batch() -> None:
    batch, index = pictures(64), np.arange(64)
    together = randaugment(batch.clone(), 3, 1, index, 2, 15)
    alone = torch.cat([randaugment(batch[i : i + 1].clone(), 3, 1, index[i : i + 1], 2, 15) for i in index])
    assert torch.equal(together, alone)


def test_every_operation_is_drawn_alike_often() -> None:
    """One round of one operation: each picture equals one of the operations' results."""
    n = 2800
    one = pictures(1)
    results = {}
    for name in OPERATIONS:
        for sign in (1, -1) if name in SIGNED else (1,):
            results[name, sign] = OPERATIONS[name](one, sign * strength(name, 20, (24, 20)))[0].numpy().tobytes()
    assert len(set(results.values())) == len(results)
    changed = randaugment(one.repeat(n, 1, 1, 1), 0, 0, np.arange(n), 1, 20)
    counts = dict.fromkeys(results, 0)
    by_content = {content: key for key, content in results.items()}
    for picture in changed.numpy():
        counts[by_content[picture.tobytes()]] += 1
    for (name, _), count in counts.items():
        assert abs(count - n / 14 / (2 if name in SIGNED else 1)) < 60


def test_torchs_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    randaugment(pictures(8), 0, 0, np.arange(8), 2, 9)
    assert torch.equal(before, torch.get_rng_state())


def test_grey_pictures_can_be_augmented() -> None:
    assert randaugment(pictures(64, 1), 0, 0, np.arange(64), 2, 9).shape == (64, 1, 24, 20)
