"""Accuracy of a split: top-1, top-5, balanced, and of each class, with intervals.

Where pictures have several right classes (ImageNet-ReaL, Beyer et al., 2020, arXiv:2006.07159), any of them is right,
and pictures without one do not count.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.evals.findings import Findings
from vitmods.evals.intervals import mean_of_shares, share, wilson
from vitmods.evals.metrics import Metric
from vitmods.evals.subject import Subject
from vitmods.evals.top1 import first_five

METRICS = (
    Metric("top1", "top-1 accuracy", "top1"),
    Metric("top5", "top-5 accuracy", "top1"),
    Metric("balanced_accuracy", "balanced accuracy", "top1"),
)

Ints = NDArray[np.int64]


def accuracy(subject: Subject) -> Findings:
    """The protocol: shares of pictures with Wilson's intervals, and the mean over classes of the share in each.

    Classes without a picture are in no mean.
    """
    ranked, targets = first_five(subject.logits), subject.targets
    label_sets = subject.pictures.splits[subject.split].label_sets
    if label_sets is None:
        right, counted = ranked == targets[:, None], np.full(len(targets), True)
    else:
        right, counted = in_sets(ranked, label_sets), np.array([len(labels) > 0 for labels in label_sets])
    first, five = right[:, 0].numpy()[counted], right.any(dim=1).numpy()[counted]
    labels, classes = targets.numpy()[counted], subject.pictures.classes
    pictures = np.bincount(labels, minlength=len(classes))
    hits = np.bincount(labels[first], minlength=len(classes))
    seen = pictures > 0
    count = len(labels)
    return Findings(
        metrics={
            "top1": float(first.mean()),
            "top5": float(five.mean()),
            "balanced_accuracy": float((hits[seen] / pictures[seen]).mean()),
        },
        detail={"pictures": count, "per_class": _per_class(classes, hits, pictures)},
        intervals={
            "top1": share(int(first.sum()), count),
            "top5": share(int(five.sum()), count),
            "balanced_accuracy": mean_of_shares(hits[seen], pictures[seen]),
        },
    )


def in_sets(ranked: Tensor, label_sets: Sequence[tuple[int, ...]]) -> Tensor:
    """Whether each of the classes (n, 5) is among the picture's right ones: bool (n, 5)."""
    most = max(map(len, label_sets))
    padded = torch.tensor([[*labels, *[-1] * (most - len(labels))] for labels in label_sets])
    return (ranked[:, :, None] == padded[:, None, :]).any(dim=2)


def _per_class(classes: Sequence[str], hits: Ints, pictures: Ints) -> dict[str, Any]:
    low, high = wilson(hits, pictures)
    return {
        name: {"pictures": n, "accuracy": x / n if n else None, "interval": [a, b]}
        for name, x, n, a, b in zip(classes, *(column.tolist() for column in (hits, pictures, low, high)), strict=True)
    }
