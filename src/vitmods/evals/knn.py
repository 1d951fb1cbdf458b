"""k nearest neighbors among the training images, by cosine, as in DINO (Caron et al., 2021, arXiv:2104.14294).

The 20 nearest vote for their classes with weight exp(similarity / 0.07).
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from vitmods.evals.base import PROTOCOLS, Protocol, ProtocolResult, accuracy_of, check_can_learn
from vitmods.evals.options import Options
from vitmods.evals.outputs import ModelOutputs
from vitmods.tasks.metrics import Metric

if TYPE_CHECKING:
    from vitmods.data import ImageDataset

METRICS = (Metric("knn", "nearest-neighbor accuracy", "knn"),)
NEIGHBOURS, TEMPERATURE = 20, 0.07
_SIMILARITIES = 2**26  # at a time: a quarter of a gigabyte


def check(dataset: "ImageDataset", split: str, options: Options) -> None:
    """UserError where a class has no training image."""
    check_can_learn(dataset, split, "knn")


@torch.inference_mode()
def knn(outputs: ModelOutputs) -> ProtocolResult:
    """The protocol: accuracy on the evaluated split with Wilson's interval."""
    train, tested = outputs.features("train"), outputs.features(outputs.split)
    features, labels = train.features.to(outputs.device), train.targets.to(outputs.device)
    scores = vote(features, labels, tested.features.to(outputs.device), len(outputs.dataset.classes))
    right = (scores.argmax(dim=1).cpu() == tested.targets).numpy()
    return accuracy_of("knn", right, neighbors=min(NEIGHBOURS, len(labels)), temperature=TEMPERATURE)


def vote(features: Tensor, labels: Tensor, asked: Tensor, classes: int) -> Tensor:
    """Scores (M, K) of `asked` (M, C) by their nearest among `features` (N, C) of the classes `labels` (N,)."""
    features, asked = F.normalize(features, dim=1), F.normalize(asked, dim=1)
    scores = []
    for part in torch.split(asked, max(1, _SIMILARITIES // len(features))):
        nearest = (part @ features.T).topk(min(NEIGHBOURS, len(features)), dim=1)
        weights = (nearest.values / TEMPERATURE).exp()
        scores.append(weights.new_zeros(len(part), classes).scatter_add(1, labels[nearest.indices], weights))
    return torch.cat(scores)


PROTOCOLS.add("knn", Protocol("knn", "nearest neighbors in the features", METRICS, knn, check, False))
