"""Linear evaluation: SGD as torch has it, on augmented views, with a rate that the evaluated images do not choose."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitmods as vm
from vitmods.data import load
from vitmods.evals.linear import RATES, learn, linear
from vitmods.evals.options import Options
from vitmods.evals.outputs import ModelOutputs
from vitmods.recipes.recipe import Augment
from vitmods.util.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits():
    return load("digits", img_size=(8, 8), in_chans=1, limit_train=128, augment=Augment(mixup=0.5))


def outputs(dataset, split="test", epochs=3):
    torch.manual_seed(0)
    model = vm.vit("mu1/4", img_size=8, in_chans=1, num_classes=10).eval()
    return ModelOutputs(model, dataset, split, 64, CPU, Options(linear_epochs=epochs))


def test_it_is_sgd_with_momentum_and_a_cosine(digits):
    made, rate = outputs(digits), 0.03
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


@pytest.mark.parametrize(("split", "chosen_on"), [("test", "val"), ("val", "a fifth of train")])
def test_what_is_evaluated_is_not_what_is_chosen_by(outputs_of, made_up, small_model, split, chosen_on):
    dataset = made_up(train=60, val=30, test=30, noise=30)
    found = linear(outputs_of(small_model(), dataset, split=split))
    assert found.detail["chosen_on"] == chosen_on
    rows = {row["lr"]: row["accuracy"] for row in found.detail["accuracy_by_lr"]}
    assert rows[found.detail["lr"]] == max(rows.values()) > 0.8
    low, high = found.intervals["linear"]
    assert low < found.metrics["linear"] < high
    dataset.splits[split].labels = (dataset.splits[split].labels + 1) % 3
    again = linear(outputs_of(small_model(), dataset, split=split))
    assert again.detail["accuracy_by_lr"] == found.detail["accuracy_by_lr"]
    assert again.metrics["linear"] < 0.3 < 0.8 < found.metrics["linear"]


def test_images_that_are_left_out_are_not_learned(digits):
    left_out = np.arange(128) % 2 == 0
    labels = digits.splits["train"].labels
    other = replace(digits.splits["train"], labels=np.where(left_out, (labels + 1) % 10, labels))
    changed = replace(digits, splits={**digits.splits, "train": other})
    first, second = (learn(outputs(data), RATES, left_out) for data in (digits, changed))
    torch.testing.assert_close(first.weight, second.weight)
    assert not torch.equal(first.weight, learn(outputs(changed), RATES).weight)


def test_a_task_says_what_its_probes_read(digits):
    made = outputs(digits)
    made.task = SimpleNamespace(probe_blocks=2, uses_head=True)
    made.model = vm.vit("mu2/4", img_size=8, in_chans=1, num_classes=10).eval()
    batch = next(iter(digits.eval_batches("test", 4)))
    assert made.batch_features(batch).shape == (4, 64)


def test_the_number_of_epochs_is_checked():
    with pytest.raises(UserError, match="linear_epochs is a number of passes"):
        Options(linear_epochs=0)
