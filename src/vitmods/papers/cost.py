"""The cost of reproducing a published table at its own scale, by arithmetic."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

from vitmods.changes import parse_changes
from vitmods.changes.compose import edit
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.papers.table import Table, TableStudy
from vitmods.recipes.registry import evidence, network, parse_recipe
from vitmods.util.errors import UserError

STEP = 6
"""FLOPs of a training step for each multiply-add of the forward: two, forward and twice as many backward"""
PEAK = 989e12
"""FLOPs a second of an H100 SXM in dense bfloat16, by its data sheet; not measured by us"""
UTILIZATION = (0.2, 0.4)
"""of the peak, in a ViT's training: an assumption"""


@dataclass(frozen=True)
class FullScale:
    """Trials, and the FLOPs of training all of them; None, and the reason, where these are unknown."""

    trials: int
    flops: float | None
    why: str = ""

    def gpu_hours(
        self, peak: float = PEAK, utilization: tuple[float, float] = UTILIZATION
    ) -> tuple[float, float] | None:
        """Hours of one accelerator with this peak (FLOPs a second), from the higher to the lower utilization."""
        if self.flops is None:
            return None
        low, high = utilization
        return self.flops / (peak * high) / 3600, self.flops / (peak * low) / 3600

    def __str__(self) -> str:
        hours = self.gpu_hours()
        if hours is None:
            return f"{self.trials:,} trials; cost unknown: {self.why}"
        digits = [2 - math.ceil(math.log10(value)) if value > 0 else 0 for value in hours]
        low, high = (f"{round(value, n):,.{max(0, n)}f}" for value, n in zip(hours, digits, strict=True))
        return (
            f"{self.trials:,} trials, {self.flops:.2g} FLOPs: about {low} to {high} GPU hours at "
            f"{100 * UTILIZATION[0]:.0f} to {100 * UTILIZATION[1]:.0f} % of {PEAK / 1e12:.0f} TFLOP/s. By arithmetic; "
            "not run by us (docs/scaling.md)"
        )


def full_scale(table: Table) -> FullScale:
    """The trials of all bases and settings of a table that can be run, trained as in the paper.

    Multiply-adds are those of our ViTs, and for other models those that the table prints. Norms, optimizer and
    evaluation are left out; a model that is trained in part is counted as if all of it was.
    """
    study = table.study
    assert study is not None
    points = math.prod(len(values.split(",")) for values in re.findall(r"--tune [\w.]+=(\S+)", study.options))
    arms = [(study.base, ""), *study.arms.items(), *((label, "") for label in study.beside)]
    trials = len(arms) * len(study.bases) * math.prod(map(len, study.sweep.values())) * points * study.seeds
    try:
        flops = sum(
            STEP * _macs(table, study, base, arm, text) * _images_seen(study, recipe, study.bases[base])
            for recipe in filter(None, (study.pretrain, study.recipe))
            for base, (arm, text) in itertools.product(study.bases, arms)
        )
    except UserError as error:
        return FullScale(trials, None, str(error))
    return FullScale(trials, flops * points * study.seeds * len(study.sweep.get("data", " ")))


def _images_seen(study: TableStudy, stage: str, base: str) -> float:
    """Views of images in the trials of one arm on a base by a recipe, summed over the settings of the sweep."""
    name = stage.partition("(")[0]
    recipe = parse_recipe(name if stage == study.pretrain else stage, model=base if ":" not in base else "S/16")
    if swept := re.search(r"--sweep steps=(\S+)", study.options):
        return float(sum(int(steps) * recipe.batch_size for steps in swept[1].split(",")))
    images, length = study.images or evidence(name).images, recipe.settings()
    if length["steps"] is not None:
        views = length["steps"] * length["batch_size"]
    elif images is None:
        raise UserError(f"the number of images for the recipe {name} is not known.")
    else:
        views = length["epochs"] * images
    fractions = study.sweep.get("limit_train", {"": 1.0}).values()
    return float(sum(len(study.sweep.get("warmup_epochs", " ")) * part * views for part in fractions))


def _macs(table: Table, study: TableStudy, base: str, arm: str, text: str) -> float:
    """Multiply-adds of an image: as the table prints them for other libraries' models, else counted."""
    if ":" in study.bases[base]:
        printed = table.numbers.get((study.cell(base, arm)[0], "FLOPs"))
        if printed is None:
            raise UserError(f"the FLOPs of {base} are not known.")
        return printed.value * 1e9
    side: dict[str, Any] = {"img_size": study.img_size} if study.img_size else {}
    changes = re.sub(r"^[\w-]+=", "", text)
    if changes in ("attention", "ffn") or "replace(" in changes:  # another training of the same multiply-adds
        changes = ""
    config = ViTConfig.from_name(network(study.bases[base], table.line_up.network), **side)
    return float(count_macs(edit(config, parse_changes(changes) if changes else ())))
