"""Accuracy, calibration and confusions of logits, and intervals of all protocols, by sklearn, scipy and by hand."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn

from vitmods.data.batch import Batch
from vitmods.evals.accuracy import (
    accuracy,
    bins_of_equal_size,
    bins_of_equal_width,
    calibration,
    calibration_errors,
    confusion,
    confusion_matrix,
    fit_temperature,
    macro_f1,
    most_confused,
    reliability,
)
from vitmods.stats.width import fraction, mean_of_fractions, mean_over_images, mean_over_seeds
from vitmods.tasks import Classification
from vitmods.util.errors import UserError


def evaluated(logits, targets, sizes):
    parts = zip(logits.split(sizes), targets.split(sizes), strict=True)
    return Classification().evaluate(lambda images: images, (Batch(x, y, torch.arange(len(x))) for x, y in parts))


@pytest.mark.parametrize("sizes", [[103], [50, 50, 3], [1] * 103, [100, 1, 2]])
def test_every_image_counts_the_same_however_batches_are_cut(sizes):
    logits, targets = torch.randn(103, 8), torch.randint(8, (103,))
    metrics = evaluated(logits, targets, sizes).metrics
    scores, labels = logits.double().softmax(1).numpy(), targets.numpy()
    for k in (1, 5):
        assert metrics[f"top{k}"] == pytest.approx(sklearn.top_k_accuracy_score(labels, scores, k=k), abs=1e-12)
    assert metrics["loss"] == pytest.approx(sklearn.log_loss(labels, scores), rel=1e-6)


def test_low_precision_logits_are_summed_in_float32_and_no_images_are_an_error():
    logits, targets = torch.randn(300, 10).bfloat16(), torch.randint(10, (300,))
    expected = torch.nn.functional.cross_entropy(logits.float(), targets).item()
    assert evaluated(logits, targets, [300]).metrics["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="is empty"):
        Classification().evaluate(lambda images: images, [])


def test_scores_of_each_image_have_the_metrics_as_means_and_ranks_that_agree_where_logits_tie():
    logits, targets = torch.randint(-3, 4, (200, 8)).float(), torch.randint(8, (200,))  # many ties
    found = evaluated(logits, targets, [120, 80])
    scores = found.per_image
    for name, places in (("top1", 1), ("top5", 5)):
        assert scores[name].mean() == pytest.approx(found.metrics[name], abs=1e-12)
        assert ((scores["rank"] <= places) == scores[name]).all()
    assert scores["rank"].min() == 1
    assert scores["rank"].max() <= 8
    p = logits.double().softmax(1)
    right = p[torch.arange(200), targets]
    assert scores["p"] == pytest.approx(right.numpy(), rel=1e-5)
    assert scores["nll"] == pytest.approx(-right.log().numpy(), rel=1e-5)
    one_hot = torch.nn.functional.one_hot(targets, 8)
    assert scores["brier"] == pytest.approx(((p - one_hot) ** 2).sum(1).numpy(), abs=1e-6)


def test_the_protocol_counts_each_class_that_has_images(outputs_of, made_up, small_model):
    outputs = outputs_of(small_model(), made_up(test=[30, 5, 60, 0], classes=4))
    found = accuracy(outputs)
    predicted, targets = outputs.logits.argmax(1).numpy(), outputs.targets.numpy()
    assert found.metrics["top1"] == pytest.approx((predicted == targets).mean())
    assert found.metrics["top5"] == 1.0
    *rows, empty = found.detail["per_class"].values()
    assert empty == {"images": 0, "accuracy": None, "interval": [0.0, 1.0]}
    assert [row["images"] for row in rows] == [30, 5, 60]
    recalls = sklearn.recall_score(targets, predicted, average=None, labels=[0, 1, 2])
    assert [row["accuracy"] for row in rows] == pytest.approx(recalls)
    assert found.metrics["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    assert found.metrics["worst_class_accuracy"] == pytest.approx(min(recalls))
    assert all(low <= found.metrics[name] <= high for name, (low, high) in found.intervals.items())


def test_any_of_several_right_classes_counts_and_images_without_one_do_not(outputs_of, made_up, small_model):
    dataset, model = made_up(classes=8, test=2), small_model(classes=8)
    ranked = outputs_of(model, dataset).logits.argsort(dim=1, descending=True)
    first, second, sixth = (ranked[:, place].tolist() for place in (0, 1, 5))
    sets = [(first[0], sixth[0]), (sixth[1], second[1]), (sixth[2],), ()] + [(x,) for x in first[4:]]
    dataset.splits["test"].label_sets = tuple(sets)
    found = accuracy(outputs_of(model, dataset))
    assert found.detail["images"] == 15
    assert found.metrics["top1"] == pytest.approx(13 / 15)
    assert found.metrics["top5"] == pytest.approx(14 / 15)


@pytest.mark.parametrize(("known", "read"), [(9, [7, 2, 4]), (3, [0, 1, 2])])  # of the images' classes alone: no map
def test_logits_of_some_of_the_model_s_classes(outputs_of, made_up, small_model, known, read):
    dataset, model = made_up(classes=3, test=40), small_model(classes=known)
    dataset.class_map = (7, 2, 4)
    outputs = outputs_of(model, dataset)
    expected = torch.cat([model(batch.inputs) for batch in dataset.eval_batches("test", 64)])[:, read]
    torch.testing.assert_close(outputs.logits, expected)
    right = (expected.argmax(1) == outputs.targets).float().mean().item()
    assert accuracy(outputs).metrics["top1"] == pytest.approx(right)


BINNED = bins_of_equal_width, bins_of_equal_size


def slow_ece(confidence, correct, parts):
    """Guo et al., Eq. 3, bin by bin."""
    return sum(len(i) / len(confidence) * abs(correct[i].mean() - confidence[i].mean()) for i in parts if len(i))


@given(st.integers(0, 2**32 - 1), st.integers(1, 200))
def test_both_calibration_errors_are_the_paper_s(seed, n):
    rng = np.random.default_rng(seed)
    confidence, correct = rng.uniform(0.01, 1, n), rng.random(n) < 0.7
    errors = [calibration_errors(confidence, correct, b(confidence)).mean() for b in BINNED]
    equal_width = [np.flatnonzero(((m - 1) / 15 < confidence) & (confidence <= m / 15)) for m in range(1, 16)]
    ends = -(-np.arange(16) * n // 15)  # as many in each, but for one
    equal_size = [np.argsort(confidence)[a:b] for a, b in pairwise(ends)]
    assert errors == pytest.approx([slow_ece(confidence, correct, parts) for parts in (equal_width, equal_size)])


def test_the_protocol_of_calibration(outputs_of, made_up, small_model):
    assert bins_of_equal_width(np.array([1 / 15, 1 / 15 + 1e-9, 1.0])).tolist() == [0, 1, 14]  # their upper ends
    sure = np.full(1000, 0.9)
    assert calibration_errors(sure, np.arange(1000) < 600, bins_of_equal_width(sure)).mean() == pytest.approx(0.3)
    confidence, correct = np.array([0.05, 0.06, 0.5, 1.0]), np.array([True, False, True, True])
    rows = reliability(confidence, correct, bins_of_equal_width(confidence))
    assert [(row["bin"], row["images"], row["accuracy"]) for row in rows] == [(0, 2, 0.5), (7, 1, 1.0), (14, 1, 1.0)]
    assert rows[0]["confidence"] == pytest.approx(0.055)

    outputs = outputs_of(small_model(), made_up())
    found = calibration(outputs)
    p, targets = outputs.logits.double().softmax(1).numpy(), outputs.targets.numpy()
    errors = [calibration_errors(p.max(1), p.argmax(1) == targets, b(p.max(1))).mean() for b in BINNED]
    assert [found.metrics["ece"], found.metrics["adaptive_ece"]] == pytest.approx(errors, abs=1e-9)
    assert found.metrics["nll"] == pytest.approx(sklearn.log_loss(targets, p), rel=1e-9)
    assert found.metrics["brier"] == pytest.approx(((p - np.eye(3)[targets]) ** 2).sum(1).mean(), rel=1e-9)
    assert set(found.intervals) == {"nll", "brier"}
    assert all(low < found.metrics[name] < high for name, (low, high) in found.intervals.items())
    assert sum(row["images"] for row in found.detail["reliability"]) == len(targets)


@pytest.mark.parametrize("t", [0.2, 1.0, 7.0])
def test_the_temperature_is_found_by_which_logits_were_scaled(t):
    logits = torch.randn(4000, 5, dtype=torch.float64) * 2
    targets = torch.multinomial(logits.softmax(1), 1)[:, 0]
    found = fit_temperature(logits * t, targets)
    assert found == pytest.approx(t, rel=0.1)
    least, lower, higher = (
        sklearn.log_loss(targets, (logits * t / found * factor).softmax(1)) for factor in (1, 0.98, 1.02)
    )
    assert least < min(lower, higher)
    with pytest.raises(UserError, match="every image is right"):
        fit_temperature(torch.eye(3) * 4, torch.arange(3))


def test_matrix_and_f1_of_classes_with_images_are_sklearn_s():
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(0, 5, 300), rng.integers(0, 6, 300)  # the last is only predicted
    matrix = confusion_matrix(true, predicted, 7)
    assert (matrix == sklearn.confusion_matrix(true, predicted, labels=range(7))).all()
    expected = sklearn.f1_score(true, predicted, average="macro", labels=range(5))
    assert macro_f1(matrix) == pytest.approx(expected)


def test_the_protocol_of_confusions(outputs_of, made_up, small_model):
    rows = most_confused(np.array([[5, 2, 0], [7, 1, 0], [0, 0, 9]]), ("a", "b", "c"))
    assert rows == [{"class": "b", "taken_for": "a", "images": 7}, {"class": "a", "taken_for": "b", "images": 2}]
    found = confusion(outputs_of(small_model(), made_up(test=[4, 6, 9])))
    assert np.sum(found.detail["matrix"], axis=1).tolist() == [4, 6, 9]
    many = confusion(outputs_of(small_model(classes=201), made_up(classes=201, test=1)))
    assert "matrix" not in many.detail
    assert len(many.detail["most_confused"]) == 20


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_of_a_fraction_is_scipy_s(counts):
    hits, images = counts
    known = stats.binomtest(hits, images).proportion_ci(method="wilson")
    assert fraction(hits, images) == pytest.approx((known.low, known.high), abs=1e-12)


def test_the_mean_of_fractions_and_the_mean_over_images_cover():
    assert fraction(0, 0) == (0.0, 1.0)
    assert mean_of_fractions(np.array([7]), np.array([9])) == pytest.approx(fraction(7, 9))
    assert mean_over_images(np.array([1.0])) is None
    rng, images, truth = np.random.default_rng(1), np.array([8, 40, 200]), np.array([0.95, 0.6, 0.3])
    intervals = [mean_of_fractions(rng.binomial(images, truth), images) for _ in range(4000)]
    assert 0.92 <= np.mean([low <= truth.mean() <= high for low, high in intervals]) <= 0.985
    intervals = [mean_over_images(rng.exponential(1.0, 200)) for _ in range(4000)]
    assert 0.92 <= np.mean([low <= 1 <= high for low, high in intervals]) <= 0.965


def test_the_mean_over_seeds_is_student_s():
    values = [0.71, 0.74, 0.69]
    known = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert mean_over_seeds(values) == pytest.approx(known, rel=1e-12)
    assert mean_over_seeds([0.7]) is None
