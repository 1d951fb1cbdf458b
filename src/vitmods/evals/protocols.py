"""The protocols by name, the metrics that they give, and running several on one model."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vitmods.evals.base import PROTOCOLS, Protocol, ProtocolResult
from vitmods.evals.features import fewshot_metric, shots_of
from vitmods.evals.options import Options
from vitmods.evals.outputs import ModelOutputs, Progress, silent
from vitmods.tasks.base import TASKS, Task
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError, unknown

if TYPE_CHECKING:
    from vitmods.data import ImageDataset


def metrics() -> dict[str, Metric]:
    """The metrics of tasks and protocols by name. UserError where two metrics share a name."""
    named: dict[str, Metric] = {}
    owners: dict[str, str] = {}
    for kind, registry in (("protocol", PROTOCOLS), ("task", TASKS)):
        for owner, thing in registry.items():
            for metric in thing.metrics:
                shots = shots_of(metric.name)
                other = named.setdefault(metric.name, metric if shots is None else fewshot_metric(shots))
                first = f"the {kind} {owner}" if shots is None else "the protocol fewshot"
                first = owners.setdefault(metric.name, first)
                if other != metric:
                    raise UserError(
                        f"The {kind} {owner} has a metric {metric.name!r} ({metric.title}), and so does {first} "
                        f"({other.title}): give one of them another name."
                    )
    return named


OTHER_WORDS = {"accuracy": "top1", "acc": "top1"}
"""other words by which users look for a metric"""


def metric_named(name: str) -> Metric:
    """The metric of that name, few-shot accuracy for any number of shots; UserError with the nearest for others."""
    named, shots = metrics(), shots_of(name)
    if shots is not None:
        return fewshot_metric(shots)
    if name not in named:
        raise unknown("metric", name, named, OTHER_WORDS)
    return named[name]


def options_for(metric: str, options: Options) -> Options:
    """The options with which a protocol computes only this metric.

    Raises:
        UserError: the metric is unknown, or the options leave it out.
    """
    shots, name = shots_of(metric), metric_named(metric).name
    for protocol in PROTOCOLS.values():
        if name in {offered.name for offered in protocol.metrics}:
            protocol.check_metric(name, options)
    return options if shots is None else replace(options, shots=(shots,))


def check_protocols(
    dataset: "ImageDataset",
    names: Iterable[str],
    *,
    split: str,
    options: Options | None = None,
    task: Task | None = None,
) -> None:
    """Raise UserError, before long work, where `run_protocols` would fail.

    That is: an unknown protocol (the nearest is named), a missing split, images, options and a task's model that a
    protocol cannot use, or an option that none of them reads.
    """
    protocols, options = [PROTOCOLS[name] for name in names], options or Options()
    for option in unread(options, protocols):
        reader = next(protocol.name for protocol in PROTOCOLS.values() if option in protocol.options)
        raise UserError(
            f"{option} is an option of the protocol {reader}, which is not asked for: leave --{option} out, or ask for "
            f"--protocol {reader} too."
        )
    if split not in dataset.summary()["splits"]:
        raise UserError(f'The split "{split}" does not exist; this set has {", ".join(dataset.summary()["splits"])}.')
    for protocol in protocols:
        if protocol.target != dataset.target:
            if dataset.target == "none":
                raise UserError(
                    f"The protocol {protocol.name} needs the {protocol.target} of each image, which these images do "
                    "not have: compare by a metric of the task (--metric), or add classes to the images."
                )
            fit = ", ".join(other.name for other in PROTOCOLS.values() if other.target == dataset.target)
            remedy = f"ask for {fit}" if fit else "compare by a metric of the task"
            raise UserError(
                f"The protocol {protocol.name} needs the {protocol.target} of each image, and these are trained by "
                f"their {dataset.target}: {remedy}."
            )
        if task is not None and protocol.reads_logits and not task.uses_head:
            fit = ", ".join(other.name for other in PROTOCOLS.values() if not other.reads_logits)
            raise UserError(
                f"The protocol {protocol.name} reads logits of classes, which models of the task {task.name} do not "
                f"have: use {fit}."
            )
        protocol.check(dataset, split, options)


def unread(options: Options, protocols: Iterable[Protocol]) -> list[str]:
    """Names of options that differ from the default and that none of the protocols reads."""
    read = {name for protocol in protocols for name in protocol.options}
    unread = [field for field in fields(Options) if field.name not in read]
    return [field.name for field in unread if getattr(options, field.name) != field.default]


def run_protocols(
    model: nn.Module,
    dataset: "ImageDataset",
    names: Iterable[str],
    *,
    split: str,
    batch_size: int,
    device: torch.device,
    options: Options | None = None,
    task: Task | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    progress: Progress = silent,
) -> dict[str, ProtocolResult]:
    """Run the named protocols; the split passes the model once for all that read its outputs.

    Args:
        model: images (B, C, H, W) to logits (B, K), with `get_classifier`, on `device`. It keeps its mode.
        dataset: see `vitmods.data.load`.
        names: keys of `PROTOCOLS`.
        split: "train", "val" or "test"; training images are seen without augmentation.
        task: the task that trained the model, which may compute features by itself (`Task.features`).
        autocast: surrounds every forward pass, for arithmetic in lower precision.
        progress: may show a progress bar.

    Raises:
        UserError: as `check_protocols`.
    """
    names, options = list(names), options or Options()
    check_protocols(dataset, names, split=split, options=options, task=task)
    outputs = ModelOutputs(model, dataset, split, batch_size, device, options, task, autocast, progress)
    training = model.training
    model.eval()
    try:
        return {name: PROTOCOLS[name].run(outputs) for name in names}
    finally:
        model.train(training)
