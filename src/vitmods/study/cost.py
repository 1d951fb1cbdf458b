"""Steps of a model on batches of noise, made as trials make them: their time and memory, and costs relative to base.

Costs of arms are measured interleaved with base in one process (`vitmods.bench`).
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Self

import torch
from torch import Tensor, nn

from vitmods.bench import (
    BLOCK_S,
    ROUNDS,
    Ratio,
    Work,
    now,
    peak_bytes,
    quiet_threads,
    rounds_of,
    seconds_per_call,
)
from vitmods.data.batch import Batch
from vitmods.finetune.adapters import has_adapters, merge_adapters
from vitmods.model.flops import count_params
from vitmods.model.vit import ViT
from vitmods.recipes import Recipe
from vitmods.study.bases import Base, macs_of
from vitmods.tasks.base import Task, TaskModel
from vitmods.train.device import DeviceAndPrecision
from vitmods.train.distributed import StepLoss
from vitmods.train.optim import Ema, clip_gradients, make_optimizer


class Steps:
    """A model on its device, with its optimizer and moving average.

    Args:
        model: as it is trained, frozen as the recipe sets; its weights change.
        task: what is trained; a copy is used, since its state belongs to one model.
        recipe: gives the optimizer, clipping, moving average and precision.
        device: where the steps are made.
        images: what the model is built for: size, channels and classes.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        recipe: Recipe,
        device: torch.device,
        images: Base,
    ):
        self._other_models = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0  # bytes
        self.model = self.deployed = model.to(device)
        if has_adapters(model):  # which are merged when it is used
            self.deployed = copy.deepcopy(model)
            merge_adapters(self.deployed)
        self.recipe, self.device, self._images = recipe, device, images
        placement = DeviceAndPrecision(device, recipe.precision)
        self._autocast, self._scaler = placement.autocast, placement.scaler()
        self.task = copy.copy(task)
        self.task.begin(model)
        self._loss = StepLoss(self.task, self.model)
        self.optimizer = make_optimizer(model, recipe)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.ema = None if recipe.ema is None else Ema(model, recipe.ema)

    def compiled(self, mode: str | None = None) -> Self:
        """The same model and optimizer, whose training steps are compiled, as those of a trial with `compile`. What was
        compiled before is compiled again: beyond eight models of one process PyTorch would silently not do it."""
        torch.compiler.reset()
        other = copy.copy(self)
        other._loss = StepLoss(self.task, self.model)
        other._loss.compile(mode=mode)
        return other

    def train(self, count: int) -> Work:
        """A training step on a batch of `count` images that is on the device at once."""
        batch = self._batch(count)

        def step() -> None:
            self._part(batch, 1)
            self._update()

        return step

    def infer(self, count: int) -> Work:
        """The outputs of `count` images."""
        images = self._batch(count).inputs

        def infer() -> None:
            self.deployed.eval()
            with torch.inference_mode(), self._autocast():
                self.deployed(images)

        return infer

    def timed(self, count: int, parts: int = 1, most_s: float = 0.0) -> tuple[int, float, float]:
        """Time a step on a batch of `parts` parts of `count` images each, by the wall clock.

        After `most_s` seconds no further part begins; one is always computed.

        Returns:
            How many parts were computed, seconds of each, and seconds of the update.
        """
        batch, computed, begin = self._batch(count), 0, now(self.device)
        while computed < parts and (computed == 0 or now(self.device) - begin < most_s):
            self._part(batch, parts)
            computed += 1
        trained = now(self.device)
        self._update()
        return computed, (trained - begin) / computed, now(self.device) - trained

    def fitting(self, make: Callable[[int], Work], largest: int, most_s: float, least: int = 1) -> int:
        """The largest batch, doubled from `least` up to `largest`, for which a call of `make(batch)` takes at most
        about `most_s` seconds. A first call that takes many times that is not repeated."""
        batch = min(least, largest)
        call, begin = make(batch), now(self.device)
        call()
        if now(self.device) - begin > 4 * most_s:
            return batch
        while batch < largest and 2 * seconds_per_call(call, 1, self.device) <= most_s:
            batch = min(2 * batch, largest)
            call = make(batch)
            call()  # kernels are chosen
        return batch

    def peak(self, count: int) -> int:
        """Bytes at the peak of a training step, without other models on the device."""
        self.timed(count)  # the optimizer's state is made
        peak = peak_bytes(lambda: self.timed(count), self.alive(), self.device)
        return peak - self._other_models

    def infer_peak(self, count: int) -> int:
        """Bytes at the peak of inference on `count` images: weights and activations, without images and optimizer."""
        tensors = [*self.deployed.parameters(), *self.deployed.buffers()]
        infer, weights = self.infer(count), sum(tensor.nbytes for tensor in tensors)
        other = torch.cuda.memory_allocated(self.device) - weights if self.device.type == "cuda" else 0
        return peak_bytes(infer, tensors, self.device) - other

    def _part(self, batch: Batch, parts: int) -> None:
        self.model.train()
        with self._autocast():
            loss, _ = self._loss(batch)
        self._scaler.scale(loss / parts).backward()

    def _update(self) -> None:
        optimizer = self.recipe.optimizer
        self._scaler.unscale_(self.optimizer)
        if optimizer.clip_norm is not None:
            clip_gradients(self._parameters, optimizer.clip_norm, optimizer.clip_each)
        self.task.before_step(self.model, 1, 1)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()
        self.task.after_step(self.model, 1, 1)

    def _batch(self, count: int) -> Batch:
        shape = (self._images.in_chans, *self._images.img_size)
        return self.task.synthetic(count, shape, self._images.num_classes, self.recipe).to(self.device)

    def averages(self) -> list[nn.Module]:
        """The moving average or the teacher that is kept next to the model, if there is one."""
        kept = self.ema.model if self.ema else self.task.evaluated(self.model)
        return [] if kept is None else [kept]

    def alive(self) -> Iterator[Tensor]:
        """Yield the tensors that stay between steps, except gradients."""
        for model in (self.model, *self.averages()):
            yield from (*model.parameters(), *model.buffers())
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


CALL_S = 0.3  # batches are halved until one call takes at most about this long
LARGE_BATCH = 64
HOST_BOUND = 0.9  # of a step's time is the host's, to start its operations
LEAST = 2  # images of a training step: a batch norm needs two


def measuring(
    models: Iterable[tuple[str, nn.Module]],
    task: Task,
    recipe: Recipe,
    device: torch.device,
    budget_s: float = 30.0,
    images: Base | None = None,
    arms: int = 1,
    compiled: bool = False,
) -> Generator[None, None, dict[str, Any]]:
    """Measure the costs of models, the first of which is base. A step prepares an arm or makes rounds of about a
    second.

    The models are trained a few steps on `device`: pass copies.

    Each arm is timed alternately with base, until the interval of each ratio is narrow enough. If `models` builds
    models on demand, base and one arm are in memory at a time.

    Args:
        models: (name, model); all take the same images.
        task: what is trained.
        recipe: gives the precision, the optimizer and the largest training batch.
        budget_s: seconds, divided among the arms, after which no further round begins; seven rounds are always made,
            of shorter blocks if the budget needs it.
        images: the base that the models are built for, with size, channels and classes; None: that of base, a ViT.
        arms: number of models after base.
        compiled: compiled training steps are measured too.

    Returns:
        `base`: params, trained (a number), macs (None: unknown), train_step_s, infer_1_s, infer_n_s, peak_memory_bytes,
        infer_memory_bytes, train_batch, infer_batch; `arms`: name -> params and flops (ratios), trained (a number),
        train_step, infer_1, infer_n, peak_memory and infer_memory (Ratio as a dict), `against`, how base and the arm
        are built if they are built differently (else None), and `host_bound`, see `results.ArmCost`; and how it was
        measured: device, threads, clock, rounds (the fewest of a ratio).
    """
    remaining = iter(models)
    _, first = next(remaining)
    images = images or first.vit_config  # type: ignore[assignment]
    assert images is not None
    first_backbone = first.backbone if isinstance(first, TaskModel) else first
    library = None if isinstance(first_backbone, ViT) else type(first_backbone).__module__.partition(".")[0]
    end = time.monotonic() + budget_s
    with quiet_threads(device):
        steps = Steps(first, task, recipe, device, images)
        base = _TimedModel(steps, images, budget_s=budget_s / max(arms, 1), compiled=compiled)
        ratios: dict[str, Any] = {}
        base_s: dict[str, list[float]] = {kind: [] for kind in base.calls}
        fewest = ROUNDS[1]
        for count in range(arms, 0, -1):
            name, model = next(remaining)
            against = None
            if library and isinstance(model.backbone if isinstance(model, TaskModel) else model, ViT):
                against = f"base is built by {library} and the arm by vitmods: the ratios hold that difference too"
            arm = _TimedModel(Steps(model, task, recipe, device, images), images, base)
            yield
            rounds = yield from _time_alternately(base, arm, max(0.0, end - time.monotonic()) / count)
            base_s = {kind: [*base_s[kind], *(times["base"] for times in rounds[kind])] for kind in rounds}
            fewest = min([fewest, *map(len, rounds.values())])
            timed = {kind: [times["arm"] / times["base"] for times in rounds[kind]] for kind in rounds}
            ratios[name] = {**arm.ratios(base, timed), "against": against}
            del arm, model  # before the next one is built
        for kind, times in base_s.items():
            times += [] if times else [base.seconds(kind) for _ in range(ROUNDS[0])]
    return {
        "base": {
            "params": base.params,
            "trained": base.trained,
            "macs": base.macs,
            **{f"{kind}_s": statistics.median(times) for kind, times in base_s.items()},
            "peak_memory_bytes": base.peak,
            "infer_memory_bytes": base.infer_peak,
            "train_batch": base.batches["train_step"],
            "infer_batch": base.batches["infer_n"],
        },
        "arms": ratios,
        "device": str(device),
        "threads": 1 if device.type == "cpu" else None,
        "clock": "CPU time" if device.type == "cpu" else "device events",
        "rounds": fewest,
    }


def _time_alternately(
    base: _TimedModel, arm: _TimedModel, limit_s: float
) -> Generator[None, None, dict[str, list[dict[str, float]]]]:
    models = {"base": base, "arm": arm}
    kinds = {kind: kind for kind in base.calls}
    return rounds_of(kinds, [*models], lambda kind, name: models[name].seconds(kind), limit_s)


class _TimedModel:
    """A model with a call for each kind of work.

    Base determines the batches, and how often a call is repeated, so that the fewest rounds of two models take
    `budget_s` seconds on a machine as busy as now.
    """

    def __init__(
        self,
        steps: Steps,
        images: Base,
        base: _TimedModel | None = None,
        budget_s: float = math.inf,
        compiled: bool = False,
    ):
        self._device, began, began_cpu = steps.device, time.perf_counter(), time.process_time()
        self.trained = sum(p.numel() for p in steps.model.parameters() if p.requires_grad)
        self.params, self.macs = count_params(steps.deployed), macs_of(steps.deployed, images)
        self.batches: dict[str, int] = base.batches if base else {
            "train_step": steps.fitting(steps.train, steps.recipe.part_size, CALL_S, LEAST),
            "infer_1": 1,
            "infer_n": steps.fitting(steps.infer, LARGE_BATCH, CALL_S),
        }  # fmt: skip
        self.peak = steps.peak(self.batches["train_step"])
        self.infer_peak = steps.infer_peak(self.batches["infer_n"])
        make = {"train_step": steps.train, "infer_1": steps.infer, "infer_n": steps.infer}
        self.calls: dict[str, Work] = {kind: make[kind](batch) for kind, batch in self.batches.items()}
        if compiled or (base is not None and "compiled_step" in base.calls):
            self.calls["compiled_step"] = steps.compiled().train(self.batches["train_step"])
            if base is not None:
                base.calls["compiled_step"]()  # compiled again
        for call in self.calls.values():
            call()  # warm-up: kernels are chosen, optimizer state is made
        self.repeats: dict[str, int] = base.repeats if base else dict.fromkeys(self.calls, 1)
        if base is None:
            cpu_s = max(time.process_time() - began_cpu, 1e-6) if self._device.type == "cpu" else math.inf
            slower = max(1.0, (time.perf_counter() - began) / cpu_s)  # where other processes use the cores
            block_s = min(BLOCK_S, budget_s / slower / (2 * len(self.calls) * ROUNDS[0]))
            self.repeats = {kind: max(1, round(block_s / max(self.seconds(kind), 1e-6))) for kind in self.calls}

    def seconds(self, kind: str) -> float:
        """Seconds per call."""
        return seconds_per_call(self.calls[kind], self.repeats[kind], self._device)

    @property
    def host_bound(self) -> bool:
        """Whether on a GPU a training step takes about as long as the host takes to start its operations."""
        if self._device.type != "cuda":
            return False
        parts = []
        for _ in range(5):
            begin = now(self._device)
            self.calls["train_step"]()
            queued = time.perf_counter()
            parts.append((queued - begin) / (now(self._device) - begin))
        return statistics.median(parts) > HOST_BOUND

    def ratios(self, base: _TimedModel, rounds: Mapping[str, list[float]]) -> dict[str, Any]:
        """Ratios to base, with the batch that each was measured with."""
        ratios = {kind: asdict(Ratio.of_rounds(times)) for kind, times in rounds.items()}
        memory = {"peak_memory": self.peak / base.peak, "infer_memory": self.infer_peak / base.infer_peak}
        for (kind, ratio), work in zip(memory.items(), ("train_step", "infer_n"), strict=True):
            ratios[kind] = {**asdict(Ratio(ratio, ratio, ratio)), "batch": self.batches[work]}
            ratios[work]["batch"] = self.batches[work]
        flops = self.macs / base.macs if self.macs and base.macs else None
        facts = {"trained": self.trained, "flops": flops, "host_bound": self.host_bound}
        return {"params": self.params / base.params, **facts, **ratios}
