"""Time and memory of computations on a shared machine: paired, interleaved, repeatable.

Shared machines are noisy, so a ratio is the median over rounds of one / other, where each round times both in short
blocks, one after the other, and rounds alternate their order: what neighbors do slows either as often as the other. On
a CPU one thread and the CPU clock are used, while wall time with all threads can be off by a factor.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK_S = 0.04  # a timed block repeats its work until it lasts about this long
ROUNDS = (7, 60)
WIDTH = 0.05  # of the interval, as a fraction of the ratio, at which no more rounds are made
LEVEL = 0.98  # of an interval after a given number of rounds: looking at it after each leaves 95 % of them right
Work = Callable[[], Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Ratio:
    """arm / base: the median over rounds, and its 95 % interval."""

    ratio: float
    low: float
    high: float

    @classmethod
    def of_rounds(cls, ratios: Sequence[float]) -> Ratio:
        """The interval lies between two of the ratios, whatever their distribution: the chance that at most k of n are
        below the true median is that of at most k heads among n coins."""
        values, count = sorted(ratios), len(ratios)
        tails = accumulate(math.comb(count, heads) for heads in range(count))
        outside = sum(tail <= (1 - LEVEL) / 2 * 2**count for tail in tails)
        rank = max(outside - 1, 0)
        return cls(statistics.median(values), values[rank], values[count - 1 - rank])

    @property
    def is_precise(self) -> bool:
        return self.high - self.low <= WIDTH * self.ratio


def interleave(
    kinds: Mapping[str, T], names: list[str], seconds: Callable[[T, str], float], budget_s: float
) -> dict[str, list[dict[str, float]]]:
    """kind -> one {model: seconds per call} a round. Every second round goes backwards, so that a drift cancels.

    Seven rounds at least and 60 at most; none begins after `budget_s` seconds, and a kind has no more once the
    intervals of its ratios to the first model are at most 5 % wide.
    """
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    end = time.monotonic() + budget_s
    least, most = ROUNDS
    for number in range(most):
        if number >= least:
            kinds = {kind: timed for kind, timed in kinds.items() if not _is_precise(rounds[kind], names)}
            if not kinds or time.monotonic() > end:
                break
        order = names if number % 2 == 0 else names[::-1]
        for kind, timed in kinds.items():
            rounds[kind].append({name: seconds(timed, name) for name in order})
    return rounds


def _is_precise(rounds: list[dict[str, float]], names: list[str]) -> bool:
    base, *others = names
    return all(Ratio.of_rounds([times[name] / times[base] for times in rounds]).is_precise for name in others)


def seconds_per_call(call: Work, repeats: int, device: torch.device, wall: bool = False) -> float:
    """On a CPU by its own clock, if not `wall`; elsewhere by the wall clock, since an accelerator works on while the
    CPU waits."""
    if device.type == "cpu" and not wall:
        start = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - start) / repeats
    start = now(device)
    for _ in range(repeats):
        call()
    return (now(device) - start) / repeats


def now(device: torch.device) -> float:
    """Seconds by the wall clock, once the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def quiet_threads(device: torch.device) -> Iterator[None]:
    """One thread on a CPU, where the CPU clock then is the time that the work takes."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _LiveStorages(TorchDispatchMode):
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


def device_name(device: torch.device) -> str:
    """The trade name of the GPU, or of the processor where the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
