"""What a study says of its settings before it trains."""

import warnings
from functools import partial

import pytest
import torch

import vitmods as vm
from vitmods.study.arms import make_arms
from vitmods.study.warnings import already_told, cautions

KINDS = ("layer", "rms", "scale", "batch", "instance", "group", "power", "switchable")


@pytest.fixture(scope="module")
def pictures():
    return vm.data.load("digits", img_size=(8, 8), in_chans=1, recipe=vm.Recipe(), limit_train=100)


@pytest.fixture
def told(pictures):
    return partial(cautions_of, pictures)


def cautions_of(pictures, texts, **recipe):
    base = vm.vit("mu2/4", img_size=8, in_chans=1)
    models = {"base": base} | {arm.name: vm.apply(base, *arm.changes) for arm in make_arms(texts)}
    return cautions(models, {name: vm.Recipe(**recipe) for name in models}, pictures)


def test_norms_over_small_batches_are_named_together(told):
    (small,) = told([f"{kind}=norm(kind={kind})" for kind in KINDS[1:6]] + ["switchnorm"], batch_size=7)
    assert small.startswith("Arms batch, switchnorm: ")
    assert "batches of 7" in small
    assert told(["batchnorm"], batch_size=8) == []
    assert told(["norm(kind=switchable,batch=false)", "instancenorm"], batch_size=2) == []


def test_what_counts_is_the_part_that_is_computed_at_once(told):
    (small,) = told(["batchnorm"], batch_size=64, accumulate=16)
    assert "batches of 4" in small


def test_a_warm_up_that_outlasts_the_trial_is_told(told, pictures):
    steps = pictures.steps_per_epoch(64)
    (long,) = told(["powernorm", "short=norm(kind=power,warmup=2)"], epochs=10)
    assert long.startswith("Arm powernorm: PowerNorm warms up for 3,000 batches, and a trial has")
    assert f"a trial has {10 * steps}." in long
    assert told([f"norm(kind=power,warmup={10 * steps - 1})"], epochs=10) == []


def test_the_norms_own_warning_is_not_repeated():
    norm = vm.apply(vm.vit("mu2/4", img_size=8), vm.Norm("batch"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with already_told():
            norm(torch.zeros(2, 3, 8, 8))
    assert caught == []
    with pytest.warns(UserWarning, match="below 8"):
        vm.apply(vm.vit("mu2/4", img_size=8), vm.Norm("batch"))(torch.zeros(2, 3, 8, 8))
