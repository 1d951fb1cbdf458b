"""Batches are pure functions of seed, epoch and sample; every option of the augment does something; and a device needs
no more than bytes."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitmods.data.augment import inception_boxes
from vitmods.data.batch import for_device
from vitmods.data.geometry import resize
from vitmods.util.errors import UserError

from .support import UNCHANGED as PLAIN
from .support import by_sample, load

BUSY = {"flip": 0.5, "randaugment": (2, 9), "erasing": 0.5, "mixup": 0.4, "cutmix": 1.0}
CROPS = ("none", "pad", "random_resized", "inception")


@cache
def digits(crop="none", size=8, channels=3):
    augment = replace(PLAIN, crop=crop)
    return load("digits", img_size=size, in_chans=channels, augment=augment, limit_train=150)


def with_(dataset, **overrides):
    return replace(dataset, augment=replace(dataset.augment, **overrides))


def epoch_of(dataset, **chosen):
    return list(dataset.train_batches(**{"seed": 1, "epoch": 2, "batch_size": 32, **chosen}))


def same(a, b):
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("inputs", "targets", "index"))


def all_same(a, b):
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


@settings(deadline=None, max_examples=4)
@given(st.sampled_from(CROPS), st.integers(-5, 2**64), st.integers(0, 500), st.integers(12, 170), st.integers(0, 3))
def test_resuming_and_workers_change_nothing(crop, seed, epoch, batch_size, workers):
    dataset = with_(digits(crop), **BUSY, repeats=1 + seed % 3)
    chosen = {"seed": seed, "epoch": epoch, "batch_size": batch_size}
    complete = epoch_of(dataset, **chosen)
    start = len(complete) // 2
    assert all_same(epoch_of(replace(dataset, workers=workers), start=start, **chosen), complete[start:])


@settings(deadline=None, max_examples=6)
@given(st.sampled_from(CROPS), st.integers(0, 2**32), st.integers(0, 9), st.integers(7, 60))
def test_a_samples_augmentation_does_not_depend_on_its_batch(crop, seed, epoch, batch_size):
    dataset = with_(digits(crop), flip=0.5, randaugment=(1, 9), erasing=0.5)
    some = by_sample(epoch_of(dataset, seed=seed, epoch=epoch, batch_size=batch_size))
    all_at_once = by_sample(epoch_of(dataset, seed=seed, epoch=epoch, batch_size=1000))
    assert all(all_at_once[i] == image for i, image in some.items())


def test_every_epoch_visits_every_sample_once_but_for_the_last_partial_batch():
    orders = [torch.cat([b.index for b in epoch_of(digits(), epoch=e, batch_size=30)]).tolist() for e in range(3)]
    assert all(sorted(order) == list(range(150)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != torch.cat([b.index for b in epoch_of(digits(), seed=5, epoch=0, batch_size=30)]).tolist()
    for batch_size, sizes in ((32, [32] * 4), (150, [150]), (151, [150]), (1000, [150])):
        assert [len(b.index) for b in epoch_of(digits(), batch_size=batch_size)] == sizes
        assert digits().steps_per_epoch(batch_size) == len(sizes)
    assert epoch_of(digits(), start=4) == []


OPTIONS = [
    *({"flip": share} for share in (0.5, 1.0)),
    *({"randaugment": space} for space in ((1, 5), (2, 5), (1, 25), (3, 20))),
    *({"randaugment": (1, 5), "randaugment_space": space} for space in ("big_vision", "timm")),
    {"randaugment": (1, 5), "randaugment_space": "timm", "randaugment_noise": 1.0},
    *({"erasing": share} for share in (0.2, 0.9, 1.0)),
    *({"mixup": alpha} for alpha in (0.5, 1.0)),
    *({"cutmix": alpha} for alpha in (1.0, 9.0)),
    {"mixup": 9.0, "cutmix": 9.0},
    {"mean": (0.2,)},
    {"std": (0.2,)},
    {"mean": (0.5, 0.4, 0.3)},
]


def test_every_option_alters_the_images_in_its_own_way():
    plain, seen = epoch_of(digits()), set()
    for option in OPTIONS:
        changed = epoch_of(with_(digits(), **option))
        assert not any(torch.equal(a.inputs, b.inputs) for a, b in zip(plain, changed, strict=True)), option
        assert all(torch.equal(a.index, b.index) for a, b in zip(plain, changed, strict=True))
        mixed = "mixup" in option or "cutmix" in option
        assert all((b.targets.dtype == torch.float32) == mixed for b in changed)
        seen.add(frozenset(by_sample(changed).items()))
    assert len(seen) == len(OPTIONS)


def test_every_crop_and_its_parameters_alter_the_images():
    changes = ({"crop_scale": (0.5, 0.6)}, {"crop_ratio": (0.4, 0.5)})
    sets = [*map(digits, CROPS), *(with_(digits(crop), **changed) for crop in CROPS[2:] for changed in changes)]
    views = [epoch_of(dataset)[0].inputs for dataset in sets]
    assert len({view.numpy().tobytes() for view in views}) == 8
    whole = with_(digits("random_resized"), crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0))
    assert torch.equal(epoch_of(whole)[0].inputs, views[0])


@pytest.mark.parametrize("crop", ["none", "inception"])
def test_every_way_of_resizing_alters_the_images(crop, make_folder):
    root, views, pixels = make_folder({"a": 9, "b": 9}, size=(30, 40)), set(), set()
    for resample in ("bicubic", "bilinear", "big_vision"):
        dataset = load(root, img_size=16, augment=replace(PLAIN, crop=crop, resample=resample))
        views.add(epoch_of(dataset, batch_size=14)[0].inputs.numpy().tobytes())
        pixels.add(next(iter(dataset.eval_batches("val", 9))).inputs.numpy().tobytes())
    assert len(views) == len(pixels) == 3


def test_big_visions_random_crops_are_cut_from_the_original(make_folder):
    root = make_folder({"a": 9, "b": 9}, size=(30, 40))
    augment = replace(PLAIN, crop="inception", resample="big_vision")
    dataset = load(root, img_size=16, augment=augment, test_fraction=0.1)
    train = dataset.splits["train"]
    assert (train.store.index.shapes == (3, 30, 40)).all()
    assert {pixels.shape for _, pixels in dataset.samples(4)} == {(18, 24, 3)}
    batch = epoch_of(dataset, batch_size=14)[0]
    boxes = inception_boxes(
        1, 2, batch.index.numpy(), np.tile([30, 40], (14, 1)), augment.crop_scale, augment.crop_ratio
    )
    for image, i, (top, left, height, width) in zip(batch.inputs, batch.index, boxes.tolist(), strict=True):
        original = np.asarray(Image.open(root / train.ids[i])).transpose(2, 0, 1)
        cut = torch.from_numpy(original[:, top : top + height, left : left + width].copy())
        expected = resize(cut[None], (16, 16), "tf_bilinear")[0]
        assert torch.equal(torch.round((image * 0.5 + 0.5) * 255).to(torch.uint8), expected)


def test_repeats_show_fewer_images_in_several_views():
    once, thrice = with_(digits("pad"), flip=0.5), with_(digits("pad"), flip=0.5, repeats=3)
    assert thrice.steps_per_epoch(30) == once.steps_per_epoch(30) == 5
    batches, views = epoch_of(thrice, batch_size=30), {}
    order = torch.cat([batch.index for batch in epoch_of(once, batch_size=30)]).tolist()
    assert sorted(torch.cat([batch.index for batch in batches]).tolist()) == sorted(order[:50] * 3)
    for batch in batches:
        assert torch.equal(batch.targets, torch.from_numpy(thrice.splits["train"].labels[batch.index]))
        assert (batch.index != batch.index.roll(1)).all()
        for i, image in zip(batch.index.tolist(), batch.inputs, strict=True):
            views.setdefault(i, []).append(image.numpy().tobytes())
    assert np.mean([len(set(copies)) for copies in views.values()]) > 2
    first = by_sample(epoch_of(once, batch_size=150))
    assert all(first[i] in copies for i, copies in views.items())


def test_a_change_is_made_to_the_view_before_it_is_normalized():
    seen = []

    def change(dataset, index):
        assert dataset.dtype == torch.uint8
        assert dataset.shape[1:] == (3, 8, 8)
        seen.extend(index.tolist())
        return 255 - dataset

    plain, changed = (list(digits().eval_batches("test", 64, transform)) for transform in (None, change))
    assert seen == list(range(len(digits().splits["test"])))
    for a, b in zip(plain, changed, strict=True):
        torch.testing.assert_close(b.inputs, -a.inputs)
        assert torch.equal(a.targets, b.targets)
    assert all_same(plain, list(digits().eval_batches("test", 64)))


def test_flip_mirrors_the_chosen_share():
    plain, some, every = (torch.cat([b.inputs for b in epoch_of(with_(digits(), flip=p))]) for p in (0.0, 0.3, 1.0))
    flipped = (some == plain.flip(-1)).flatten(1).all(1)
    assert ((some == plain).flatten(1).all(1) | flipped).all()
    assert 0.2 < flipped.float().mean() < 0.4
    assert torch.equal(every, plain.flip(-1))


def test_normalization_is_the_recipes_and_its_mean_over_channels_for_gray_images():
    split = digits().splits["train"]
    batch = epoch_of(with_(digits(), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)))[0]
    pixels = torch.from_numpy(split.store.batch(batch.index.numpy())).double() / 255
    mean, std = (torch.tensor(v).double().view(3, 1, 1) for v in ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7]))
    torch.testing.assert_close(batch.inputs.double(), (pixels - mean) / std, atol=1e-6, rtol=1e-6)
    gray = with_(digits(channels=1), mean=(0.1, 0.2, 0.6), std=(0.4, 0.5, 0.6))
    assert same(epoch_of(gray)[0], epoch_of(with_(digits(channels=1), mean=(0.3,), std=(0.5,)))[0])


def test_evaluation_shows_every_image_in_order_unaugmented():
    dataset = with_(digits("pad"), **BUSY)
    for split in ("train", "val", "test"):
        batches = list(dataset.eval_batches(split, 64))
        assert torch.cat([b.index for b in batches]).tolist() == list(range(len(dataset.splits[split])))
        assert torch.cat([b.targets for b in batches]).tolist() == dataset.splits[split].labels.tolist()
        assert torch.cat([b.inputs for b in batches]).shape[1:] == (3, 8, 8)
        again = replace(dataset, workers=2, augment=PLAIN).eval_batches(split, 64)
        assert all_same(batches, list(again))
    with pytest.raises(UserError, match='does not have a split "dev", only train, val, test'):
        list(dataset.eval_batches("dev", 8))


def test_rectangles_and_mixed_and_small_sizes(make_folder):
    root = make_folder({"a": 6}, size=(30, 40))
    make_folder({"b": 6}, size=(50, 20))
    make_folder({"c": 6}, size=(9, 9))
    for crop in CROPS:
        dataset = load(root, img_size=(16, 24), augment=replace(PLAIN, crop=crop, eval_crop=0.875, **BUSY))
        batches = epoch_of(dataset, batch_size=4)
        assert all(b.inputs.shape == (4, 3, 16, 24) for b in batches)
        assert all_same(epoch_of(replace(dataset, workers=2), batch_size=4), batches)
        assert next(iter(dataset.eval_batches("train", 7))).inputs.shape == (7, 3, 16, 24)
    small = digits("none", size=20)
    assert next(iter(small.eval_batches("test", 5))).inputs.shape == (5, 3, 20, 20)
    assert small.splits["test"].store.batch(np.arange(2)).shape[1:] == (3, 8, 8)


def test_samples_go_round_the_classes():
    samples = digits(channels=1).samples(23)
    assert [name for name, _ in samples] == [str(i % 10) for i in range(23)]
    assert all(p.shape == (8, 8, 3) and p.dtype == np.uint8 and p.flags.c_contiguous for _, p in samples)
    assert len(digits().samples(10_000)) == 150


# Batches that reach a device as bytes become there what they would have been on the CPU

CPU = torch.device("cpu")
DEFERRED = [
    {},
    {"erasing": 0.8, "randaugment": (1, 5.0)},
    {"mixup": 0.8, "erasing": 0.8},
    {"cutmix": 1.0, "erasing": 0.8, "repeats": 2},
    {"mixup": 0.2, "cutmix": 1.0},
]


@pytest.mark.parametrize("options", DEFERRED, ids=str)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_batch_of_bytes_is_the_same_to_the_bit(options, processes):
    images = with_(digits("pad", channels=1), **options)
    if processes > 1:
        images = images.for_process(1, processes)
    pairs = list(zip(epoch_of(images), epoch_of(images.as_uint8()), strict=True))
    assert len(pairs) == 4
    for ready, raw in pairs:
        assert raw.inputs.dtype == torch.uint8
        assert raw.targets.dtype == ready.targets.dtype
        assert same(ready, raw.to(CPU))
        # In parts, as for accumulated gradients: an image is mixed with one of another part.
        for first, other in zip(ready.parts(5), raw.moved(CPU).parts(5), strict=True):
            assert same(first, other.to(CPU))


def test_evaluations_and_several_views_of_bytes_are_the_same_to_the_bit():
    def joint(stored, targets, draw):
        first = torch.stack([torch.from_numpy(image.copy()) for image in stored])
        return (first, first[:, :, :4, :4].contiguous()), targets

    plain = digits(channels=1)
    views = replace(plain, joint=joint)
    pairs = [*zip(plain.eval_batches("test", 100), plain.as_uint8().eval_batches("test", 100), strict=True)]
    pairs += zip(epoch_of(views), epoch_of(views.as_uint8()), strict=True)
    for ready, raw in pairs:
        assert {tensor.dtype for tensor in (raw.inputs, *raw.views)} == {torch.uint8}
        actual = raw.to(CPU)
        assert same(ready, actual)
        assert len(ready.views) == len(actual.views)
        assert all(map(torch.equal, ready.views, actual.views))


def test_only_a_gpu_gets_bytes():
    dataset = digits()
    assert for_device(dataset, CPU) is dataset
    assert for_device(dataset, torch.device("mps")) is dataset
    assert for_device(dataset, torch.device("cuda", 1)).uint8
    other = object()
    assert for_device(other, torch.device("cuda")) is other


def test_all_tensors_of_a_batch_are_pinned(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    images = with_(digits("pad", channels=1), **DEFERRED[3]).for_process(0, 2).as_uint8()
    batch = next(images.train_batches(seed=0, epoch=0, batch_size=24))
    batch.pinned()
    later = batch.deferred
    erased = [tensor for one in (later.erased, later.before_erased) if one for tensor in (one.inside, one.noise)]
    held = [batch.inputs, batch.targets, batch.index, later.before, later.mean, later.std, *erased]
    assert {id(tensor) for tensor in pinned} == {id(tensor) for tensor in held}
