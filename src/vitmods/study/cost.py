"""What each arm costs, as ratios to base, measured interleaved in one process (`vitmods.bench`).

Steps of a model on batches of noise, made as trials make them: what dry runs time, and what costs are ratios of.

Two training steps of a recipe at full shape on images of noise: what they take here, and the whole run would.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters.apply import apply
from vitmods.bench import BLOCK_S, ROUNDS, Ratio, Work, interleave, now, peak_bytes, quiet_threads, seconds_per_call
from vitmods.data.batch import Batch
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_params
from vitmods.model.vit import ViT, vit
from vitmods.recipes import Recipe
from vitmods.study.arms import BASE
from vitmods.study.bases import Base, macs_of
from vitmods.tasks.base import DEFAULT, Task, TaskModel, make_task
from vitmods.tasks.features import without_head
from vitmods.train.device import does_not_fit, is_out_of_memory
from vitmods.train.optim import Ema, clip_gradients, freeze, make_optimizer
from vitmods.util.errors import UserError


class Steps:
    """A model on its device, with its optimizer and moving average.

    Args:
        model: as it is trained, frozen where the recipe says so; it is trained a few steps and not kept as it was.
        task: what is trained; a copy is used, since what it keeps from step to step belongs to one model.
        recipe: gives the optimizer, clipping, moving average and precision.
        device: where the steps are made.
        images: what the model is built for: size, channels and classes.
    """

    def __init__(self, model: nn.Module, task: Task, recipe: Recipe, device: torch.device, images: Base):
        self._beside = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        there = all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))
        self.model = model if there else model.to(device)  # tensors without numbers are moved once at most
        self.recipe, self.device, self._images = recipe, device, images
        self.task = copy.copy(task)
        self.task.begin(model)
        self.optimizer = make_optimizer(model, recipe)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.ema = None if recipe.ema is None else Ema(model, recipe.ema)

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
            self.model.eval()
            with torch.inference_mode(), self._autocast():
                self.model(images)

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
        """The largest batch, halved from `largest`, for which a call of `make(batch)` takes no longer than about
        `most_s` seconds. A first call that takes many times that is not repeated."""
        least = min(least, largest)
        few, begin = make(least), now(self.device)
        few()
        if now(self.device) - begin > 4 * most_s:
            return least
        alone, batch = seconds_per_call(few, 2, self.device) / least, largest
        while batch > least and alone * batch > most_s:
            batch = max(least, batch // 2)
        return batch

    def peak(self, count: int, parts: int = 1) -> int:
        """Bytes at the peak of a training step; models that are on the device beside this one are left out."""
        self.timed(count)  # the optimizer's state is made
        found = peak_bytes(lambda: self.timed(count, parts, float("inf")), self.alive(), self.device)
        return found - self._beside

    def infer_peak(self, count: int) -> int:
        """Bytes at the peak of `count` images' outputs: the weights and what stands beside them, without the images,
        and without what training keeps."""
        own = [*self.model.parameters(), *self.model.buffers()]
        infer, weights = self.infer(count), sum(tensor.nbytes for tensor in own)
        beside = torch.cuda.memory_allocated(self.device) - weights if self.device.type == "cuda" else 0
        return peak_bytes(infer, own, self.device) - beside

    def _part(self, batch: Batch, parts: int) -> None:
        self.model.train()
        with self._autocast():
            loss, _ = self.task.loss(self.model, batch)
        (loss / parts).backward()

    def _update(self) -> None:
        if self.recipe.optimizer.clip_norm is not None:
            clip_gradients(self._parameters, self.recipe.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()
        self.task.after_step(self.model, 1, 1)

    def _batch(self, count: int) -> Batch:
        shape = (self._images.in_chans, *self._images.img_size)
        return self.task.synthetic(count, shape, self._images.num_classes, self.recipe).to(self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16-mixed")

    def alive(self) -> Iterator[Tensor]:
        """What stays between steps, but for gradients."""
        for model in (self.model, *((self.ema.model,) if self.ema else ())):
            yield from (*model.parameters(), *model.buffers())
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


CALL_S = 0.3  # batches are halved until one call takes at most about this long
LARGE_BATCH = 64
LEAST = 2  # images of a training step: a batch norm needs two


def measure(
    models: Iterable[tuple[str, nn.Module]],
    task: Task,
    recipe: Recipe,
    device: torch.device,
    budget_s: float = 30.0,
    images: Base | None = None,
    arms: int = 1,
) -> dict[str, Any]:
    """Costs of the models, the first of which is base. They are trained a few steps on `device`: pass copies.

    Each arm is timed beside base alone. If `models` makes models on demand, base and one arm are in memory at a time,
    and base as vitmods builds it where `against` needs that. Each figure is measured until its own interval is narrow
    enough.

    Args:
        models: (name, model); all take the same images.
        task: what is trained.
        recipe: gives the precision, the optimizer and the largest training batch.
        budget_s: seconds, divided among the arms, after which no further round begins; seven rounds are always made,
            of shorter blocks where the budget asks for it.
        images: what base is built for, which says size, channels and classes; None: as base, a ViT, says.
        arms: how many models follow base.

    Returns:
        `base`: params, macs (None: not known of that model), train_step_s, infer_1_s, infer_n_s, peak_memory_bytes,
        infer_memory_bytes, train_batch, infer_batch; `arms`: name -> params and flops (ratios), and train_step,
        infer_1, infer_n, peak_memory and infer_memory (Ratio as a dict), and `against`, how base and the arm are built
        where base is of another library and the arm is ours (else None): base is timed as ours then if vitmods can read
        it; and how it was measured: device, threads, clock, rounds (the fewest of a ratio).
    """
    waiting = iter(models)
    _, model = next(waiting)
    images = images or model.vit_config  # type: ignore[assignment]
    assert images is not None
    with quiet_threads(device):
        first = model
        base = _Timed(Steps(first, task, recipe, device, images), images, budget_s=budget_s / max(arms, 1))

        @cache
        def as_ours() -> _Timed | None:
            try:
                ours = apply(first)
            except UserError:  # no reader knows it
                return None
            return _Timed(Steps(ours, task, recipe, device, images), images, base)

        found: dict[str, Any] = {}
        rounds: list[tuple[_Timed, dict[str, list[dict[str, float]]]]] = []
        end = time.monotonic() + budget_s
        for left in range(arms, 0, -1):
            name, model = next(waiting)
            library = _other_library(first, model)
            ours = as_ours() if library else None
            beside = ours or base
            arm = _Timed(Steps(model, task, recipe, device, images), images, base)
            seconds = max(0.0, end - time.monotonic()) / left
            both = {BASE: beside, name: arm}
            times = interleave({kind: kind for kind in base.calls}, list(both), _seconds_of(both), seconds)
            rounds.append((beside, times))
            found[name] = {**arm.ratios(name, beside, times), "against": _against(library, ours is not None)}
            del both, arm, model
        own = [times for beside, times in rounds if beside is base]
        kinds = {
            kind: [t[BASE] for times in own for t in times[kind]] or [base.seconds(kind) for _ in range(ROUNDS[0])]
            for kind in base.calls
        }
    return {
        "base": {
            "params": base.params,
            "macs": base.macs,
            **{f"{kind}_s": statistics.median(seconds) for kind, seconds in kinds.items()},
            "peak_memory_bytes": base.peak,
            "infer_memory_bytes": base.infer_peak,
            "train_batch": base.batches["train_step"],
            "infer_batch": base.batches["infer_n"],
        },
        "arms": found,
        "device": str(device),
        "threads": 1 if device.type == "cpu" else None,
        "clock": "CPU time" if device.type == "cpu" else "device events",
        "rounds": min(len(one) for _, times in rounds for one in times.values()),
    }


def _other_library(base: nn.Module, arm: nn.Module) -> str | None:
    """Name the library that builds base where vitmods builds the arm, so that ratios to base as it is trained would
    compare two implementations."""
    base, arm = (m.backbone if isinstance(m, TaskModel) else m for m in (base, arm))
    if isinstance(base, ViT) or not isinstance(arm, ViT):
        return None
    return type(base).__module__.partition(".")[0]


def _against(library: str | None, is_as_ours: bool) -> str | None:
    if library is None:
        return None
    if is_as_ours:
        return f"base is timed as vitmods builds it, like the arm, and trained as {library} builds it"
    return f"base is built by {library} and the arm by vitmods: the ratios hold that difference too"


class _Timed:
    """A model with a call for each kind of work; base says how large batches are, and how often a call is repeated: so
    that the fewest rounds of two models take `budget_s` seconds."""

    def __init__(self, steps: Steps, images: Base, base: _Timed | None = None, budget_s: float = math.inf):
        self._device = steps.device
        self.params, self.macs = count_params(steps.model), macs_of(steps.model, images)
        self.batches: dict[str, int] = base.batches if base else _batches(steps)
        self.peak = steps.peak(self.batches["train_step"])
        self.infer_peak = steps.infer_peak(self.batches["infer_n"])
        make = {"train_step": steps.train, "infer_1": steps.infer, "infer_n": steps.infer}
        self.calls: dict[str, Work] = {kind: make[kind](batch) for kind, batch in self.batches.items()}
        for call in self.calls.values():
            call()  # warm-up: kernels are chosen, optimizer state is made
        self.repeats: dict[str, int] = base.repeats if base else dict.fromkeys(self.calls, 1)
        if base is None:
            block_s = min(BLOCK_S, budget_s / (2 * len(self.calls) * ROUNDS[0]))
            self.repeats = {kind: max(1, round(block_s / max(self.seconds(kind), 1e-6))) for kind in self.calls}

    def seconds(self, kind: str) -> float:
        """Seconds per call."""
        return seconds_per_call(self.calls[kind], self.repeats[kind], self._device)

    def ratios(self, name: str, base: _Timed, rounds: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
        timed = {kind: asdict(Ratio.of_rounds([t[name] / t[BASE] for t in own])) for kind, own in rounds.items()}
        for kind in ("train_step", "infer_n"):
            timed[kind]["batch"] = self.batches[kind]
        memory, inference = self.peak / base.peak, self.infer_peak / base.infer_peak
        return {
            "params": self.params / base.params,
            "flops": self.macs / base.macs if self.macs and base.macs else None,
            **timed,
            "peak_memory": {**asdict(Ratio(memory, memory, memory)), "batch": self.batches["train_step"]},
            "infer_memory": {**asdict(Ratio(inference, inference, inference)), "batch": self.batches["infer_n"]},
        }


def _batches(steps: Steps) -> dict[str, int]:
    train = steps.fitting(steps.train, steps.recipe.part_size, CALL_S, LEAST)
    return {"train_step": train, "infer_1": 1, "infer_n": steps.fitting(steps.infer, LARGE_BATCH, CALL_S)}


def _seconds_of(timed: Mapping[str, _Timed]) -> Callable[[str, str], float]:
    return lambda kind, name: timed[name].seconds(kind)


PART_ON_CPU = 16  # images: more at once are no faster on a CPU and need more memory
STEP_S = 20.0  # a step that takes longer is cut short after some of its parts, the others taking as long


@dataclass(frozen=True)
class Rehearsal:
    """Seconds and bytes of one optimizer step."""

    part: int
    """images that are on the device at once"""
    parts: int
    """of a batch"""
    computed: int
    """of those, in the step that was timed"""
    part_s: float
    """forward and backward of a part"""
    update_s: float
    """clipping, optimizer and moving average"""
    peak: int
    """most bytes of tensors at once"""

    @property
    def step_s(self) -> float:
        return self.parts * self.part_s + self.update_s


def rehearse(config: ViTConfig, recipe: Recipe, device: torch.device, task: str = DEFAULT) -> Rehearsal:
    """Make two steps; the first gives the memory, the second the time.

    Where the recipe does not cut its batches, they are cut into parts that fit: halves until they do on a GPU, 16
    images on a CPU.

    Raises:
        UserError: one image, or a part of the size that the recipe says, does not fit the memory of the device.
    """
    part = recipe.part_size if recipe.accumulate > 1 or device.type != "cpu" else min(PART_ON_CPU, recipe.part_size)
    while True:
        try:
            made = make_task(task, recipe)
            backbone = vit(config) if made.uses_head else without_head(vit(config))
            model = made.wrap(backbone, config.num_classes)
            freeze(model, recipe)
            steps, parts = Steps(model, made, recipe, device, config), -(-recipe.batch_size // part)
            peak = steps.peak(part, min(2, parts))
            return Rehearsal(part, parts, *steps.timed(part, parts, STEP_S), peak)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if recipe.accumulate > 1 or part == 1:
                raise does_not_fit(part, device) from None
        torch.cuda.empty_cache()
        part = -(-part // 2)
