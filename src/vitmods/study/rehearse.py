"""Two training steps of a recipe at full shape on images of noise: what they take here, and the whole run would."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitmods.analysis.timing import peak_bytes
from vitmods.model.config import ViTConfig
from vitmods.model.vit import vit
from vitmods.recipes import Recipe
from vitmods.tasks.base import DEFAULT, TASKS
from vitmods.train.optim import Ema, clip_gradients, freeze, make_optimizer
from vitmods.util.errors import UserError

PART_ON_CPU = 16  # images: more at once are no faster on a CPU and need more memory
STEP_S = 20.0  # a step that takes longer is cut short after some of its parts, the others taking as long


@dataclass(frozen=True)
class Rehearsal:
    """Seconds and bytes of one optimizer step."""

    part: int
    """images that are on the device at once"""
    parts: int
    """of a batch"""
    computed: int
    """of those, in the step that was timed"""
    part_s: float
    """forward and backward of a part"""
    update_s: float
    """clipping, optimizer and moving average"""
    peak: int
    """most bytes of tensors at once"""

    @property
    def step_s(self) -> float:
        return self.parts * self.part_s + self.update_s


def rehearse(config: ViTConfig, recipe: Recipe, device: torch.device, task: str = DEFAULT) -> Rehearsal:
    """Make two steps; the first gives the memory, the second the time.

    Where the recipe does not cut its batches, they are cut into parts that fit: halves until they do on a GPU, 16
    images on a CPU.

    Raises:
        UserError: one image, or a part of the size that the recipe says, does not fit the memory of the device.
    """
    part = recipe.part_size if recipe.accumulate > 1 or device.type != "cpu" else min(PART_ON_CPU, recipe.part_size)
    while True:
        try:
            return _two_steps(config, recipe, device, part, task)
        except torch.OutOfMemoryError:
            if recipe.accumulate > 1 or part == 1:
                raise UserError(
                    f"{part} images at once do not fit the memory of {device}. Cut the batch into more parts with "
                    "accumulate, or choose a smaller model or image size."
                ) from None
        torch.cuda.empty_cache()
        part = -(-part // 2)


def _two_steps(config: ViTConfig, recipe: Recipe, device: torch.device, part: int, task: str) -> Rehearsal:
    step = _Step(config, recipe, device, part, task)
    peak = peak_bytes(lambda: step.run(min(2, step.parts)), step.alive(), device)
    computed, part_s, update_s = step.run(step.parts)
    return Rehearsal(part, step.parts, computed, part_s, update_s, peak)


class _Step:
    """A model, its optimizer and one part of a batch."""

    def __init__(self, config: ViTConfig, recipe: Recipe, device: torch.device, part: int, task: str):
        self.recipe, self.device, self.parts = recipe, device, -(-recipe.batch_size // part)
        self.task = TASKS[task].from_recipe(recipe)
        self.model = self.task.wrap(vit(config)).to(device).train()
        self.task.begin(self.model)
        freeze(self.model, recipe)
        self.optimizer = make_optimizer(self.model, recipe)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.ema = None if recipe.ema is None else Ema(self.model, recipe.ema)
        shape = (config.in_chans, *config.img_size)
        self.batch = self.task.synthetic(part, shape, config.num_classes, recipe).to(device)

    def run(self, parts: int) -> tuple[int, float, float]:
        """(parts that were computed, seconds of each, seconds of the update)"""
        begin = self._now()
        computed = 0
        while computed < parts and (computed == 0 or self._now() - begin < STEP_S):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16-mixed"):
                loss, _ = self.task.loss(self.model, self.batch)
            (loss / self.parts).backward()
            computed += 1
        trained = self._now()
        if self.recipe.optimizer.clip_norm is not None:
            clip_gradients(self.parameters, self.recipe.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()
        self.task.after_step(self.model, 1, 1)
        return computed, (trained - begin) / computed, self._now() - trained

    def alive(self) -> Iterator[Tensor]:
        """Tensors that exist before the step."""
        yield from (value for value in vars(self.batch).values() if isinstance(value, Tensor))
        for model in (self.model, *((self.ema.model,) if self.ema else ())):
            yield from (*model.parameters(), *model.buffers())

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()
