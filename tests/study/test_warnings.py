"""What a study says of its settings before it trains."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

import vitmods as vm
from vitmods.study.arms import make_arms
from vitmods.study.warnings import already_reported, study_warnings

KINDS = ("layer", "rms", "scale", "batch", "instance", "group", "power", "switchable")


@pytest.fixture(scope="module")
def dataset():
    return vm.data.load("digits", img_size=(8, 8), in_chans=1, augment=vm.Recipe().augment, limit_train=100)


@pytest.fixture
def record(dataset):
    return partial(warnings_of, dataset)


def warnings_of(dataset, texts, **recipe):
    base = vm.vit("mu2/4", img_size=8, in_chans=1)
    models = {"base": base} | {arm.name: vm.apply(base, *arm.changes) for arm in make_arms(texts)}
    return study_warnings([(name, model, vm.Recipe().with_(**recipe)) for name, model in models.items()], dataset)


def test_norms_over_small_batches_are_named_together(record):
    (small,) = record([f"{kind}=norm(kind={kind})" for kind in KINDS[1:6]] + ["switchnorm"], batch_size=7)
    assert small.startswith("Arms batch, switchnorm: ")
    assert "batches of 7" in small
    assert record(["batchnorm"], batch_size=8) == []
    assert record(["norm(kind=switchable,batch=false)", "instancenorm"], batch_size=2) == []


def test_what_counts_is_the_part_that_is_computed_at_once(record):
    (small,) = record(["batchnorm"], batch_size=64, accumulate=16)
    assert "batches of 4" in small


def test_a_warm_up_that_outlasts_the_trial_is_reported(record, dataset):
    steps = dataset.steps_per_epoch(64)
    (long,) = record(["powernorm", "short=norm(kind=power,warmup=2)"], epochs=10)
    assert long.startswith("Arm powernorm: PowerNorm warms up for 3,000 batches, and a trial has")
    assert f"a trial has {10 * steps}." in long
    assert record([f"norm(kind=power,warmup={10 * steps - 1})"], epochs=10) == []


def test_parallel_branches_of_a_shallow_model_are_advised_against(record):
    (advice,) = record(["parallel", "dpn"])
    assert advice.startswith("Arm parallel: its paper has gains in deep models")
    (renamed,) = record(["p=parallel"])
    assert renamed.startswith("Arm p, parallel: its paper has gains in deep models")
    assert advice.endswith("Here are 2 blocks of width 32.")
    change = vm.Parallel()
    said = {name: bool(change.advice(vm.ViTConfig.from_name(name))) for name in ("S12x2/16", "B12x2/16", "S18x2/16")}
    assert said == {"S12x2/16": True, "B12x2/16": False, "S18x2/16": False}
    base = vm.vit("mu2/4", img_size=8)
    assert "advice" in str(vm.diff(base, vm.apply(base, change)))
    assert "advice" not in str(vm.diff(base, vm.apply(base, vm.DualPatchNorm())))


def test_the_norms_own_warning_is_not_repeated():
    norm = vm.apply(vm.vit("mu2/4", img_size=8), vm.Norm("batch"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with already_reported():
            norm(torch.zeros(2, 3, 8, 8))
    assert caught == []
    with pytest.warns(UserWarning, match="below 8"):
        vm.apply(vm.vit("mu2/4", img_size=8), vm.Norm("batch"))(torch.zeros(2, 3, 8, 8))


def test_what_is_odd_in_the_images_is_said_before_training(tmp_path, short_clocks):
    for seed, place in enumerate(("train/cat/0", "train/cat/1", "train/dog/0", "train/dog/1", "val/cat/0")):
        pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / f"{place}.png")
    study = vm.Study("mu2/4", ["dpn"], data=tmp_path, img_size=8, recipe=vm.Recipe().with_(epochs=1, batch_size=4))
    with pytest.warns(UserWarning, match="Classes without an image in val: dog"):
        study.dry_run(workers=1, device="cpu")
