"""RandAugment of every space: what an image is given is drawn by counter, alike often, and the same in any company."""

import random

import numpy as np
import pytest
import torch

from vitmods.data import randaugment as module
from vitmods.data.randaugment import randaugment
from vitmods.recipes import Augment

SPACES = ("torchvision", "big_vision", "timm")


def images(n: int = 32, channels: int = 3) -> torch.Tensor:
    """Smooth images with an edge, so that every operation has something to change."""
    rows, columns = np.mgrid[:24, :20]
    base = 10 + 5 * rows + 3 * columns + 40 * (rows > 12)
    noise = np.random.default_rng(0).integers(0, 30, (n, channels, 24, 20))
    return torch.from_numpy((base + noise).clip(0, 240).astype(np.uint8))


def augment(space: str, count: int = 2, magnitude: float = 9, noise: float = 0.0) -> Augment:
    noise = noise if space == "timm" else 0.0
    return Augment(randaugment=(count, magnitude), randaugment_space=space, randaugment_noise=noise)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_changed_alike_in_any_batch(space: str, channels: int) -> None:
    batch, index, chosen = images(64, channels), np.arange(64), augment(space, noise=0.5)
    together = randaugment(batch.clone(), 3, 1, index, chosen)
    alone = torch.cat([randaugment(batch[i : i + 1].clone(), 3, 1, index[i : i + 1], chosen) for i in index])
    assert torch.equal(together, alone)
    changed = (together != batch).flatten(1).any(1)
    assert changed.float().mean() > 0.6
    assert not torch.equal(together, randaugment(batch.clone(), 3, 2, index, chosen))
    assert not torch.equal(together, randaugment(batch.clone(), 4, 1, index, chosen))


@pytest.mark.parametrize("space", SPACES)
def test_no_global_generator_is_touched(space: str) -> None:
    def states() -> tuple[object, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()
    randaugment(images(200), 0, 0, np.arange(200), augment(space, noise=0.5))
    assert states() == before


@pytest.mark.parametrize("space", module.SPACES)
def test_every_operation_is_drawn_alike_often(space: str) -> None:
    """One round of one operation: each image equals one of the operations' results."""
    names, signed, change = module.SPACES[space]
    n, magnitude = 2800, {"torchvision": 20, "big_vision": 1}[space]
    one = images(1)
    results = {}
    for name in names:
        for sign in (1, -1) if name in signed else (1,):
            if name != "Cutout":  # of which each is another one
                result = change(one.numpy(), name, sign * magnitude, lambda _: np.zeros(1))
                results[name, sign] = result.tobytes()
    assert len(set(results.values())) == len(results)
    changed = randaugment(one.repeat(n, 1, 1, 1), 0, 0, np.arange(n), augment(space, 1, magnitude))
    counts = dict.fromkeys(results, 0) | ({("Cutout", 1): 0} if "Cutout" in names else {})
    by_content = {content: key for key, content in results.items()}
    for image in changed.numpy():
        counts[by_content.get(image.tobytes(), ("Cutout", 1))] += 1
    for (name, _), count in counts.items():
        assert abs(count - n / len(names) / (2 if name in signed else 1)) < 60
