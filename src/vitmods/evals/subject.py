"""What is evaluated: a model on the pictures of a split, run once for all protocols."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitmods.errors import UserError
from vitmods.evals.options import Options
from vitmods.train.device import to_device

if TYPE_CHECKING:
    from vitmods.data import PictureSet


@dataclass(frozen=True)
class Outputs:
    """Of all n pictures of a split, in order, on the CPU: logits (n, K) and features (n, C), float32; targets (n,)."""

    logits: Tensor
    features: Tensor
    targets: Tensor


@dataclass
class Subject:
    """A model (in evaluation mode, on `device`), pictures, and the split that is evaluated.

    `autocast` surrounds every forward pass, for arithmetic in lower precision.
    """

    model: nn.Module
    pictures: "PictureSet"
    split: str
    batch_size: int
    device: torch.device
    options: Options
    autocast: Callable[[], AbstractContextManager] = nullcontext
    _outputs: dict[str, Outputs] = field(default_factory=dict)

    def outputs(self, split: str | None = None) -> Outputs:
        """Of the evaluated split, or another one; computed at the first call.

        Features are what the head reads (after pooling, norm and, where there is one, the representation layer).

        Raises:
            UserError: there is no such split, or it is empty.
        """
        split = split or self.split
        if split not in self._outputs:
            self._outputs[split] = self._run(split)
        return self._outputs[split]

    @torch.inference_mode()
    def _run(self, split: str) -> Outputs:
        logits, targets = [], []
        with _read_by_head(self.model) as features:
            for batch in self.pictures.eval_batches(split, self.batch_size):
                part = to_device(batch, self.device)
                with self.autocast():
                    logits.append(self.model(part.images).float())
                targets.append(batch.targets)
        if not targets:
            raise UserError(f"There are no pictures in the split {split}.")
        return Outputs(torch.cat(logits).cpu(), torch.cat(features).cpu(), torch.cat(targets))


@contextmanager
def _read_by_head(model: nn.Module) -> Iterator[list[Tensor]]:
    """What the model's head reads, of each forward pass: cheaper than all tokens, of which the head reads few."""
    seen: list[Tensor] = []
    head: nn.Module = model.get_classifier()  # type: ignore[operator]
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float()))
    try:
        yield seen
    finally:
        hook.remove()
