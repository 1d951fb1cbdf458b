"""What each arm costs, as ratios to base, measured interleaved in one process (`vitmods.bench`)."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
from torch import nn

from vitmods.adapters.apply import apply
from vitmods.bench import BLOCK_S, ROUNDS, Ratio, Work, interleave, quiet_threads, seconds_per_call
from vitmods.model.flops import count_params
from vitmods.model.vit import ViT
from vitmods.recipes import Recipe
from vitmods.study.arms import BASE
from vitmods.study.bases import Base, macs_of
from vitmods.study.steps import Steps
from vitmods.tasks.base import Task, TaskModel
from vitmods.util.errors import UserError

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
