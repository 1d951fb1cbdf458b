"""What the features of a trained model can be used for: few-shot transfer, nearest neighbors, a linear probe.

All learn from training images and are evaluated on another split.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import linalg
from torch import Tensor

from vitmods.evals.base import ProtocolResult, accuracy_of, check_can_learn, protocol, training_counts
from vitmods.evals.options import SHOTS, Options
from vitmods.evals.outputs import ModelOutputs
from vitmods.stats.width import mean_over_seeds
from vitmods.tasks.metrics import Metric
from vitmods.train.probe import Floats, learn
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data import ImageDataset

Ints = NDArray[np.int64]

# Few-shot transfer: linear least squares on the features of a few training images a class, as in big_vision.
#
# Features are whitened by mean and standard deviation of the chosen images, a constant feature is added, and
# w = (X'X + l2 I)^-1 X'Y with targets -1 and 1 (Zhai et al., 2022, arXiv:2106.04560, and its successors report 5 and 10
# shots). Images are chosen by a permutation of each class, the same for all shots: the smaller sets are parts of the
# larger ones.

SEEDS, L2 = 3, 2.0**10
_CONSTANT, _LEAST_STD = 100.0, 1e-5


def fewshot_metric(shots: int) -> Metric:
    """Accuracy with so many training images of each class."""
    return Metric(f"fewshot{shots}", f"{shots}-shot accuracy", "fewshot")


def shots_of(name: str) -> int | None:
    """5 for "fewshot5"; None for other names."""
    number = name.removeprefix("fewshot")
    return int(number) if number != name and number.isdecimal() and int(number) > 0 else None


def check_fewshot(dataset: "ImageDataset", split: str, options: Options) -> None:
    """Raise UserError if a class has fewer training images than the largest number of shots."""
    counts = training_counts(dataset, split, "fewshot")
    name, least = min(counts.items(), key=lambda item: item[1])
    if least < max(options.shots):
        possible = [shots for shots in options.shots if shots <= least] or [least]
        remedy = f"ask for {' or '.join(map(str, possible))} shots" if least else "add images, or leave fewshot out"
        raise UserError(
            f"{max(options.shots)} shots need as many training images of every class, and {name} has {least}: {remedy}."
        )


@protocol(
    "fewshot",
    "least squares on few images",
    tuple(map(fewshot_metric, SHOTS)),
    check=check_fewshot,
    reads_logits=False,
    options=("shots",),
)
def fewshot(outputs: ModelOutputs) -> ProtocolResult:
    """Mean accuracy over three choices of training images, with Student's interval over them."""
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
    by_metric = {fewshot_metric(shots).name: accuracies for shots, accuracies in values.items()}
    intervals = {name: mean_over_seeds(accuracies) for name, accuracies in by_metric.items()}
    by_shots = {str(shots): {"values": accuracies} for shots, accuracies in values.items()}
    return ProtocolResult(
        {name: float(np.mean(accuracies)) for name, accuracies in by_metric.items()},
        {"images": len(targets), "seeds": SEEDS, "l2": L2, "shots": by_shots},
        {name: ends for name, ends in intervals.items() if ends is not None},
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
    """w (C, K) that minimizes |a w - targets|^2 + l2 |w|^2, by the smaller of the two systems of equations."""
    n, c = a.shape
    if n >= c:
        return linalg.solve(a.T @ a + l2 * np.eye(c), a.T @ targets, assume_a="pos")
    weights = a.T @ linalg.solve(a @ a.T + l2 * np.eye(n), targets, assume_a="pos")
    return weights


# k nearest neighbors among the training images, by cosine, as in DINO (Caron et al., 2021, arXiv:2104.14294): the 20
# nearest vote for their classes with weight exp(similarity / 0.07).

NEIGHBOURS, TEMPERATURE = 20, 0.07
_SIMILARITIES = 2**26  # at a time: a quarter of a gigabyte


@protocol(
    "knn",
    "nearest neighbors in the features",
    (Metric("knn", "nearest-neighbor accuracy", "knn"),),
    check=lambda dataset, split, options: check_can_learn(dataset, split, "knn"),
    reads_logits=False,
)
@torch.inference_mode()
def knn(outputs: ModelOutputs) -> ProtocolResult:
    """Accuracy on the evaluated split with Wilson's interval."""
    train, tested = outputs.features("train"), outputs.features(outputs.split)
    features, labels = train.features.to(outputs.device), train.targets.to(outputs.device)
    scores = vote(features, labels, tested.features.to(outputs.device), len(outputs.dataset.classes))
    right = (scores.argmax(dim=1).cpu() == tested.targets).numpy()
    return accuracy_of("knn", right, neighbors=min(NEIGHBOURS, len(labels)), temperature=TEMPERATURE)


def vote(features: Tensor, labels: Tensor, queries: Tensor, classes: int) -> Tensor:
    """Scores (M, K) of `queries` (M, C) by their nearest among `features` (N, C) of the classes `labels` (N,)."""
    features, queries = F.normalize(features, dim=1), F.normalize(queries, dim=1)
    scores = []
    for part in torch.split(queries, max(1, _SIMILARITIES // len(features))):
        nearest = (part @ features.T).topk(min(NEIGHBOURS, len(features)), dim=1)
        weights = (nearest.values / TEMPERATURE).exp()
        scores.append(weights.new_zeros(len(part), classes).scatter_add(1, labels[nearest.indices], weights))
    return torch.cat(scores)


def choosing_split(dataset: "ImageDataset", split: str) -> str | None:
    """The split to choose by, which is not the evaluated one; None: there is none."""
    return "val" if split != "val" and "val" in dataset.summary()["splits"] else None


def check_probe(dataset: "ImageDataset", split: str, options: Options, name: str = "probe") -> None:
    """Raise UserError if a class is without training images, or none can be spared to choose by."""
    check_can_learn(dataset, split, name)
    if choosing_split(dataset, split) is None and max(training_counts(dataset, split, name).values()) < 2:
        raise UserError(f"{name} is chosen on val or on a part of train, and every class has one training image.")


@protocol(
    "probe",
    "logistic regression on the features",
    (Metric("probe", "linear probe accuracy", "probe"),),
    check=check_probe,
    reads_logits=False,
)
def probe(outputs: ModelOutputs) -> ProtocolResult:
    """Accuracy on the evaluated split with Wilson's interval."""
    train, tested = outputs.probe_features("train"), outputs.probe_features(outputs.split)
    classes = len(outputs.dataset.classes)
    by = choosing_split(outputs.dataset, outputs.split)
    chosen, accuracies = learn(train, outputs.probe_features(by) if by else None, classes, outputs.device)
    by_l2 = [{"l2": l2, "accuracy": value} for l2, value in accuracies.items()]
    right = chosen.right(tested).numpy()
    return accuracy_of("probe", right, l2=chosen.l2, chosen_on=by or "a fifth of train", accuracy_by_l2=by_l2)
