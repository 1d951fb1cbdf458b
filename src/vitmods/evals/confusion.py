"""Which classes are taken for which: the confusion matrix, and F1 from it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitmods.evals.base import PROTOCOLS, Protocol, ProtocolResult
from vitmods.evals.outputs import ModelOutputs
from vitmods.tasks.metrics import Metric

METRICS = (Metric("macro_f1", "mean F1 of the classes", "confusion"),)
LARGEST_MATRIX, LISTED = 200, 20


def confusion(outputs: ModelOutputs) -> ProtocolResult:
    """The protocol: true classes in rows, predicted ones in columns. The mean of F1 is over classes with images.

    Above 200 classes the matrix is not part of the details, the most frequent confusions are.
    """
    classes = outputs.dataset.classes
    matrix = confusion_matrix(outputs.targets.numpy(), outputs.logits.argmax(dim=1).numpy(), len(classes))
    detail: dict[str, Any] = {"images": int(matrix.sum()), "most_confused": most_confused(matrix, classes)}
    if len(classes) <= LARGEST_MATRIX:
        detail |= {"classes": list(classes), "matrix": matrix.tolist()}
    return ProtocolResult({"macro_f1": macro_f1(matrix)}, detail)


def confusion_matrix(true: NDArray[np.int64], predicted: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Counts (K, K): of images of the row's class, how many were taken for the column's."""
    return np.bincount(true * classes + predicted, minlength=classes**2).reshape(classes, classes)


def macro_f1(matrix: NDArray[np.int64]) -> float:
    """The mean, over classes with images, of 2 * hits / (images of the class + images taken for it)."""
    images, taken = matrix.sum(axis=1), matrix.sum(axis=0)
    seen = images > 0
    return float((2 * matrix.diagonal()[seen] / (images + taken)[seen]).mean())


def most_confused(matrix: NDArray[np.int64], classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """The most frequent confusions, most frequent first: the class, what it was taken for, and how many images."""
    errors = matrix.copy()
    np.fill_diagonal(errors, 0)
    order = np.argsort(-errors, axis=None, kind="stable")[:LISTED]
    pairs = zip(*np.unravel_index(order, errors.shape), strict=True)
    return [
        {"class": classes[i], "taken_for": classes[j], "images": int(errors[i, j])} for i, j in pairs if errors[i, j]
    ]


PROTOCOLS.add("confusion", Protocol("confusion", "which classes are taken for which", METRICS, confusion))
