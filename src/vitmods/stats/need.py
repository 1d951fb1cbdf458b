"""What it would take to decide an arm that is open: seeds, or test images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from vitmods.stats.plan import detectable, images_for, sd_range, seeds_can_decide
from vitmods.stats.sequential import LOOKS, nominal_level
from vitmods.stats.verdict import Effect, Verdict

MOST = LOOKS[-1]


@dataclass(frozen=True)
class Need:
    """What finds an effect of the size seen; where that is within the margin, what shows that nothing matters.

    seeds, low, high: for the spread seen, and over its 80 % range; None: more than the most of a study, 32
    images: test images, where no number of seeds would do; else 0
    """

    effect: Effect
    seeds: int | None = None
    low: int | None = None
    high: int | None = None
    images: int = 0

    def __str__(self) -> str:
        effect = self.effect
        size, unit = f"{abs(effect.effect):.{effect.digits}f}", f" {effect.shown_unit}".rstrip()
        if self.images:
            return f"more seeds cannot decide this: it takes about {self.images:,} test images"
        what = f"to find an effect of the size seen ({size}{unit})"
        if _is_small(effect):
            what = f"to rule out a difference of {effect.margin:g}{unit}"
        if self.seeds is None:
            return f"{what} takes more than {MOST} seeds: out of reach"
        return f"{what} takes about {self.seeds} seeds ({self.low} to {self.high or f'more than {MOST}'})"


def needed(effect: Effect) -> Need | None:
    """None for an arm that is decided, or of which too little is known yet.

    More seeds than were planned make a study one that is looked at twice, and its level is that of each look.
    """
    if effect.verdict != Verdict.OPEN or not (effect.sd > 0 and math.isfinite(effect.df)):
        return None
    k, small = effect.family, _is_small(effect)
    sought = effect.margin if small else abs(effect.effect)
    images_sd = effect.images_sd if effect.generalize == "images" and effect.images > 1 else 0.0
    if not seeds_can_decide(sought, images_sd, k, effect.alpha):
        return Need(effect, images=images_for(sought, images_sd, effect.images, k, effect.alpha))
    low, high = sd_range(effect.sd, effect.df)
    seeds, few, many = (_seeds(sought / sd, k, images_sd / sd, small, effect.n) for sd in (effect.sd, low, high))
    return Need(effect, seeds, few, many)


def _is_small(effect: Effect) -> bool:
    return abs(effect.effect) < effect.margin


@lru_cache(maxsize=1024)
def _seeds(sought: float, k: int, images_sd: float, equivalent: bool, done: int) -> int | None:
    """The fewest seeds, more than `done`, that find `sought`, in sd of one trial; None: more than 32."""

    def enough(n: int) -> bool:
        found = detectable(k, n, nominal_level(max(n, LOOKS[0])), round(images_sd, 1))
        return (found.equivalent if equivalent else found.effect) <= sought

    few, many = min(done, MOST), MOST
    if few == many or not enough(many):
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many
