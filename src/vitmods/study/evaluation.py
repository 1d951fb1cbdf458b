"""Judging trained weights: the protocol of the study's metric on a split, beside the trial that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.evals.protocols import check_protocols, run_protocols
from vitmods.recipes.length import resolve_on
from vitmods.study.arms import BASE, Arm
from vitmods.study.start import open_trial
from vitmods.study.store import read_json
from vitmods.study.tuning import VAL
from vitmods.train.device import make_fabric
from vitmods.util.errors import UserError
from vitmods.util.files import write_json

if TYPE_CHECKING:
    from vitmods.data import Batch, ImageDataset
    from vitmods.recipes import Recipe
    from vitmods.study.measure import Measure
    from vitmods.study.plan import Settings


class EvaluatedOnVal:
    """Images for a trial that others may be preferred to: it is evaluated on val, and test is out of its reach."""

    eval_split = val_split = VAL

    def __init__(self, dataset: ImageDataset):
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def eval_batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        assert split != "test", "a trial must not see test before the choice"
        return self._dataset.eval_batches(split, batch_size)


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
    for arm in (Arm(BASE), *settings.arms):
        for point in settings.grid.points:
            resolve_on(settings.recipe_of(arm, point), dataset)
    measure = settings.measure
    for evaluated in {settings.evaluated_on(split), split}:
        check_protocols(dataset, [measure.metric.protocol], split=evaluated, options=measure.options)


def evaluate_trial(
    folder: Path, dataset: ImageDataset, recipe: Recipe, measure: Measure, split: str, device: str
) -> None:
    """Run the measure's protocol on a finished trial's weights and note what it finds in <split>.json.

    Args:
        folder: the trial's.
        images: its images.
        recipe: its recipe: precision, and how many images fit in memory.
        measure: whose protocol is run.
        split: the split that is looked at.
        device: see `vitmods.train.train_trial`.

    Raises:
        UserError: the images or the options do not allow the protocol.
    """
    fabric = make_fabric(device, recipe.precision)
    protocol = measure.metric.protocol
    results = run_protocols(
        fabric.to_device(open_trial(folder)),
        dataset,
        [protocol],
        split=split,
        batch_size=recipe.part_size,
        device=fabric.device,
        options=measure.options,
        autocast=fabric.autocast,
    )
    if measure.name not in results[protocol].metrics:
        raise UserError(f"The protocol {protocol} gives no {measure.name} with these options; compare another metric.")
    before = (read_json(folder / f"{split}.json") or {}).get("protocols", {})
    record = {"options": measure.to_dict()["options"], **results[protocol].to_dict()}
    protocols = {**before, protocol: record}
    write_json(folder / f"{split}.json", {"schema": 1, "split": split, "protocols": protocols, "failed": None})
