"""What fits a budget: so many seeds of a study, or a smaller one, as a command that can be copied."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.model.names import parse_name
from vitmods.recipes.length import resolve
from vitmods.stats.plan import seeds_within
from vitmods.stats.sequential import LOOKS, NOMINAL
from vitmods.study.bases import make_base
from vitmods.study.edits import is_foreign
from vitmods.study.plan import MOST_SEEDS, Settings
from vitmods.study.schedule import Budget
from vitmods.util.errors import UserError
from vitmods.util.shorthand import without_options
from vitmods.util.text import duration, plural

if TYPE_CHECKING:
    from vitmods.study.estimate import Estimate

SEEDS, FEWEST = 5, 3
SMALLER = {"H": "L", "L": "B", "B": "S", "S": "Ti"}
SIDES = (384, 224, 160, 128, 96, 64, 48, 32)
FEWEST_PATCHES = 4  # a side
FEWEST_EPOCHS = 5


@dataclass(frozen=True)
class Smaller:
    """options: of the shell, that differ from the study's; `seconds` is what the study would then take, about."""

    options: Mapping[str, Any]
    seconds: float
    of_s: float
    limit_s: float
    command: str | None

    def __str__(self) -> str:
        """One line that can be copied."""
        return (
            f"The study takes about {duration(self.of_s)}, more than {duration(self.limit_s)}. This one takes about "
            f"{duration(self.seconds)}:\n  {self._call()}"
        )

    def _call(self) -> str:
        if self.command is None:
            given = {name.replace("-", "_"): repr(value) for name, value in self.options.items()}
            if "epochs" in given:
                given["recipe"] = f"recipe.with_(epochs={given.pop('epochs')})"
            return f"vm.Study(..., {', '.join(f'{name}={value}' for name, value in given.items())})"
        words = list(
            without_options(
                shlex.split(self.command), {"--dry-run", "--pilot", *(f"--{name}" for name in self.options)}
            )
        )
        words += [str(word) for name, value in self.options.items() for word in (f"--{name}", value)]
        return shlex.join(words)


def planned_within(budget: Budget, estimate: Estimate) -> Estimate:
    """With the most seeds that fit; of a study that runs until it is decided, the largest maximum: 8, 16 or 32.

    Where fewer than three fit, or fewer than the first look takes, `refused` has the arithmetic.
    """
    settings, k, each = estimate.settings, len(estimate.settings.arms), estimate.each
    least = LOOKS[0] if settings.until_decided else FEWEST
    seeds = 0
    while seeds < MOST_SEEDS and _fits(budget, estimate, seeds + 1):
        seeds += 1
    try:
        if seeds < least and budget.seconds is not None:  # raises, with the arithmetic of all that the study takes
            base, *arms = (arm.trial_s * each / estimate.abreast for arm in estimate.arms)
            seeds_within(budget.seconds - estimate.tuning_s, base, statistics.fmean(arms), k, least)
        elif seeds < least:
            left = (budget.trials or 0) - estimate.tuning_trials
            seeds_within(left, each, each, k, least, lambda count: plural(round(count), "trial"))
    except UserError as error:
        return replace(estimate, refused=error)
    if settings.until_decided:
        seeds = max((most for most in NOMINAL if most <= seeds), default=seeds)
    return estimate.with_seeds(tuple(range(seeds)))


def _fits(budget: Budget, estimate: Estimate, seeds: int) -> bool:
    trials = sum(arm.left(estimate.each * seeds) for arm in estimate.arms) + estimate.tuning_trials
    return (budget.seconds is None or estimate.seconds(seeds) <= budget.seconds) and (
        budget.trials is None or trials <= budget.trials
    )


def smaller(estimate: Estimate, limit_s: float, command: str | None) -> Smaller | None:
    """The first study that fits into `limit_s` seconds as seeds, image size, base and epochs are made smaller by turns.

    Its time follows from the measured one by multiply-adds and steps. None where even the smallest does not fit.
    """
    settings, options = estimate.settings, dict[str, Any]()
    seeds, least = len(settings.seeds), LOOKS[0] if settings.until_decided else FEWEST
    first = _macs(settings, {})
    if seeds > SEEDS and not settings.until_decided:
        seeds = options["seeds"] = SEEDS
    knobs = [_image_size, _base, _epochs]
    while (seconds := _seconds(settings, estimate, options, seeds, first)) > limit_s:
        if knobs:
            knob = knobs.pop(0)
            if less := knob(settings, options):
                options |= less
                knobs.append(knob)
        elif seeds > least:
            seeds = options["max-seeds" if settings.until_decided else "seeds"] = least
        else:
            return None
    return Smaller(options, seconds, estimate.total_s, limit_s, command) if options else None


def _seconds(settings: Settings, estimate: Estimate, options: Mapping[str, Any], seeds: int, first: int) -> float:
    """From the beginning: trials of another base or size are others."""
    part = float(options.get("epochs", settings.recipe.epochs)) / settings.recipe.epochs
    if first:
        part *= _macs(settings, options) / first
    trials = seeds * estimate.each + len(settings.tuning_trials()) / len(estimate.arms) * (not settings.same_seeds)
    return part * trials * sum(arm.trial_s for arm in estimate.arms) / estimate.abreast


def _macs(settings: Settings, options: Mapping[str, Any]) -> int:
    """Of base; 0: not known of other libraries' models."""
    fixed = settings.fixed
    base, size = options.get("base", fixed["base"]), options.get("img-size")
    config = make_base(base, 10, fixed["img_size"] if size is None else (size, size), fixed["in_chans"])
    return count_macs(config) if isinstance(config, ViTConfig) else 0


def _image_size(settings: Settings, options: Mapping[str, Any]) -> dict[str, Any]:
    rows, columns = settings.fixed["img_size"]
    patch = _patch(settings)
    side = options.get("img-size", rows)
    if patch is None or rows != columns:
        return {}
    found = [one for one in SIDES if one < side and one % patch == 0 and one // patch >= FEWEST_PATCHES]
    return {"img-size": found[0]} if found else {}


def _base(settings: Settings, options: Mapping[str, Any]) -> dict[str, Any]:
    base = options.get("base", settings.fixed["base"])
    if _patch(settings) is None:
        return {}
    size, depth, parallel, patch, _ = parse_name(base)
    plain = depth is None and parallel == 1 and size in SMALLER
    return {"base": f"{SMALLER[size]}/{patch}"} if plain else {}


def _patch(settings: Settings) -> int | None:
    """The patch side of a base that is a ViT by its name, and has no weights to begin with."""
    base = settings.fixed["base"]
    if not isinstance(base, str) or is_foreign(base) or "start" in settings.fixed:
        return None
    try:
        return parse_name(base)[3]
    except UserError:
        return None


def _epochs(settings: Settings, options: Mapping[str, Any]) -> dict[str, Any]:
    recipe = settings.recipe
    half = options.get("epochs", recipe.epochs) // 2
    if recipe.steps is not None or half < FEWEST_EPOCHS:
        return {}
    try:
        resolve(recipe.with_(epochs=half), 100 * recipe.batch_size)
    except UserError:  # a warm-up that is as long
        return {}
    return {"epochs": half}
