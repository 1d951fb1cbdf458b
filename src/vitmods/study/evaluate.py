"""A model's weights on images, by the protocols of `vitmods.evals`: a trial's, or those of another library."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitmods.evals.accuracy import fit_temperature
from vitmods.evals.base import PROTOCOLS
from vitmods.evals.options import Options
from vitmods.evals.outputs import ModelOutputs, Progress, silent
from vitmods.evals.protocols import check_protocols
from vitmods.stats.width import mean_over_seeds
from vitmods.study.checkpoints import Checkpoint, seeds_in
from vitmods.study.settings import measure_of
from vitmods.study.store import StudyImages
from vitmods.study.trial import load_images, measure_model
from vitmods.tasks.base import DEFAULT, make_task
from vitmods.util.errors import UserError
from vitmods.util.files import similar_folder
from vitmods.util.text import listing

if TYPE_CHECKING:
    from vitmods.data import ImageDataset


def temperature_of(checkpoint: Checkpoint) -> float:
    """The temperature of a trial's logits, fitted on its val split. Raises UserError for weights without their images,
    images without that split, and tasks without classes."""
    if "data" not in checkpoint.settings:
        raise UserError(f"{checkpoint.source} does not say which images it was trained on: give the folder of a trial.")
    dataset = load_images(checkpoint.settings, checkpoint.recipe, 0)
    if "val" not in dataset.splits:
        raise UserError(f"{checkpoint.source}: its images do not have a split val to fit a temperature on.")
    task = make_task(checkpoint.settings.get("task", DEFAULT), checkpoint.recipe)
    if task.target != "class" or not task.uses_head:
        raise UserError(f"A temperature is for the logits of classes, which the task {task.name} does not have.")
    outputs = ModelOutputs(checkpoint.model.eval(), dataset, "val", 64, torch.device("cpu"), Options(), task)
    return fit_temperature(outputs.logits, outputs.targets)


def evaluate(
    checkpoints: str | Path | Sequence[str | Path],
    protocols: Iterable[str] | None = None,
    *,
    split: str | None = None,
    data: str | None = None,
    batch_size: int = 64,
    device: str = "auto",
    workers: int = 0,
    options: Options | None = None,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Evaluate each checkpoint by protocols on all images of a split; `over_seeds` summarizes several.

    Args:
        checkpoints: one or several of: a trial's folder, of `vitmods train` or of a study; an arm's folder in a study,
            which holds its seeds; or what `vitmods.adapters.open_checkpoint` opens.
        protocols: keys of `vitmods.evals.PROTOCOLS`; None: the one by which trials of that task are compared, or where
            there is none for it, the task's own evaluation.
        split: "train", "val" or "test"; None: the split that numbers of these images are reported on. Training
            images are evaluated without augmentation.
        data: the images; None: the trial's own.
        batch_size: images at a time.
        device: where; see `vitmods.train.train_trial`.
        workers: threads that prepare images ahead.
        options: of the protocols.
        progress: may show how far it is.

    Returns:
        For each checkpoint, ready for JSON: checkpoint, data, split, images; `metrics` and `intervals` of all protocols
        by the metric's name; and the other results of each protocol in `protocols`.

    Raises:
        UserError: a checkpoint does not exist, the images have other classes, or a protocol cannot use them; always
            before anything is computed.
    """
    sources = [checkpoints] if isinstance(checkpoints, (str, Path)) else checkpoints
    names = None if protocols is None else [PROTOCOLS[name].name for name in protocols]
    if not sources or names == []:
        raise UserError("Name at least one checkpoint, a trial's folder for instance, and one protocol or none.")
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, not {batch_size}.")
    pairs: list[tuple[Checkpoint, ImageDataset]] = []
    paths = [path for source in sources for path in seeds_in(str(source))]
    if twice := next((path for path in paths if [*map(os.path.abspath, paths)].count(os.path.abspath(path)) > 1), None):
        raise UserError(f"{twice} is given twice: leave one out, since an average would count it double.")
    for checkpoint in [_open(path, data) for path in paths]:
        settings, recipe = checkpoint.settings, checkpoint.recipe
        if pairs and (pairs[-1][0].settings, pairs[-1][0].recipe) == (settings, recipe):  # read the same images once
            pairs.append((checkpoint, pairs[-1][1]))
        else:
            pairs.append((checkpoint, load_images(settings, recipe, workers)))
    tasks = [checkpoint.settings.get("task", DEFAULT) for checkpoint, _ in pairs]
    if names is None and len(set(tasks)) > 1:
        raise UserError(f"These checkpoints are of several tasks ({listing(sorted(set(tasks)))}): name a protocol.")
    usual, options = measure_of(tasks[0]).metric.protocol, options or Options()
    names = ([usual] if usual else []) if names is None else names
    for (checkpoint, dataset), task in zip(pairs, tasks, strict=True):
        made = make_task(task, checkpoint.recipe)
        check_protocols(dataset, names, split=split or dataset.eval_split, options=options, task=made)
        reads_classes = any(PROTOCOLS[name].reads_logits for name in names) if names else not made.reads_any_classes
        if reads_classes:
            _check_classes(checkpoint, dataset)
        if data is None and dataset.summary()["fingerprint"] != checkpoint.fingerprint:
            warnings.warn("the images are no longer those that the trial was trained on.", stacklevel=2)
    evaluations = []
    for (checkpoint, dataset), task in zip(pairs, tasks, strict=True):
        where = split or dataset.eval_split
        images = StudyImages.of_weights(str(checkpoint.source)) if data is not None else None
        if where != "train" and images and (count := images.trained_on(dataset.splits[where])):
            warnings.warn(
                f"{count:,} of {len(dataset.splits[where].ids):,} images of {where} were training images of "
                f"{checkpoint.source}: scores on them are optimistic. Give images that it has not seen.",
                stacklevel=2,
            )
        results = measure_model(
            checkpoint.model, make_task(task, checkpoint.recipe), checkpoint.recipe, dataset, names, where, batch_size,
            device, options, progress,
        )  # fmt: skip
        evaluation: dict[str, Any] = {
            "checkpoint": checkpoint.source,
            "name": checkpoint.name,
            "data": dataset.name,
            "split": where,
            "images": dataset.summary()["splits"][where]["count"],
            "metrics": {name: value for result in results.values() for name, value in result.metrics.items()},
            "intervals": {name: [*ends] for result in results.values() for name, ends in result.intervals.items()},
            "protocols": {name: result.detail for name, result in results.items()},
        }
        evaluations.append(evaluation)
    return evaluations


def over_seeds(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average each metric over several evaluations of `evaluate`, with Student's interval over them.

    Raises:
        UserError: they are not of the same images.
    """
    if len({(evaluation["data"], evaluation["split"], evaluation["images"]) for evaluation in evaluations}) > 1:
        raise UserError("The checkpoints were evaluated on different images: name the same with --data and --split.")
    metrics = [evaluation["metrics"] for evaluation in evaluations]
    values = {name: [of_seed[name] for of_seed in metrics] for name in metrics[0]}
    intervals = {name: mean_over_seeds(row) for name, row in values.items()}
    return {
        "checkpoints": list(evaluations),
        "metrics": {name: sum(row) / len(row) for name, row in values.items()},
        "intervals": {name: list(ends) for name, ends in intervals.items() if ends is not None},
    }


def summary(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce what `evaluate` or `over_seeds` returns to its numbers, without the protocols' other results."""
    short = {name: value for name, value in evaluation.items() if name != "protocols"}
    return short if "checkpoints" not in short else {**short, "checkpoints": [*map(summary, short["checkpoints"])]}


def figure_names(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the first part of the file names of each evaluation's figures, such as `dpn-seed0-`, each another."""
    names = [evaluation["name"] for evaluation in evaluations]
    return [f"{name}{f'-{i}' * (names.count(name) > 1)}-" for i, name in enumerate(names)]


def _open(source: str, data: str | None) -> Checkpoint:
    """Open a checkpoint with the trial's own images or those of `data`, which have the default split without a
    trial."""
    checkpoint = Checkpoint.open(source).as_seen() if data is not None or Path(source).is_dir() else None
    if checkpoint is None or (data is None and "data" not in checkpoint.settings):
        what = "is not a trial's folder, which names its images" if Path(source).exists() else "does not exist here"
        hint = similar_folder(Path(source)) or "Weights that are not a trial's are evaluated on the images of --data."
        raise UserError(f"{source} {what}. {hint}")
    settings = dict(checkpoint.settings)
    if settings.pop("train_on_all", False) and (data is None or data == settings["data"]):
        raise UserError(
            f"{source} was trained on all images of {settings['data']}, including test, so no score on them is a "
            "fair estimate: use the estimate of its study, or give other images with --data."
        )
    return checkpoint if data is None else replace(checkpoint, settings={**settings, "data": data})


def _check_classes(checkpoint: Checkpoint, dataset: ImageDataset) -> None:
    """Raise UserError unless the classes have the same names and order: otherwise every number would be wrong."""
    classes, config = dataset.classes, getattr(checkpoint.model, "vit_config", None)
    outputs = len(checkpoint.classes) if checkpoint.classes is not None else config.num_classes if config else 0
    remedy = "Give images of the same classes, in folders of the same names; fewshot, probe and knn take any."
    if dataset.class_map is not None:
        if max(dataset.class_map) >= outputs:
            raise UserError(f"{dataset.name} is for models of more classes than {outputs}: give one of those.")
    elif len(classes) != outputs:
        what = f"the model has {outputs} classes and {dataset.name} has {len(classes)}"
        raise UserError(f"These are other classes: {what}. {remedy}")
    elif checkpoint.classes is None:
        warnings.warn(
            f"the checkpoint does not name its classes: they are taken to be those of {dataset.name}, in its order.",
            stacklevel=3,
        )
    elif classes != checkpoint.classes:
        trained, present = next(pair for pair in zip(checkpoint.classes, classes) if pair[0] != pair[1])
        what = f"where the model knows the class {trained!r}, {dataset.name} has {present!r}"
        raise UserError(f"These are other classes: {what}. {remedy}")
