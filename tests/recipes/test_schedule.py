from pathlib import Path

import numpy as np
import pytest

from vitmods.recipes import Recipe
from vitmods.recipes.schedule import lr_at, resolve

GOLDEN = Path(__file__).parents[1] / "golden"
BIG_VISION = {
    "cosine_i1k": {"warmup_steps": 100},
    "rsqrt": {"schedule": "rsqrt", "warmup_steps": 100, "rsqrt_timescale": 200, "cooldown_steps": 50},
    "linear": {"schedule": "linear", "warmup_steps": 0},
}


def rates(at, dataset=64, **fields):
    length = resolve(Recipe().with_(**{"batch_size": 64, **fields}), dataset)
    return [lr_at(length, step) for step in at]


@pytest.mark.parametrize("name", BIG_VISION)
def test_equals_big_visions_schedules_over_a_thousand_steps(name):
    expected = np.load(GOLDEN / "bv_schedules.npz")[name]
    ours = rates(range(0, 1001, 10), dataset=6_400, lr=1.0, steps=1000, **BIG_VISION[name])
    np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize(("name", "warmup"), [("bv_adam_wd_cosine", 4), ("bv_momentum_hp", 2)])
def test_equals_big_visions_cosine_over_twelve_steps(name, warmup):
    expected = np.load(GOLDEN / f"{name}.npz")["sched"]
    np.testing.assert_allclose(rates(range(13), lr=1.0, steps=12, warmup_steps=warmup), expected, atol=1e-7)


@pytest.mark.parametrize("array", ["lr_of_epoch", "lr_step_e_plus_1"])
def test_epoch_cosine_is_what_deit_trains_with(array):
    # Its scheduler, stepped after epoch e, gives the rate of epoch e + 1; epoch 0 has the first rate too.
    expected = np.load(GOLDEN / "deit_cosine_epoch_lr.npz")[array]
    deit = {"schedule": "epoch_cosine", "epochs": 300, "warmup_epochs": 5.0, "warmup_lr": 1e-6, "min_lr": 1e-5}
    for place in (0, 6):  # the same in the first and in the last of the 7 steps of an epoch
        ours = rates((7 * epoch + place for epoch in range(301)), dataset=7 * 64, **deit)
        np.testing.assert_allclose(ours[1:], expected, atol=1e-12, rtol=0)
        assert ours[0] == ours[1] == 1e-6


def test_rates_by_hand():
    for schedule in ("cosine", "linear", "poly"):
        ours = rates((0, 5, 10), steps=10, warmup_steps=0, lr=0.5, min_lr=0.1, schedule=schedule, poly_power=1.0)
        assert ours == pytest.approx([0.5, 0.3, 0.1])
    ours = rates((0, 4, 9, 10), steps=10, warmup_steps=0, lr=3e-5, schedule="poly")
    assert ours == pytest.approx([3e-5, 3e-5 * 0.6**0.9, 3e-5 * 0.1**0.9, 0.0])
    assert rates([1], epochs=10, warmup_epochs=1.5, lr=1.0) == pytest.approx([1 / 1.5])
    ours = rates((0, 1, 2, 4), steps=10, warmup_steps=4, lr=1.0, warmup_lr=0.2)
    assert ours == pytest.approx([0.2, 0.4, 0.6, 1.0])
    fields = {"steps": 10, "warmup_steps": 5, "lr": 1e-3, "min_lr": 1e-4, "warmup_lr": 1e-5}
    ours = rates((0, 5, 10), **fields, batch_size=16, lr_batch=64)
    assert ours == pytest.approx([1e-5, 2.5e-4, 2.5e-5])


def test_the_cooldown_brings_any_schedule_to_zero():
    for schedule in ("cosine", "linear", "poly", "rsqrt", "epoch_cosine"):
        fields = {"steps": 20, "warmup_steps": 0, "schedule": schedule}
        whole, cooled = rates(range(21), **fields), rates(range(21), **fields, cooldown_steps=4)
        assert cooled[:17] == whole[:17]
        assert cooled[18:] == pytest.approx([whole[18] / 2, whole[19] / 4, 0.0])
