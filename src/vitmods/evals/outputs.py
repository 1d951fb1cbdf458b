"""A model's outputs on the images of a split, computed once for all protocols."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitmods.data.batch import for_device
from vitmods.evals.options import Options
from vitmods.tasks.base import TaskModel
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data import ImageDataset


Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""passes on so many steps of a kind, and may show how far it is"""


def silent(steps: Iterable[Any], total: int, kind: str) -> Iterable[Any]:
    """Shows nothing."""
    return steps


@dataclass(frozen=True)
class Features:
    """The inputs of the head for all n images of a split, in order, float32 (n, C), and their classes, int64 (n,), or
    labels, float32 (n, K)."""

    features: Tensor
    targets: Tensor


@dataclass
class ModelOutputs:
    """A model (in evaluation mode, on `device`), images, and the split that is evaluated.

    `autocast` surrounds every forward pass, for arithmetic in lower precision; `progress` may show batches and
    corruptions. Outputs are kept on the CPU.
    """

    model: nn.Module
    dataset: "ImageDataset"
    split: str
    batch_size: int
    device: torch.device
    options: Options
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
        """The inputs of the head: after pooling, norm and representation layer. UserError if the model's head is not
        known."""
        if head_of(self.model) is None:
            raise UserError(
                f"The features of a {type(self.model).__name__} are not known: give it a method get_classifier() that "
                "returns its last linear layer, as timm's models have, or leave out protocols that read features."
            )
        return self._outputs(split)

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
        reader = _read_by_head(self.model) if head_of(self.model) is not None else nullcontext(list[Tensor]())
        with reader as read:
            batches = for_device(self.dataset, self.device).eval_batches(split, self.batch_size)
            for batch in self.progress(batches, count, split):
                with self.autocast():
                    outputs = self.model(batch.to(self.device).inputs).float()
                if split == self.split:  # of the training images they would fill the memory, and nobody asks
                    logits.append(outputs)
                targets.append(batch.targets)
        if not targets:
            raise UserError(f"The split {split} is empty.")
        if logits:
            self._logits = torch.cat(logits).cpu()
        return Features(torch.cat(read).cpu() if read else torch.empty(0), torch.cat(targets))


def head_of(model: nn.Module) -> nn.Module | None:
    """The classifier: that of `get_classifier()` (timm's contract), or the last linear map under a usual name of heads;
    None: not known of this model."""
    model = model.backbone if isinstance(model, TaskModel) else model
    if hasattr(model, "get_classifier"):
        return model.get_classifier()  # type: ignore[operator,no-any-return]
    heads = [getattr(model, name, None) for name in ("heads", "head", "classifier", "fc")]
    parts = [part for head in heads if head is not None for part in head.modules() if isinstance(part, nn.Linear)]
    return parts[-1] if parts else None


@contextmanager
def _read_by_head(model: nn.Module) -> Iterator[list[Tensor]]:
    """The inputs of the model's head in each forward pass: cheaper than all tokens, of which the head reads few."""
    seen: list[Tensor] = []
    head = head_of(model)
    assert head is not None
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float()))
    try:
        yield seen
    finally:
        hook.remove()
