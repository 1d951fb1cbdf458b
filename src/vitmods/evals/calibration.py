"""Calibration: does a class that is given probability p turn out right in a fraction p of the cases?

Expected calibration error over 15 bins (Guo et al., 2017, arXiv:1706.04599, Eq. 3), the Brier score and the negative
log-likelihood, both of which also reward being right. Probabilities are the softmax of the logits.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitmods.evals.base import PROTOCOLS, Protocol, ProtocolResult, means_of
from vitmods.evals.outputs import ModelOutputs
from vitmods.tasks.metrics import Metric

METRICS = (
    Metric("ece", "calibration error, ECE", "calibration", higher_is_better=False),
    Metric("adaptive_ece", "ECE in bins of equal size", "calibration", higher_is_better=False),
    Metric("nll", "negative log-likelihood", "calibration", higher_is_better=False, unit="nats"),
    Metric("brier", "Brier score", "calibration", higher_is_better=False, unit=""),
)
BINS = 15

Floats = NDArray[np.float64]


def calibration(outputs: ModelOutputs) -> ProtocolResult:
    """The protocol. NLL and Brier score are means over images and have intervals; the binned errors have none, since
    they are biased upwards where images are few."""
    log_p = outputs.logits.double().log_softmax(dim=1)
    targets = outputs.targets
    nll = -log_p.gather(1, targets[:, None])[:, 0].numpy()
    p = log_p.exp()
    brier = ((p**2).sum(dim=1) - 2 * p.gather(1, targets[:, None])[:, 0] + 1).numpy()
    top = p.max(dim=1)
    confidence, correct = top.values.numpy(), (top.indices == targets).numpy()
    equal_width, equal_size = bins_of_equal_width(confidence), bins_of_equal_size(confidence)
    errors = {
        "ece": calibration_error(confidence, correct, equal_width),
        "adaptive_ece": calibration_error(confidence, correct, equal_size),
    }
    rows = reliability(confidence, correct, equal_width)
    return means_of({"nll": nll, "brier": brier}, errors, images=len(targets), reliability=rows)


def bins_of_equal_width(confidence: Floats, bins: int = BINS) -> NDArray[np.int64]:
    """The bin of each confidence (n,), where bin m of M is ((m - 1) / M, m / M]."""
    return np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)


def bins_of_equal_size(confidence: Floats, bins: int = BINS) -> NDArray[np.int64]:
    """The bin of each confidence (n,), where each bin holds as many images (Nixon et al., 2019, arXiv:1904.01685).

    Equal confidences may fall in two bins; which of their images falls in which, is a matter of their order.
    """
    places = np.empty(len(confidence), dtype=np.int64)
    places[np.argsort(confidence, kind="stable")] = np.arange(len(confidence))
    return places * bins // len(confidence)


def calibration_error(confidence: Floats, correct: NDArray[np.bool_], bin_of: NDArray[np.int64]) -> float:
    """The mean over images of |accuracy - mean confidence| of the bin that the image is in."""
    gaps = np.bincount(bin_of, weights=correct - confidence)
    return float(np.abs(gaps).sum() / len(confidence))


def reliability(confidence: Floats, correct: NDArray[np.bool_], bin_of: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Of each bin with images, in order: how many, their mean confidence and their accuracy."""
    rows = []
    for number in np.unique(bin_of):
        inside = bin_of == number
        rows.append(
            {
                "bin": int(number),
                "images": int(inside.sum()),
                "confidence": float(confidence[inside].mean()),
                "accuracy": float(correct[inside].mean()),
            }
        )
    return rows


PROTOCOLS.add("calibration", Protocol("calibration", "whether probabilities are what they say", METRICS, calibration))
