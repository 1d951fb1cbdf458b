"""Protocols that need only the logits of a split: accuracy, average precision, calibration, confusions."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.evals.base import ProtocolResult, means_of, protocol
from vitmods.evals.options import Options
from vitmods.evals.outputs import ModelOutputs
from vitmods.stats.width import fraction, mean_of_fractions, mean_over_images, wilson
from vitmods.tasks.base import on_cpu
from vitmods.tasks.classification import Classification, first_five
from vitmods.tasks.metrics import Metric
from vitmods.tasks.multilabel import MultiLabel, average_precisions, measured
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data import ImageDataset

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@protocol(
    "top1",
    "accuracy, with that of each class",
    (
        *Classification.metrics,
        Metric("balanced_accuracy", "balanced accuracy", "top1"),
        Metric("worst_class_accuracy", "accuracy of the worst class", "top1"),
    ),
)
def accuracy(outputs: ModelOutputs) -> ProtocolResult:
    """Fractions of images with Wilson's intervals, and the mean and the smallest over classes of the fraction in each.

    If images have several right classes (ImageNet-ReaL, Beyer et al., 2020, arXiv:2006.07159), any of them is right,
    and images without one do not count; nor do classes without an image. The smallest is without interval: of few
    images a class it is lower than the worst class is, as the smallest of noisy numbers.
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
    of_classes = hits[seen] / images[seen]
    # The balanced accuracy is a mean over images in which those of rare classes count more.
    weight = count / (seen.sum() * images[labels])
    per_image = {"top1": first, "top5": five, "balanced_accuracy": first * weight}
    return ProtocolResult(
        metrics={
            "top1": float(first.mean()),
            "top5": float(five.mean()),
            "balanced_accuracy": float(of_classes.mean()),
            "worst_class_accuracy": float(of_classes.min()),
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


@protocol("average_precision", "how well labels sort images", MultiLabel.metrics, target="labels")
def average_precision(outputs: ModelOutputs) -> ProtocolResult:
    """Mean average precision of several labels an image, with that of each label. The mean leaves out labels without
    an image, and is without interval, as it is not a mean over images."""
    logits, targets = outputs.logits, outputs.targets
    metrics, columns = measured(logits, targets)
    of_label, per_image = average_precisions(logits, targets), on_cpu(columns)
    exact = per_image["exact_match"]
    intervals = {"exact_match": fraction(int(exact.sum()), len(exact))}
    if ranking := mean_over_images(per_image["ranking_precision"].astype("float64")):
        intervals = {"ranking_precision": (ranking[0], min(ranking[1], 1.0)), **intervals}
    per_label = {
        name: {"images": int(targets[:, k].sum()), "average_precision": of_label.get(k)}
        for k, name in enumerate(outputs.dataset.classes)
    }
    return ProtocolResult(metrics, {"images": len(targets), "per_label": per_label}, intervals, per_image)


BINS = 15


def fit_temperature(logits: Tensor, targets: Tensor) -> float:
    """The T at which softmax(logits / T) has the least negative log-likelihood (Guo et al., 2017, section 4.2).

    logits (n, K), of images that neither trained the model nor are evaluated; targets int64 (n,). The likeliest class
    of an image stays the same. Raises UserError where every image is right, for which T would be 0.
    """
    from scipy.optimize import minimize_scalar

    logits = logits.double()
    if (logits.argmax(dim=1) == targets).all():
        raise UserError("No temperature can be fitted: on val every image is right, so that any smaller one is better.")

    def loss(log_t: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits / math.exp(log_t), targets))

    found = minimize_scalar(loss, bounds=(-7.0, 7.0), method="bounded", options={"xatol": 1e-6})
    return math.exp(found.x)


def _check_temperature(dataset: "ImageDataset", split: str, options: Options) -> None:
    if options.temperature is None:
        return
    if options.temperature not in dataset.splits:
        raise UserError(f"These images do not have a split {options.temperature} to fit a temperature on.")
    if options.temperature == split:
        raise UserError(
            f"A temperature is not measured on the images that it is fitted on: evaluate another split than {split} "
            "(--split test)."
        )


@protocol(
    "calibration",
    "whether probabilities are right as often as they claim",
    (
        Metric("ece", "calibration error, ECE", "calibration", higher_is_better=False),
        Metric("adaptive_ece", "ECE in bins of equal size", "calibration", higher_is_better=False),
        Metric("nll", "negative log-likelihood", "calibration", higher_is_better=False, unit="nats"),
        Metric("brier", "Brier score", "calibration", higher_is_better=False, unit=""),
    ),
    check=_check_temperature,
    options=("temperature",),
)
def calibration(outputs: ModelOutputs) -> ProtocolResult:
    """Does a class that is given probability p turn out right in a fraction p of the cases?

    Expected calibration error over 15 bins (Guo et al., 2017, arXiv:1706.04599, Eq. 3), the Brier score and the
    negative log-likelihood, both of which also reward being right. Probabilities are the softmax of the logits. NLL and
    Brier score are means over images and have intervals; the binned errors do not, since they are biased upwards if
    images are few, in arms alike.

    With the option temperature the logits are first divided by one that is fitted on val.
    """
    t = 1.0
    if outputs.options.temperature is not None:
        val = outputs.on(outputs.options.temperature)
        t = fit_temperature(val.logits, val.targets)
    log_p, targets = (outputs.logits.double() / t).log_softmax(dim=1), outputs.targets
    p = log_p.exp()
    nll, right = (values.gather(1, targets[:, None])[:, 0] for values in (-log_p, p))
    brier = (p**2).sum(dim=1) - 2 * right + 1
    top = p.max(dim=1)
    confidence, correct = top.values.numpy(), (top.indices == targets).numpy()
    equal_width = bins_of_equal_width(confidence)
    errors = {
        "ece": calibration_errors(confidence, correct, equal_width),
        "adaptive_ece": calibration_errors(confidence, correct, bins_of_equal_size(confidence)),
    }
    rows, metrics = reliability(confidence, correct, equal_width), {name: float(x.mean()) for name, x in errors.items()}
    result = means_of({"nll": nll.numpy(), "brier": brier.numpy()}, metrics, images=len(targets), reliability=rows)
    if outputs.options.temperature is not None:
        result = replace(result, detail={**result.detail, "temperature": t})
    return replace(result, per_image={**result.per_image, **errors})


def bins_of_equal_width(confidence: Floats, bins: int = BINS) -> Ints:
    """The bin of each confidence (n,), where bin m of M is ((m - 1) / M, m / M]."""
    return np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)


def bins_of_equal_size(confidence: Floats, bins: int = BINS) -> Ints:
    """The bin of each confidence (n,), where each bin holds as many images (Nixon et al., 2019, arXiv:1904.01685).

    Equal confidences may fall in two bins, by the order of their images.
    """
    places = np.empty(len(confidence), dtype=np.int64)
    places[np.argsort(confidence, kind="stable")] = np.arange(len(confidence))
    return places * bins // len(confidence)


def calibration_errors(confidence: Floats, correct: NDArray[np.bool_], bin_of: Ints) -> Floats:
    """Return correct - confidence of each image (n,), with the sign of its mean over the bin of the image.

    The mean over images is the expected calibration error: |accuracy - mean confidence| of each bin, by its images.
    """
    gaps = correct - confidence
    return np.asarray(np.sign(np.bincount(bin_of, gaps))[bin_of] * gaps)


def reliability(confidence: Floats, correct: NDArray[np.bool_], bin_of: Ints) -> list[dict[str, Any]]:
    """Return the points of a reliability diagram: images, mean confidence and accuracy of each bin with images."""
    inside = {int(number): bin_of == number for number in np.unique(bin_of)}
    return [
        {"bin": number, "images": int(mask.sum()), "confidence": float(confidence[mask].mean()),
         "accuracy": float(correct[mask].mean())}
        for number, mask in inside.items()
    ]  # fmt: skip


LARGEST_MATRIX, LISTED = 200, 20


@protocol(
    "confusion", "which classes are mistaken for which", (Metric("macro_f1", "mean F1 of the classes", "confusion"),)
)
def confusion(outputs: ModelOutputs) -> ProtocolResult:
    """True classes in rows, predicted ones in columns. The mean of F1 is over classes with images.

    Above 200 classes the matrix is not part of the details, the most frequent confusions are.
    """
    classes = outputs.dataset.classes
    matrix = confusion_matrix(outputs.targets.numpy(), outputs.logits.argmax(dim=1).numpy(), len(classes))
    detail: dict[str, Any] = {"images": int(matrix.sum()), "most_confused": most_confused(matrix, classes)}
    if len(classes) <= LARGEST_MATRIX:
        detail |= {"classes": list(classes), "matrix": matrix.tolist()}
    return ProtocolResult({"macro_f1": macro_f1(matrix)}, detail)


def confusion_matrix(true: Ints, predicted: Ints, classes: int) -> Ints:
    """Count the images of each class (row) by the predicted class (column), (K, K)."""
    return np.bincount(true * classes + predicted, minlength=classes**2).reshape(classes, classes)


def macro_f1(matrix: Ints) -> float:
    """Return the mean F1 over classes with images, F1 = 2 * hits / (images of the class + predictions of it)."""
    images, taken = matrix.sum(axis=1), matrix.sum(axis=0)
    seen = images > 0
    return float((2 * matrix.diagonal()[seen] / (images + taken)[seen]).mean())


def most_confused(matrix: Ints, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """List the most frequent confusions: the true class, the predicted one, and the number of images."""
    errors = matrix.copy()
    np.fill_diagonal(errors, 0)
    order = np.argsort(-errors, axis=None, kind="stable")[:LISTED]
    pairs = zip(*np.unravel_index(order, errors.shape), strict=True)
    return [
        {"class": classes[i], "taken_for": classes[j], "images": int(errors[i, j])} for i, j in pairs if errors[i, j]
    ]
