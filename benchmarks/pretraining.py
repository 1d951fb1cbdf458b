"""A training step of DINO and of BeiT against a plain loop around the same network, without reading images.

    python benchmarks/pretraining.py --rounds 9 --out benchmarks/results

The plain loops are those of the papers' released code in short: DINO's network reads each size of crops in one pass,
its teacher moves parameter by parameter, and gradients are clipped one by one; BeiT's network computes all patches and
then puts mask tokens in their places. Goal: at most 1.05 of the plain loop. "again" is a second plain loop: its ratio
is what the clock cannot resolve. Then BeiT with a decoder of one block against its mask tokens in the model itself, for
75 of 196 patches masked and for three quarters, without and with shared relative positions.
"""

import argparse
import copy
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from paired import one_thread, paired, report
from recording import OneBatch
from torch import Tensor, nn
from torch.nn import functional as F

import vitmods as vm
from vitmods.data.batch import Batch
from vitmods.recipes import RECIPES, Recipe
from vitmods.tasks import Task
from vitmods.tasks.base import TaskModel, make_task
from vitmods.tasks.beit.masks import draw_masks
from vitmods.train import RunOptions
from vitmods.train.loop import TrialRun
from vitmods.train.optim import parameter_groups

Step = Callable[[], object]


def made(name: str, recipe: Recipe, base: str, side: int, **shape: Any) -> tuple[TaskModel, Task, Batch]:
    """The network of a task, always with the same weights, and a batch of noise."""
    task = make_task(name, recipe)
    torch.manual_seed(0)
    model = task.wrap(vm.vit(base, img_size=side, num_classes=0, **shape), 10)
    batch = task.synthetic(recipe.batch_size, (3, side, side), 10, recipe)
    assert isinstance(model, TaskModel)
    if name == "beit":
        model.codes.fit([batch.inputs])
    return model, task, batch


def ours(name: str, recipe: Recipe, base: str, side: int, folder: Path, **shape: Any) -> Step:
    """The step of a trial."""
    model, task, batch = made(name, recipe, base, side, **shape)
    folder.mkdir()
    data, options = OneBatch(batch), RunOptions("cpu", tensorboard=False, progress=False)
    run = TrialRun(model, task, data, recipe, folder=folder, options=options)
    run.model.train()
    return lambda: run._train_step(batch)


def plain(name: str, recipe: Recipe, base: str, side: int, folder: Path) -> Step:
    """The same step, in a loop of its own."""
    model, task, batch = made(name, recipe, base, side)
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe.optimizer.weight_decay), lr=1e-4)
    model.train()
    if name == "beit":
        return lambda: plain_beit(model, task, batch, optimizer)
    teacher, center = copy.deepcopy(model).requires_grad_(False).eval(), torch.zeros(1, task.part.prototypes)
    return lambda: plain_dino(model, teacher, center, task, batch, optimizer)


def of_sizes(model: TaskModel, views: tuple[Tensor, ...]) -> Tensor:
    """The outputs of views in the order of their sizes, a pass for each size."""
    sizes = dict.fromkeys(view.shape[-1] for view in views)
    passes = [model.backbone(torch.cat([view for view in views if view.shape[-1] == size])) for size in sizes]
    return model.head(torch.cat(passes))


def plain_dino(
    model: TaskModel, teacher: nn.Module, center: Tensor, task: Task, batch: Batch, optimizer: torch.optim.Optimizer
) -> None:
    part, views = task.part, (batch.inputs, *batch.views)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    target_outputs = of_sizes(teacher, views[:2])
    outputs = (of_sizes(model, views) / part.student_temp).chunk(len(views))
    targets = F.softmax((target_outputs - center) / part.teacher_temp, dim=-1).detach().chunk(2)
    losses = [
        torch.sum(-target * F.log_softmax(output, dim=-1), dim=-1).mean()
        for i, target in enumerate(targets)
        for j, output in enumerate(outputs)
        if i != j
    ]
    loss = sum(losses) / len(losses)
    center.mul_(0.9).add_(target_outputs.sum(dim=0, keepdim=True) / len(target_outputs), alpha=0.1)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            factor = 3.0 / (parameter.grad.norm(2) + 1e-6)
            if factor < 1:
                parameter.grad.mul_(factor)
    optimizer.step()
    with torch.no_grad():
        for kept, trained in zip(teacher.parameters(), model.parameters(), strict=True):
            kept.mul_(0.996).add_(trained.detach(), alpha=1 - 0.996)
    loss.item()


def plain_beit(model: TaskModel, task: Task, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    masks = draw_masks(task.part, model.grid, batch.targets[1], batch.inputs.device)
    with torch.no_grad():
        codes = model.codes(batch.inputs)[masks.mask]
    tokens = model.backbone.forward_features(batch.inputs, mask=masks.mask)[:, model.backbone.num_prefix_tokens :]
    loss = F.cross_entropy(model.head(tokens[masks.mask]), codes)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 3.0)
    optimizer.step()
    loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["mu6/4", "Ti/16"], help="models; images have 8 patches a side")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    results = {}
    for base in options.sizes:
        side = 8 * int(base.rpartition("/")[2])
        for name in ("dino", "beit"):
            recipe = RECIPES[f"{name}_small"](1, batch_size=options.batch)
            with tempfile.TemporaryDirectory() as folder:
                arguments = name, recipe, base, side
                variants = {
                    "plain": plain(*arguments, Path(folder)),
                    "plain again": plain(*arguments, Path(folder)),
                    "vitmods": ours(*arguments, Path(folder) / "trial"),
                }
                results[f"{name}, {base} at {side} px"] = paired(variants, "plain", options.rounds)
        for masked, relative in product((75 / 196, 0.75), (False, "shared")):
            with tempfile.TemporaryDirectory() as folder:
                variants = {}
                for variant, depth in (("mask tokens", 0), ("mask tokens again", 0), ("decoder", 1)):
                    with_decoder = recipe.with_(masked=masked, decoder_depth=depth)
                    variants[variant] = ours("beit", with_decoder, base, side, Path(folder) / variant, rel_pos=relative)
                title = f"{masked:.2f} masked{', relative positions' if relative else ''}, {base} at {side} px"
                results[title] = paired(variants, "mask tokens", options.rounds)
    report("pretraining", results, options.out)


if __name__ == "__main__":
    main()
