"""Batches are pure functions of seed, epoch and sample, and every option of the augment does something."""

import dataclasses
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitmods import data
from vitmods.data import Batch, ImageDataset
from vitmods.data.augment import inception_boxes
from vitmods.data.geometry import resize
from vitmods.recipes import Augment
from vitmods.util.errors import UserError

PLAIN = Augment(crop="none", flip=0.0, eval_crop=1.0)
BUSY = {"flip": 0.5, "randaugment": (2, 9), "erasing": 0.5, "mixup": 0.4, "cutmix": 1.0}
CROPS = ("none", "pad", "random_resized", "inception")
RESAMPLES = ("bicubic", "bilinear", "big_vision")


@cache
def digits(crop: str = "none", size: int = 8, channels: int = 3) -> ImageDataset:
    return data.load(
        "digits", img_size=size, in_chans=channels, augment=dataclasses.replace(PLAIN, crop=crop), limit_train=150
    )


def with_(dataset: ImageDataset, **overrides) -> ImageDataset:
    return replace(dataset, augment=dataclasses.replace(dataset.augment, **overrides))


def epoch_of(dataset: ImageDataset, **chosen) -> list[Batch]:
    return list(dataset.train_batches(**{"seed": 1, "epoch": 2, "batch_size": 32, **chosen}))


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("inputs", "targets", "index"))


def all_same(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def by_sample(batches: list[Batch]) -> dict[int, bytes]:
    return {
        int(i): image.numpy().tobytes() for batch in batches for i, image in zip(batch.index, batch.inputs, strict=True)
    }


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("channels", [1, 3])
def test_shapes_and_types(crop: str, channels: int) -> None:
    batch = epoch_of(digits(crop, channels=channels))[0]
    assert batch.inputs.shape == (32, channels, 8, 8)
    assert (batch.inputs.dtype, batch.targets.dtype, batch.index.dtype) == (torch.float32, torch.int64, torch.int64)
    assert batch.targets.tolist() == digits(crop).splits["train"].labels[batch.index].tolist()
    assert batch.inputs.is_contiguous()


@settings(deadline=None, max_examples=12)
@given(st.sampled_from(CROPS), st.integers(-5, 2**64), st.integers(0, 500), st.integers(12, 170), st.integers(0, 3))
def test_resuming_and_workers_change_nothing(crop: str, seed: int, epoch: int, batch_size: int, workers: int) -> None:
    dataset = with_(digits(crop), **BUSY, repeats=1 + seed % 3)
    chosen = {"seed": seed, "epoch": epoch, "batch_size": batch_size}
    whole = epoch_of(dataset, **chosen)
    start = len(whole) // 2
    assert all_same(epoch_of(replace(dataset, workers=workers), start=start, **chosen), whole[start:])


@settings(deadline=None, max_examples=10)
@given(st.sampled_from(CROPS), st.integers(0, 2**32), st.integers(0, 9), st.integers(7, 60))
def test_a_samples_augmentation_does_not_depend_on_its_batch(crop: str, seed: int, epoch: int, batch_size: int) -> None:
    dataset = with_(digits(crop), flip=0.5, randaugment=(1, 9), erasing=0.5)
    some = by_sample(epoch_of(dataset, seed=seed, epoch=epoch, batch_size=batch_size))
    all_at_once = by_sample(epoch_of(dataset, seed=seed, epoch=epoch, batch_size=1000))
    assert all(all_at_once[i] == image for i, image in some.items())


def test_every_epoch_visits_every_sample_once_in_another_order() -> None:
    orders = [torch.cat([b.index for b in epoch_of(digits(), epoch=e, batch_size=30)]).tolist() for e in range(3)]
    assert all(sorted(order) == list(range(150)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != torch.cat([b.index for b in epoch_of(digits(), seed=5, epoch=0, batch_size=30)]).tolist()


def test_the_last_partial_batch_is_dropped_unless_it_is_the_only_one() -> None:
    for batch_size, sizes in ((32, [32] * 4), (150, [150]), (151, [150]), (1000, [150])):
        assert [len(b.index) for b in epoch_of(digits(), batch_size=batch_size)] == sizes
        assert digits().steps_per_epoch(batch_size) == len(sizes)


def test_starting_at_the_end_gives_nothing() -> None:
    assert epoch_of(digits(), start=4) == []


@pytest.mark.parametrize("varied", [{"seed": 9}, {"epoch": 9}])
@pytest.mark.parametrize("option", [{"flip": 0.5}, {"randaugment": (1, 9)}, {"erasing": 0.5}, {"crop": "pad"}])
def test_other_seeds_and_epochs_augment_otherwise(option: dict, varied: dict) -> None:
    dataset = with_(digits(), **option)
    everything = {"batch_size": 1000}
    assert by_sample(epoch_of(dataset, **everything)) != by_sample(epoch_of(dataset, **everything, **varied))


@pytest.mark.parametrize(
    "option",
    [
        {"flip": 1.0},
        {"flip": 0.5},
        {"randaugment": (1, 20)},
        {"randaugment": (3, 20)},
        {"randaugment": (2, 0), "randaugment_space": "big_vision"},
        {"randaugment": (2, 9), "randaugment_space": "timm", "randaugment_noise": 0.5},
        {"erasing": 0.3},
        {"erasing": 1.0},
        {"mixup": 0.5},
        {"cutmix": 9.0},
        {"mixup": 9.0, "cutmix": 9.0},
        {"mean": (0.2,)},
        {"std": (0.2,)},
        {"mean": (0.5, 0.4, 0.3)},
    ],
    ids=str,
)
def test_every_option_alters_the_images(option: dict) -> None:
    plain, changed = epoch_of(digits()), epoch_of(with_(digits(), **option))
    assert not any(torch.equal(a.inputs, b.inputs) for a, b in zip(plain, changed, strict=True))
    assert all(torch.equal(a.index, b.index) for a, b in zip(plain, changed, strict=True))
    mixed = "mixup" in option or "cutmix" in option
    assert all((b.targets.dtype == torch.float32) == mixed for b in changed)


def test_options_differ_from_each_other() -> None:
    options = [{"flip": 0.5}, {"flip": 1.0}, {"randaugment": (1, 5)}, {"randaugment": (2, 5)}, {"randaugment": (1, 25)}]
    options += [{"randaugment": (1, 5), "randaugment_space": space} for space in ("big_vision", "timm")]
    options += [{"randaugment": (1, 5), "randaugment_space": "timm", "randaugment_noise": 1.0}]
    options += [{"erasing": 0.2}, {"erasing": 0.9}, {"mixup": 0.1}, {"mixup": 1.0}, {"cutmix": 1.0}, {"cutmix": 9.0}]
    seen = [frozenset(by_sample(epoch_of(with_(digits(), **option))).items()) for option in options]
    assert len(set(seen)) == len(seen)


def test_every_crop_and_its_parameters_alter_the_images() -> None:
    views = [epoch_of(digits(crop))[0].inputs for crop in CROPS]
    resized = digits("random_resized")
    views.append(epoch_of(with_(resized, crop_scale=(0.5, 0.6)))[0].inputs)
    views.append(epoch_of(with_(resized, crop_ratio=(0.4, 0.5)))[0].inputs)
    inception = digits("inception")
    views.append(epoch_of(with_(inception, crop_scale=(0.5, 0.6)))[0].inputs)
    views.append(epoch_of(with_(inception, crop_ratio=(0.4, 0.5)))[0].inputs)
    assert len({view.numpy().tobytes() for view in views}) == 8
    assert torch.equal(epoch_of(with_(resized, crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0)))[0].inputs, views[0])


@pytest.mark.parametrize("crop", ["none", "pad", "random_resized", "inception"])
def test_every_way_of_resizing_alters_the_images(crop: str, make_folder) -> None:
    root = make_folder({"a": 9, "b": 9}, size=(30, 40))
    views, shown = [], []
    for resample in RESAMPLES:
        dataset = data.load(root, img_size=16, augment=dataclasses.replace(PLAIN, crop=crop, resample=resample))
        views.append(epoch_of(dataset, batch_size=14)[0].inputs)
        shown.append(next(iter(dataset.eval_batches("val", 9))).inputs)
    assert len({view.numpy().tobytes() for view in views}) == 3
    assert len({view.numpy().tobytes() for view in shown}) == 3


def test_big_visions_random_crops_are_cut_from_the_original(make_folder) -> None:
    root = make_folder({"a": 9, "b": 9}, size=(30, 40))
    augment = dataclasses.replace(PLAIN, crop="inception", resample="big_vision")
    dataset = data.load(root, img_size=16, augment=augment, test_fraction=0.1)
    train = dataset.splits["train"]
    assert (train.store.index.shapes == (3, 30, 40)).all()
    assert {shown.shape for _, shown in dataset.samples(4)} == {(18, 24, 3)}
    batch = epoch_of(dataset, batch_size=14)[0]
    boxes = inception_boxes(
        1, 2, batch.index.numpy(), np.tile([30, 40], (14, 1)), augment.crop_scale, augment.crop_ratio
    )
    for image, i, (top, left, height, width) in zip(batch.inputs, batch.index, boxes.tolist(), strict=True):
        original = np.asarray(Image.open(root / train.ids[i])).transpose(2, 0, 1)
        cut = torch.from_numpy(original[:, top : top + height, left : left + width].copy())
        expected = resize(cut[None], (16, 16), "tf_bilinear")[0]
        assert torch.equal(torch.round((image * 0.5 + 0.5) * 255).to(torch.uint8), expected)


def test_repeats_show_fewer_images_in_several_views() -> None:
    once, thrice = with_(digits("pad"), flip=0.5), with_(digits("pad"), flip=0.5, repeats=3)
    assert thrice.steps_per_epoch(30) == once.steps_per_epoch(30) == 5
    batches = epoch_of(thrice, batch_size=30)
    seen = torch.cat([batch.index for batch in batches]).tolist()
    order = torch.cat([batch.index for batch in epoch_of(once, batch_size=30)]).tolist()
    assert sorted(seen) == sorted(order[:50] * 3)
    for batch in batches:
        assert torch.equal(batch.targets, torch.from_numpy(thrice.splits["train"].labels[batch.index]))
        assert (batch.index != batch.index.roll(1)).all()
    views = {i: [] for i in seen}
    for batch in batches:
        for i, image in zip(batch.index.tolist(), batch.inputs, strict=True):
            views[i].append(image.numpy().tobytes())
    assert np.mean([len(set(copies)) for copies in views.values()]) > 2
    first = by_sample(epoch_of(once, batch_size=150))
    assert all(first[i] in copies for i, copies in views.items())


def test_a_change_is_made_to_the_view_before_it_is_normalized() -> None:
    seen = []

    def change(dataset: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        assert dataset.dtype == torch.uint8
        assert dataset.shape[1:] == (3, 8, 8)
        seen.extend(index.tolist())
        return 255 - dataset

    plain, changed = (list(digits().eval_batches("test", 64, given)) for given in (None, change))
    assert seen == list(range(len(digits().splits["test"])))
    for a, b in zip(plain, changed, strict=True):
        torch.testing.assert_close(b.inputs, -a.inputs)
        assert torch.equal(a.targets, b.targets)
    assert all_same(plain, list(digits().eval_batches("test", 64)))


def test_flip_mirrors_the_chosen_share() -> None:
    plain, half = (torch.cat([b.inputs for b in epoch_of(p)]) for p in (digits(), with_(digits(), flip=0.3)))
    flipped = (half == plain.flip(-1)).flatten(1).all(1)
    assert ((half == plain).flatten(1).all(1) | flipped).all()
    assert 0.2 < flipped.float().mean() < 0.4
    assert torch.equal(torch.cat([b.inputs for b in epoch_of(with_(digits(), flip=1.0))]), plain.flip(-1))


def test_normalization_is_the_recipes() -> None:
    split = digits().splits["train"]
    batch = epoch_of(with_(digits(), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)))[0]
    pixels = torch.from_numpy(split.store.batch(batch.index.numpy())).double() / 255
    mean, std = (torch.tensor(v).double().view(3, 1, 1) for v in ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7]))
    torch.testing.assert_close(batch.inputs.double(), (pixels - mean) / std, atol=1e-6, rtol=1e-6)


def test_gray_images_take_the_mean_of_the_channels_normalization() -> None:
    gray = with_(digits(channels=1), mean=(0.1, 0.2, 0.6), std=(0.4, 0.5, 0.6))
    assert same(epoch_of(gray)[0], epoch_of(with_(digits(channels=1), mean=(0.3,), std=(0.5,)))[0])


def test_evaluation_shows_every_image_in_order_unaugmented() -> None:
    dataset = with_(digits("pad"), **BUSY)
    for split in ("train", "val", "test"):
        batches = list(dataset.eval_batches(split, 64))
        assert torch.cat([b.index for b in batches]).tolist() == list(range(len(dataset.splits[split])))
        assert torch.cat([b.targets for b in batches]).tolist() == dataset.splits[split].labels.tolist()
        assert torch.cat([b.inputs for b in batches]).shape[1:] == (3, 8, 8)
        again = replace(dataset, workers=2, augment=PLAIN).eval_batches(split, 64)
        assert all_same(batches, list(again))
    with pytest.raises(UserError, match='no split "dev"; this set has train, val, test'):
        list(dataset.eval_batches("dev", 8))


def test_images_smaller_than_the_view_are_enlarged() -> None:
    batch = next(iter(digits("none", size=20).eval_batches("test", 5)))
    assert batch.inputs.shape == (5, 3, 20, 20)
    assert digits("none", size=20).splits["test"].store.batch(np.arange(2)).shape[1:] == (3, 8, 8)
    assert epoch_of(digits("random_resized", size=20))[0].inputs.shape == (32, 3, 20, 20)


def test_rectangles_and_mixed_sizes(make_folder) -> None:
    root = make_folder({"a": 6}, size=(30, 40))
    make_folder({"b": 6}, size=(50, 20))
    make_folder({"c": 6}, size=(9, 9))
    for crop in CROPS:
        dataset = data.load(
            root, img_size=(16, 24), augment=dataclasses.replace(PLAIN, crop=crop, eval_crop=0.875, **BUSY)
        )
        batches = epoch_of(dataset, batch_size=4)
        assert all(b.inputs.shape == (4, 3, 16, 24) for b in batches)
        assert all_same(epoch_of(replace(dataset, workers=2), batch_size=4), batches)
        assert next(iter(dataset.eval_batches("train", 7))).inputs.shape == (7, 3, 16, 24)


def test_samples_go_round_the_classes() -> None:
    samples = digits(channels=1).samples(23)
    assert [name for name, _ in samples] == [str(i % 10) for i in range(23)]
    assert all(p.shape == (8, 8, 3) and p.dtype == np.uint8 and p.flags.c_contiguous for _, p in samples)
    assert len(digits().samples(10_000)) == 150


def test_a_batch_may_be_changed_without_changing_the_store() -> None:
    dataset = with_(digits(), flip=1.0)
    before = dataset.splits["train"].store.pixels.copy()
    for batch in epoch_of(dataset):
        batch.inputs.zero_()
    assert np.array_equal(before, dataset.splits["train"].store.pixels)
