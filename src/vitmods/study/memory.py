"""Memory of a trial on each device, estimated in advance by a step on fake tensors."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vitmods.bench import peak_bytes
from vitmods.changes import Change
from vitmods.changes.compose import edit
from vitmods.model.config import ViTConfig
from vitmods.model.vit import ViT
from vitmods.recipes import Recipe
from vitmods.study.cost import Steps, make_model
from vitmods.study.plan import Settings
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, base_config
from vitmods.tasks.base import DEFAULT, TaskModel
from vitmods.train.options import RunOptions, check_divides
from vitmods.util.errors import UserError
from vitmods.util.text import size

SAVING = ("recompute", "checkpointing")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the peak of a step, by what takes them. The allocator's gaps, the driver and buffers of
    communication come on top: about a tenth, and a GB."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    """the moving average of the weights, if there is one"""
    whole: int
    """of a divided model: blocks that are whole while they compute, and their gradients until they are divided"""
    activations: int
    """all else at the peak: what is kept for backward, the batch, and what operations make on their way"""
    part: int
    """images that are on the device at once"""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.average + self.whole + self.activations

    def __str__(self) -> str:
        named = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "moving average": self.average,
            "whole blocks": self.whole,
            f"activations of {self.part} images at once": self.activations,
        }
        parts = ", ".join(f"{name} {size(count)}" for name, count in named.items() if count)
        return f"{size(self.total)}: {parts}"


def memory_of(
    config: ViTConfig, recipe: Recipe, task: str = DEFAULT, devices: int = 1, options: RunOptions | None = None,
) -> Memory:  # fmt: skip
    """Estimate the memory of a trial on each device. Nothing is computed or allocated.

    Activations are those of `recipe.precision` on a GPU, where attention does not keep its weights.

    Args:
        config: the model, changes included.
        recipe: gives the batch, which is divided among the devices and by `accumulate`, the optimizer, what is trained.
        task: its name.
        devices: processes that train together, a device each.
        options: `recompute`, `checkpointing` and `shard` are read.

    Raises:
        UserError: a batch that cannot be divided, or a model that cannot be run so.
    """
    check_divides(recipe.batch_size, devices)
    options = options or RunOptions("cpu")
    options.check_processes(devices)
    part = -(-recipe.batch_size // (devices * recipe.accumulate))
    config = config.with_(**recipe.model.to_config())
    with torch.device("meta"):
        model, made = make_model(ViT(config), config.num_classes, recipe, task)
    options.save_memory(model)
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # to copy a model, in PyTorch
        steps = Steps(model.to_empty(device="cpu"), made, recipe, CPU, config)
        steps.timed(part)  # the optimizer's state is made
        peak = peak_bytes(lambda: steps.timed(part, min(2, recipe.accumulate)), steps.alive(), CPU)
        weights = _bytes([*steps.model.parameters(), *steps.model.buffers()])
        gradients = _bytes([p for p in steps.model.parameters() if p.requires_grad])
        states = [value for state in steps.optimizer.state.values() for value in state.values()]
        optimizer = _bytes([value for value in states if isinstance(value, torch.Tensor)])
        average = _bytes([*steps.ema.model.parameters(), *steps.ema.model.buffers()]) if steps.ema else 0
        average -= _bytes([p for p in steps.model.parameters() if not p.requires_grad]) if steps.ema else 0
    activations = max(0, peak - weights - gradients - optimizer - average)
    if not options.shard:
        return Memory(weights, gradients, optimizer, average, 0, activations, part)
    weights, gradients, optimizer, average = (
        -(-count // devices) for count in (weights, gradients, optimizer, average)
    )
    # FSDP2 gathers whole parameters: the block that computes, the next one, and those outside of blocks. It has a
    # block's gradients twice, as they are computed and in the order in which they are sent.
    backbone = model.backbone if isinstance(model, TaskModel) else model
    blocks = [list(block.parameters()) for block in getattr(backbone, "blocks", ())]
    in_blocks = {id(parameter) for block in blocks for parameter in block}
    outside = _bytes([parameter for parameter in model.parameters() if id(parameter) not in in_blocks])
    largest = max(map(_bytes, blocks), default=0)
    trained = max((_bytes([p for p in block if p.requires_grad]) for block in blocks), default=0)
    return Memory(weights, gradients, optimizer, average, 2 * largest + outside + 2 * trained, activations, part)


def trial_memory(settings: Settings, options: RunOptions, devices: int = 1) -> dict[str, Memory]:
    """Estimate the memory of a trial of the last arm: with these options, and in other ways that save memory.

    Raises:
        UserError: the model is not one that a ViTConfig describes, training would refuse it, or as for `memory_of`.
    """
    options.check_processes(devices)
    arm, recipe = settings.every_arm[-1], settings.recipe
    images = TrialRunner(StudyFolder(os.devnull), settings, options).dataset(recipe)
    config = base_config(settings, images.num_classes)
    changes = [change for change in arm.changes if isinstance(change, Change)]
    if not isinstance(config, ViTConfig) or len(changes) < len(arm.changes):
        raise UserError(
            "Memory is estimated for vitmods' ViTs and their changes alone: leave --devices and --shard out."
        )
    config, recipe, task = edit(config, changes), settings.recipe_of(arm), settings.fixed.get("task", DEFAULT)
    memory = {"as asked": memory_of(config, recipe, task, devices, options)}
    for name in SAVING:
        if not getattr(options, name) and not (name == "recompute" and options.compile):
            saving: dict[str, Any] = {name: True}
            with suppress(UserError):  # the model does not support it
                memory[f"with --{name}"] = memory_of(config, recipe, task, devices, replace(options, **saving))
    return memory


def _bytes(tensors: list[torch.Tensor] | list[nn.Parameter]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
