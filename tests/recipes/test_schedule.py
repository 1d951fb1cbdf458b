"""The learning rate and the length of training."""

from pathlib import Path

import numpy as np
import pytest

from vitmods.recipes import Recipe
from vitmods.recipes.schedule import lr_at, resolve, resolve_on
from vitmods.util.errors import UserError

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
    actual = rates(range(0, 1001, 10), dataset=6_400, lr=1.0, steps=1000, **BIG_VISION[name])
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("array", ["lr_of_epoch", "lr_step_e_plus_1"])
def test_epoch_cosine_is_what_deit_trains_with(array):
    # Its scheduler, stepped after epoch e, gives the rate of epoch e + 1; epoch 0 has the first rate too.
    expected = np.load(GOLDEN / "deit_cosine_epoch_lr.npz")[array]
    deit = {"schedule": "epoch_cosine", "epochs": 300, "warmup_epochs": 5.0, "warmup_lr": 1e-6, "min_lr": 1e-5}
    for place in (0, 6):  # the same in the first and in the last of the 7 steps of an epoch
        actual = rates((7 * epoch + place for epoch in range(301)), dataset=7 * 64, **deit)
        np.testing.assert_allclose(actual[1:], expected, atol=1e-12, rtol=0)
        assert actual[0] == actual[1] == 1e-6


def test_rates_by_hand():
    for schedule in ("cosine", "linear", "poly"):
        actual = rates((0, 5, 10), steps=10, warmup_steps=0, lr=0.5, min_lr=0.1, schedule=schedule, poly_power=1.0)
        assert actual == pytest.approx([0.5, 0.3, 0.1])
    actual = rates((0, 4, 9, 10), steps=10, warmup_steps=0, lr=3e-5, schedule="poly")
    assert actual == pytest.approx([3e-5, 3e-5 * 0.6**0.9, 3e-5 * 0.1**0.9, 0.0])
    assert rates([1], epochs=10, warmup_epochs=1.5, lr=1.0) == pytest.approx([1 / 1.5])
    actual = rates((0, 1, 2, 4), steps=10, warmup_steps=4, lr=1.0, warmup_lr=0.2)
    assert actual == pytest.approx([0.2, 0.4, 0.6, 1.0])
    fields = {"steps": 10, "warmup_steps": 5, "lr": 1e-3, "min_lr": 1e-4, "warmup_lr": 1e-5}
    actual = rates((0, 5, 10), **fields, batch_size=16, lr_batch=64)
    assert actual == pytest.approx([1e-5, 2.5e-4, 2.5e-5])


def test_the_cooldown_brings_any_schedule_to_zero():
    for schedule in ("cosine", "linear", "poly", "rsqrt", "epoch_cosine"):
        fields = {"steps": 20, "warmup_steps": 0, "schedule": schedule}
        full, cooled = rates(range(21), **fields), rates(range(21), **fields, cooldown_steps=4)
        assert cooled[:17] == full[:17]
        assert cooled[18:] == pytest.approx([full[18] / 2, full[19] / 4, 0.0])


def test_lengths_by_hand():
    # 99 % of ImageNet's training split; the published configuration speaks of 93k.
    length = resolve(Recipe().with_(epochs=300, batch_size=4096, warmup_steps=10_000), 1_268_355)
    assert (length.steps_per_epoch, length.steps, length.warmup_steps) == (309, 92_700, 10_000)
    assert (length.epochs, length.images_seen) == (300, 92_700 * 4096)
    for lr_batch, rates in ((512, (1e-3, 2e-5)), (None, (5e-4, 1e-5))):
        length = resolve(Recipe().with_(lr=5e-4, min_lr=1e-5, lr_batch=lr_batch, batch_size=1024), 5_000)
        assert (length.lr, length.min_lr) == rates


def test_steps_may_end_inside_an_epoch_and_views_repeat():
    length = resolve(Recipe(steps=25, batch_size=100, accumulate=3), 1_000)
    assert (length.steps, length.steps_per_epoch, length.epochs) == (25, 10, 2.5)
    assert Recipe(batch_size=10, accumulate=4).part_size == 3
    assert (length.batch_size, length.accumulate, length.part_size) == (100, 3, 34)
    assert resolve(Recipe().with_(repeats=3), 1_000) == resolve(Recipe(), 1_000)


def test_warmup():
    for fields, expected in (
        ({"epochs": 30}, 3.0 * 10),
        ({"epochs": 300}, 5.0 * 10),
        ({"epochs": 30, "warmup_epochs": 2.5}, 25.0),
        ({"epochs": 30, "warmup_steps": 7}, 7),
        ({"steps": 2_500}, 250.0),
        ({"steps": 2_500, "warmup_epochs": 2.0}, 20.0),
    ):
        assert resolve(Recipe().with_(batch_size=100, **fields), 1_000).warmup_steps == pytest.approx(expected)


def test_a_data_set_says_its_own_length():
    class Stream:
        splits = {"train": range(1_000)}  # noqa: RUF012

        def steps_per_epoch(self, batch_size):
            return 3

    assert resolve_on(Recipe(epochs=2), Stream()).steps == 6


@pytest.mark.parametrize(
    ("fields", "images", "words"),
    [
        ({"batch_size": 512}, 160, "batch of 512 images is more than the 160 .* set batch_size to 160 or less"),
        ({"batch_size": 64}, 4, "the 4 of the training set, and these are too few .*: add images, hundreds at least"),
        ({"epochs": 2, "warmup_steps": 20}, 640, "20 steps of warm-up .* nothing of the 20 steps on 640 images"),
        ({"steps": 20, "warmup_epochs": 3.0}, 640, "30 steps of warm-up .* nothing of the 20 steps"),
        ({"epochs": 2, "cooldown_steps": 18}, 640, "2 steps of warm-up and 18 of cool-down leave nothing of the 20"),
    ],
)
def test_what_does_not_fit_the_images_is_refused(fields, images, words):
    with pytest.raises(UserError, match=words):
        resolve(Recipe().with_(**fields), images)


def test_a_trial_is_evaluated_every_epoch_but_a_hundred_times_at_most():
    for fields, images, every, count in (
        ({"epochs": 30}, 640, 10, 30),
        ({"epochs": 300}, 640, 30, 100),
        ({"steps": 2_500}, 64, 25, 100),
        ({"steps": 25}, 640, 10, 3),
        ({"steps": 5}, 640, 10, 1),
    ):
        length = resolve(Recipe().with_(**fields), images)
        assert (length.evaluate_every(), length.evaluations()) == (every, count)
        assert length.evaluate_every(500) == 500 * length.steps_per_epoch
    small = resolve(Recipe().with_(steps=300, batch_size=32), 64)
    assert {images: small.evaluations(images=images) for images in (10, 200, 1000)} == {10: 75, 200: 22, 1000: 10}
