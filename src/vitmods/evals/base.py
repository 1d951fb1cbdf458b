"""The interface and registry of protocols for trained models; files of this folder and plugins add to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitmods.evals.options import Options
from vitmods.stats.width import Interval, fraction, mean_over_images
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError
from vitmods.util.registry import Registry

if TYPE_CHECKING:
    from vitmods.data import ImageDataset
    from vitmods.evals.outputs import ModelOutputs


@dataclass(frozen=True)
class ProtocolResult:
    """Numbers by the names of the protocol's metrics, their 95 % intervals where there are any, JSON-able details, and
    of each image of the split, in order, what a metric is the mean of: (n,) arrays by the metric's name."""

    metrics: dict[str, float]
    detail: dict[str, Any] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)
    per_image: Mapping[str, NDArray[Any]] = field(default_factory=dict, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON, without the scores of each image."""
        intervals = {name: list(ends) for name, ends in self.intervals.items()}
        return {"metrics": self.metrics, "intervals": intervals, "detail": self.detail}


@dataclass(frozen=True)
class Protocol:
    """One way of measuring a model.

    title: what it is, in words.
    check: raises UserError if the images or the options do not allow it, without reading a pixel; check_metric: if the
        options leave a metric out.
    reads_logits: the model must have been trained on the classes of the images; otherwise only features are read.
    options: names of the Options that it reads.
    target: what it needs to know of each image, as a task says it.
    """

    name: str
    title: str
    metrics: tuple[Metric, ...]
    run: Callable[[ModelOutputs], ProtocolResult]
    check: Callable[[ImageDataset, str, Options], None] = lambda dataset, split, options: None
    reads_logits: bool = True
    options: tuple[str, ...] = ()
    target: str = "class"
    check_metric: Callable[[str, Options], None] = lambda metric, options: None


PROTOCOLS: Registry[Protocol] = Registry(
    "protocol", "vitmods.evals", "vitmods.papers.corruptions", check="vitmods.evals.protocols:metrics"
)
Run = Callable[["ModelOutputs"], ProtocolResult]


def protocol(name: str, title: str, metrics: tuple[Metric, ...], **facts: Any) -> Callable[[Run], Run]:
    """Register the function that runs a protocol; facts are fields of `Protocol`."""

    def register(run: Run) -> Run:
        PROTOCOLS.add(name, Protocol(name, title, metrics, run, **facts), origin=run)
        return run

    return register


def accuracy_of(metric: str, right: NDArray[np.bool_], **detail: Any) -> ProtocolResult:
    """The fraction of images (n,) that are right, with Wilson's interval."""
    hits, images = int(right.sum()), len(right)
    intervals = {metric: fraction(hits, images)}
    return ProtocolResult({metric: hits / images}, {"images": images, **detail}, intervals, {metric: right})


def means_of(per_image: Mapping[str, NDArray[Any]], metrics: Mapping[str, float], **detail: Any) -> ProtocolResult:
    """Means over images, with their intervals, and other metrics, which have none."""
    ends_of = {name: mean_over_images(values) for name, values in per_image.items()}
    intervals = {name: ends for name, ends in ends_of.items() if ends is not None}
    means = {name: float(values.mean()) for name, values in per_image.items()}
    return ProtocolResult({**metrics, **means}, detail, intervals, per_image)


def training_counts(dataset: ImageDataset, split: str, protocol: str) -> Mapping[str, int]:
    """Return the training images of each class. Raises UserError without any, or if the train split is evaluated."""
    splits = dataset.summary()["splits"]
    if "train" not in splits:
        raise UserError(f"{protocol} learns from training images, and {dataset.name} does not have any: leave it out.")
    if split == "train":
        raise UserError(f"{protocol} learns from the split train: evaluate it on another (--split test).")
    return splits["train"]["per_class"]


def check_can_learn(dataset: ImageDataset, split: str, protocol: str) -> None:
    """Raise UserError if a class is without training images, or if `training_counts` raises."""
    missing = [name for name, count in training_counts(dataset, split, protocol).items() if count == 0]
    if missing:
        raise UserError(f"{protocol} learns from training images, which are missing for {', '.join(missing)}.")
