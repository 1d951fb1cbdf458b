"""What a study would take and could find, before it is run."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from vitmods.changes import Change, conflicts
from vitmods.model.config import ViTConfig
from vitmods.stats.design import MOST_CHANGES, plan_factorial
from vitmods.stats.factorial import detectable as detectable_by
from vitmods.stats.plan import MOST, detectable, images_at_worst, resolution, sd_range, seeds_for
from vitmods.stats.sequential import LOOKS, nominal_level
from vitmods.study.arms import Arm
from vitmods.study.bases import Base
from vitmods.study.plan import Settings
from vitmods.study.spread import Spread
from vitmods.study.weights import Keep
from vitmods.util.errors import UserError
from vitmods.util.files import rendered
from vitmods.util.text import duration, listing, plural, size

if TYPE_CHECKING:
    from vitmods.study.fits import Smaller

SEEDS = (3, 5, 8, 16)
WIDTH = 100  # of what is printed
LONG_S = 12 * 3600.0  # a night: for a study that takes longer, what would take less is shown


@dataclass(frozen=True)
class ArmEstimate:
    """One arm: sizes, and seconds for a trial, on average over the points that are tried. `trials` are those that are
    still to be run, `finished` those of the study's seeds that are not; the evaluations on test that follow a choice
    are part of them."""

    arm: str
    changes: str
    params: int
    macs: int | None
    """None: not known of this model"""
    step_s: float
    trial_s: float
    trials: int
    finished: int = 0

    def left(self, trials: int) -> int:
        """How many of so many trials are not finished."""
        return max(0, trials - self.finished)


@dataclass(frozen=True)
class Estimate:
    """What `vitmods compare --dry-run` prints.

    steps:   of a trial of base, under each setting of the sweep
    workers: trials at a time, of which `abreast` do not slow each other down: on GPUs one each
    spread:  None: not known
    budget_s: seconds that the study may take; None: no end
    smaller: a study that takes less, where this one does not fit or takes long
    refused: why no number of seeds fits the budget; None: one does
    test_images: test images that verdicts are about, or groups of them if `grouped`; 0: scores are not of single images
    design:  what a factorial design of the arms' changes would find; empty: there is none
    """

    settings: Settings
    arms: tuple[ArmEstimate, ...]
    workers: int
    abreast: int
    steps: Mapping[str, int]
    dataset: Mapping[str, int]
    spread: Spread | None = None
    test_images: int = 0
    grouped: bool = False
    budget_s: float | None = None
    smaller: Smaller | None = None
    refused: UserError | None = None
    design: str = ""
    keep_weights: Keep = "all"

    def with_seeds(self, seeds: tuple[int, ...]) -> Estimate:
        """Of the same study with other seeds; the finished ones are among the first."""
        more = self.each * (len(seeds) - len(self.settings.seeds))
        arms = tuple(replace(arm, trials=max(0, arm.trials + more)) for arm in self.arms)
        return replace(self, settings=self.settings.with_seeds(seeds), arms=arms)

    @property
    def finished(self) -> int:
        return self.settings.planned - sum(arm.trials for arm in self.arms)

    @property
    def points(self) -> int:
        return len(self.settings.grid.points)

    @property
    def total_s(self) -> float:
        """Seconds for all trials, `abreast` at a time; the measurement of costs and the report come on top."""
        return sum(arm.trial_s * arm.trials for arm in self.arms) / self.abreast

    @property
    def each(self) -> int:
        """Trials of an arm with one seed, under one setting."""
        return self.points if self.settings.same_seeds else 1

    @property
    def tuning_trials(self) -> int:
        """Of those that are still to be run, which points are chosen by before the study's own seeds."""
        return sum(map(self._tuning, self.arms)) if self.settings.grid else 0

    @property
    def tuning_s(self) -> float:
        """Seconds for these."""
        return sum(arm.trial_s * self._tuning(arm) for arm in self.arms) / self.abreast

    def _tuning(self, arm: ArmEstimate) -> int:
        return arm.trials - arm.left(self.each * len(self.settings.seeds))

    def seconds(self, seeds: int) -> float:
        """Seconds for a study of so many seeds, without what is finished."""
        return sum(arm.trial_s * arm.left(self.each * seeds) for arm in self.arms) / self.abreast + self.tuning_s

    @property
    def alpha(self) -> float:
        """Of each look of a study that runs until it is decided."""
        settings = self.settings
        return nominal_level(len(settings.seeds)) if settings.until_decided else 0.05

    @property
    def images_sd(self) -> float:
        """sqrt of the images part at worst, in the unit of differences; 0: not known, or verdicts are not about it."""
        if self.spread is None or not self.spread.images or self.settings.generalize == "seeds" or self.settings.folds:
            return 0.0
        return images_at_worst(self.spread.disagree, self.spread.images)

    def weights_bytes(self, keep: Keep | None = None) -> int:
        """Of the final weights that stay of the trials that are still to be run."""
        most = {"all": None, "best": 1, "none": 0}[keep or self.keep_weights]
        return sum(4 * arm.params * (arm.trials if most is None else min(arm.trials, most)) for arm in self.arms)

    @property
    def working_bytes(self) -> int:
        """More that is taken while trials run: each worker's checkpoints, the last two and one that is being written,
        of weights and Adam's state; and of a tuned study weights that wait for the choice."""
        checkpoints = self.workers * 3 * 12 * max((arm.params for arm in self.arms if arm.trials), default=0)
        waiting = self.weights_bytes("all") - self.weights_bytes() if self.points > 1 else 0
        return checkpoints + waiting

    def decides(self) -> str:
        """What the plan finds, in a sentence: `5 seeds of 4 arms and base in about 25 min find effects above ...`."""
        seeds, k = len(self.settings.seeds), len(self.settings.arms)
        most = "At most " if self.settings.until_decided else ""
        plan = f"{most}{plural(seeds, 'seed')} of {plural(k, 'arm')} and base in about {duration(self.total_s)}"
        if self.settings.design:
            return f"{plan}."
        if self.spread is None:
            return f"{plan}; what they can find is not known yet: --pilot tells."
        found = detectable(k, seeds, self.alpha) * (self.spread.sd * self._wider(seeds))
        return f"{plan} find effects above about {found.effect:.2g} {self.unit}".rstrip() + "."

    @property
    def unit(self) -> str:
        unit = self.settings.measure.metric.unit
        return "points" if unit == "%" else unit

    def __str__(self) -> str:
        table = [["arm", "parameters", "GMACs", "trials", "s/step", "a trial"]]
        named = any(arm.changes not in ("", arm.arm) for arm in self.arms)
        if named:
            table[0].insert(1, "changes")
        for arm in self.arms:
            sizes = f"{arm.params:,}", "not known" if arm.macs is None else f"{arm.macs / 1e9:.3g}"
            record = [arm.arm, arm.changes] if named else [arm.arm]
            table.append([*record, *sizes, str(arm.trials), f"{arm.step_s:.3g}", duration(arm.trial_s)])
        splits = ", ".join(f"{count:,} {name}" for name, count in self.dataset.items())
        lasts = f"about {duration(self.total_s)} of training, and the measurement of costs"
        done = f" ({self.finished} are finished)" if self.finished else ""
        tried = f" Every arm is tried with {self.points} points of the grid." if self.points > 1 else ""
        return "\n".join(
            [
                *_drawn(table, 2 if named else 1),
                "",
                f"Images: {splits}. {self._lengths()}{tried}",
                f"{sum(arm.trials for arm in self.arms)} trials to run{done}, {self.workers} at a time: {lasts}.",
                self._disk(),
                "",
                *self._plan(),
                *textwrap.wrap(self.design, WIDTH),
                *textwrap.wrap(str(self.refused or ""), WIDTH),
                *([str(self.smaller)] if self.smaller else []),
            ]
        )

    def _lengths(self) -> str:
        """`A trial has 40 steps.`, or where settings differ in it the length of each."""
        counts = list(self.steps.values())
        if len(set(counts)) == 1:
            return f"A trial has {counts[0]:,} steps."
        return f"A trial has {listing([f'{count:,} steps with {setting}' for setting, count in self.steps.items()])}."

    def _disk(self) -> str:
        other: Keep = "best" if self.keep_weights == "all" else "all"
        return (
            f"Final weights that stay in the folder ({self.keep_weights}) take {size(self.weights_bytes())}; with "
            f"--keep-weights {other} {size(self.weights_bytes(other))}.\n"
            f"While trials run, checkpoints take up to {size(self.working_bytes)} more."
        )

    def _plan(self) -> Iterator[str]:
        """What the arms' effects must be to be found, by seeds."""
        k, sd = len(self.settings.arms), self.spread.sd if self.spread else 1.0
        if k < 1 or self.settings.design:  # whose effects are not those of runs
            return
        unit = self.unit if self.spread else "sd of a trial"
        if self.spread is None:
            yield "sd of a trial: unknown. --pilot trains four trials of base, which then count."
        else:
            low, high = sd_range(sd, self.spread.df)
            yield f"sd of a trial: {sd:.2g} {unit} (80 % range {low:.2g} to {high:.2g}), {self.spread.source}."
        heads = [["seeds", "time", "finds effects above"]]
        worst = self.images_sd
        if worst:
            heads[0].append("on other images, at worst")
        for seeds in SEEDS:
            parts = (0.0, round(worst / sd, 2)) if worst else (0.0,)
            found = (detectable(k, seeds, self.alpha, images) * (sd * self._wider(seeds)) for images in parts)
            shown = [f"{one.effect:.2g} {unit}".rstrip() for one in found]
            heads.append([str(seeds), duration(self.seconds(seeds)), *shown])
        yield from _drawn(heads, 0)
        yield from self._equivalent(k, sd)

    def _wider(self, seeds: int) -> float:
        """How much wider intervals are where seeds are tested on other parts of the images."""
        overlap = self.dataset["test"] / self.dataset["train"] if self.settings.folds else 0.0
        return math.sqrt(1 + seeds * overlap)

    def _equivalent(self, k: int, sd: float) -> Iterator[str]:
        margin = self.settings.margin
        if self.test_images:
            yield from textwrap.wrap(resolution(self.test_images, self.grouped, margin, k, self.alpha), WIDTH)
        if self.spread is None or not margin or self.settings.folds:
            return
        what = f"equivalent within {margin:g} {self.unit}".rstrip()
        seeds = seeds_for(margin / sd, k, self.alpha)
        if seeds is None:
            yield f"{what}: not feasible (> {MOST:,} seeds)."
            return
        beyond = self.budget_s is not None and self.seconds(seeds) > self.budget_s
        limit = f"; not feasible (> {LOOKS[-1]} seeds)" if seeds > LOOKS[-1] else "; more than the budget" * beyond
        yield f"{what}: {seeds} seeds, about {duration(self.seconds(seeds))}{limit}."


def _drawn(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of a table, the first row as its head, the first `left` columns flush left; at most 100 columns wide."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(rows[0]):
        names = number < left
        table.add_column(
            heading, justify="left" if names else "right", no_wrap=not names, overflow="fold" if names else "ellipsis"
        )
    for row in rows[1:]:
        table.add_row(*row)
    return [line for line in rendered(table, WIDTH).splitlines() if line]


def factorial_design(settings: Settings, config: Base, sd: float, unit: str) -> str:
    """What a factorial design would find with about as many trials; empty where fewer than three arms are single
    changes of a ViT."""
    changes = {arm.name: arm.changes for arm in settings.arms if _is_one_change(arm)}
    k, seeds = len(settings.arms), len(settings.seeds)
    if not 3 <= len(changes) == k <= MOST_CHANGES or not isinstance(config, ViTConfig) or settings.grid:
        return ""
    single = {name: cast("tuple[Change, ...]", one) for name, one in changes.items()}
    try:
        design = plan_factorial(list(single), conflicts(single, config))
    except UserError:  # they do not go together
        return ""
    runs, trials = len(design.runs), (k + 1) * seeds
    repeats = max(2, round(trials / runs))
    found, alone = detectable_by(design, repeats), detectable(k, seeds)
    if not found.effect < alone.effect:
        return ""
    return (
        f"{listing(list(design.changes))} go together: a factorial design (--design factorial) of {runs} runs x "
        f"{repeats} seeds, {runs * repeats} trials, finds effects above about {found.effect * sd:.2g} {unit}; one at a "
        f"time, {trials} trials find {alone.effect * sd:.2g}."
    )


def _is_one_change(arm: Arm) -> bool:
    return len(arm.changes) == 1 and isinstance(arm.changes[0], Change) and not arm.recipe and arm.start is None
