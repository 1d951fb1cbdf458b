"""What a published table costs to make again at its own scale, by arithmetic."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.papers.table import Table, TableStudy
    from vitmods.recipes import Recipe

STEP = 6
"""FLOPs of a training step for each multiply-add of the forward: two, forward and twice as many backward"""
PEAK = 989e12
"""FLOPs a second of an H100 SXM in dense bfloat16, by its data sheet; not measured by us"""
UTILIZATION = (0.2, 0.4)
"""of the peak, in a ViT's training: an assumption"""


@dataclass(frozen=True)
class FullScale:
    """Trials, and the FLOPs of training all of them; None, and why, where something is not known."""

    trials: int
    flops: float | None
    why: str = ""

    def gpu_hours(
        self, peak: float = PEAK, utilization: tuple[float, float] = UTILIZATION
    ) -> tuple[float, float] | None:
        """From the higher to the lower utilization: hours of one accelerator with this peak, in FLOPs a second."""
        if self.flops is None:
            return None
        low, high = utilization
        return self.flops / (peak * high) / 3600, self.flops / (peak * low) / 3600

    def __str__(self) -> str:
        hours = self.gpu_hours()
        if hours is None:
            return f"{self.trials:,} trials; their cost is not known: {self.why}"
        low, high = map(_round, hours)
        return (
            f"{self.trials:,} trials, {self.flops:.2g} FLOPs: about {low} to {high} GPU hours at "
            f"{100 * UTILIZATION[0]:.0f} to {100 * UTILIZATION[1]:.0f} % of {PEAK / 1e12:.0f} TFLOP/s. By arithmetic; "
            "not run by us (docs/scaling.md)"
        )


def training_flops(macs: float, images: float) -> float:
    """Of a training that sees so many views; norms, optimizer and evaluation left out."""
    return STEP * macs * images


def _round(hours: float) -> str:
    digits = 2 - math.ceil(math.log10(hours)) if hours > 0 else 0
    return f"{round(hours, digits):,.{max(0, digits)}f}"


def full_scale(table: Table) -> FullScale:
    """The trials of all bases and settings of a table that can be run, as the paper trains them.

    Multiply-adds are those of our ViTs, and of other models those that the table prints; of a part that is trained
    alone, as if all was.
    """
    study = table.study
    assert study is not None
    points = math.prod(len(values.split(",")) for values in re.findall(r"--tune [\w.]+=(\S+)", study.options))
    arms, settings = len(study.every_arm) + 1, math.prod(map(len, study.sweep.values()))
    trials = arms * len(study.bases) * settings * points * study.seeds
    try:
        flops = sum(training_flops(macs, seen) for macs, seen in _models(table, study))
    except UserError as error:
        return FullScale(trials, None, str(error))
    return FullScale(trials, flops * points * study.seeds)


def _models(table: Table, study: TableStudy) -> Iterator[tuple[float, float]]:
    """Multiply-adds of an image, and images that a trial sees, of each base, setting and arm."""
    for label, base in study.bases.items():
        seen = sum(_images_seen(study, base))
        for arm, text in {study.base: "", **study.arms, **dict.fromkeys(study.beside, "")}.items():
            yield _macs(table, study, label, base, arm, text), seen


def _images_seen(study: TableStudy, base: str) -> Iterator[float]:
    """Images that a trial sees under each setting of the sweep."""
    from vitmods.recipes.registry import evidence, parse_recipe

    name = study.recipe.partition("(")[0]
    recipe = parse_recipe(study.recipe, model=base if ":" not in base else "S/16")
    images = study.images or evidence(name).images
    for steps in re.findall(r"--sweep steps=(\S+)", study.options):
        yield from (int(count) * recipe.batch_size for count in steps.split(","))
        return
    for part in study.sweep.get("limit_train", {"": 1.0}).values():
        several = len(study.sweep.get("warmup_epochs", " "))
        yield several * part * _length(recipe, images, name)


def _length(recipe: Recipe, images: int | None, name: str) -> float:
    settings = recipe.settings()
    if settings["steps"] is not None:
        return float(settings["steps"] * settings["batch_size"])
    if images is None:
        raise UserError(f"how many images the recipe {name} was for.")
    return float(settings["epochs"] * images)


def _macs(table: Table, study: TableStudy, label: str, base: str, arm: str, text: str) -> float:
    if ":" in base:
        return _printed(table, study.cell(label, arm)[0], label)
    from vitmods.changes.compose import edit
    from vitmods.model.config import ViTConfig
    from vitmods.model.flops import count_macs

    side: dict[str, Any] = {"img_size": study.img_size} if study.img_size else {}
    config = ViTConfig.from_name(base, **side)
    return float(count_macs(edit(config, _changes(text))))


def _changes(text: str) -> Any:
    """The changes of an arm; none where it is only trained otherwise."""
    from vitmods.changes import parse_changes

    written = re.sub(r"^[\w-]+=", "", text)
    return () if written in ("", "attention", "ffn") or "replace(" in written else parse_changes(written)


def _printed(table: Table, row: str, label: str) -> float:
    number = table.numbers.get((row, "FLOPs"))
    if number is None:
        raise UserError(f"how many FLOPs {label} takes.")
    return number.value * 1e9
