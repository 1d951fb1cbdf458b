"""Linear probe: multinomial logistic regression on standardized features of all training images.

The strength of L2 is chosen by accuracy on images that are not evaluated: val, or, where val is what is evaluated or
there is none, a part of train; the probe is then trained on all of train again.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from vitmods.evals.base import PROTOCOLS, Protocol, ProtocolResult, accuracy_of, check_can_learn, training_counts
from vitmods.evals.options import Options
from vitmods.evals.outputs import Features, ModelOutputs
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data import ImageDataset

METRICS = (Metric("probe", "linear probe accuracy", "probe"),)
STRENGTHS = tuple(10.0**power for power in range(1, -7, -1))  # from strong to weak: each begins where the last ended
_HELD_OUT, _ITERATIONS = 5, 500


def check(dataset: "ImageDataset", split: str, options: Options) -> None:
    """UserError where a class has no training image, or none can be spared to choose L2 by."""
    check_can_learn(dataset, split, "probe")
    if _choosing_split(dataset, split) is None and max(training_counts(dataset, split, "probe").values()) < 2:
        raise UserError("probe chooses L2 on val or on a part of train, and every class has one training image.")


def probe(outputs: ModelOutputs) -> ProtocolResult:
    """The protocol: accuracy on the evaluated split with Wilson's interval."""
    train, tested = outputs.features("train"), outputs.features(outputs.split)
    classes, device = len(outputs.dataset.classes), outputs.device
    by = _choosing_split(outputs.dataset, outputs.split)
    learnt, evaluated = (train, outputs.features(by)) if by else _cut(train)
    accuracies, fits = {}, {}
    weights = None
    for l2 in STRENGTHS:
        fits[l2] = fit(learnt, classes, l2, device, weights)
        weights = fits[l2].weights
        accuracies[l2] = int(fits[l2].right(evaluated).sum()) / len(evaluated.targets)
    best = max(accuracies, key=accuracies.__getitem__)
    chosen = fits[best] if by else fit(train, classes, best, device)
    by_l2 = [{"l2": l2, "accuracy": value} for l2, value in accuracies.items()]
    right = chosen.right(tested).numpy()
    return accuracy_of("probe", right, l2=best, chosen_on=by or "a fifth of train", accuracy_by_l2=by_l2)


@dataclass(frozen=True)
class Fit:
    """Weights (C + 1, K), the bias last, for features that are standardized by mean and std (C,)."""

    weights: NDArray[np.float64]
    mean: Tensor
    std: Tensor

    def right(self, on: Features) -> Tensor:
        """Whether the class with the highest score is the right one: bool (n,)."""
        weights = torch.from_numpy(self.weights).float()
        scores = (on.features - self.mean) / self.std @ weights[:-1] + weights[-1]
        return scores.argmax(dim=1) == on.targets


def fit(on: Features, classes: int, l2: float, device: torch.device, start: NDArray[np.float64] | None = None) -> Fit:
    """Weights that make the mean cross-entropy + l2 / 2 * |W|^2 least; the bias is not punished.

    By L-BFGS from `start`, or from zero; loss and gradient are computed on `device`.
    """
    mean, std = on.features.mean(dim=0), on.features.std(dim=0, correction=0)
    std = torch.where(std > 0, std, 1.0)
    x, y = ((on.features - mean) / std).to(device), on.targets.to(device)
    shape = (x.shape[1] + 1, classes)

    def loss_and_gradient(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = torch.from_numpy(flat.reshape(shape)).to(device, torch.float32)
        log_p = (x @ weights[:-1] + weights[-1]).log_softmax(dim=1)
        loss = F.nll_loss(log_p, y).item()
        error = log_p.exp_()
        error[torch.arange(len(y), device=device), y] -= 1
        error /= len(y)
        gradient = torch.cat([x.T @ error, error.sum(dim=0, keepdim=True)]).double().cpu().numpy()
        punished = flat.reshape(shape)[:-1]
        gradient[:-1] += l2 * punished
        return loss + l2 / 2 * float((punished**2).sum()), gradient.ravel()

    first = np.zeros(shape) if start is None else start
    options = {"maxiter": _ITERATIONS, "gtol": 1e-5}
    solution = minimize(loss_and_gradient, first.ravel(), jac=True, method="L-BFGS-B", options=options)
    return Fit(solution.x.reshape(shape), mean, std)


def _choosing_split(dataset: "ImageDataset", split: str) -> str | None:
    return "val" if split != "val" and "val" in dataset.summary()["splits"] else None


def _cut(train: Features) -> tuple[Features, Features]:
    """Four fifths of each class and the rest; a class of two gives one to each."""
    labels = train.targets.numpy()
    rank = np.empty(len(labels), dtype=np.int64)
    for number in np.unique(labels):
        members = np.flatnonzero(labels == number)
        rank[members] = np.arange(len(members))
    held_out = torch.from_numpy(rank % _HELD_OUT == 1)
    return tuple(Features(train.features[part], train.targets[part]) for part in (~held_out, held_out))  # type: ignore


PROTOCOLS.add("probe", Protocol("probe", "logistic regression on the features", METRICS, probe, check, False))
