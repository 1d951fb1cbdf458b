"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitmods.recipes.length import Resolved


def lr_at(length: Resolved, step: int) -> float:
    """Learning rate of optimizer step `step`, the first being 0.

    Of T steps, w of them warm-up, with p = (step - w) / (T - w) cut to [0, 1]:

    - `cosine`: min_lr + (lr - min_lr) (1 + cos(pi p)) / 2 (Loshchilov & Hutter, arXiv:1608.03983);
    - `linear`: min_lr + (lr - min_lr) (1 - p);
    - `poly`: min_lr + (lr - min_lr) (1 - p) ** power (Liu et al., arXiv:1506.04579);
    - `rsqrt`: lr / sqrt(1 + max(0, step - w) / timescale) (Zhai et al., arXiv:2106.04560);
    - `step`: lr / 10 ** (how many fractions of `step_at` of all T steps are behind it);
    - `epoch_cosine`: see `_epoch_cosine`.

    The warm-up goes in a line from warmup_lr at step 0, the cool-down multiplies by (T - step) / cooldown_steps.
    """
    rate = _epoch_cosine(length, step) if length.schedule == "epoch_cosine" else _warmed_up(length, step)
    if length.cooldown_steps:
        rate *= min(1.0, (length.steps - step) / length.cooldown_steps)
    return rate


def _warmed_up(length: Resolved, step: int) -> float:
    """All but `epoch_cosine`, with warm-up as big_vision has it."""
    fraction = min(1.0, step / length.warmup_steps if length.warmup_steps else 1.0)
    return length.warmup_lr + (_DECAYS[length.schedule](length, step) - length.warmup_lr) * fraction


def _progress(length: Resolved, step: int) -> float:
    done = (step - length.warmup_steps) / max(length.steps - length.warmup_steps, 1e-9)
    return min(max(done, 0.0), 1.0)


def _cosine(length: Resolved, step: int) -> float:
    fraction = 0.5 * (1 + math.cos(math.pi * _progress(length, step)))
    return length.min_lr + (length.lr - length.min_lr) * fraction


def _linear(length: Resolved, step: int) -> float:
    return length.min_lr + (length.lr - length.min_lr) * (1 - _progress(length, step))


def _poly(length: Resolved, step: int) -> float:
    left: float = (1 - _progress(length, step)) ** length.poly_power
    return length.min_lr + (length.lr - length.min_lr) * left


def _rsqrt(length: Resolved, step: int) -> float:
    return length.lr / math.sqrt(1 + max(0.0, step - length.warmup_steps) / length.rsqrt_timescale)


def _step(length: Resolved, step: int) -> float:
    return length.lr / math.pow(10, sum(step >= round(at * length.steps) for at in length.step_at))


_DECAYS: dict[str, Callable[[Resolved, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "poly": _poly,
    "rsqrt": _rsqrt,
    "step": _step,
}


def _epoch_cosine(length: Resolved, step: int) -> float:
    """The rate of DeiT's training, the same throughout an epoch.

    Its cosine begins with the training, under the warm-up and not after it, and its scheduler is stepped after each
    epoch by the number of that epoch: epoch e has the rate of e - 1, and epochs 0 and 1 have the first.
    """
    number = max(0, step // length.steps_per_epoch - 1)
    warmup = length.warmup_steps / length.steps_per_epoch
    if number < warmup:
        return length.warmup_lr + number * (length.lr - length.warmup_lr) / warmup
    return length.min_lr + 0.5 * (length.lr - length.min_lr) * (1 + math.cos(math.pi * number / length.epochs))
