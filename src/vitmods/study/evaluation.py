"""Evaluating trained weights: the protocol of the study's metric on a split, beside the trial that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitmods.data.batch import for_device
from vitmods.evals.base import ProtocolResult
from vitmods.evals.protocols import check_protocols, run_protocols
from vitmods.recipes.length import resolve_on
from vitmods.stats.intervals import mean_over_images
from vitmods.study.start import open_trial
from vitmods.study.store import read_json
from vitmods.study.tuning import VAL
from vitmods.train.device import make_fabric
from vitmods.train.trial import read_scores, write_scores
from vitmods.util.errors import UserError
from vitmods.util.files import write_json

if TYPE_CHECKING:
    from vitmods.data import Batch, ImageDataset
    from vitmods.recipes import Recipe
    from vitmods.study.measure import Measure
    from vitmods.study.plan import Settings
    from vitmods.tasks.base import Task


class EvaluatedOnVal:
    """Images for a trial that others may be preferred to: it is evaluated on val, and test is out of its reach."""

    eval_split = val_split = VAL

    def __init__(self, dataset: ImageDataset):
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def as_uint8(self) -> EvaluatedOnVal:
        """For a GPU."""
        return EvaluatedOnVal(self._dataset.as_uint8())

    def eval_batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        assert split != "test", "a trial must not see test before the choice"
        return self._dataset.eval_batches(split, batch_size)


def answer_splits(settings: Settings, dataset: ImageDataset) -> tuple[str, ...]:
    """The splits that the answer is about: test, or val where there is no test. Where vitmods made both and nothing is
    chosen on val, all images that are held out; with folds test alone, so that each image counts once."""
    made = dataset.summary()["split_origin"].startswith("made") and {VAL, "test"} <= set(dataset.splits)
    return (VAL, "test") if made and not (settings.grid or settings.folds) else (dataset.eval_split,)


def check_images(settings: Settings, dataset: ImageDataset) -> None:
    """UserError where the images lack a split that is needed, or do not allow a recipe or the metric's protocol."""
    splits, split = dataset.splits, dataset.eval_split
    if settings.grid and VAL not in splits:
        raise UserError(
            "There is no val split to choose on. Make one from train with a val_fraction above 0 (--val-fraction 0.2), "
            "or give a folder named val."
        )
    if settings.grid and split == VAL:
        raise UserError(
            "There is no test split: what is chosen on val cannot be reported on val, where the chosen number is too "
            "good. Add a test split (a folder named test); a source with train alone is cut into all three."
        )
    for arm in settings.every_arm:
        for point in settings.grid.points:
            resolve_on(settings.recipe_of(arm, point), dataset)
    measure, evaluated_on = settings.measure, {split, *([VAL] if settings.grid else [])}
    for evaluated in evaluated_on if measure.metric.protocol else ():
        check_protocols(dataset, [measure.metric.protocol], split=evaluated, options=measure.options)


def own_evaluation(
    task: Task, model: nn.Module, dataset: ImageDataset, split: str, batch_size: int, device: torch.device
) -> ProtocolResult:
    """What the task's own evaluation finds of a model in evaluation mode, on `device`: as of a protocol."""
    batches = for_device(dataset, device).eval_batches(split, batch_size)
    found = task.evaluate(model, (batch.to(device) for batch in batches))
    names = {metric.name for metric in task.metrics}
    means = {name: mean_over_images(found.per_image[name]) for name in found.per_image if name in names}
    return ProtocolResult(
        {name: value for name, value in found.metrics.items() if name in names},
        {name: dict(zip(dataset.classes, values, strict=True)) for name, values in found.detail.items()},
        {name: ends for name, ends in means.items() if ends is not None},
        found.per_image,
    )


def trial_scores(folder: Path, split: str) -> dict[str, NDArray[Any]]:
    """What is known of each image of a split, (n,) arrays by name beside `ids`: from the training's own evaluation, and
    from protocols. Empty where the task says nothing of single images. UserError where a file is damaged."""
    return read_scores(folder / f"{split}.npz")


def evaluate_trial(
    folder: Path, dataset: ImageDataset, task: Task, recipe: Recipe, measure: Measure, split: str, device: str
) -> None:
    """Run the measure's protocol, or the task's own evaluation where it has none, on a finished trial's weights; note
    what is found in <split>.json, and of each image in <split>.npz.

    Args:
        folder: the trial's.
        dataset: its images.
        task: what it was trained for.
        recipe: its recipe: precision, and how many images fit in memory.
        measure: whose protocol is run.
        split: the split that is looked at.
        device: see `vitmods.train.train_trial`.

    Raises:
        UserError: the images or the options do not allow the protocol.
    """
    fabric = make_fabric(device, recipe.precision)
    model, protocol = fabric.to_device(open_trial(folder)), measure.metric.protocol
    if protocol:
        result = run_protocols(
            model,
            dataset,
            [protocol],
            split=split,
            batch_size=recipe.part_size,
            device=fabric.device,
            options=measure.options,
            autocast=fabric.autocast,
        )[protocol]
    else:  # what the task's own evaluation alone gives
        with fabric.autocast():
            result = own_evaluation(task, model.eval(), dataset, split, recipe.part_size, fabric.device)
    if measure.name not in result.metrics:
        raise UserError(
            f"The {protocol or task.name} evaluation gives no {measure.name} with these options; compare another "
            "metric."
        )
    if result.per_image:
        scores = {"ids": np.array(dataset.splits[split].ids, dtype=str), **result.per_image}
        write_scores(folder / f"{split}.npz", {**trial_scores(folder, split), **scores})
    before = (read_json(folder / f"{split}.json") or {}).get("protocols", {})
    record = {"options": measure.to_dict()["options"], **result.to_dict()}
    protocols = {**before, protocol or task.name: record}
    write_json(folder / f"{split}.json", {"schema": 1, "split": split, "protocols": protocols, "failed": None})
