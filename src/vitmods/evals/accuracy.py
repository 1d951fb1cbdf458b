"""Accuracy of a split: top-1, top-5, balanced, and of each class, with intervals.

Where images have several right classes (ImageNet-ReaL, Beyer et al., 2020, arXiv:2006.07159), any of them is right,
and images without one do not count. `top1` is what training is evaluated by: it keeps no outputs.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.evals.base import PROTOCOLS, Protocol, ProtocolResult
from vitmods.evals.outputs import ModelOutputs
from vitmods.stats.width import fraction, mean_of_fractions, wilson
from vitmods.tasks.classification import Classification, first_five
from vitmods.tasks.metrics import Metric

METRICS = (
    *Classification.metrics,
    Metric("balanced_accuracy", "balanced accuracy", "top1"),
    Metric("worst_class_accuracy", "accuracy of the worst class", "top1"),
)

Ints = NDArray[np.int64]


def accuracy(outputs: ModelOutputs) -> ProtocolResult:
    """The protocol: fractions of images with Wilson's intervals, and the mean and the smallest over classes of the
    fraction in each.

    Classes without an image are in neither. The smallest has no interval: of few images a class it is lower than the
    worst class is, as the smallest of noisy numbers.
    """
    ranked, targets = first_five(outputs.logits), outputs.targets
    label_sets = outputs.dataset.splits[outputs.split].label_sets
    if label_sets is None:
        right, counted = ranked == targets[:, None], np.full(len(targets), True)
    else:
        right, counted = in_sets(ranked, label_sets), np.array([len(labels) > 0 for labels in label_sets])
    first, five = right[:, 0].numpy()[counted], right.any(dim=1).numpy()[counted]
    labels, classes = targets.numpy()[counted], outputs.dataset.classes
    images = np.bincount(labels, minlength=len(classes))
    hits = np.bincount(labels[first], minlength=len(classes))
    seen, count = images > 0, len(labels)
    low, high = (bound.tolist() for bound in wilson(hits, images))
    per_class = {
        name: {"images": n, "accuracy": hit / n if n else None, "interval": [low[i], high[i]]}
        for i, (name, hit, n) in enumerate(zip(classes, hits.tolist(), images.tolist(), strict=True))
    }
    # The balanced accuracy is a mean over images in which those of rare classes count more.
    weight = count / (seen.sum() * images[labels])
    per_image = {"top1": first, "top5": five, "balanced_accuracy": first * weight}
    return ProtocolResult(
        metrics={
            "top1": float(first.mean()),
            "top5": float(five.mean()),
            "balanced_accuracy": float((hits[seen] / images[seen]).mean()),
            "worst_class_accuracy": float((hits[seen] / images[seen]).min()),
        },
        detail={"images": count, "per_class": per_class},
        intervals={
            "top1": fraction(int(first.sum()), count),
            "top5": fraction(int(five.sum()), count),
            "balanced_accuracy": mean_of_fractions(hits[seen], images[seen]),
        },
        per_image=per_image if label_sets is None else {},
    )


def in_sets(ranked: Tensor, label_sets: Sequence[tuple[int, ...]]) -> Tensor:
    """Whether each of the classes (n, 5) is among the image's right ones: bool (n, 5)."""
    most = max(map(len, label_sets))
    padded = torch.tensor([[*labels, *[-1] * (most - len(labels))] for labels in label_sets])
    return (ranked[:, :, None] == padded[:, None, :]).any(dim=2)


PROTOCOLS.add("top1", Protocol("top1", "accuracy, with that of each class", METRICS, accuracy))
