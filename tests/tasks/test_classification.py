from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from vitmods.data import Batch
from vitmods.recipes import Recipe
from vitmods.tasks import Classification
from vitmods.tasks.classification import LOSSES, binary_cross_entropy, sigmoid_cross_entropy, softmax_cross_entropy


@pytest.mark.parametrize(
    ("loss", "name"), [(sigmoid_cross_entropy, "sigmoid_xent"), (softmax_cross_entropy, "softmax_xent")]
)
def test_losses_equal_big_visions(golden, loss, name):
    g = golden("bv_losses")
    assert loss(g["logits"], g["labels"]).mean().item() == pytest.approx(g[name].item(), abs=1e-10)


def test_binary_cross_entropy_equals_timms_with_its_threshold():
    from timm.loss import BinaryCrossEntropy

    torch.manual_seed(0)
    logits, fractions = torch.randn(6, 5, dtype=torch.float64), torch.zeros(6, 5, dtype=torch.float64)
    fractions[torch.arange(6), torch.tensor([0, 1, 2, 3, 4, 0])] = 0.97  # mixed of two, one hardly to be seen
    fractions[torch.arange(6), torch.tensor([3, 1, 0, 4, 2, 1])] += 0.03
    expected = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)(logits, fractions)
    torch.testing.assert_close(binary_cross_entropy(logits, fractions).mean(), expected)
    assert Classification.from_recipe(Recipe().with_(loss="bce")).loss_name == "bce"


@pytest.mark.parametrize("loss", [sigmoid_cross_entropy, softmax_cross_entropy, binary_cross_entropy])
def test_smoothing_mixes_the_target_with_the_uniform_one_for_numbers_and_shares(loss):
    # All losses are linear in the target, and that of `binary_cross_entropy` is spread after it is made whole.
    logits, classes = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 6, 3, 3, 1])
    shares, uniform = torch.nn.functional.one_hot(classes, 7).double(), torch.full((5, 7), 1 / 7, dtype=torch.float64)
    spread = sigmoid_cross_entropy(logits, uniform) / 7 if loss is binary_cross_entropy else loss(logits, uniform)
    for smoothing in (0.0, 0.2):
        expected = (1 - smoothing) * loss(logits, classes) + smoothing * spread
        for targets in (classes, shares):
            torch.testing.assert_close(loss(logits, targets, smoothing), expected)


def test_training_accuracy_of_mixed_targets_counts_the_largest_share():
    logits = torch.eye(4)
    fractions = torch.tensor([[0.6, 0.4, 0, 0], [0.6, 0.4, 0, 0], [0, 0, 1, 0], [0.9, 0, 0, 0.1]])
    batch = Batch(logits, fractions, torch.arange(4))
    loss, statistics = Classification().loss(lambda images: images, batch)
    assert statistics["top1"].item() == 0.5
    torch.testing.assert_close(loss, softmax_cross_entropy(logits, fractions).mean())


def test_evaluation_is_without_smoothing():
    logits, classes = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    batch = Batch(logits, classes, torch.arange(6))
    task = Classification.from_recipe(Recipe().with_(loss="sigmoid", label_smoothing=0.3))
    metrics = task.evaluate(lambda images: images, [batch]).metrics
    assert metrics["loss"] == pytest.approx(sigmoid_cross_entropy(logits, classes).mean().item(), rel=1e-6)
    assert task.metrics[0].name in metrics


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid", "bce"])
def test_balanced_class_weights_are_scikit_learns_and_average_one(loss, mixed):
    labels = np.repeat([0, 1, 3], [12, 3, 1])  # class 2 is without images
    dataset = SimpleNamespace(splits={"train": SimpleNamespace(labels=labels)}, summary=lambda: {"classes": "abcd"})
    task = Classification.from_recipe(Recipe().with_(loss=loss, class_weights="balanced"))
    task.fit(None, dataset)
    expected = compute_class_weight("balanced", classes=np.unique(labels), y=labels)
    assert task.weights[[0, 1, 3]].tolist() == pytest.approx(expected.tolist())
    assert task.weights[torch.from_numpy(labels)].mean().item() == pytest.approx(1)
    torch.manual_seed(0)
    logits, classes = torch.randn(16, 4), torch.from_numpy(labels)
    targets = torch.nn.functional.one_hot(classes, 4).float()
    targets = 0.7 * targets + 0.3 * targets.flip(0) if mixed else classes
    weights = task.weights[classes] if not mixed else 0.7 * task.weights[classes] + 0.3 * task.weights[classes.flip(0)]
    actual, _ = task.loss(lambda images: images, Batch(logits, targets, torch.arange(16)))
    torch.testing.assert_close(actual, (weights * LOSSES[loss](logits, targets, 0.0)).mean())
    if loss == "softmax" and not mixed:  # PyTorch's divides by the sum of the weights in the batch, 16 here
        torch.testing.assert_close(actual, torch.nn.functional.cross_entropy(logits, classes, task.weights))
    assert task.evaluate(lambda images: images, [Batch(logits, classes, classes)]).metrics["loss"] == pytest.approx(
        LOSSES[loss](logits, classes, 0.0).mean().item()
    )
