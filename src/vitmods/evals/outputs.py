"""A model's outputs on the images of a split, computed once for all protocols."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitmods.data.batch import Batch, for_device
from vitmods.evals.options import Options
from vitmods.tasks.base import Task, TaskModel
from vitmods.tasks.features import check_head, head_inputs, head_of, last_blocks
from vitmods.train.probe import Features
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data import ImageDataset


Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""yields the given steps, and may show a progress bar for them"""


def silent(steps: Iterable[Any], total: int, kind: str) -> Iterable[Any]:
    """Show no progress."""
    return steps


@dataclass
class ModelOutputs:
    """A model (in evaluation mode, on `device`), images, and the split that is evaluated.

    `task` computes features if it does so by itself (`Task.features`). `autocast` surrounds every forward pass, for
    arithmetic in lower precision; `progress` may show batches and corruptions. Outputs are kept on the CPU.
    """

    model: nn.Module
    dataset: "ImageDataset"
    split: str
    batch_size: int
    device: torch.device
    options: Options
    task: Task | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    progress: Progress = silent
    _features: dict[str, Features] = field(default_factory=dict)
    _logits: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def logits(self) -> Tensor:
        """float32 (n, K), of the evaluated split, for the classes of the images."""
        self._outputs(self.split)
        return self.select_classes(self._logits)

    @property
    def targets(self) -> Tensor:
        """Classes of the evaluated split, int64 (n,), or labels, float32 (n, K)."""
        return self._outputs(self.split).targets

    def features(self, split: str) -> Features:
        """The task's features, by default the inputs of the head: after pooling, norm and representation layer.
        UserError if the model's head is not known."""
        if not self._asks_task:
            check_head(self._backbone)
        return self._outputs(split)

    @torch.inference_mode()
    def probe_features(self, split: str) -> Features:
        """Features of the task's `probe_blocks`, by default `features`. UserError if the model does not have them."""
        blocks = 1 if self.task is None else self.task.probe_blocks
        if blocks == 1:
            return self.features(split)
        features, targets = [], []
        for batch in for_device(self.dataset, self.device).eval_batches(split, self.batch_size):
            features.append(self.batch_features(batch.to(self.device)).cpu())
            targets.append(batch.targets.cpu())
        return Features(torch.cat(features), torch.cat(targets))

    @torch.no_grad()
    def batch_features(self, batch: Batch) -> Tensor:
        """`probe_features` (B, C) of a batch on the device, which may be of augmented images."""
        blocks = 1 if self.task is None else self.task.probe_blocks
        with self.autocast():
            if blocks > 1:
                return last_blocks(self._backbone, batch.inputs, blocks).float()
            if self.task is not None and self._asks_task:
                return self.task.features(self.model, batch).float()
            check_head(self._backbone)
            with head_inputs(self._backbone) as read:
                self.model(batch.inputs)
        return torch.cat(read).float()

    @property
    def _backbone(self) -> nn.Module:
        return self.model.backbone if isinstance(self.model, TaskModel) else self.model

    @property
    def _asks_task(self) -> bool:
        """Whether the task computes features by itself: without logits, or otherwise than by default."""
        task = self.task
        return task is not None and (not task.uses_head or type(task).features is not Task.features)

    def on(self, split: str) -> "ModelOutputs":
        """Return the outputs of the same model on another split."""
        return replace(self, split=split, _features={}, _logits=torch.empty(0))

    def _outputs(self, split: str) -> Features:
        if split not in self._features:
            self._features[split] = self._run(split)
        return self._features[split]

    def select_classes(self, logits: Tensor) -> Tensor:
        """The model's logits (B, all its classes) for the classes of the images (B, K), where they are fewer: a model
        that was trained on a part of the classes has as many as its images."""
        chosen = self.dataset.class_map
        return logits if chosen is None or logits.shape[1] == len(chosen) else logits[:, list(chosen)]

    @torch.inference_mode()
    def predicted(self, images: Tensor) -> Tensor:
        """The most likely class of each image, int64 (B,), on the CPU; the model sees a batch at once, no more."""
        classes = []
        for part in torch.split(images, self.batch_size):
            with self.autocast():
                logits = self.model(part.to(self.device, non_blocking=True))
            classes.append(self.select_classes(logits).argmax(dim=1))
        return torch.cat(classes).cpu()

    @torch.inference_mode()
    def _run(self, split: str) -> Features:
        logits, targets = [], []
        count = math.ceil(self.dataset.summary()["splits"][split]["count"] / self.batch_size)
        reads_head = not self._asks_task and head_of(self._backbone) is not None
        reader = head_inputs(self._backbone) if reads_head else nullcontext(list[Tensor]())
        has_logits = self.task is None or self.task.uses_head
        with reader as read:
            batches = for_device(self.dataset, self.device).eval_batches(split, self.batch_size)
            for batch in self.progress(batches, count, split):
                batch = batch.to(self.device)
                with self.autocast():
                    if self.task is not None and self._asks_task:
                        read.append(self.task.features(self.model, batch).float())
                    if has_logits and (reads_head or split == self.split):
                        outputs = self.model(batch.inputs).float()
                        if split == self.split:  # those of training images would fill the memory
                            logits.append(outputs)
                targets.append(batch.targets)
        if not targets:
            raise UserError(f"The split {split} is empty.")
        if logits:
            self._logits = torch.cat(logits).cpu()
        return Features(torch.cat(read).cpu() if read else torch.empty(0), torch.cat(targets).cpu())
