from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss

from vitmods.evals.accuracy import (
    bins_of_equal_size,
    bins_of_equal_width,
    calibration,
    calibration_errors,
    fit_temperature,
    reliability,
)
from vitmods.util.errors import UserError


def slow_ece(confidence, correct, bins=15):
    """Guo et al., Eq. 3, bin by bin."""
    total = 0.0
    for m in range(1, bins + 1):
        inside = [i for i, p in enumerate(confidence) if (m - 1) / bins < p <= m / bins]
        if inside:
            accuracy, mean = np.mean([correct[i] for i in inside]), np.mean([confidence[i] for i in inside])
            total += len(inside) / len(confidence) * abs(accuracy - mean)
    return total


@given(st.integers(0, 2**32 - 1), st.integers(1, 200))
@settings(max_examples=50)
def test_ece_is_the_paper_s_and_does_not_depend_on_the_order(seed, n):
    rng = np.random.default_rng(seed)
    confidence, correct = rng.uniform(0.01, 1, n), rng.random(n) < 0.7
    ece = calibration_errors(confidence, correct, bins_of_equal_width(confidence)).mean()
    assert ece == pytest.approx(slow_ece(confidence, correct), abs=1e-12)
    assert 0 <= ece <= 1
    order = rng.permutation(n)
    for binned in (bins_of_equal_width, bins_of_equal_size):
        again = calibration_errors(confidence[order], correct[order], binned(confidence[order])).mean()
        assert again == pytest.approx(calibration_errors(confidence, correct, binned(confidence)).mean(), abs=1e-12)


def test_bins_of_equal_width_have_their_upper_ends_and_those_of_equal_size_as_many():
    assert bins_of_equal_width(np.array([1 / 15, 1 / 15 + 1e-9, 1.0])).tolist() == [0, 1, 14]
    confidence = np.random.default_rng(0).uniform(0, 1, 151) ** 4
    sizes = np.bincount(bins_of_equal_size(confidence))
    assert len(sizes) == 15
    assert set(sizes) <= {10, 11}
    ends = [confidence[bins_of_equal_size(confidence) == m] for m in range(15)]
    assert all(low.max() <= high.min() for low, high in pairwise(ends))


def test_perfect_calibration_has_no_error_and_overconfidence_has_its_own():
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.2, 1, 200_000)
    correct = rng.random(200_000) < confidence
    for binned in (bins_of_equal_width, bins_of_equal_size):
        assert calibration_errors(confidence, correct, binned(confidence)).mean() < 0.005
    sure = np.full(1000, 0.9)
    assert calibration_errors(sure, np.arange(1000) < 600, bins_of_equal_width(sure)).mean() == pytest.approx(0.3)


def test_reliability_holds_every_image():
    confidence, correct = np.array([0.05, 0.06, 0.5, 1.0]), np.array([True, False, True, True])
    rows = reliability(confidence, correct, bins_of_equal_width(confidence))
    assert [(row["bin"], row["images"], row["accuracy"]) for row in rows] == [(0, 2, 0.5), (7, 1, 1.0), (14, 1, 1.0)]
    assert rows[0]["confidence"] == pytest.approx(0.055)


def test_the_protocol(outputs_of, made_up, small_model):
    outputs = outputs_of(small_model(), made_up())
    found = calibration(outputs)
    p, targets = outputs.logits.double().softmax(1).numpy(), outputs.targets.numpy()
    confidence, correct = p.max(1), p.argmax(1) == targets
    assert found.metrics["ece"] == pytest.approx(slow_ece(confidence, correct), abs=1e-9)
    assert found.metrics["nll"] == pytest.approx(log_loss(targets, p), rel=1e-9)
    assert found.metrics["brier"] == pytest.approx(((p - np.eye(3)[targets]) ** 2).sum(1).mean(), rel=1e-9)
    assert set(found.intervals) == {"nll", "brier"}
    assert all(low < found.metrics[name] < high for name, (low, high) in found.intervals.items())
    assert sum(row["images"] for row in found.detail["reliability"]) == len(targets)


@pytest.mark.parametrize("t", [0.2, 1.0, 7.0])
def test_the_temperature_is_found_by_which_logits_were_scaled(t):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4000, 5, generator=generator, dtype=torch.float64) * 2
    targets = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    found = fit_temperature(logits * t, targets)
    assert found == pytest.approx(t, rel=0.1)
    least = log_loss(targets, (logits * t / found).softmax(1))
    assert all(least < log_loss(targets, (logits * t / found * factor).softmax(1)) for factor in (0.98, 1.02))


def test_without_a_wrong_image_there_is_no_temperature():
    with pytest.raises(UserError, match="every image is right"):
        fit_temperature(torch.eye(3) * 4, torch.arange(3))
