"""Warnings about arms under a study's settings, given once before the training and in the report."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vitmods.layers.norms import PowerNorm
from vitmods.layers.norms.contract import SMALL_BATCH, RunningNorm, SmallBatchWarning
from vitmods.layers.norms.whitening import NotFittedWarning
from vitmods.model.names import MODELS, parse_name
from vitmods.model.vit import ViT
from vitmods.recipes.schedule import resolve_on
from vitmods.study.arms import is_foreign

if TYPE_CHECKING:
    from torch import nn

    from vitmods.data import ImageDataset
    from vitmods.recipes import Recipe
    from vitmods.study.plan import Settings

FEW_IMAGES, PHOTOGRAPH = 10_000, 64
TRAINED = {
    "Ti": "vit_tiny_patch16_224", "S": "vit_small_patch16_224", "B": "vit_base_patch16_224",
    "L": "vit_large_patch16_224",
}  # fmt: skip


def few_images(settings: Settings, dataset: ImageDataset) -> list[str]:
    """Advise to start from trained weights if photographs are few and the model is trained from scratch."""
    images, weights = len(dataset.splits["train"]), trained_weights(settings.fixed)
    if not weights or images >= FEW_IMAGES:
        return []
    return [
        f"{images:,} training images are few to train {settings.fixed['base']} from scratch. Start from trained "
        f"weights (--from {weights}, docs/finetune.md): accuracy is far higher, and changes may rank differently."
    ]


def trained_weights(settings: Mapping[str, Any]) -> str:
    """Return timm's name of weights that suit a study's base and images; empty without any, or if it has weights."""
    base, sides = settings["base"], settings["img_size"]
    photographs = settings["in_chans"] == 3 and min(sides) >= PHOTOGRAPH
    if "start" in settings or not photographs or not isinstance(base, str) or is_foreign(base) or base in MODELS:
        return ""
    size, *shape, _ = parse_name(base)
    if size == "mu" and settings["task"] in ("classification", "multilabel"):
        size, shape = "Ti", [None, 1, 16]  # another base, which classifies photographs better than any mu from scratch
    suits = shape == [None, 1, 16] and not any(side % 16 for side in sides)
    return TRAINED.get(size, "") if suits else ""


def study_warnings(arms: Iterable[tuple[str, nn.Module, Recipe]], dataset: ImageDataset) -> list[str]:
    """Return a sentence for each warning.

    Args:
        arms: name, model and recipe of each arm, base first; a model is not kept.
        dataset: for its size.
    """
    small: dict[int, list[str]] = {}
    long: dict[tuple[int, int], list[str]] = {}
    converted: dict[str, list[str]] = {}
    advised: dict[tuple[str, str], list[str]] = {}
    base = ""
    for arm, model, recipe in arms:
        base = base or type(model).__name__
        if isinstance(model, ViT) and base != type(model).__name__:
            converted.setdefault(base, []).append(arm)
        batch = recipe.part_size
        steps = resolve_on(recipe, dataset).steps
        warmup = max((norm.warmup for norm in model.modules() if isinstance(norm, PowerNorm)), default=0)
        if batch < SMALL_BATCH and any(map(_gathers, model.modules())):
            small.setdefault(batch, []).append(arm)
        if isinstance(model, ViT):
            for change in model.changes:
                if advice := change.advice(model.vit_config):
                    advised.setdefault((str(change), advice), []).append(arm)
        if warmup >= steps * recipe.accumulate:
            long.setdefault((warmup, steps * recipe.accumulate), []).append(arm)
    return [
        *(
            f"{_arms(changed)}: changes make a vitmods ViT of base, which itself stays a {kind}. So the costs compare "
            "two implementations too. A base by its own name (vit_small_patch16_224) is a vitmods ViT."
            for kind, changed in converted.items()
        ),
        *(
            f"{_arms(arms)}: the norms take statistics from batches of {batch}, and below {SMALL_BATCH} images these "
            "are noisy. Use a larger batch, or a norm that does without."
            for batch, arms in small.items()
        ),
        *(
            f"{_arms(arms)}: PowerNorm warms up for {warmup:,} batches, and a trial has {steps:,}. So it normalizes by "
            "the batch throughout; the running statistics serve the evaluation alone. norm(kind=power,warmup=...) sets "
            "another warm-up."
            for (warmup, steps), arms in long.items()
        ),
        *(
            f"{_arms(arms)}{'' if arms == [change] else f', {change}'}: {advice}"
            for (change, advice), arms in advised.items()
        ),
    ]


def _gathers(module: object) -> bool:
    """A norm that reads the whole batch in training keeps running statistics for the evaluation."""
    return isinstance(module, RunningNorm) and any(True for _ in module.buffers(recurse=False))


def _arms(names: list[str]) -> str:
    return f"{'Arm' if len(names) == 1 else 'Arms'} {', '.join(names)}"


@contextmanager
def already_reported() -> Iterator[None]:
    """Suppress what `study_warnings` has reported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SmallBatchWarning)
        warnings.simplefilter("ignore", NotFittedWarning)  # trials compute it
        yield
