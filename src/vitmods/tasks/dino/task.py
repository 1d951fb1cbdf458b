"""DINO (Caron et al., 2021, arXiv:2104.14294): crops of an image agree, against a teacher that follows the student."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.data.batch import Batch
from vitmods.data.dataset import Joint
from vitmods.recipes import Recipe
from vitmods.recipes.schedule import half_cosine
from vitmods.tasks.base import TASKS, Measured, Task, noise, on_cpu
from vitmods.tasks.dino.model import DinoModel
from vitmods.tasks.dino.recipes import DinoPart
from vitmods.tasks.dino.views import GLOBAL_CROPS, local_size, multi_crop
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError

UNIFORM, CERTAIN, EQUAL = 0.999, 0.001, 1e-3  # collapse: entropy as a fraction of log K, spread of features


def dino_loss(student: Tensor, teacher: Tensor, center: Tensor, student_temp: float, teacher_temp: float) -> Tensor:
    """Mean cross-entropy of each large crop's target and the student's output for each other crop.

    student: outputs (views * B, K); teacher: outputs (2 * B, K) of the first two views; center: (1, K).
    """
    targets = ((teacher - center) / teacher_temp).softmax(dim=-1).chunk(GLOBAL_CROPS)
    log_p = (student / student_temp).log_softmax(dim=-1).chunk(GLOBAL_CROPS * len(student) // len(teacher))
    terms = [
        -(target * outputs).sum(dim=-1).mean()
        for i, target in enumerate(targets)
        for j, outputs in enumerate(log_p)
        if i != j
    ]
    return torch.stack(terms).mean()


def next_center(center: Tensor, mean: Tensor, momentum: float) -> Tensor:
    """The center after a step whose teacher's outputs have this mean, (1, K) both."""
    return center * momentum + mean * (1 - momentum)


def teacher_temperature(part: DinoPart, epoch: int) -> float:
    """The teacher's temperature in an epoch: a line over the warm-up's epochs, both ends included, then constant."""
    if epoch >= part.teacher_temp_epochs:
        return part.teacher_temp
    fraction = epoch / max(part.teacher_temp_epochs - 1, 1)
    return part.teacher_temp_start + (part.teacher_temp - part.teacher_temp_start) * fraction


@TASKS.register("dino")
class Dino(Task):
    """Evaluated by k-NN on the teacher's features where images have classes.

    The teacher has the student's weights at first and follows them after each step; its stochastic depth and dropout
    are off. Epochs of the settings are those of the recipe; with `steps`, the same fractions of the training.
    """

    name, title = "dino", "without labels: crops agree with a teacher (DINO)"
    target = "any"
    metrics = (
        Metric("teacher_entropy", "entropy of the teacher", "", unit="nats"),
        Metric("feature_spread", "spread of the features", "", unit=""),
    )
    compared_by = "knn"
    recipe_part = DinoPart
    usual_recipe = "dino_100"
    small_recipe = "dino_small"
    uses_head = False
    divides = False
    unread = (
        "randaugment", "randaugment_space", "randaugment_noise", "erasing", "mixup", "cutmix", "loss",
        "label_smoothing", "head_bias",
    )  # fmt: skip

    def __init__(self, part: DinoPart | None = None, epochs: int = 1) -> None:
        self.part, self.epochs = part or DinoPart(), epochs
        self.probe_blocks = self.part.probe_blocks
        self._epoch, self.is_done = 0, False
        self._sum: Any = 0.0  # of the teacher's outputs since the last step, on their device
        self._count = 0

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """With the recipe's part and epochs."""
        return cls(recipe.part(DinoPart), recipe.epochs)

    @property
    def joint(self) -> Joint:
        """The crops of the recipe's part."""
        return partial(multi_crop, self.part)

    def wrap(self, backbone: nn.Module, classes: int) -> nn.Module:
        """The backbone with a projection head. UserError if it is for images of one size."""
        return DinoModel(backbone, self.part)

    def begin(self, model: nn.Module) -> None:
        """Copy the student."""
        self.teacher = copy.deepcopy(model).requires_grad_(False).eval()
        self._epoch = 0

    def evaluated(self, model: nn.Module) -> nn.Module:
        return self.teacher

    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """DINO's loss with the center before this batch, and the entropy of the teacher's targets."""
        center: Any = self.teacher.center
        views = (batch.inputs, *batch.views)
        with torch.no_grad():
            teacher = self.teacher(*views[:GLOBAL_CROPS]).float()
        temperature = teacher_temperature(self.part, self._epoch)
        loss = dino_loss(model(*views).float(), teacher, center, self.part.student_temp, temperature)
        self._sum, self._count = self._sum + teacher.sum(0, keepdim=True), self._count + len(teacher)
        return loss, {"teacher_entropy": _entropy(((teacher - center) / temperature).softmax(-1)).mean()}

    def before_step(self, model: nn.Module, step: int, steps: int) -> None:
        """Keep the last layer while it is frozen."""
        if (step - 1) * self.epochs < self.part.freeze_last_layer * steps:
            assert isinstance(model, DinoModel)
            for parameter in model.head.last_layer.parameters():
                parameter.grad = None

    @torch.no_grad()
    def after_step(self, model: nn.Module, step: int, steps: int) -> None:
        """Move teacher and center."""
        momentum = half_cosine(self.part.teacher_momentum, 1.0, step - 1, steps)
        torch._foreach_lerp_(list(self.teacher.parameters()), list(model.parameters()), 1 - momentum)
        for (name, kept), buffer in zip(self.teacher.named_buffers(), model.buffers(), strict=True):
            if name != "center":
                kept.copy_(buffer)
        center: Any = self.teacher.center
        if self._count:
            center.copy_(next_center(center, self.mean(self._sum / self._count), self.part.center_momentum))
        self._sum, self._count = 0.0, 0
        self._epoch, self.is_done = step * self.epochs // steps, step == steps

    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self.teacher.state_dict(), "epoch": self._epoch, "is_done": self.is_done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.teacher.load_state_dict(state["teacher"])
        self._epoch, self.is_done = state["epoch"], state["is_done"]

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        """The backbone's features, without the projection head."""
        assert isinstance(model, DinoModel)
        return model.backbone(batch.inputs)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Measured:
        """The entropy of the teacher's targets, and the spread of the features: the root of the summed variances of
        features of length 1, 0 if all are equal and at most 1.

        `loss` is the cross-entropy of the target and the output, at the student's temperature, of the same view. At the
        end of a training, equal features and targets that do not depend on the image are a failure.
        """
        assert isinstance(model, DinoModel)
        features, columns, losses = [], dict[str, list[Tensor]](), []
        first = []
        for batch in batches:
            features.append(self.features(model, batch).float())
            outputs = model.head(features[-1]).float()
            targets = ((outputs - model.center) / self.part.teacher_temp).softmax(-1)
            columns.setdefault("teacher_entropy", []).append(_entropy(targets))
            losses.append(-(targets * (outputs / self.part.student_temp).log_softmax(-1)).sum(-1))
            first.append(targets.argmax(-1))
        if not features:
            raise UserError("The split that is to be evaluated is empty.")
        lengths = F.normalize(torch.cat(features), dim=1)
        spread = float(lengths.std(0, correction=0).norm())
        per_image = on_cpu(columns)
        entropy = float(per_image["teacher_entropy"].mean())
        failure = self._collapse(entropy, spread, len(torch.cat(first).unique())) if self.is_done else None
        metrics = {"teacher_entropy": entropy, "feature_spread": spread, "loss": float(torch.cat(losses).mean())}
        return Measured(metrics, per_image, failure=failure)

    def _collapse(self, entropy: float, spread: float, targets: int) -> str | None:
        share = entropy / math.log(self.part.prototypes)
        if spread < EQUAL:
            return f"collapse: all images have the same features (spread {spread:.2g})"
        if share > UNIFORM:
            return f"collapse: the teacher's targets are uniform (entropy {entropy:.3g} of {entropy / share:.3g})"
        if share < CERTAIN and targets == 1:
            return f"collapse: the teacher gives all images one target (entropy {entropy:.2g})"
        return None

    def synthetic(self, count: int, shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Batch:
        """Two large views and the small ones."""
        images, (height, width) = noise(count, shape), local_size(self.part, (shape[1], shape[2]))
        views = (images, *[images[:, :, :height, :width]] * self.part.local_crops)
        return Batch(images, torch.arange(count) % max(classes, 1), torch.arange(count), views)


def _entropy(p: Tensor) -> Tensor:
    """-sum p log p of each row, (B,)."""
    return -torch.xlogy(p, p).sum(dim=-1)
