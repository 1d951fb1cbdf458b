"""Two training steps of a recipe at full shape on images of noise: what they take here, and the whole run would."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vitmods.model.config import ViTConfig
from vitmods.model.vit import vit
from vitmods.recipes import Recipe
from vitmods.study.steps import Steps
from vitmods.tasks.base import DEFAULT, make_task
from vitmods.tasks.features import without_head
from vitmods.train.device import does_not_fit, is_out_of_memory
from vitmods.train.optim import freeze

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
            made = make_task(task, recipe)
            backbone = vit(config) if made.uses_head else without_head(vit(config))
            model = made.wrap(backbone, config.num_classes)
            freeze(model, recipe)
            steps, parts = Steps(model, made, recipe, device, config), -(-recipe.batch_size // part)
            peak = steps.peak(part, min(2, parts))
            return Rehearsal(part, parts, *steps.timed(part, parts, STEP_S), peak)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if recipe.accumulate > 1 or part == 1:
                raise does_not_fit(part, device) from None
        torch.cuda.empty_cache()
        part = -(-part // 2)
