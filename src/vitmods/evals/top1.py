"""Top-1 and top-5 accuracy and mean loss over a split."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor


class LabelledPictures(Protocol):
    """images (B, C, H, W) and int64 class numbers (B,)."""

    @property
    def images(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...


@torch.inference_mode()
def top1(
    model: Callable[[Tensor], Tensor], batches: Iterable[LabelledPictures], loss: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, float]:
    """Fractions of pictures whose class is the model's first, or among its first five, and the mean loss.

    Every picture counts the same, however the batches are cut. With fewer than five classes `top5` is 1.

    Args:
        model: images (B, C, H, W) to logits (B, K), in evaluation mode and on the device of the batches.
        batches: all pictures of the split, each once.
        loss: logits (B, K) and class numbers (B,) to the loss of each picture (B,).

    Raises:
        ValueError: there are no pictures.
    """
    pictures = 0
    # Left on the device until the end: reading a number waits for the device.
    totals: list[Tensor] = []
    for batch in batches:
        logits = model(batch.images).float()
        ranked = first_five(logits) == batch.targets[:, None]
        totals.append(torch.stack([ranked[:, 0].sum(), ranked.sum(), loss(logits, batch.targets).sum()]))
        pictures += len(batch.targets)
    if pictures == 0:
        raise ValueError("there are no pictures in the split that is to be evaluated.")
    columns: list[list[Any]] = torch.stack(totals).T.tolist()
    first, five, total_loss = (math.fsum(column) / pictures for column in columns)
    return {"top1": first, "top5": five, "loss": total_loss}


def first_five(logits: Tensor) -> Tensor:
    """The five largest classes of logits (B, K), or all where there are fewer: (B, min(5, K))."""
    return logits.topk(min(5, logits.shape[1]), dim=1).indices
