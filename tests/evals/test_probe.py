import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from vitmods.evals.features import check_probe, probe
from vitmods.evals.options import Options
from vitmods.train.probe import STRENGTHS, Features, fit
from vitmods.util.errors import UserError

CPU = torch.device("cpu")


def blobs(n, classes=4, c=6, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    features = np.random.default_rng(7).normal(size=(classes, c))[labels] * 2 + rng.normal(size=(n, c)) * 3 + 5
    features[:, 0] = 1.5  # constant features must not divide by zero
    return Features(torch.from_numpy(features).float(), torch.from_numpy(labels))


def mislabel(dataset, split):
    """Then what is good elsewhere is bad there."""
    dataset.splits[split].labels = (dataset.splits[split].labels + 1) % 3


@pytest.mark.parametrize("l2", [1.0, 1e-2, 1e-4])
def test_the_fit_is_sklearn_s(l2):
    on = blobs(200)
    found = fit(on, 4, l2, CPU)
    x = ((on.features - found.mean) / found.std).numpy()
    known = LogisticRegression(C=1 / (l2 * len(x)), tol=1e-8, max_iter=5000).fit(x, on.targets.numpy())
    np.testing.assert_allclose(found.weights[:-1], known.coef_.T, atol=2e-3)
    centered = found.weights[-1] - found.weights[-1].mean()
    np.testing.assert_allclose(centered, known.intercept_ - known.intercept_.mean(), atol=2e-3)
    assert found.right(on).double().mean().item() == pytest.approx(known.score(x, on.targets.numpy()), abs=0.005)


def test_the_strength_is_chosen_on_val(outputs_of, made_up, small_model):
    dataset = made_up(train=30, val=30, test=30, noise=90)
    mislabel(dataset, "val")
    outputs = outputs_of(small_model(), dataset)
    found = probe(outputs)
    train, val, test = (outputs.features(name) for name in ("train", "val", "test"))
    accuracies = {l2: fit(train, 3, l2, CPU).right(val).double().mean().item() for l2 in STRENGTHS}
    assert found.detail["chosen_on"] == "val"
    record = {row["l2"]: row["accuracy"] for row in found.detail["accuracy_by_l2"]}
    assert record == pytest.approx(accuracies, abs=0.03)  # by another way to the same place
    assert record[found.detail["l2"]] == max(record.values())
    right = fit(train, 3, found.detail["l2"], CPU).right(test)
    assert found.metrics["probe"] == pytest.approx(right.double().mean().item(), abs=0.03)
    low, high = found.intervals["probe"]
    assert low < found.metrics["probe"] < high


@pytest.mark.parametrize("splits", [{"train": 30, "val": 30}, {"train": 30, "test": 30}])
def test_what_is_evaluated_is_not_what_is_chosen_by(outputs_of, made_up, small_model, splits):
    dataset, evaluated = made_up(**splits), list(splits)[1]
    assert probe(outputs_of(small_model(), dataset, split=evaluated)).metrics["probe"] > 0.6
    mislabel(dataset, evaluated)
    found = probe(outputs_of(small_model(), dataset, split=evaluated))
    assert found.detail["chosen_on"] == "a fifth of train"
    assert found.metrics["probe"] < 0.3
    assert max(row["accuracy"] for row in found.detail["accuracy_by_l2"]) > 0.6


def test_one_image_of_each_class_is_too_few_to_choose_by(made_up):
    check_probe(made_up(train=1, val=5, test=5), "test", Options())
    for splits, words in (({"train": 1}, "one training image"), ({"train": [3, 0, 3]}, "missing for class 1")):
        with pytest.raises(UserError, match=words):
            check_probe(made_up(**splits, test=5), "test", Options())
