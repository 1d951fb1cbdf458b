"""Accuracy of a split: top-1, top-5, balanced, and of each class, with intervals.

Where pictures have several right classes (ImageNet-ReaL, Beyer et al., 2020, arXiv:2006.07159), any of them is right,
and pictures without one do not count. `top1` is what training is judged by: it keeps no outputs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.evals.metrics import Metric
from vitmods.evals.result import Findings
from vitmods.evals.subject import Subject
from vitmods.stats.intervals import mean_of_shares, share, wilson

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


class LabelledPictures(Protocol):
    """images (B, C, H, W) and int64 class numbers (B,)."""

    @property
    def images(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...


@torch.inference_mode()
def top1(
    model: Callable[[Tensor], Tensor], batches: Iterable[LabelledPictures], loss: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, float]:
    """Fractions of pictures whose class is the model's first, or among its first five, and the mean loss.

    Every picture counts the same, however the batches are cut. With fewer than five classes `top5` is 1.

    Args:
        model: images (B, C, H, W) to logits (B, K), in evaluation mode and on the device of the batches.
        batches: all pictures of the split, each once.
        loss: logits (B, K) and class numbers (B,) to the loss of each picture (B,).

    Raises:
        ValueError: there are no pictures.
    """
    pictures = 0
    # Left on the device until the end: reading a number waits for the device.
    totals: list[Tensor] = []
    for batch in batches:
        logits = model(batch.images).float()
        ranked = first_five(logits) == batch.targets[:, None]
        totals.append(torch.stack([ranked[:, 0].sum(), ranked.sum(), loss(logits, batch.targets).sum()]))
        pictures += len(batch.targets)
    if pictures == 0:
        raise ValueError("there are no pictures in the split that is to be evaluated.")
    columns: list[list[Any]] = torch.stack(totals).T.tolist()
    first, five, total_loss = (math.fsum(column) / pictures for column in columns)
    return {"top1": first, "top5": five, "loss": total_loss}


def first_five(logits: Tensor) -> Tensor:
    """The five largest classes of logits (B, K), or all where there are fewer: (B, min(5, K))."""
    return logits.topk(min(5, logits.shape[1]), dim=1).indices
