"""What a published table costs at the paper's scale, by arithmetic: multiply-adds, images, and a GPU's rate."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass

from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.papers.line_up import TableStudy
from vitmods.recipes.length import resolve
from vitmods.recipes.registry import evidence, parse_recipe, split_recipe
from vitmods.util.errors import UserError

STEP = 6  # operations of a training step for each multiply-add: 2 forward, 4 backward
PEAK = 989e12  # H100 SXM, dense bfloat16, by its data sheet; not measured by us
UTILIZATION = (0.2, 0.4)  # of the peak, for a ViT's training step: an assumption


@dataclass(frozen=True)
class FullScale:
    """All trials of a table's study at the paper's scale.

    trials: arms and base, of each base model, setting and seed
    flops:  of all of them, the trainings alone
    """

    trials: int
    flops: float

    def gpu_hours(self, peak: float = PEAK, utilization: tuple[float, float] = UTILIZATION) -> tuple[float, float]:
        """From the higher to the lower utilization: hours of one accelerator with this peak, in operations a second."""
        low, high = utilization
        return self.flops / (peak * high) / 3600, self.flops / (peak * low) / 3600

    def __str__(self) -> str:
        low, high = self.gpu_hours()
        return (
            f"{self.trials} trials, {self.flops:.2g} operations: about {_round(low)} to {_round(high)} GPU hours at "
            f"{100 * UTILIZATION[0]:.0f} to {100 * UTILIZATION[1]:.0f} % of {PEAK / 1e12:.0f} TFLOP/s. By arithmetic; "
            "not run by us (docs/scaling.md)"
        )


def training_flops(config: ViTConfig, images_seen: int) -> float:
    """Operations of a training: 6 for each multiply-add of each view; norms, optimizer and evaluation left out."""
    return float(STEP * count_macs(config) * images_seen)


def full_scale(study: TableStudy) -> FullScale | None:
    """Of the study behind a table. None where a base is no ViT of this library, or the number of images is not
    known. Arms are counted as base is: what they add is small."""
    if study.start or not study.recipe or "limit_train" in study.sweep:
        return None
    name = split_recipe(study.recipe)[0]
    images, steps = evidence(name).images, _steps(study.options)
    if not steps and (images is None or "epochs" in study.sweep):
        return None
    # At the paper's scale a sweep over steps stands in the options, instead of that over epochs.
    flops, settings = 0.0, 1 if steps else math.prod(len(values) for values in study.sweep.values())
    for base in study.bases.values():
        try:
            config = ViTConfig.from_name(base, img_size=study.img_size, num_classes=1000)
            recipe = parse_recipe(study.recipe, model=base)
        except UserError:
            return None
        seen = [count * recipe.batch_size for count in steps]
        seen = seen or [resolve(recipe, images or 0).images_seen]
        flops += sum(training_flops(config, count) for count in seen)
    each = (len(study.every_arm) + 1) * study.seeds * settings
    return FullScale(each * len(study.bases) * max(1, len(steps)), each * flops)


def _steps(options: str) -> tuple[int, ...]:
    """Those that the options of the command sweep over."""
    found = [word.partition("=")[2] for word in shlex.split(options) if word.startswith("steps=")]
    return tuple(int(value) for words in found for value in words.split(","))


def _round(hours: float) -> str:
    digits = 2 - math.ceil(math.log10(hours)) if hours > 0 else 0
    return f"{round(hours, digits):,.{max(0, digits)}f}"
