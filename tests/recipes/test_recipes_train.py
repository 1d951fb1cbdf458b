"""Every recipe trains: two real steps on handwritten digits, with all its augmentation, loss and optimizer."""

import math

import pytest
import torch

import vitmods as vm
from vitmods import data
from vitmods.recipes import RECIPES
from vitmods.tasks import Classification
from vitmods.train import RunOptions, train_trial


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains(name, tmp_path):
    recipe = RECIPES[name]().with_(steps=2, warmup_steps=0, warmup_epochs=None, batch_size=36)
    dataset = data.load("digits", img_size=8, in_chans=3, augment=recipe.augment, limit_train=200)
    torch.manual_seed(0)
    model = vm.vit("mu/4", img_size=8, num_classes=10, **recipe.model.to_config())
    before = [p.clone() for p in model.parameters()]
    task = Classification.from_recipe(recipe)
    result = train_trial(
        model, task, dataset, recipe, out=tmp_path, options=RunOptions("cpu", progress=False, tensorboard=False)
    )
    assert (result["status"], result["steps"]) == ("finished", 2)
    assert math.isfinite(result["metrics"]["loss"])
    changed = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    # A head of zeros lets no gradient through before its first update.
    assert sum(changed) >= (2 if recipe.model.init == "big_vision" else len(changed))
