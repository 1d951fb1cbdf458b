"""The head of trained weights begins as a linear probe of what it reads."""

import pytest
import torch
from torch import nn

from vitmods.recipes import RECIPES, Recipe
from vitmods.tasks.base import TASKS
from vitmods.tasks.features import head_inputs
from vitmods.train.probe import Features, learn


def features(bench, model, split):
    targets = []
    with torch.no_grad(), head_inputs(model.eval()) as read:
        for batch in bench.dataset.eval_batches(split, 64):
            model(batch.inputs)
            targets.append(batch.targets)
    return Features(torch.cat(read), torch.cat(targets))


def test_its_logits_are_those_of_the_probe(bench, tmp_path):
    run = bench.run(tmp_path, bench.recipe(head_start="probe"))
    run.metrics.close()
    model = run.model.eval()
    train = features(bench, model, "train")
    probe, _ = learn(train, None, 10, torch.device("cpu"))
    right = model.head(train.features).argmax(dim=1) == train.targets
    assert torch.equal(right, probe.right(train))
    assert right.float().mean() > 0.6, "features of an untrained model suffice for most training digits"
    drawn = bench.model().state_dict()
    assert all(torch.equal(value, drawn[name]) for name, value in model.state_dict().items() if "head" not in name)


def test_a_stopped_trial_resumes_to_the_same_weights(bench, tmp_path, monkeypatch):
    recipe = bench.recipe(head_start="probe")
    bench.train(tmp_path / "whole", recipe=recipe)
    bench.stop(monkeypatch, tmp_path / "parts", at=5, recipe=recipe)
    monkeypatch.setattr("vitmods.train.loop.head_from_probe", None)  # a checkpoint has the head
    bench.train(tmp_path / "parts", recipe=recipe)
    assert bench.numbers(tmp_path / "parts") == bench.numbers(tmp_path / "whole")


@pytest.mark.parametrize("head", [nn.Identity(), nn.Linear(64, 10, bias=False), nn.Linear(64, 7)], ids=str)
def test_another_head_is_left_with_a_reason(bench, tmp_path, head):
    model = bench.model()
    model.head = head
    with pytest.warns(UserWarning, match="is drawn, not a linear probe: its last layer is not a linear one"):
        bench.run(tmp_path, bench.recipe(head_start="probe"), model).metrics.close()


def test_one_image_of_a_class_is_enough():
    """There is then none to choose the strength by; one class has none at all."""
    probe, _ = learn(Features(torch.eye(9), torch.arange(9)), None, 10, torch.device("cpu"))
    weight, bias = probe.linear()
    assert (torch.eye(9) @ weight.T + bias).argmax(dim=1).tolist() == list(range(9))


def test_trials_without_it_are_those_of_before():
    assert "head_start" not in Recipe().to_dict()
    for name in ("finetune", "finetune_sgd"):
        recipe = RECIPES[name]()
        assert Recipe.from_dict(recipe.to_dict()).head_start == "probe"


@pytest.mark.parametrize("name", sorted(TASKS))
def test_tasks_without_a_head_of_classes_do_not_read_it(name):
    assert TASKS[name].fitted(RECIPES["finetune"]()).head_start == ("probe" if name == "classification" else "drawn")
