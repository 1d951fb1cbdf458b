"""What a study should know of its arms under these settings: said once before the training, and in the report."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vitmods.layers.norms import PowerNorm
from vitmods.layers.norms.contract import SMALL_BATCH, RunningNorm, SmallBatchWarning
from vitmods.recipes.length import resolve_on
from vitmods.study.models import implementation_warnings

if TYPE_CHECKING:
    from torch import nn

    from vitmods.data import ImageDataset
    from vitmods.recipes import Recipe


def study_warnings(models: Mapping[str, nn.Module], recipes: Mapping[str, Recipe], dataset: ImageDataset) -> list[str]:
    """A sentence for each thing to know.

    Args:
        models, recipes: of every arm, by its name.
        images: the data set, for its size.
    """
    small: dict[int, list[str]] = {}
    long: dict[tuple[int, int], list[str]] = {}
    for arm, model in models.items():
        recipe = recipes[arm]
        batch = recipe.part_size
        steps = resolve_on(recipe, dataset).steps
        warmup = max((norm.warmup for norm in model.modules() if isinstance(norm, PowerNorm)), default=0)
        if batch < SMALL_BATCH and any(map(_gathers, model.modules())):
            small.setdefault(batch, []).append(arm)
        if warmup >= steps * recipe.accumulate:
            long.setdefault((warmup, steps * recipe.accumulate), []).append(arm)
    return [
        *implementation_warnings(models),
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
    ]


def _gathers(module: object) -> bool:
    """A norm that reads the whole batch in training keeps running statistics for the evaluation."""
    return isinstance(module, RunningNorm) and any(True for _ in module.buffers(recurse=False))


def _arms(names: list[str]) -> str:
    return f"{'Arm' if len(names) == 1 else 'Arms'} {', '.join(names)}"


@contextmanager
def already_reported() -> Iterator[None]:
    """No trial repeats what `warnings` says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SmallBatchWarning)
        yield
