"""What each arm costs, as ratios to base, measured interleaved in one process (`vitmods.analysis.timing`)."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.analysis.timing import BLOCK_S, Ratio, Work, interleave, peak_bytes, quiet_threads, seconds_per_call
from vitmods.data.batch import Batch
from vitmods.model.flops import count_params
from vitmods.recipes import Recipe
from vitmods.study.bases import Base
from vitmods.study.models import macs_of
from vitmods.tasks.base import Task
from vitmods.train.optim import make_optimizer

CALL_S = 1.0  # batches are halved until one call takes at most about this long
LARGE_BATCH = 64


@dataclass
class _Timed:
    """One kind of work: the same call for every model, repeated so that it can be timed."""

    calls: dict[str, Work]
    repeats: int


def measure(
    models: Mapping[str, nn.Module],
    task: Task,
    recipe: Recipe,
    device: torch.device,
    budget_s: float = 30.0,
    images: Base | None = None,
) -> dict[str, Any]:
    """Costs of the models, the first of which is base. They are trained a few steps on `device`: pass copies.

    Args:
        models: name -> model; all take the same images.
        task: what is trained.
        recipe: gives the precision, the optimizer and the largest training batch.
        budget_s: seconds after which no further round begins; three rounds are always made.
        images: what base is built for, which says size, channels and classes; None: as base, a ViT, says.

    Returns:
        `base`: params, macs (None: not known of that model), train_step_s, infer_1_s, infer_n_s, peak_memory_bytes,
        train_batch, infer_batch; `arms`: name -> params and flops (ratios), and train_step, infer_1, infer_n,
        peak_memory (Ratio as a dict);
        and how it was measured: device, threads, clock, rounds.
    """
    images = images or next(iter(models.values())).vit_config  # type: ignore[assignment]
    assert images is not None
    with quiet_threads(device):
        bench = _Bench(dict(models), task, recipe, device, images)
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


class _Bench:
    """The models with their inputs and optimizers, ready to be timed."""

    def __init__(self, models: dict[str, nn.Module], task: Task, recipe: Recipe, device: torch.device, images: Base):
        self.models, self.task, self.recipe, self.device, self.images = models, task, recipe, device, images
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

    def _batch(self, count: int) -> Batch:
        images = self.images
        shape = (images.in_chans, *images.img_size)
        return self.task.synthetic(count, shape, images.num_classes, self.recipe).to(self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16-mixed")

    def _train_call(self, name: str, batch: int) -> Work:
        model, optimizer, made = self.models[name], self.optimizers[name], self._batch(batch)
        task = copy.copy(self.task)  # what it keeps from step to step belongs to a model
        task.begin(model)

        def step() -> None:
            model.train()
            with self._autocast():
                loss, _ = task.loss(model, made)
            loss.backward()
            optimizer.step()
            task.after_step(model, 1, 1)
            optimizer.zero_grad(set_to_none=True)

        return step

    def _infer_call(self, name: str, batch: int) -> Work:
        model, images = self.models[name], self._batch(batch).images

        def infer() -> None:
            model.eval()
            with torch.inference_mode(), self._autocast():
                model(images)

        return infer
