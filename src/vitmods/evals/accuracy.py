"""Accuracy of a split: top-1, top-5, balanced, and of each class, with intervals."""

import numpy as np

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


def accuracy(subject: Subject) -> Findings:
    """The protocol: shares of pictures with Wilson's intervals, and the mean over classes of the share in each.

    Classes without a picture are in no mean.
    """
    outputs = subject.outputs()
    ranked = (first_five(outputs.logits) == outputs.targets[:, None]).numpy()
    targets, classes = outputs.targets.numpy(), subject.pictures.classes
    pictures = np.bincount(targets, minlength=len(classes))
    hits = np.bincount(targets[ranked[:, 0]], minlength=len(classes))
    seen = pictures > 0
    count, first, five = len(ranked), int(ranked[:, 0].sum()), int(ranked.sum())
    balanced = float((hits[seen] / pictures[seen]).mean())
    low, high = wilson(hits, pictures)
    return Findings(
        metrics={"top1": first / count, "top5": five / count, "balanced_accuracy": balanced},
        detail={
            "pictures": count,
            "per_class": {
                name: {"pictures": int(n), "accuracy": x / n if n else None, "interval": [float(a), float(b)]}
                for name, x, n, a, b in zip(classes, hits.tolist(), pictures.tolist(), low, high, strict=True)
            },
        },
        intervals={
            "top1": share(first, count),
            "top5": share(five, count),
            "balanced_accuracy": mean_of_shares(hits[seen], pictures[seen]),
        },
    )
