"""A model's weights on images, by the protocols of `vitmods.evals`: a trial's, or those of another library."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.evals.base import PROTOCOLS, ProtocolResult
from vitmods.evals.options import Options
from vitmods.evals.outputs import Progress, silent
from vitmods.evals.protocols import check_protocols, run_protocols
from vitmods.stats.width import mean_over_seeds
from vitmods.study.checkpoints import seeds_in
from vitmods.study.opened import Opened, open_trained
from vitmods.study.plan import measure_of
from vitmods.study.trial import load_images, own_evaluation
from vitmods.tasks.base import DEFAULT, make_task
from vitmods.train.device import place
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data import ImageDataset


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
    """What protocols find of each checkpoint on all images of a split, JSON-able; `over_seeds` sums several up.

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
        Of each: checkpoint, data, split, images; `metrics` and `intervals` of all protocols by the metric's name; and
        what each protocol found beside them, in `protocols`.

    Raises:
        UserError: there is no such checkpoint, the images have other classes, or a protocol cannot use them; always
            before anything is computed.
    """
    known = None if protocols is None else [PROTOCOLS[name] for name in protocols]
    each = [checkpoints] if isinstance(checkpoints, (str, Path)) else checkpoints
    if not each or known == []:
        raise UserError("Name at least one checkpoint, a trial's folder for instance, and one protocol or none.")
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, not {batch_size}.")
    everything = _with_images([_open(found, data) for source in each for found in seeds_in(str(source))], workers)
    task = everything[0][0].settings.get("task", DEFAULT)
    usual, options = measure_of(task).metric.protocol, options or Options()
    chosen = known or ([PROTOCOLS[usual]] if usual else [])
    names = [protocol.name for protocol in chosen]
    for opened, dataset in everything:
        check_protocols(dataset, names, split=split or dataset.eval_split, options=options)
        if not chosen or any(protocol.reads_logits for protocol in chosen):
            _check_classes(opened, dataset)
        if data is None and dataset.summary()["fingerprint"] != opened.fingerprint:
            warnings.warn("the images are no longer those that the trial was trained on.", stacklevel=2)
    found = []
    for opened, dataset in everything:
        placement, where = place(device, opened.recipe.precision), split or dataset.eval_split
        model = opened.model.to(placement.device)
        if chosen:
            results = run_protocols(
                model,
                dataset,
                names,
                split=where,
                batch_size=batch_size,
                device=placement.device,
                options=options,
                autocast=placement.autocast,
                progress=progress,
            )
        else:
            made = make_task(task, opened.recipe)
            with placement.autocast():
                results = {task: own_evaluation(made, model.eval(), dataset, where, batch_size, placement.device)}
        found.append(_record(opened, dataset, where, results))
    return found


def over_seeds(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each metric over several evaluations of `evaluate`, with Student's interval over them.

    Raises:
        UserError: they are not of the same images.
    """
    dataset = {(one["data"], one["split"], one["images"]) for one in found}
    if len(dataset) > 1:
        raise UserError("The checkpoints were evaluated on different images: name the same with --data and --split.")
    values = {name: [one["metrics"][name] for one in found] for name in found[0]["metrics"]}
    intervals = {name: mean_over_seeds(row) for name, row in values.items()}
    return {
        "checkpoints": list(found),
        "metrics": {name: sum(row) / len(row) for name, row in values.items()},
        "intervals": {name: list(ends) for name, ends in intervals.items() if ends is not None},
    }


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of what `evaluate` or `over_seeds` gives, the numbers alone: without what protocols found beside them."""
    short = {name: value for name, value in found.items() if name != "protocols"}
    return short if "checkpoints" not in short else {**short, "checkpoints": [*map(summary, short["checkpoints"])]}


def figure_names(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the files of each evaluation's figures begin with: `dpn-seed0-` of a trial, the file's name of others; with
    a number where two would be the same."""
    names = [one["name"] for one in found]
    return [f"{name}{f'-{i}' * (names.count(name) > 1)}-" for i, name in enumerate(names)]


def _record(opened: Opened, dataset: ImageDataset, split: str, results: Mapping[str, ProtocolResult]) -> dict[str, Any]:
    return {
        "checkpoint": opened.source,
        "name": opened.name,
        "data": dataset.name,
        "split": split,
        "images": dataset.summary()["splits"][split]["count"],
        "metrics": {name: value for found in results.values() for name, value in found.metrics.items()},
        "intervals": {name: list(ends) for found in results.values() for name, ends in found.intervals.items()},
        "protocols": {name: found.detail for name, found in results.items()},
    }


def _open(source: str, data: str | None) -> Opened:
    """Images are the trial's own, or those of `data`, which are split as by default if no trial says how."""
    opened = open_trained(source) if data is not None or Path(source).is_dir() else None
    if opened is None or (data is None and "data" not in opened.settings):
        raise UserError(f"{source} is no trial's folder, which names its images: say which with --data.")
    settings = dict(opened.settings)
    if settings.pop("train_on_all", False) and (data is None or data == settings["data"]):
        raise UserError(
            f"{source} was trained on all images of {settings['data']}, test too, so no number on them says how "
            "good it is: take the estimate of its study, or give other images with --data."
        )
    return opened if data is None else replace(opened, settings={**settings, "data": data})


def _with_images(all_opened: Sequence[Opened], workers: int) -> list[tuple[Opened, ImageDataset]]:
    """Each with its images; those that follow one another with the same settings are read once."""
    found: list[tuple[Opened, ImageDataset]] = []
    for opened in all_opened:
        last = found[-1] if found else None
        if last is not None and (last[0].settings, last[0].recipe) == (opened.settings, opened.recipe):
            found.append((opened, last[1]))
            continue
        found.append((opened, load_images(opened.settings, opened.recipe.augment, workers)))
    return found


def _check_classes(opened: Opened, dataset: ImageDataset) -> None:
    """As many classes are not enough: under other names, or in another order, every number would be wrong."""
    found, config = dataset.classes, getattr(opened.model, "vit_config", None)
    outputs = len(opened.classes) if opened.classes is not None else config.num_classes if config else 0
    remedy = "Give images of the same classes, in folders of the same names; fewshot, probe and knn take any."
    if dataset.class_map is not None:
        if max(dataset.class_map) >= outputs:
            raise UserError(f"{dataset.name} is for models of more classes than {outputs}: give one of those.")
        return
    if len(found) != outputs:
        what = f"the model has {outputs} classes and {dataset.name} has {len(found)}"
        raise UserError(f"These are other classes: {what}. {remedy}")
    if opened.classes is None:
        warnings.warn(
            f"the checkpoint does not name its classes: they are taken to be those of {dataset.name}, in its order.",
            stacklevel=3,
        )
    elif found != opened.classes:
        mine, theirs = next(pair for pair in zip(opened.classes, found) if pair[0] != pair[1])
        what = f"where the model knows the class {mine!r}, {dataset.name} has {theirs!r}"
        raise UserError(f"These are other classes: {what}. {remedy}")
