"""Peak memory of a computation, in bytes of tensor storage: exact and repeatable on a CPU, the allocator's on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that are alive, by listening to every operation and to every storage's end."""

    def __init__(self, already: Iterable[torch.Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for tensor in already:
            self._meet(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._meet(leaf)
        return result

    def _meet(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, size).atexit = False

    def _forget(self, size: int) -> None:
        self.live -= size


def peak_bytes(work: Callable[[], Any], alive: Iterable[torch.Tensor], device: torch.device) -> int:
    """Most bytes of tensors alive at once while `work` runs.

    Args:
        work: the computation, e.g. one training step.
        alive: tensors that exist before it and count too: parameters, buffers, gradients, optimizer state.
        device: on a CUDA device the allocator is asked, which counts all tensors there and the space inside operations;
            on a CPU the storages that operations return are counted, not their scratch space.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    tracker = _LiveStorages(alive)
    with tracker:
        work()
    return tracker.peak
