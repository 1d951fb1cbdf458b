"""Images that are kept on the GPU give the batches that the loader gives, bit for bit, and start few operations."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

import vitmods as vm
from vitmods import data
from vitmods.data import dataset
from vitmods.data.batch import for_device, kept_on
from vitmods.recipes import Augment, Recipe
from vitmods.tasks import Classification
from vitmods.train import RunOptions, TrialRun

AUGMENTS = {
    "plain": Augment(crop="none", flip=0.0),
    "all": Augment(crop="pad", erasing=0.8, mixup=0.8),
    "pasted": Augment(crop="pad", cutmix=1.0, erasing=0.8, repeats=2),
    "balanced": Augment(crop="none", sampler="balanced"),
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Digits enlarged to 16 px in three channels, and colored images of several sizes."""
    folder = tmp_path_factory.mktemp("images")
    for i in range(40):
        place = folder / "ab"[i % 2]
        place.mkdir(exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (10 + i % 5, 14, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{i}.png")
    plain = AUGMENTS["plain"]
    return {
        "digits": data.load("digits", img_size=(16, 16), in_chans=3, augment=plain, limit_train=96),
        "sizes": data.load(str(folder), img_size=(12, 8), augment=plain, cache_dir=folder / "cache"),
    }


@pytest.mark.parametrize("images", ["digits", "sizes"])
@pytest.mark.parametrize("name", AUGMENTS)
@pytest.mark.parametrize("processes", [1, 2])
def test_batches_are_those_of_the_loader_to_the_bit(sets, images, name, processes, gpu, monkeypatch):
    monkeypatch.setattr(dataset, "_MOVED", 10)
    read = dataclasses.replace(sets[images], augment=AUGMENTS[name])
    if processes > 1:
        read = read.for_process(1, processes)
    options = {"seed": 3, "epoch": 1, "batch_size": 8}
    kept = kept_on(read, torch.device("cuda"))
    assert kept.on_device.device.type == "cuda"
    monkeypatch.setattr(dataset.ImageDataset, "_centre_views", None)  # the store is not read again
    with gpu.no_waits():
        batches = [(b.index, b.pinned().to(torch.device("cuda"))) for b in kept.train_batches(**options)]
    monkeypatch.undo()
    expected = list(read.train_batches(**options))
    assert len(batches) == len(expected) > 1
    for (index, made), ready in zip(batches, expected, strict=True):
        assert torch.equal(index, ready.index)
        assert torch.equal(made.inputs.cpu(), ready.inputs)
        assert torch.equal(made.targets.cpu(), ready.targets)


def test_a_batch_takes_five_operations_whatever_its_size(sets, gpu):
    read = dataclasses.replace(sets["digits"], augment=Augment(crop="pad"))
    kept = kept_on(read, torch.device("cuda"))
    for size in (8, 64):
        with gpu.launching() as launches:
            batch = next(kept.train_batches(seed=0, epoch=0, batch_size=size))
        assert batch.inputs.dtype == torch.uint8
        assert launches.total() == 5


def test_what_a_device_cannot_do_exactly_or_hold_is_left_to_the_loader(sets, gpu, monkeypatch):
    device, read = torch.device("cuda"), sets["digits"]
    for fields in ({"crop": "random_resized"}, {"crop": "inception"}, {"randaugment": (1, 5.0)}):
        left = dataclasses.replace(read, augment=dataclasses.replace(AUGMENTS["plain"], **fields))
        assert kept_on(left, device) is left
    left = dataclasses.replace(read, joint=lambda *given: given)
    assert kept_on(left, device) is left
    takes = 96 * 3 * 16 * 16
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * takes, 80 << 30))
    assert kept_on(read, device).on_device.numel() == takes
    padded = dataclasses.replace(read, augment=AUGMENTS["all"])
    assert kept_on(padded, device) is padded
    assert kept_on(read, torch.device("cpu")) is read
    other = object()
    assert kept_on(other, device) is other


def test_a_trial_trains_on_kept_images(sets, gpu, tmp_path):
    """Its weights are those of a trial that reads the same images."""
    recipe = Recipe().with_(steps=3, batch_size=8, warmup_steps=1, crop="pad", flip=0.5, mixup=0.2, erasing=0.5)
    read, weights = dataclasses.replace(sets["digits"], augment=recipe.augment), []
    for name in ("kept", "read"):
        torch.manual_seed(0)
        model = vm.vit("mu1/4", img_size=16, num_classes=10)
        options = RunOptions("cuda", tensorboard=False, progress=False)
        trial = TrialRun(model, Classification.from_recipe(recipe), read, recipe, folder=tmp_path, options=options)
        assert trial.train_ds.on_device is not None
        if name == "read":
            trial.train_ds = for_device(read, torch.device("cuda"))
        for _, batch in zip(range(3), trial._batches(), strict=False):
            trial._train_step(batch.pinned())
        trial.metrics.close()
        weights.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)
