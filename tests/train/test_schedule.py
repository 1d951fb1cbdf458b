from pathlib import Path

import numpy as np
import pytest

from vitmods.train.schedule import cosine_with_warmup

GOLDEN = Path(__file__).parents[1] / "golden"


def test_equals_big_visions_cosine_over_a_thousand_steps():
    golden = np.load(GOLDEN / "bv_schedules.npz")["cosine_i1k"]
    ours = [cosine_with_warmup(step, total=1000, warmup=100, lr=1.0) for step in range(0, 1001, 10)]
    np.testing.assert_allclose(ours, golden, atol=1e-6)


def test_equals_big_visions_cosine_over_twelve_steps():
    golden = np.load(GOLDEN / "bv_adam_wd_cosine.npz")["sched"]
    ours = [cosine_with_warmup(step, total=12, warmup=4, lr=1.0) for step in range(13)]
    np.testing.assert_allclose(ours, golden, atol=1e-7)


def test_without_warmup_it_starts_at_the_top_and_ends_at_the_floor():
    assert cosine_with_warmup(0, 10, 0, lr=0.5, min_lr=0.1) == 0.5
    assert cosine_with_warmup(5, 10, 0, lr=0.5, min_lr=0.1) == pytest.approx(0.3)
    assert cosine_with_warmup(10, 10, 0, lr=0.5, min_lr=0.1) == pytest.approx(0.1)


def test_warmup_may_end_between_two_steps():
    assert cosine_with_warmup(1, 10, 1.5, lr=1.0) == pytest.approx(1 / 1.5)
