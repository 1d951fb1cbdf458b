"""Batches that reach a device as uint8 become there what they would have been on the CPU, to the bit."""

import dataclasses

import pytest
import torch

from vitmods import data
from vitmods.data.batch import for_device
from vitmods.recipes import Augment

CPU = torch.device("cpu")
PLAIN = Augment(crop="pad")
AUGMENTS = {
    "plain": PLAIN,
    "erasing": dataclasses.replace(PLAIN, erasing=0.8, randaugment=(1, 5.0)),
    "mixup": dataclasses.replace(PLAIN, mixup=0.8, erasing=0.8),
    "cutmix": dataclasses.replace(PLAIN, cutmix=1.0, erasing=0.8, repeats=2),
    "both": dataclasses.replace(PLAIN, mixup=0.2, cutmix=1.0, crop="random_resized"),
}


@pytest.fixture(scope="module")
def digits():
    return data.load("digits", img_size=(8, 8), in_chans=1, augment=PLAIN, limit_train=96)


def same(one, other):
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.targets, other.targets)
    assert torch.equal(one.index, other.index)
    assert len(one.views) == len(other.views)
    assert all(map(torch.equal, one.views, other.views))


@pytest.mark.parametrize("name", AUGMENTS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_batch_is_the_same_to_the_bit(digits, name, processes):
    images = dataclasses.replace(digits, augment=AUGMENTS[name])
    if processes > 1:
        images = images.for_process(1, processes)
    options = {"seed": 3, "epoch": 1, "batch_size": 24}
    pairs = list(zip(images.train_batches(**options), images.as_uint8().train_batches(**options), strict=True))
    assert len(pairs) == 4
    for ready, raw in pairs:
        assert raw.inputs.dtype == torch.uint8
        assert raw.targets.dtype == ready.targets.dtype
        same(ready, raw.to(CPU))
        # In parts, as for accumulated gradients: an image is mixed with one of another part.
        for first, other in zip(ready.parts(5), raw.moved(CPU).parts(5), strict=True):
            same(first, other.to(CPU))


def test_evaluations_and_several_views_are_the_same_to_the_bit(digits):
    def joint(stored, targets, draw):
        first = torch.stack([torch.from_numpy(image.copy()) for image in stored])
        return (first, first[:, :, :4, :4].contiguous()), targets

    views, options = dataclasses.replace(digits, joint=joint), {"seed": 3, "epoch": 1, "batch_size": 24}
    pairs = [*zip(digits.eval_batches("test", 100), digits.as_uint8().eval_batches("test", 100), strict=True)]
    pairs += zip(views.train_batches(**options), views.as_uint8().train_batches(**options), strict=True)
    for ready, raw in pairs:
        assert {tensor.dtype for tensor in (raw.inputs, *raw.views)} == {torch.uint8}
        same(ready, raw.to(CPU))


def test_only_a_gpu_gets_bytes(digits):
    assert for_device(digits, CPU) is digits
    assert for_device(digits, torch.device("mps")) is digits
    assert for_device(digits, torch.device("cuda", 1)).uint8
    other = object()
    assert for_device(other, torch.device("cuda")) is other


def test_all_tensors_of_a_batch_are_pinned(digits, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    images = dataclasses.replace(digits, augment=AUGMENTS["cutmix"]).for_process(0, 2).as_uint8()
    batch = next(images.train_batches(seed=0, epoch=0, batch_size=24))
    batch.pinned()
    later = batch.deferred
    erased = [tensor for one in (later.erased, later.before_erased) if one for tensor in (one.inside, one.noise)]
    held = [batch.inputs, batch.targets, batch.index, later.before, later.mean, later.std, *erased]
    assert {id(tensor) for tensor in pinned} == {id(tensor) for tensor in held}
