"""A small backbone with the modules of a task, and digits to train it on."""

import torch

import vitmods as vm
from vitmods.tasks import TASKS


def on_digits(name, recipe, *changes):
    """(model, task, images)"""
    task = TASKS[name].from_recipe(recipe)
    few = {"limit_train": 96, "limit_val": 40, "test_fraction": 0.05}
    images = task.load_data("digits", img_size=8, in_chans=1, augment=recipe.augment, **few)
    torch.manual_seed(0)
    backbone = vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=0, **recipe.model.to_config())
    return task.wrap(vm.apply(backbone, *changes) if changes else backbone, 10), task, images
