"""What each arm costs, as ratios to base, measured interleaved in one process.

Shared machines are noisy, so a ratio is the median over rounds of arm / base, where each round times every arm once
and rounds alternate their order. On a CPU one thread and the CPU clock are used: what neighbors do then moves a ratio
by a percent or two, while wall time with all threads can be off by a factor. On a GPU its own events are used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vitmods.model.flops import count_params
from vitmods.recipes import Recipe
from vitmods.study.models import Base, macs_of, noise_images
from vitmods.study.memory import peak_bytes
from vitmods.train.optim import make_optimizer

BLOCK_S = 0.1  # a timed block repeats its work until it lasts about this long
CALL_S = 1.0  # batches are halved until one call takes at most about this long
LARGE_BATCH = 64
ROUNDS = (3, 15)
Work = Callable[[], Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Ratio:
    """arm / base: median over rounds, and the middle half of the rounds."""

    ratio: float
    low: float
    high: float

    @classmethod
    def of_rounds(cls, ratios: list[float]) -> Ratio:
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(middle, low, high)


@dataclass
class _Timed:
    """One kind of work: the same call for every model, repeated so that it can be timed."""

    calls: dict[str, Work]
    repeats: int


def measure(
    models: Mapping[str, nn.Module],
    recipe: Recipe,
    device: torch.device,
    budget_s: float = 30.0,
    images: Base | None = None,
) -> dict[str, Any]:
    """Costs of the models, the first of which is base. They are trained a few steps on `device`: pass copies.

    Args:
        models: name -> model; all take the same images.
        recipe: gives the precision, the optimizer and the largest training batch.
        budget_s: seconds after which no further round begins; three rounds are always made.
        images: what base is built for, which says size, channels and classes; None: as base, a ViT, says.

    Returns:
        `base`: params, macs (None: not known of that model), train_step_s, infer_1_s, infer_n_s, peak_memory_bytes, train_batch, infer_batch;
        `arms`: name -> params and flops (ratios), and train_step, infer_1, infer_n, peak_memory (Ratio as a dict);
        and how it was measured: device, threads, clock, rounds.
    """
    with quiet_threads(device):
        images = images or next(iter(models.values())).vit_config  # type: ignore[assignment]
        assert images is not None
        bench = _Bench(dict(models), recipe, device, images)
        kinds = bench.kinds()
        rounds = interleave(kinds, list(models), bench.seconds, budget_s)
        peaks = bench.peaks()
    base = next(iter(models))
    sizes = {name: (count_params(model), macs_of(model, images)) for name, model in models.items()}

    def ratios(arm: str) -> dict[str, Any]:
        timed = {kind: asdict(Ratio.of_rounds([t[arm] / t[base] for t in rounds[kind]])) for kind in kinds}
        timed["train_step"]["batch"], timed["infer_n"]["batch"] = bench.train_batch, bench.infer_batch
        memory = peaks[arm] / peaks[base]
        (params, macs), (base_params, base_macs) = sizes[arm], sizes[base]
        counted = {"params": params / base_params, "flops": macs / base_macs if macs and base_macs else None}
        kept = {**asdict(Ratio(memory, memory, memory)), "batch": bench.train_batch}
        return {**counted, **timed, "peak_memory": kept}

    return {
        "base": {
            "params": sizes[base][0],
            "macs": sizes[base][1],
            **{f"{kind}_s": statistics.median(t[base] for t in rounds[kind]) for kind in kinds},
            "peak_memory_bytes": peaks[base],
            "train_batch": bench.train_batch,
            "infer_batch": bench.infer_batch,
        },
        "arms": {arm: ratios(arm) for arm in models if arm != base},
        "device": str(device),
        "threads": 1 if device.type == "cpu" else None,
        "clock": "CPU time" if device.type == "cpu" else "device events",
        "rounds": len(rounds["train_step"]),
    }


def interleave(
    kinds: Mapping[str, T], names: list[str], seconds: Callable[[T, str], float], budget_s: float
) -> dict[str, list[dict[str, float]]]:
    """kind -> one {model: seconds per call} a round. Every second round goes backwards, so that a drift cancels."""
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    end = time.monotonic() + budget_s
    least, most = ROUNDS
    for number in range(most):
        if number >= least and time.monotonic() > end:
            break
        order = names if number % 2 == 0 else names[::-1]
        for kind, timed in kinds.items():
            rounds[kind].append({name: seconds(timed, name) for name in order})
    return rounds


class _Bench:
    """The models with their inputs and optimizers, ready to be timed."""

    def __init__(self, models: dict[str, nn.Module], recipe: Recipe, device: torch.device, images: Base):
        self.models, self.recipe, self.device, self.images = models, recipe, device, images
        self.base = next(iter(models))
        for model in models.values():
            model.to(device)
        self.optimizers = {name: make_optimizer(model, recipe) for name, model in models.items()}
        self.train_batch = self._fitting_batch(self._train_call, recipe.part_size)
        self.infer_batch = self._fitting_batch(self._infer_call, LARGE_BATCH)

    def kinds(self) -> dict[str, _Timed]:
        works = {
            "train_step": (self._train_call, self.train_batch),
            "infer_1": (self._infer_call, 1),
            "infer_n": (self._infer_call, self.infer_batch),
        }
        return {kind: self._timed(call, batch) for kind, (call, batch) in works.items()}

    def _timed(self, make: Callable[[str, int], Work], batch: int) -> _Timed:
        timed = _Timed({name: make(name, batch) for name in self.models}, repeats=1)
        for call in timed.calls.values():
            call()  # warm-up: kernels are chosen, optimizer state is made
        timed.repeats = max(1, round(BLOCK_S / max(self.seconds(timed, self.base), 1e-6)))
        return timed

    def seconds(self, timed: _Timed, name: str) -> float:
        """Seconds per call."""
        return seconds_per_call(timed.calls[name], timed.repeats, self.device)

    def peaks(self) -> dict[str, int]:
        """Bytes at the peak of one training step; on a GPU the other models wait elsewhere."""
        found = {}
        for model in self.models.values():
            model.to("cpu")
        for name, model in self.models.items():
            self.optimizers.clear()
            model.to(self.device)
            self.optimizers[name] = make_optimizer(model, self.recipe)
            step = self._train_call(name, self.train_batch)
            step()
            found[name] = peak_bytes(step, self._alive(name), self.device)
            model.zero_grad(set_to_none=True)
            model.to("cpu")
        return found

    def _alive(self, name: str) -> Iterator[Tensor]:
        model = self.models[name]
        yield from model.buffers()
        for parameter in model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        for state in self.optimizers[name].state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def _fitting_batch(self, make: Callable[[str, int], Work], largest: int) -> int:
        """The largest batch, halved from `largest`, for which base's call takes no longer than about CALL_S."""
        one = make(self.base, 1)
        one()
        alone = self.seconds(_Timed({self.base: one}, repeats=2), self.base)
        batch = largest
        while batch > 1 and alone * batch > CALL_S:
            batch //= 2
        return batch

    def _dataset(self, batch: int) -> Tensor:
        return noise_images(self.images, batch).to(self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16-mixed")

    def _train_call(self, name: str, batch: int) -> Work:
        model, optimizer, dataset = self.models[name], self.optimizers[name], self._dataset(batch)
        targets = torch.arange(batch, device=self.device) % self.images.num_classes

        def step() -> None:
            model.train()
            with self._autocast():
                loss = cross_entropy(model(dataset), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def _infer_call(self, name: str, batch: int) -> Work:
        model, dataset = self.models[name], self._dataset(batch)

        def infer() -> None:
            model.eval()
            with torch.inference_mode(), self._autocast():
                model(dataset)

        return infer


def seconds_per_call(call: Work, repeats: int, device: torch.device) -> float:
    """On a CPU by its own clock; elsewhere by the wall clock, since an accelerator works on while the CPU waits."""
    if device.type == "cpu":
        start = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - start) / repeats
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.accelerator.synchronize(device)
    return (time.perf_counter() - start) / repeats


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
