"""Linear evaluation as in DINO (Caron et al., 2021, arXiv:2104.14294): a layer on frozen features of augmented views.

Each epoch the frozen model sees random crops and mirror images of the training images, and a linear layer learns their
classes by SGD with momentum 0.9, without decay, along a cosine to 0. Several rates learn side by side from the same
views; the one that is best on images that are not evaluated counts. Features are those of the linear probe.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitmods.data.batch import for_device
from vitmods.evals.base import ProtocolResult, accuracy_of, protocol
from vitmods.evals.features import check_probe, choosing_split
from vitmods.evals.options import Options
from vitmods.evals.outputs import ModelOutputs
from vitmods.tasks.metrics import Metric
from vitmods.train.probe import Features, held_out
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data import ImageDataset

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""for steps of BATCH images; DINO's own is 1e-3"""
BATCH, MOMENTUM, STD = 256, 0.9, 0.01


class Layers(NamedTuple):
    """A linear layer for each of R rates: weight (R, C, K) and bias (R, 1, K)."""

    weight: Tensor
    bias: Tensor

    def scores(self, features: Tensor) -> Tensor:
        """(B, C) -> (R, B, K)"""
        return features @ self.weight + self.bias


def check_linear(dataset: "ImageDataset", split: str, options: Options) -> None:
    """Raise UserError as the probe's check, and for inputs that are not images."""
    check_probe(dataset, split, options, "linear")
    if not hasattr(dataset, "in_random_crops"):
        raise UserError("linear learns from random crops of images, which these inputs are not: take probe.")


@protocol(
    "linear",
    "a linear layer on augmented views",
    (Metric("linear", "linear evaluation accuracy", "linear"),),
    check=check_linear,
    reads_logits=False,
    options=("linear_epochs",),
)
def linear(outputs: ModelOutputs) -> ProtocolResult:
    """Accuracy on the evaluated split with Wilson's interval."""
    by, tested = choosing_split(outputs.dataset, outputs.split), outputs.probe_features(outputs.split)
    left_out = None if by else held_out(outputs.dataset.split("train").labels)
    layers = learn(outputs, RATES, left_out)
    if by:
        chosen_on = outputs.probe_features(by)
    else:
        train = outputs.probe_features("train")
        chosen_on = Features(train.features[left_out], train.targets[left_out])
    accuracies = [float(right.double().mean()) for right in _right(layers, chosen_on)]
    best = int(np.argmax(accuracies))
    if by is None:  # the chosen rate learns from all training images
        layers = learn(outputs, RATES[best : best + 1])
    right = _right(layers, tested)[best if by else 0]
    by_rate = [{"lr": rate, "accuracy": value} for rate, value in zip(RATES, accuracies, strict=True)]
    facts = {"epochs": outputs.options.linear_epochs, "chosen_on": by or "a fifth of train", "accuracy_by_lr": by_rate}
    return accuracy_of("linear", right.numpy(), lr=RATES[best], **facts)


def learn(outputs: ModelOutputs, rates: Sequence[float], left_out: NDArray[np.bool_] | None = None) -> Layers:
    """Train a layer with each rate. left_out: (n,), True for training images that are not learned."""
    views = for_device(outputs.dataset.in_random_crops(), outputs.device)
    epochs, classes = outputs.options.linear_epochs, outputs.dataset.num_classes
    steps_per_epoch = views.steps_per_epoch(BATCH)
    total, step = epochs * steps_per_epoch, 0
    lr = torch.tensor(rates, device=outputs.device)[:, None, None]
    layers, momenta = None, (torch.zeros(()), torch.zeros(()))
    for epoch in range(epochs):
        for batch in views.train_batches(seed=0, epoch=epoch, batch_size=BATCH):
            features = outputs.batch_features(moved := batch.to(outputs.device))
            targets, used = moved.targets, None
            if left_out is not None:
                used = torch.from_numpy(~left_out[batch.index.cpu().numpy()]).to(outputs.device)
            if layers is None:
                drawn = STD * torch.randn(features.shape[1], classes, generator=torch.Generator().manual_seed(0))
                weight = drawn.to(outputs.device).repeat(len(rates), 1, 1)
                layers = Layers(weight, torch.zeros(len(rates), 1, classes, device=outputs.device))
                momenta = (torch.zeros_like(layers.weight), torch.zeros_like(layers.bias))
            for momentum, gradient, parameter in zip(momenta, _gradients(layers, features, targets, used), layers):
                momentum.mul_(MOMENTUM).add_(gradient)
                parameter.sub_(lr * 0.5 * (1 + math.cos(math.pi * step / total)) * momentum)
            step += 1
    assert layers is not None  # an epoch has a batch
    return layers


def _gradients(layers: Layers, features: Tensor, targets: Tensor, used: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of the mean cross-entropy of each rate over the images that are used."""
    weights = torch.ones_like(targets, dtype=torch.float32) if used is None else used.float()
    error = layers.scores(features).softmax(dim=-1)
    error -= F.one_hot(targets, error.shape[-1])
    error *= (weights / weights.sum().clamp(min=1))[:, None]
    return features.T @ error, error.sum(dim=1, keepdim=True)


def _right(layers: Layers, on: Features) -> Tensor:
    """Whether each rate's most likely class is the right one: bool (R, n), on the CPU."""
    on_cpu = Layers(*(part.cpu() for part in layers))
    return on_cpu.scores(on.features).argmax(dim=-1) == on.targets
