"""What the loop asks of a task and of the data. It knows nothing else about either."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol

from torch import Tensor, nn


class Batch(Protocol):
    """Tensors whose first axis counts images: images (B, C, H, W), targets (B,) or (B, K), index (B,)."""

    @property
    def images(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def index(self) -> Tensor: ...


class Images(Protocol):
    """A data set as the loop reads it; `vitmods.data.load` returns one."""

    @property
    def eval_split(self) -> str: ...
    @property
    def val_split(self) -> str: ...
    @property
    def splits(self) -> Mapping[str, Sized]: ...
    def steps_per_epoch(self, batch_size: int) -> int: ...
    def train_batches(self, *, seed: int, epoch: int, batch_size: int, start: int = 0) -> Iterator[Batch]: ...
    def eval_batches(self, split: str, batch_size: int) -> Iterator[Batch]: ...
    def summary(self) -> dict[str, Any]: ...


class Task(Protocol):
    """What is trained and how it is evaluated."""

    @property
    def metric(self) -> str:
        """The metric of `evaluate` that trials are compared by; the higher the better."""
        ...

    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the images of `batch`, and 0-d statistics for the log, also means over the images."""
        ...

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Metrics over all images of `batches`, among them `loss` and the one named by `metric`."""
        ...
