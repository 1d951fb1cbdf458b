"""What learns from features: few shots as in big_vision, neighbors and the probe as in sklearn, the linear layer as in
torch; none is chosen by the images that are evaluated."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

import vitmods as vm
from vitmods.data import load
from vitmods.evals import features as module
from vitmods.evals.features import (
    check_fewshot,
    check_probe,
    fewshot,
    knn,
    least_squares_scores,
    permuted_classes,
    probe,
    ridge,
    shots_of,
    vote,
)
from vitmods.evals.linear import RATES, learn, linear
from vitmods.evals.options import Options
from vitmods.evals.outputs import ModelOutputs
from vitmods.recipes.recipe import Augment
from vitmods.stats.width import mean_over_seeds
from vitmods.train.probe import STRENGTHS, Features, fit
from vitmods.util.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "fewshot_lsr_n_ge_d.npz"
CPU = torch.device("cpu")


@pytest.mark.parametrize("l2", ["1024", "1", "0.01"])
def test_scores_of_few_shots_are_big_vision_s(l2):
    g = np.load(GOLDEN)
    scores = least_squares_scores(g["x"], g["y"], g["x_test"], int(g["num_classes"]), float(l2))
    np.testing.assert_allclose(scores, g[f"scores_l2_{l2}"], rtol=1e-6)
    assert (scores.argmax(axis=1) == g["y_test"]).mean() == pytest.approx(g[f"acc_l2_{l2}"].item(), abs=1e-6)


@given(st.integers(1, 30), st.integers(1, 30), st.sampled_from([0.01, 1.0, 1024.0]), st.integers(0, 999))
def test_both_systems_of_equations_give_the_ridge_solution(n, c, l2, seed):
    rng = np.random.default_rng(seed)
    a, targets = rng.normal(size=(n, c)), rng.normal(size=(n, 3))
    expected = np.linalg.inv(a.T @ a + l2 * np.eye(c)) @ a.T @ targets
    np.testing.assert_allclose(ridge(a, targets, l2), expected, rtol=1e-6, atol=1e-8)


def test_smaller_sets_are_parts_of_larger_ones_and_balanced():
    labels = np.random.default_rng(0).integers(0, 4, 100)
    members, rng = permuted_classes(labels, 4, seed=1), np.random.default_rng(1)
    for number in range(4):
        assert members[number].tolist() == rng.permutation(np.where(labels == number)[0]).tolist()


def test_few_shots_are_the_mean_over_three_choices(outputs_of, made_up, small_model):
    outputs = outputs_of(small_model(), made_up(), shots=(1, 5))
    found = fewshot(outputs)
    train, test = outputs.features("train"), outputs.features("test")
    for shots in (1, 5):
        values = []
        for seed in range(3):
            chosen = np.concatenate([m[:shots] for m in permuted_classes(train.targets.numpy(), 3, seed)])
            x, y = train.features.double().numpy()[chosen], train.targets.numpy()[chosen]
            scores = least_squares_scores(x, y, test.features.double().numpy(), 3, 1024.0)
            values.append((scores.argmax(1) == test.targets.numpy()).mean())
        assert found.detail["shots"][str(shots)]["values"] == pytest.approx(values)
        assert found.metrics[f"fewshot{shots}"] == pytest.approx(np.mean(values))
        assert found.intervals[f"fewshot{shots}"] == pytest.approx(mean_over_seeds(values))
    assert found.metrics["fewshot5"] > 0.5 > 1 / 3
    assert [shots_of(name) for name in ("fewshot10", "fewshot", "fewshot0", "top5", "10")] == [10] + [None] * 4


UNFIT = {
    "too few": (check_fewshot, {}, "test", {}, r"class 1 has 7: ask for 1 or 5 shots\."),
    "another number": (check_fewshot, {}, "test", {"shots": (20,)}, r"ask for 7 shots\."),
    "none of a class": (check_fewshot, {"train": [40, 0, 30]}, "test", {}, "add images"),
    "the training split": (check_fewshot, {}, "train", {}, "evaluate it on another"),
    "no training images": (check_fewshot, {"train": 0}, "test", {}, "does not have any"),
    "nothing to choose by": (check_probe, {"train": 1}, "test", {}, "one training image"),
    "none of a class to probe": (check_probe, {"train": [3, 0, 3]}, "test", {}, "missing for class 1"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_too_few_images_are_reported_before_work(made_up, case):
    check, splits, split, options, words = UNFIT[case]
    splits = {name: count for name, count in {"train": [40, 7, 30], "test": 5, **splits}.items() if count}
    with pytest.raises(UserError, match=words):
        check(made_up(**splits), split, Options(**options))


def test_just_enough_images(made_up):
    check_fewshot(made_up(train=[40, 7, 30], test=5), "test", Options(shots=(1, 5, 7)))
    check_probe(made_up(train=1, val=5, test=5), "test", Options())


@pytest.mark.parametrize("known", [200, 7])  # fewer than 20 too
def test_votes_of_neighbors_are_sklearn_s(known, monkeypatch):
    rng = np.random.default_rng(0)
    x, asked = (torch.from_numpy(rng.normal(size=(n, 10))).float() for n in (known, 50))
    labels = torch.arange(known) % 4
    peer = KNeighborsClassifier(
        min(20, known), metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07)
    ).fit(x, labels)
    scores = vote(x, labels, asked, 4)
    fractions = (scores / scores.sum(dim=1, keepdim=True)).numpy()
    np.testing.assert_allclose(fractions, peer.predict_proba(asked), atol=1e-4)
    monkeypatch.setattr(module, "_SIMILARITIES", 3 * known)
    torch.testing.assert_close(vote(x, labels, asked, 4), scores, rtol=1e-4, atol=0)


def test_the_protocol_of_neighbors(outputs_of, made_up, small_model):
    outputs = outputs_of(small_model(), made_up(noise=40))
    found = knn(outputs)
    train, test = outputs.features("train"), outputs.features("test")
    scores = vote(train.features, train.targets, test.features, 3)
    assert found.metrics["knn"] == pytest.approx((scores.argmax(1) == outputs.targets).float().mean().item())
    assert found.metrics["knn"] > 0.6
    assert found.detail["neighbors"] == 20


def mislabel(dataset, split):
    """Then what is good elsewhere is bad there."""
    dataset.splits[split].labels = (dataset.splits[split].labels + 1) % 3


@pytest.mark.parametrize("l2", [1.0, 1e-2, 1e-4])
def test_the_fit_of_the_probe_is_sklearn_s(l2):
    labels, rng = np.arange(200) % 4, np.random.default_rng(0)
    x = rng.normal(size=(4, 6))[labels] * 2 + rng.normal(size=(200, 6)) * 3 + 5
    x[:, 0] = 1.5  # constant features must not divide by zero
    on = Features(torch.from_numpy(x).float(), torch.from_numpy(labels))
    found = fit(on, 4, l2, CPU)
    x = ((on.features - found.mean) / found.std).numpy()
    known = LogisticRegression(C=1 / (l2 * len(x)), tol=1e-8, max_iter=5000).fit(x, labels)
    np.testing.assert_allclose(found.weights[:-1], known.coef_.T, atol=2e-3)
    centered = found.weights[-1] - found.weights[-1].mean()
    np.testing.assert_allclose(centered, known.intercept_ - known.intercept_.mean(), atol=2e-3)
    assert found.right(on).double().mean().item() == pytest.approx(known.score(x, labels), abs=0.005)


def test_the_strength_of_the_probe_is_chosen_on_val(outputs_of, made_up, small_model):
    dataset = made_up(train=30, val=30, test=30, noise=90)
    mislabel(dataset, "val")
    outputs = outputs_of(small_model(), dataset)
    found = probe(outputs)
    train, val, test = (outputs.features(name) for name in ("train", "val", "test"))
    accuracies = {l2: fit(train, 3, l2, CPU).right(val).double().mean().item() for l2 in STRENGTHS}
    record = {row["l2"]: row["accuracy"] for row in found.detail["accuracy_by_l2"]}
    assert record == pytest.approx(accuracies, abs=0.03)  # by another way to the same place
    assert record[found.detail["l2"]] == max(record.values())
    right = fit(train, 3, found.detail["l2"], CPU).right(test)
    assert found.metrics["probe"] == pytest.approx(right.double().mean().item(), abs=0.03)


@pytest.mark.parametrize(
    ("protocol", "split", "splits", "chosen_on"),
    [
        (linear, "test", ("val", "test"), "val"),
        (linear, "val", ("val", "test"), "a fifth of train"),
        (probe, "test", ("val", "test"), "val"),
        (probe, "val", ("val",), "a fifth of train"),
        (probe, "test", ("test",), "a fifth of train"),
    ],
)
def test_what_is_evaluated_is_not_what_is_chosen_by(
    outputs_of, made_up, small_model, protocol, split, splits, chosen_on
):
    dataset, name = made_up(**dict.fromkeys(splits, 30), train=60, noise=30), protocol.__name__
    found = protocol(outputs_of(small_model(), dataset, split=split))
    (by_setting,) = (rows for key, rows in found.detail.items() if key.startswith("accuracy_by"))
    setting = "lr" if protocol is linear else "l2"
    rows = {row[setting]: row["accuracy"] for row in by_setting}
    assert found.detail["chosen_on"] == chosen_on
    assert rows[found.detail[setting]] == max(rows.values()) > 0.8
    low, high = found.intervals[name]
    assert low < found.metrics[name] < high
    mislabel(dataset, split)
    again = protocol(outputs_of(small_model(), dataset, split=split))
    assert again.detail[f"accuracy_by_{setting}"] == by_setting
    assert again.metrics[name] < 0.3 < 0.8 < found.metrics[name]


@pytest.fixture(scope="module")
def digits():
    return load("digits", img_size=(8, 8), in_chans=1, limit_train=128, augment=Augment(mixup=0.5))


def of_digits(dataset, size="mu1/4"):
    torch.manual_seed(0)
    model = vm.vit(size, img_size=8, in_chans=1, num_classes=10).eval()
    return ModelOutputs(model, dataset, "test", 64, CPU, Options(linear_epochs=3))


def test_the_linear_layer_learns_by_sgd_with_momentum_and_a_cosine(digits):
    made, rate = of_digits(digits), 0.03
    weight = learn(made, [1e-3]).weight[0]
    layer = torch.nn.Linear(weight.shape[0], 10)
    with torch.no_grad():
        layer.weight.copy_(0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).T)
        layer.bias.zero_()
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    views = digits.in_random_crops()
    assert (views.augment.crop, views.augment.flip, views.augment.mixup) == ("random_resized", 0.5, 0.0)
    for epoch in range(3):
        for batch in views.train_batches(seed=0, epoch=epoch, batch_size=256):
            loss = F.cross_entropy(layer(made.batch_features(batch)), batch.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    both = learn(made, [1e-3, rate])
    torch.testing.assert_close(both.weight[1], layer.weight.detach().T, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(both.bias[1, 0], layer.bias.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(both.weight[0], weight)


def test_images_that_are_left_out_are_not_learned(digits):
    left_out = np.arange(128) % 2 == 0
    labels = digits.splits["train"].labels
    other = replace(digits.splits["train"], labels=np.where(left_out, (labels + 1) % 10, labels))
    changed = replace(digits, splits={**digits.splits, "train": other})
    first, second = (learn(of_digits(data), RATES, left_out) for data in (digits, changed))
    torch.testing.assert_close(first.weight, second.weight)
    assert not torch.equal(first.weight, learn(of_digits(changed), RATES).weight)


def test_a_task_says_what_its_probes_read(digits):
    made = of_digits(digits, "mu2/4")
    made.task = SimpleNamespace(probe_blocks=2, uses_head=True)
    batch = next(iter(digits.eval_batches("test", 4)))
    assert made.batch_features(batch).shape == (4, 64)
