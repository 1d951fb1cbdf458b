"""Linear probe: multinomial logistic regression on standardized features of training images.

The strength of L2 is chosen by accuracy on images that are not evaluated: on those that are given, or on a fifth of the
training images, after which the probe is trained on all of them again.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor, nn

from vitmods.adapters.transfer import evaluating
from vitmods.tasks.features import check_head, head_inputs
from vitmods.util.errors import UserError

Floats = NDArray[np.float64]

STRENGTHS = tuple(10.0**power for power in range(1, -7, -1))  # from strong to weak: each begins where the last ended
PROBE_IMAGES = 5000
"""training images, evenly spread, that a head begins from"""
_HELD_OUT, _ITERATIONS, _BATCH = 5, 500, 64


@dataclass(frozen=True)
class Features:
    """The inputs of the head for all n images of a split, in order, float32 (n, C), and their classes, int64 (n,), or
    labels, float32 (n, K)."""

    features: Tensor
    targets: Tensor


@dataclass(frozen=True)
class LinearProbe:
    """Weights (C + 1, K), the bias last, for features that are standardized by mean and std (C,). l2: its strength."""

    weights: Floats
    mean: Tensor
    std: Tensor
    l2: float

    def right(self, on: Features) -> Tensor:
        """Whether the class with the highest score is the right one: bool (n,)."""
        weights = torch.from_numpy(self.weights).float()
        scores = (on.features - self.mean) / self.std @ weights[:-1] + weights[-1]
        return scores.argmax(dim=1) == on.targets

    def linear(self) -> tuple[Tensor, Tensor]:
        """The same map of features that are not standardized: weight (K, C) and bias (K,) of a linear layer."""
        weights, mean, std = torch.from_numpy(self.weights), self.mean.double(), self.std.double()
        weight = (weights[:-1] / std[:, None]).T
        return weight.float(), (weights[-1] - weight @ mean).float()


def learn(
    train: Features, chosen_on: Features | None, classes: int, device: torch.device
) -> tuple[LinearProbe, dict[float, float]]:
    """Learn with each strength of L2, and choose by accuracy.

    Args:
        train: n training images.
        chosen_on: images to choose by; None: a fifth of each class of `train`, after which all of `train` is learned.
        classes: K; a class may be without training images.
        device: of losses and gradients.

    Returns:
        The probe, and strength -> accuracy of each.
    """
    learnt, evaluated = train, chosen_on
    if evaluated is None:  # four fifths of each class and the rest; a class of two gives one to each
        left_out = held_out(train.targets.numpy())
        learnt, evaluated = (Features(train.features[part], train.targets[part]) for part in (~left_out, left_out))
    accuracies, fits = dict[float, float](), dict[float, LinearProbe]()
    weights = None
    for l2 in STRENGTHS:
        fits[l2] = fit(learnt, classes, l2, device, weights)
        weights = fits[l2].weights
        accuracies[l2] = int(fits[l2].right(evaluated).sum()) / max(len(evaluated.targets), 1)
    best = max(accuracies, key=accuracies.__getitem__)
    return (fits[best] if chosen_on is not None else fit(train, classes, best, device)), accuracies


def held_out(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which training images of the classes (n,) to choose by: every fifth of each class."""
    rank = np.empty(len(labels), dtype=np.int64)
    for number in np.unique(labels):
        members = np.flatnonzero(labels == number)
        rank[members] = np.arange(len(members))
    return rank % _HELD_OUT == 1


def fit(on: Features, classes: int, l2: float, device: torch.device, start: Floats | None = None) -> LinearProbe:
    """Weights that minimize the mean cross-entropy + l2 / 2 * |W|^2; the bias is not punished.

    By L-BFGS from `start`, or from zero; loss and gradient are computed on `device`.
    """
    mean, std = on.features.mean(dim=0), on.features.std(dim=0, correction=0)
    std = torch.where(std > 0, std, 1.0)
    x, y = ((on.features - mean) / std).to(device), on.targets.to(device)
    shape = (x.shape[1] + 1, classes)

    def loss_and_gradient(flat: Floats) -> tuple[float, Floats]:
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
    return LinearProbe(solution.x.reshape(shape), mean, std, l2)


@torch.no_grad()
def head_from_probe(
    backbone: nn.Module, ds: Any, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]
) -> tuple[Tensor, Tensor]:
    """Weight (K, C) and bias (K,) with which the head of a model on `device` is a linear probe.

    It learns from up to `PROBE_IMAGES` training images, as evaluation sees them. Nothing random is drawn.

    Raises:
        UserError: the head is not known, or not a linear layer with bias for the classes of `ds`; or `ds`, a set of the
            user's own, does not have `plain_batches`.
    """
    if not hasattr(ds, "plain_batches"):
        raise UserError(f"a {type(ds).__name__} does not have plain_batches(split, most, batch_size)")
    head = check_head(backbone)
    if not isinstance(head, nn.Linear) or head.bias is None or head.out_features != ds.num_classes:
        raise UserError("its last layer is not a linear one with bias and an output for each class")
    targets = []
    with evaluating(backbone), head_inputs(backbone) as read, autocast():
        for images, labels in ds.plain_batches("train", PROBE_IMAGES, _BATCH):
            backbone(images.to(device))
            targets.append(torch.as_tensor(labels))
    features = Features(torch.cat(read).cpu(), torch.cat(targets))
    # The strength is chosen within train, since val may be a part of the answer. A GPU is slower at so small steps.
    probe, _ = learn(features, None, head.out_features, torch.device("cpu"))
    return probe.linear()
