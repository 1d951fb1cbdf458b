"""A finished trial's weights on pictures: its own, or others with the same classes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from vitmods.errors import UserError
from vitmods.recipes import Recipe
from vitmods.study.start import open_trial
from vitmods.study.store import read_json
from vitmods.study.trial import load_pictures, task_of
from vitmods.train.device import make_fabric, to_device


def evaluate_trial(
    folder: Path, *, split: str | None = None, data: str | None = None, batch_size: int = 64, device: str = "auto"
) -> dict[str, Any]:
    """Metrics of a trial's final weights over all pictures of a split.

    Args:
        folder: a trial's folder, of `vitmods train` or of a study.
        split: "train", "val" or "test"; None: the split that the trial was judged by. Training pictures are evaluated
            without augmentation.
        data: another data set; None: the trial's own.
        batch_size: pictures at a time.
        device: where; see `vitmods.train.train_trial`.

    Raises:
        UserError: the folder holds no finished trial, or the pictures do not fit it.
    """
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, not {batch_size}.")
    model = open_trial(folder)
    config = read_json(folder / "config.json") or {}
    recipe = Recipe.from_dict(config["recipe"])
    pictures = load_pictures({**config["pictures"], "data": data or config["pictures"]["data"]}, recipe)
    found = pictures.summary()["fingerprint"]
    if data is None and found != config["data"]["fingerprint"]:
        warnings.warn("the pictures are no longer those that the trial was trained on.", stacklevel=2)
    _check_classes(tuple(config["data"]["classes"]), pictures.classes, pictures.name)
    fabric = make_fabric(device, recipe.precision)
    fabric.to_device(model)
    split = split or pictures.eval_split
    batches = (to_device(batch, fabric.device) for batch in pictures.eval_batches(split, batch_size))
    with fabric.autocast():
        metrics = task_of(recipe).evaluate(model, batches)
    count = len(pictures.splits[split])
    return {"folder": str(folder), "data": pictures.name, "split": split, "pictures": count, "metrics": metrics}


def _check_classes(trained: tuple[str, ...], found: tuple[str, ...], name: str) -> None:
    """As many classes are not enough: under other names, or in another order, every number would be wrong."""
    if len(found) != len(trained):
        what = f"the model has {len(trained)} classes and {name} has {len(found)}"
    elif found != trained:
        mine, theirs = next(pair for pair in zip(trained, found) if pair[0] != pair[1])
        what = f"where the model knows the class {mine!r}, {name} has {theirs!r}"
    else:
        return
    raise UserError(
        f"These are other classes: {what}. Give pictures of the same classes, in folders of the same names."
    )
