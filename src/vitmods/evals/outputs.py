"""What is evaluated: a model on the images of a split, run once for all protocols."""

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
"""What passes on so many steps of a kind, and may show how far it is."""


def silent(steps: Iterable[Any], total: int, kind: str) -> Iterable[Any]:
    """Shows nothing."""
    return steps


@dataclass(frozen=True)
class Features:
    """What the head reads of all n images of a split, in order, float32 (n, C), and their classes, int64 (n,), or
    labels, float32 (n, K)."""

    features: Tensor
    targets: Tensor


@dataclass
class ModelOutputs:
    """A model (in evaluation mode, on `device`), images, and the split that is evaluated.

    `autocast` surrounds every forward pass, for arithmetic in lower precision; `progress` may show batches and
    corruptions. What is kept lies on the CPU.
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
        """Of the evaluated split, float32 (n, K), for the classes of the images."""
        self._outputs(self.split)
        return self.select_classes(self._logits)

    @property
    def targets(self) -> Tensor:
        """Classes of the evaluated split, int64 (n,), or labels, float32 (n, K)."""
        return self._outputs(self.split).targets

    def features(self, split: str) -> Features:
        """Of a split: after pooling, norm and, where there is one, the representation layer.

        Raises:
            UserError: it is not known what the head of this model is.
        """
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
            raise UserError(f"There are no images in the split {split}.")
        if logits:
            self._logits = torch.cat(logits).cpu()
        return Features(torch.cat(read).cpu() if read else torch.empty(0), torch.cat(targets))


def head_of(model: nn.Module) -> nn.Module | None:
    """The classifier: what `get_classifier()` gives (timm's contract), or the last linear map under a name that a head
    has elsewhere; None: not known of this model."""
    model = model.backbone if isinstance(model, TaskModel) else model
    if hasattr(model, "get_classifier"):
        return model.get_classifier()  # type: ignore[operator,no-any-return]
    named = [module for name in ("heads", "head", "classifier", "fc") for module in [getattr(model, name, None)]]
    linear = [
        part for module in named if module is not None for part in module.modules() if isinstance(part, nn.Linear)
    ]
    return linear[-1] if linear else None


@contextmanager
def _read_by_head(model: nn.Module) -> Iterator[list[Tensor]]:
    """What the model's head reads, of each forward pass: cheaper than all tokens, of which the head reads few."""
    seen: list[Tensor] = []
    head = head_of(model)
    assert head is not None
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float()))
    try:
        yield seen
    finally:
        hook.remove()
