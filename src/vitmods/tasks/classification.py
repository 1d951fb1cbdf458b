"""Classification: one class an image, or a mixture of classes while training."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitmods.recipes import Recipe
from vitmods.tasks.base import Batch


def softmax_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """-sum_k t_k log softmax(logits)_k for each image.

    Args:
        logits: (B, K).
        targets: class numbers, int64 (B,), or fractions of the classes, float (B, K).
        smoothing: t becomes (1 - smoothing) t + smoothing / K (Szegedy et al., arXiv:1512.00567).

    Returns:
        (B,).
    """
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


def sigmoid_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy of every class, summed over the classes, for each image (as in big_vision).

    Args and returns are those of `softmax_cross_entropy`.
    """
    fractions = targets if targets.is_floating_point() else F.one_hot(targets, logits.shape[1]).to(logits.dtype)
    fractions = fractions * (1 - smoothing) + smoothing / logits.shape[1] if smoothing else fractions
    return F.binary_cross_entropy_with_logits(logits, fractions, reduction="none").sum(dim=1)


def binary_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy, mean over the classes, where every class with a fraction counts as whole.

    So an image that is mixed of two has both classes (Wightman et al., "ResNet strikes back", arXiv:2110.00476; as in
    the released DeiT III). Args and returns are those of `softmax_cross_entropy`; smoothing comes after.
    """
    present = (targets > 0).to(logits.dtype) if targets.is_floating_point() else targets
    return sigmoid_cross_entropy(logits, present, smoothing) / logits.shape[1]


_LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "softmax": softmax_cross_entropy,
    "sigmoid": sigmoid_cross_entropy,
    "bce": binary_cross_entropy,
}


@dataclass(frozen=True)
class Classification:
    """Mean cross-entropy over images; evaluated by top-1 accuracy.

    Label smoothing is part of training only: the loss that `evaluate` reports is without it.
    """

    loss_name: Literal["softmax", "sigmoid", "bce"] = "softmax"
    label_smoothing: float = 0.0

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """With the recipe's loss and label smoothing."""
        return cls(recipe.loss.name, recipe.loss.label_smoothing)

    @property
    def metric(self) -> str:
        return "top1"

    def loss(self, model: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of the batch, and `top1`: how often the first class is the one with the largest share."""
        logits = model(batch.images).float()
        loss = _LOSSES[self.loss_name](logits, batch.targets, self.label_smoothing).mean()
        classes = batch.targets.argmax(dim=1) if batch.targets.is_floating_point() else batch.targets
        return loss, {"top1": (logits.detach().argmax(dim=1) == classes).float().mean()}

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """`top1`, `top5` (fractions) and `loss` over all images."""
        loss = _LOSSES[self.loss_name]
        return top1(model, batches, lambda logits, targets: loss(logits, targets, 0.0))


@torch.inference_mode()
def top1(
    model: Callable[[Tensor], Tensor], batches: Iterable[Batch], loss: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, float]:
    """Fractions of images whose class is the model's first, or among its first five, and the mean loss.

    Every image counts the same, however the batches are cut. With fewer than five classes `top5` is 1.

    Args:
        model: images (B, C, H, W) to logits (B, K), in evaluation mode and on the device of the batches.
        batches: all images of the split, each once.
        loss: logits (B, K) and class numbers (B,) to the loss of each image (B,).

    Raises:
        ValueError: there are no images.
    """
    images = 0
    # Left on the device until the end: reading a number waits for the device.
    totals: list[Tensor] = []
    for batch in batches:
        logits = model(batch.images).float()
        ranked = first_five(logits) == batch.targets[:, None]
        totals.append(torch.stack([ranked[:, 0].sum(), ranked.sum(), loss(logits, batch.targets).sum()]))
        images += len(batch.targets)
    if images == 0:
        raise ValueError("there are no images in the split that is to be evaluated.")
    columns: list[list[Any]] = torch.stack(totals).T.tolist()
    first, five, total_loss = (math.fsum(column) / images for column in columns)
    return {"top1": first, "top5": five, "loss": total_loss}


def first_five(logits: Tensor) -> Tensor:
    """The five largest classes of logits (B, K), or all where there are fewer: (B, min(5, K))."""
    return logits.topk(min(5, logits.shape[1]), dim=1).indices
