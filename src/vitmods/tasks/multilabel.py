"""Multi-label classification: any number of labels an image, each decided by itself."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from vitmods.data.batch import Batch
from vitmods.recipes import Recipe
from vitmods.stats.images import jackknife, precision
from vitmods.tasks.base import TASKS, Measured, Splits, Task, likeliest, noise, on_cpu
from vitmods.tasks.classification import LOSSES
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError, needs

_PAIRS = 2**24  # of labels that are compared at a time


@TASKS.register("multilabel")
@dataclass(frozen=True)
class MultiLabel(Task):
    """Mean over images of the binary cross-entropy of all labels, summed (sigmoid) or averaged (bce) over them.

    Evaluated by mean average precision: the mean, over labels that any image has, of the area under precision over
    recall when all images are sorted by their score for that label.
    """

    name = "multilabel"
    hub_tag = "image-classification"
    title = "any number of labels an image"
    target = "labels"
    metrics = (
        Metric("map", "mean average precision", "average_precision"),
        Metric("ranking_precision", "label ranking average precision", "average_precision"),
        Metric("exact_match", "images with all labels right", "average_precision"),
    )

    loss_name: Literal["sigmoid", "bce"] = "sigmoid"
    label_smoothing: float = 0.0

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """With the recipe's loss and label smoothing. UserError for a softmax, in which labels exclude each other."""
        if recipe.loss.name == "softmax":
            raise UserError(
                "multilabel decides each label by itself; the recipe's softmax makes labels exclude each other: set "
                "loss to sigmoid or bce (--loss sigmoid)."
            )
        return cls(recipe.loss.name, recipe.loss.label_smoothing)

    @classmethod
    def fitted(cls, recipe: Recipe) -> Recipe:
        """With a sigmoid in place of a softmax."""
        recipe = super().fitted(recipe)
        return recipe.with_(loss="sigmoid") if recipe.loss.name == "softmax" else recipe

    @classmethod
    def constant_scores(cls, splits: Splits, classes: int) -> dict[str, float]:
        """For mean average precision by images in random order: slightly above the labels' frequencies. For the others
        by the frequencies as probabilities, and by the most frequent set of labels."""
        sets = [labels for split in splits for labels in split.label_sets or ()]
        if not any(sets):
            return {}
        targets = torch.zeros(len(sets), classes)
        for row, labels in zip(targets, sets, strict=True):
            row[list(labels)] = 1
        share = targets.double().mean(dim=0)
        present = share[share > 0]
        images = len(sets)
        harmonic = float((1 / torch.arange(1, images + 1, dtype=torch.float64)).sum())
        # The expectation of average precision over all orders of the images.
        random = (harmonic + (images * present - 1) * (images - harmonic) / max(images - 1, 1)) / images
        absent = 1 - present
        return {
            "map": float(random.mean()),
            "ranking_precision": float(ranking_precision(share.expand(images, -1), targets).double().mean()),
            "exact_match": Counter(sets).most_common(1)[0][1] / images,
            "nll": float(-(torch.xlogy(present, present) + torch.xlogy(absent, absent)).sum()),
            "brier": float((present * absent).sum()),
        }

    def loss(self, model: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of the batch; nothing else for the log."""
        return LOSSES[self.loss_name](model(batch.inputs).float(), batch.targets, self.label_smoothing).mean(), {}

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Measured:
        """The metrics and the mean loss. Per image: ranking_precision, exact_match (bool), and the sums over its labels
        of the negative log-likelihoods, nll, and of the squared errors, brier.

        model: images (B, C, H, W) to logits (B, K), in evaluation mode; targets of the batches: float (B, K) of 0 and
        1. Raises UserError without images or labels.
        """
        logits, targets, losses = [], [], []
        for batch in batches:
            logits.append(model(batch.inputs).float())
            targets.append(batch.targets)
            losses.append(LOSSES[self.loss_name](logits[-1], batch.targets, 0.0))
        if not logits:
            raise UserError("The split that is to be evaluated is empty.")
        metrics, per_image = measured(torch.cat(logits).cpu(), torch.cat(targets).cpu())
        return Measured({**metrics, "loss": torch.cat(losses).double().mean().item()}, on_cpu(per_image))

    def synthetic(self, count: int, shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Batch:
        """Two labels an image."""
        labels = torch.zeros(count, classes)
        labels[torch.arange(count), torch.arange(count) % classes] = 1.0
        labels[torch.arange(count), (torch.arange(count) + 1) % classes] = 1.0
        return Batch(noise(count, shape), labels, torch.arange(count))

    def predictions(self, outputs: Tensor, classes: tuple[str, ...], top: int = 5) -> list[dict[str, Any]]:
        """Labels of probability 1/2 or more are predicted, also beyond the `top`."""
        p = outputs.float().sigmoid()
        named = [[classes[k] for k in row.nonzero()[:, 0].tolist()] for row in p >= 0.5]
        rows = zip(named, likeliest(p, classes, top), strict=True)
        return [{"predicted": labels, "probabilities": row} for labels, row in rows]


def measured(logits: Tensor, targets: Tensor) -> tuple[dict[str, float], dict[str, list[Tensor]]]:
    """The metrics and the columns of `MultiLabel.evaluate`; logits and targets (n, K) on the CPU. UserError without
    labels."""
    exact = ((logits >= 0) == (targets > 0)).all(dim=1)
    ranking = ranking_precision(logits, targets)
    nll = LOSSES["sigmoid"](logits, targets, 0.0)
    brier = ((logits.sigmoid() - targets) ** 2).sum(dim=1)
    precisions = average_precisions(logits, targets)
    metrics = {
        "map": torch.tensor(list(precisions.values())).mean().item(),
        "ranking_precision": ranking.double().mean().item(),
        "exact_match": exact.double().mean().item(),
    }
    every, of_label = np.arange(len(targets)), targets.numpy() > 0
    changes = [precision(logits[:, k], of_label[:, k], every, of_label[:, k])[1] for k in precisions]
    form = torch.from_numpy(jackknife(metrics["map"], np.stack(changes, 1)))
    columns = {"ranking_precision": ranking, "exact_match": exact, "nll": nll, "brier": brier, "map": form}
    return metrics, {name: [column] for name, column in columns.items()}


def average_precisions(logits: Tensor, targets: Tensor) -> dict[int, float]:
    """Label -> average precision, for labels with an image. Logits and targets (n, K). UserError without any label, or
    without torchmetrics."""
    with needs("Average precision needs torchmetrics", "tasks"):
        from torchmetrics.functional.classification import multilabel_average_precision
    present = targets.sum(dim=0) > 0
    if not present.any():
        raise UserError("The split that is to be evaluated lacks labels: average precision needs some.")
    # Their order alone counts; torchmetrics would take the sigmoid of other numbers, which is 1 for all large logits.
    ranks = [torch.unique(column, return_inverse=True)[1] for column in logits[:, present].T]
    scores, wanted = torch.stack(ranks, 1).double() / len(logits), targets[:, present].long()
    if scores.shape[1] == 1:  # torchmetrics asks for two
        scores, wanted = scores.repeat(1, 2), wanted.repeat(1, 2)
    values = multilabel_average_precision(scores, wanted, num_labels=scores.shape[1], average="none")
    return dict(zip(present.nonzero()[:, 0].tolist(), values.tolist(), strict=False))


def ranking_precision(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the labels of an image of the fraction of right ones among all that score as high, (n,).

    1 for an image without labels, or with all of them (Tsoumakas et al., 2010, "Mining Multi-label Data").
    """
    means = []
    size = max(1, _PAIRS // logits.shape[1] ** 2)
    for scores, wanted in zip(torch.split(logits, size), torch.split(targets, size), strict=True):
        above = scores[:, None, :] >= scores[:, :, None]  # (images, label, those at least as high)
        right = (above & (wanted[:, None, :] > 0)).sum(dim=2) / above.sum(dim=2)
        count = wanted.sum(dim=1)
        mean = (right * wanted).sum(dim=1) / count.clamp(min=1)
        means.append(torch.where((count == 0) | (count == wanted.shape[1]), 1.0, mean))
    return torch.cat(means)
