"""How often a training step of each task waits for the device, on a GPU that is not there (tests/gpu/pretend.py).

    python benchmarks/waits.py --tasks beit dino

A wait is a number that is read, a copy to the host, a copy to the device that blocks, or a shape that depends on
numbers. For each task two batches: waits that grow with them are waits for each image.
"""

import argparse
import importlib.util
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vitmods as vm
from vitmods.data.batch import Batch
from vitmods.model.config import ViTConfig
from vitmods.recipes import RECIPES, Recipe
from vitmods.tasks.base import TASKS, Task, make_task
from vitmods.tasks.features import without_head
from vitmods.train.optim import clip_gradients, make_optimizer

PRETEND = Path(__file__).parents[1] / "tests/gpu/pretend.py"
SMALL: dict[str, dict[str, Any]] = {
    "dino": {"local_size": 4, "freeze_last_layer": 0.0, "prototypes": 64},
    "beit": {"codes": 64},
    "beit with a decoder": {"codes": 64, "decoder_depth": 1},
    "lit": {"vocabulary": 300, "text_width": 64, "text_depth": 1, "frozen_image": False},
    "detection": {"fpn_channels": 16},
    "instance_segmentation": {"fpn_channels": 16},
}


def pretend() -> Any:
    """The module of the pretend GPU."""
    spec = importlib.util.spec_from_file_location("pretend", PRETEND)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["pretend"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trial_of(title: str, count: int) -> tuple[Task, nn.Module, Recipe, Batch]:
    """A small trial: its task and model, and `count` images of noise."""
    name = title.partition(" ")[0]
    usual = TASKS[name].usual_recipe
    recipe = (RECIPES[usual]() if usual else Recipe()).with_(batch_size=count, accumulate=1, drop_path=0.0)
    recipe = TASKS[name].fitted(recipe).with_(**SMALL.get(title, {}))
    task = make_task(name, recipe)
    config = ViTConfig.from_name("mu1/4", img_size=(8, 8), num_classes=5)
    if task.inputs == "tokens":
        config = ViTConfig.from_name("LRA-64", img_size=(1, 32), in_chans=16, num_classes=5)
    backbone = vm.ViT(config)
    model = task.wrap(backbone if task.uses_head else without_head(backbone), 5)
    return task, model, recipe, task.synthetic(count, (config.in_chans, *config.img_size), 5, recipe)


def waits(title: str, count: int, gpu: Any) -> Counter[str]:
    """Place -> waits in the second step on `count` images of noise."""
    task, model, recipe, batch = trial_of(title, count)
    batch = batch.pinned()
    model.to("cuda").train()
    task.begin(model)
    optimizer = make_optimizer(model, recipe)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss, _ = task.loss(model, batch.to(torch.device("cuda")))
        loss.backward()
        clip_gradients([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        task.before_step(model, 1, 9)
        optimizer.step()
        task.after_step(model, 1, 9)

    step()
    found: Counter[str] = Counter()
    with gpu.counting() as counted:
        step()
    for (_, place), times in counted.items():
        found[place] += times
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=sorted({*TASKS, *SMALL}), metavar="TASK")
    parser.add_argument("--batches", nargs="*", type=int, default=[4, 8])
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    with pretend().gpu() as gpu:
        for title in options.tasks:
            counts = [waits(title, count, gpu) for count in options.batches]
            of_images = ", ".join(
                f"{sum(c.values())} of {n} images" for c, n in zip(counts, options.batches, strict=True)
            )
            own = sorted(place for place in counts[-1] if place.startswith("vitmods/"))
            print(f"{title}: {of_images}" + (f"; in {', '.join(own)}" if own else ""))


if __name__ == "__main__":
    main()
