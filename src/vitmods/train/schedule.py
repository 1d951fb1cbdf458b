"""The learning rate as a function of the step."""

import math


def cosine_with_warmup(step: int, total: int, warmup: float, lr: float, min_lr: float = 0.0) -> float:
    """Learning rate of optimiser step `step` (the first is 0) of `total`.

    Linear warm-up from 0 over `warmup` steps, times half a cosine from `lr` to `min_lr` over the rest: the schedule of
    Loshchilov & Hutter (arXiv:1608.03983) as big_vision has it, so that step 0 has rate 0 if there is a warm-up.
    """
    progress = (step - warmup) / max(total - warmup, 1e-9)
    cosine = 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
    return min(1.0, step / warmup if warmup else 1.0) * (min_lr + (lr - min_lr) * cosine)
