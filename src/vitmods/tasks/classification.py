"""Classification: one class an image, or a mixture of classes while training."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitmods.data.batch import Batch
from vitmods.recipes import Recipe
from vitmods.tasks.base import DEFAULT, TASKS, Measured, Splits, Task, likeliest, noise, on_cpu
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError


def softmax_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """-sum_k t_k log softmax(logits)_k for each image, (B,).

    logits: (B, K); targets: class numbers, int64 (B,), or fractions of the classes, float (B, K); smoothing: t becomes
    (1 - smoothing) t + smoothing / K (Szegedy et al., arXiv:1512.00567).
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


LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "softmax": softmax_cross_entropy,
    "sigmoid": sigmoid_cross_entropy,
    "bce": binary_cross_entropy,
}


@TASKS.register(DEFAULT)
@dataclass(unsafe_hash=True)
class Classification(Task):
    """Mean cross-entropy over images; evaluated by top-1 accuracy.

    Label smoothing and class weights are part of training only: the loss that `evaluate` reports is without them.
    """

    name = DEFAULT
    hub_tag = "image-classification"
    title = "one class an image"
    metrics = (Metric("top1", "top-1", "top1"), Metric("top5", "top-5", "top1"))

    loss_name: Literal["softmax", "sigmoid", "bce"] = "softmax"
    label_smoothing: float = 0.0
    class_weights: Literal["equal", "balanced"] = "equal"
    weights: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    """(K,), of the classes in the loss; None: equal, or not fitted yet"""

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """With the recipe's loss, label smoothing and class weights."""
        return cls(recipe.loss.name, recipe.loss.label_smoothing, recipe.loss.class_weights)

    def fit(self, model: nn.Module, dataset: Any) -> None:
        """Compute balanced weights from the training images, as scikit-learn: n / (K n_k), over classes with images."""
        if self.class_weights == "balanced":
            counts = np.bincount(dataset.splits["train"].labels, minlength=len(dataset.summary()["classes"]))
            shares = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
            self.weights = torch.from_numpy(shares).float()

    def begin(self, model: nn.Module) -> None:
        """Put the weights on the model's device, where no step waits for them."""
        if self.weights is not None:
            self.weights = self.weights.to(next(model.parameters()).device)

    @classmethod
    def constant_scores(cls, splits: Splits, classes: int) -> dict[str, float]:
        """For accuracies by naming the most frequent class, for probabilities by giving each class its share. Unknown
        for images with several right classes."""
        if not splits or any(split.label_sets is not None for split in splits):
            return {}
        counts = np.bincount(np.concatenate([split.labels for split in splits]), minlength=classes)
        share = np.sort(counts[counts > 0])[::-1] / counts.sum()
        first = float(share[0])
        return {
            "top1": first,
            "top5": float(share[:5].sum()),
            "balanced_accuracy": 1 / len(share),
            "worst_class_accuracy": float(len(share) == 1),
            "macro_f1": 2 * first / (1 + first) / len(share),
            "nll": float(-(share * np.log(share)).sum()),
            "brier": float(1 - (share**2).sum()),
            **dict.fromkeys(("knn", "probe"), first),
            "mean_corruption_error": 1 - first,
        }

    def loss(self, model: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of the batch, and `top1`: how often the first class is the one with the largest fraction.

        Class weights multiply the losses of images, those of a mixed image by its fractions; over all training images
        they average 1."""
        logits = model(batch.inputs).float()
        losses = LOSSES[self.loss_name](logits, batch.targets, self.label_smoothing)
        if self.weights is not None:
            is_mixed = batch.targets.is_floating_point()
            losses = losses * (batch.targets @ self.weights if is_mixed else self.weights[batch.targets])
        loss = losses.mean()
        classes = batch.targets.argmax(dim=1) if batch.targets.is_floating_point() else batch.targets
        return loss, {"top1": (logits.detach().argmax(dim=1) == classes).float().mean()}

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Measured:
        """Fractions of images whose class is the model's first, or among its first five, and the mean loss.

        Per image: the predicted class, top1, top5 (bool; True with fewer than five classes), rank of its class (1:
        first), its probability p, negative log-likelihood nll and Brier score, all by the softmax. model: images (B, C,
        H, W) to logits (B, K), in evaluation mode; targets of the batches: int64 (B,). Raises UserError without images.
        """
        images = 0
        # Left on the device until the end: reading a number waits for the device.
        totals: list[Tensor] = []
        columns: dict[str, list[Tensor]] = {}
        for batch in batches:
            logits = model(batch.inputs).float()
            ranked = first_five(logits) == batch.targets[:, None]
            loss = LOSSES[self.loss_name](logits, batch.targets, 0.0)
            totals.append(torch.stack([ranked[:, 0].sum(), ranked.sum(), loss.sum()]))
            for name, column in _of_each_image(logits, batch.targets, ranked).items():
                columns.setdefault(name, []).append(column)
            images += len(batch.targets)
        if images == 0:
            raise UserError("The split that is to be evaluated is empty.")
        sums: list[list[Any]] = torch.stack(totals).T.tolist()
        first, five, total_loss = (math.fsum(column) / images for column in sums)
        return Measured({"top1": first, "top5": five, "loss": total_loss}, on_cpu(columns))

    def synthetic(self, count: int, shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Batch:
        """Classes in turn; halves of two where the recipe mixes images."""
        targets = torch.arange(count) % classes
        if recipe.augment.mixup or recipe.augment.cutmix:
            hard = F.one_hot(targets, classes).float()
            targets = 0.5 * (hard + hard.roll(1, 0))
        return Batch(noise(count, shape), targets, torch.arange(count))

    def predictions(self, outputs: Tensor, classes: tuple[str, ...], top: int = 5) -> list[dict[str, Any]]:
        """The likeliest class is predicted; probabilities by the softmax, whatever the loss."""
        rows = likeliest(outputs.float().softmax(dim=1), classes, top)
        return [{"predicted": [next(iter(row))], "probabilities": row} for row in rows]


def _of_each_image(logits: Tensor, targets: Tensor, ranked: Tensor) -> dict[str, Tensor]:
    """(B,) each. `ranked`: whether each of the first five is the right one; the rank agrees where logits tie."""
    log_p = logits.log_softmax(dim=1)
    nll = -log_p.gather(1, targets[:, None])[:, 0]
    p = log_p.exp()
    right = logits.gather(1, targets[:, None])
    behind = (logits > right).sum(dim=1).clamp(min=ranked.shape[1])
    top5 = ranked.any(dim=1)
    return {
        "predicted": logits.argmax(dim=1).int(),
        "top1": ranked[:, 0],
        "top5": top5,
        "rank": torch.where(top5, ranked.int().argmax(dim=1), behind).int() + 1,
        "p": (-nll).exp(),
        "nll": nll,
        "brier": (p**2).sum(dim=1) - 2 * (-nll).exp() + 1,
    }


def first_five(logits: Tensor) -> Tensor:
    """The five largest classes of logits (B, K), or all where there are fewer: (B, min(5, K))."""
    return logits.topk(min(5, logits.shape[1]), dim=1).indices
