"""Few-shot transfer: linear least squares on the features of a few training images a class, as in big_vision.

Features are whitened by mean and standard deviation of the chosen images, a constant feature is added, and
w = (X'X + l2 I)^-1 X'Y with targets -1 and 1 (Zhai et al., 2022, arXiv:2106.04560, and its successors report 5 and 10
shots). Images are chosen by a permutation of each class, the same for all shots: the smaller sets are parts of the
larger ones.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from vitmods.evals.base import PROTOCOLS, Protocol, ProtocolResult, training_counts
from vitmods.evals.options import SHOTS, Options
from vitmods.evals.outputs import ModelOutputs
from vitmods.stats.width import mean_over_seeds
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data import ImageDataset

SEEDS, L2 = 3, 2.0**10
_CONSTANT, _LEAST_STD = 100.0, 1e-5

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def metric(shots: int) -> Metric:
    """Accuracy with so many training images of each class."""
    return Metric(f"fewshot{shots}", f"{shots}-shot accuracy", "fewshot")


def shots_of(name: str) -> int | None:
    """The inverse of `metric`: 5 for "fewshot5"; None for other names."""
    number = name.removeprefix("fewshot")
    return int(number) if number != name and number.isdecimal() and int(number) > 0 else None


METRICS = tuple(metric(shots) for shots in SHOTS)


def check(dataset: "ImageDataset", split: str, options: Options) -> None:
    """UserError where a class has fewer training images than the largest number of shots."""
    counts = training_counts(dataset, split, "fewshot")
    name, least = min(counts.items(), key=lambda item: item[1])
    if least < max(options.shots):
        possible = [shots for shots in options.shots if shots <= least] or [least]
        remedy = f"ask for {' or '.join(map(str, possible))} shots" if least else "add images, or leave fewshot out"
        raise UserError(
            f"{max(options.shots)} shots need as many training images of every class, and {name} has {least}: {remedy}."
        )


def fewshot(outputs: ModelOutputs) -> ProtocolResult:
    """The protocol: mean accuracy over three choices of training images, with Student's interval over them."""
    train, tested = outputs.features("train"), outputs.features(outputs.split)
    labels, targets = train.targets.numpy(), tested.targets.numpy()
    classes = len(outputs.dataset.classes)
    x_test = tested.features.double().numpy()
    values: dict[int, list[float]] = {shots: [] for shots in outputs.options.shots}
    for seed in range(SEEDS):
        members = permuted_classes(labels, classes, seed)
        for shots, accuracies in values.items():
            chosen = np.concatenate([indices[:shots] for indices in members])
            x = train.features[chosen].double().numpy()
            scores = least_squares_scores(x, labels[chosen], x_test, classes)
            accuracies.append(float((scores.argmax(axis=1) == targets).mean()))
    intervals = {shots: mean_over_seeds(accuracies) for shots, accuracies in values.items()}
    return ProtocolResult(
        metrics={metric(shots).name: float(np.mean(accuracies)) for shots, accuracies in values.items()},
        detail={
            "images": len(targets),
            "seeds": SEEDS,
            "l2": L2,
            "shots": {str(shots): {"values": accuracies} for shots, accuracies in values.items()},
        },
        intervals={metric(shots).name: ends for shots, ends in intervals.items() if ends is not None},
    )


def permuted_classes(labels: Ints, classes: int, seed: int) -> list[Ints]:
    """Positions of each class's images, each class in an order drawn from the seed."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(np.flatnonzero(labels == number)) for number in range(classes)]


def least_squares_scores(x: Floats, y: Ints, x_test: Floats, classes: int, l2: float = L2) -> Floats:
    """Scores (M, K) of test features (M, C) by a linear map learnt from features (N, C) of the classes y (N,)."""
    mean, std = x.mean(axis=0), x.std(axis=0) + _LEAST_STD
    a, a_test = (np.column_stack([(part - mean) / std, np.full(len(part), _CONSTANT)]) for part in (x, x_test))
    targets = 2.0 * np.eye(classes)[y] - 1.0
    return a_test @ ridge(a, targets, l2)


def ridge(a: Floats, targets: Floats, l2: float) -> Floats:
    """w (C, K) that makes |a w - targets|^2 + l2 |w|^2 least, by the smaller of the two systems of equations."""
    n, c = a.shape
    if n >= c:
        weights: NDArray[np.float64] = linalg.solve(a.T @ a + l2 * np.eye(c), a.T @ targets, assume_a="pos")
        return weights
    weights = a.T @ linalg.solve(a @ a.T + l2 * np.eye(n), targets, assume_a="pos")
    return weights


PROTOCOLS.add("fewshot", Protocol("fewshot", "least squares on few images", METRICS, fewshot, check, False, ("shots",)))
