"""Which classes are taken for which: the confusion matrix, and F1 from it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitmods.evals.metrics import Metric
from vitmods.evals.result import Findings
from vitmods.evals.subject import Subject

METRICS = (Metric("macro_f1", "mean F1 of the classes", "confusion"),)
LARGEST_MATRIX, LISTED = 200, 20


def confusion(subject: Subject) -> Findings:
    """The protocol: true classes in rows, predicted ones in columns. The mean of F1 is over classes with pictures.

    Above 200 classes the matrix is not part of the details, the most frequent confusions are.
    """
    classes = subject.pictures.classes
    matrix = confusion_matrix(subject.targets.numpy(), subject.logits.argmax(dim=1).numpy(), len(classes))
    detail: dict[str, Any] = {"pictures": int(matrix.sum()), "most_confused": most_confused(matrix, classes)}
    if len(classes) <= LARGEST_MATRIX:
        detail |= {"classes": list(classes), "matrix": matrix.tolist()}
    return Findings({"macro_f1": macro_f1(matrix)}, detail)


def confusion_matrix(true: NDArray[np.int64], predicted: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Counts (K, K): of pictures of the row's class, how many were taken for the column's."""
    return np.bincount(true * classes + predicted, minlength=classes**2).reshape(classes, classes)


def macro_f1(matrix: NDArray[np.int64]) -> float:
    """The mean, over classes with pictures, of 2 * hits / (pictures of the class + pictures taken for it)."""
    pictures, taken = matrix.sum(axis=1), matrix.sum(axis=0)
    seen = pictures > 0
    return float((2 * matrix.diagonal()[seen] / (pictures + taken)[seen]).mean())


def most_confused(matrix: NDArray[np.int64], classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """The most frequent confusions, most frequent first: the class, what it was taken for, and how many pictures."""
    errors = matrix.copy()
    np.fill_diagonal(errors, 0)
    order = np.argsort(-errors, axis=None, kind="stable")[:LISTED]
    pairs = zip(*np.unravel_index(order, errors.shape), strict=True)
    return [
        {"class": classes[i], "taken_for": classes[j], "pictures": int(errors[i, j])} for i, j in pairs if errors[i, j]
    ]
