"""What a study would take and could find, before it runs: time, disk, effects, and the seeds that fit a budget."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from vitmods.bench import now, seconds_per_call
from vitmods.changes import Change, conflicts
from vitmods.data.dataset import independent
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs, count_params
from vitmods.model.names import parse_name
from vitmods.recipes import Recipe
from vitmods.recipes.recipe import Schedule
from vitmods.recipes.schedule import resolve, resolve_on
from vitmods.stats.design import MOST_CHANGES, plan_factorial
from vitmods.stats.factorial import detectable as detectable_by
from vitmods.stats.gains import collapsed, has_learned
from vitmods.stats.plan import MOST, detectable, images_at_worst, resolution, sd_range, seeds_for, seeds_within
from vitmods.stats.sequential import LOOKS, NOMINAL, nominal_level
from vitmods.stats.verdict import POINTS
from vitmods.study.answer import evaluated_of
from vitmods.study.arms import BASE, Arm, is_foreign
from vitmods.study.bases import Base, macs_of, make_base
from vitmods.study.cost import Steps
from vitmods.study.executors import Keep
from vitmods.study.plan import AS_IS, MOST_SEEDS, Point, Settings, as_now
from vitmods.study.schedule import Budget
from vitmods.study.scores import decision_at
from vitmods.study.state import StudyState, TrialRecord
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, answer_splits, base_config, task_of
from vitmods.train.device import does_not_fit, is_out_of_memory
from vitmods.util.errors import UserError
from vitmods.util.files import rendered
from vitmods.util.shorthand import without_options
from vitmods.util.text import duration, listing, plural, size

if TYPE_CHECKING:
    from vitmods.data import Batch, ImageDataset
    from vitmods.recipes.schedule import Resolved


@dataclass(frozen=True)
class Spread:
    """sd:       of one trial, in points where the metric is a fraction, with `df` degrees of freedom
    source:   where it comes from
    disagree: fraction of the test images on which two trials of base disagree; NaN: not known
    images:   how many test images there are; 0: not known
    """

    sd: float
    df: float
    source: str
    disagree: float = math.nan
    images: int = 0


def known_spread(path: Path | None, state: StudyState, length: Resolved) -> Spread | None:
    """Estimate the spread from studies beside this one with the same images, metric, base and recipe, or else from its
    own finished trials. None if neither has two trials of one arm."""
    studies = list(_comparable_spreads(path, state.settings, length)) if path else []
    if not studies:
        return _spread(state)
    df = sum(study.df for study in studies)
    sd = math.sqrt(sum(study.df * study.sd**2 for study in studies) / df)
    with_images = next((study for study in studies if study.images), studies[0])
    names = ", ".join(study.source for study in studies[:3])
    more = f" and {len(studies) - 3} more" if len(studies) > 3 else ""
    return Spread(sd, df, f"from {names}{more}", with_images.disagree, with_images.images)


def _comparable_spreads(path: Path, settings: Settings, length: Resolved) -> Iterator[Spread]:
    wanted, seen = settings.to_dict(), set[tuple[int, float]]()
    names = ("images", "metric", "base", "start", "task", "folds", "recipe")
    for file in sorted(path.absolute().parent.glob("*/study.json")):
        folder = StudyFolder(file.parent)
        try:
            facts = folder.facts()
            if facts is None or folder.path == path.absolute() or "sweep" in facts.settings:
                continue
            known = as_now(facts.settings)
            if any(known.get(name) != wanted.get(name) for name in names):
                continue
            if (facts.resolved.get("steps"), facts.resolved.get("images_seen")) != (length.steps, length.images_seen):
                continue
            state = StudyState(folder, Settings.from_dict(facts.settings), evaluated_of(folder, facts))
            spread = _spread(state)
            trials = {(trial.seed, _score(state, trial)) for trial in _learned(state)}
        except UserError:  # a damaged study, or one of another version
            continue
        if spread is not None and not trials <= seen:  # a copy, or the same seeds of base again
            seen |= trials
            yield replace(spread, source=str(path.parent / folder.path.name))


def _spread(state: StudyState) -> Spread | None:
    """Estimate from the residuals of arms and seeds, or from base if only base has finished; without failed trials."""
    settings, metric = state.settings, state.settings.measure.metric
    base = [] if settings.sweep else _learned(state)
    if len(base) < 2:
        return None
    decision = decision_at(state, settings.seeds)
    sd, df, source = decision.sd, decision.df, "from this study's trials"
    if not df > 0:
        sd = statistics.stdev(_score(state, trial) for trial in base) * (POINTS if metric.unit == "%" else 1)
        df, source = len(base) - 1, f"from {plural(len(base), 'trial')} of base"
    values = [trial.images.values for trial in base if trial.images is not None]
    if settings.folds or len(values) < 2 or not all(np.isin(scores, (0, 1)).all() for scores in values):
        return Spread(sd, float(df), source) if sd > 0 else None  # folds have other images
    disagree = statistics.fmean(float(np.mean(one != other)) for one, other in combinations(values, 2))
    return Spread(sd, float(df), source, disagree, len(values[0])) if sd > 0 else None


def _learned(state: StudyState) -> list[TrialRecord]:
    """List the finished trials of base that are neither constant nor collapsed."""
    records = [record for trial, record in state.answered.items() if trial.arm.name == BASE]
    trials = [record for record in records if record.status == "finished" and not record.constant]
    metric = state.settings.measure.metric
    chance, sign = state.images.constant.get(metric.name), 1 if metric.higher_is_better else -1
    if chance is None or not trials:
        return trials
    scores = sign * np.array([_score(state, trial) for trial in trials])
    if not has_learned(scores, np.zeros(len(scores), bool), sign * chance, 0.0):
        return trials
    failed = collapsed(scores[None], sign * chance)[0]
    return [trial for trial, has_failed in zip(trials, failed, strict=True) if not has_failed]


def _score(state: StudyState, trial: TrialRecord) -> float:
    return trial.metrics[state.settings.measure.metric.name]


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
    workers: trials at a time, of which `parallel` do not slow each other down: on GPUs one each
    spread:  None: not known
    budget_s: seconds that the study may take; None: no end
    suggestion: a study that takes less, where this one does not fit or takes long
    refused: why no number of seeds fits the budget; None: one does
    test_images: test images that verdicts are about, or groups of them if `grouped`; 0: scores are not of single images
    design:  what a factorial design of the arms' changes would find; empty: there is none
    """

    settings: Settings
    arms: tuple[ArmEstimate, ...]
    workers: int
    parallel: int
    steps: Mapping[str, int]
    dataset: Mapping[str, int]
    spread: Spread | None = None
    test_images: int = 0
    grouped: bool = False
    budget_s: float | None = None
    suggestion: Suggestion | None = None
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
        """Seconds for all trials, `parallel` at a time; the measurement of costs and the report come on top."""
        return sum(arm.trial_s * arm.trials for arm in self.arms) / self.parallel

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
        return sum(arm.trial_s * self._tuning(arm) for arm in self.arms) / self.parallel

    def _tuning(self, arm: ArmEstimate) -> int:
        return arm.trials - arm.left(self.each * len(self.settings.seeds))

    def seconds(self, seeds: int) -> float:
        """Seconds for a study of so many seeds, without what is finished."""
        return sum(arm.trial_s * arm.left(self.each * seeds) for arm in self.arms) / self.parallel + self.tuning_s

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
        found = detectable(self.family, seeds, self.alpha) * (self.spread.sd * self._wider(seeds))
        return f"{plan} find effects above about {found.effect:.2g} {self.unit}".rstrip() + "."

    @property
    def family(self) -> int:
        """How many arms intervals hold together over: those of the study, or those that it will have."""
        return max(self.settings.family, len(self.settings.arms))

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
                *([str(self.suggestion)] if self.suggestion else []),
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
        k, sd = self.family, self.spread.sd if self.spread else 1.0
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


USUAL_SEEDS, FEWEST = 5, 3
NEXT_SIZE = {"H": "L", "L": "B", "B": "S", "S": "Ti"}
SIDES = (384, 224, 160, 128, 96, 64, 48, 32)
FEWEST_PATCHES = 4  # per side
FEWEST_EPOCHS = 5


@dataclass(frozen=True)
class Suggestion:
    """A study that takes less time: `seconds` instead of `of_s`, for a limit of `limit_s`.

    options: of the shell, that differ from the study's
    command: of the study; None: it was started from Python
    """

    options: Mapping[str, Any]
    seconds: float
    of_s: float
    limit_s: float
    command: str | None

    def __str__(self) -> str:
        if self.command is None:
            values = {name.replace("-", "_"): repr(value) for name, value in self.options.items()}
            if "epochs" in values:
                values["recipe"] = f"recipe.with_(epochs={values.pop('epochs')})"
            call = f"vm.Study(..., {', '.join(f'{name}={value}' for name, value in values.items())})"
        else:
            replaced = {"--dry-run", "--pilot", *(f"--{name}" for name in self.options)}
            words = list(without_options(shlex.split(self.command), replaced))
            call = shlex.join([*words, *(str(w) for name, value in self.options.items() for w in (f"--{name}", value))])
        return (
            f"The study takes about {duration(self.of_s)}, more than {duration(self.limit_s)}. This one takes about "
            f"{duration(self.seconds)}:\n  {call}"
        )


def fit_to_budget(budget: Budget, estimate: Estimate) -> Estimate:
    """Plan the most seeds that fit; with `until_decided` the largest maximum of 8, 16 and 32 that fits.

    If fewer than three fit, or fewer than the first look needs, `refused` shows the arithmetic.
    """
    settings, k, each = estimate.settings, len(estimate.settings.arms), estimate.each
    least = LOOKS[0] if settings.until_decided else FEWEST

    def fits(seeds: int) -> bool:
        trials = sum(arm.left(each * seeds) for arm in estimate.arms) + estimate.tuning_trials
        return (budget.seconds is None or estimate.seconds(seeds) <= budget.seconds) and (
            budget.trials is None or trials <= budget.trials
        )

    seeds = 0
    while seeds < MOST_SEEDS and fits(seeds + 1):
        seeds += 1
    try:
        if seeds < least and budget.seconds is not None:  # raises, with the arithmetic of all that the study takes
            base, *arms = (arm.trial_s * each / estimate.parallel for arm in estimate.arms)
            seeds_within(budget.seconds - estimate.tuning_s, base, statistics.fmean(arms), k, least)
        elif seeds < least:
            trials = (budget.trials or 0) - estimate.tuning_trials
            seeds_within(trials, each, each, k, least, lambda count: plural(round(count), "trial"))
    except UserError as error:
        return replace(estimate, refused=error)
    if settings.until_decided:
        seeds = max((most for most in NOMINAL if most <= seeds), default=seeds)
    return estimate.with_seeds(tuple(range(seeds)))


def suggest_smaller(estimate: Estimate, limit_s: float, command: str | None) -> Suggestion | None:
    """Return the first study that fits `limit_s` seconds, reducing seeds, then image size, base and epochs in turn.

    Its time follows from the measured one by multiply-adds and steps. None if even the smallest does not fit.
    """
    settings, options = estimate.settings, dict[str, Any]()
    seeds, least = len(settings.seeds), LOOKS[0] if settings.until_decided else FEWEST
    full_macs = _base_macs(settings, {})
    tuning = len(settings.tuning_trials()) / len(estimate.arms) * (not settings.same_seeds)
    if seeds > USUAL_SEEDS and not settings.until_decided:
        seeds = options["seeds"] = USUAL_SEEDS
    reductions = [_smaller_images, _smaller_base, _fewer_epochs]
    while True:
        fraction = float(options.get("epochs", settings.recipe.epochs)) / settings.recipe.epochs
        if full_macs:
            fraction *= _base_macs(settings, options) / full_macs
        # Without what is finished: trials of another base or size are new ones.
        trials_s = (seeds * estimate.each + tuning) * sum(arm.trial_s for arm in estimate.arms)
        seconds = fraction * trials_s / estimate.parallel
        if seconds <= limit_s:
            return Suggestion(options, seconds, estimate.total_s, limit_s, command) if options else None
        if reductions:
            reduce = reductions.pop(0)
            if reduced := reduce(settings, options):
                options |= reduced
                reductions.append(reduce)
        elif seeds > least:
            seeds = options["max-seeds" if settings.until_decided else "seeds"] = least
        else:
            return None


def _base_macs(settings: Settings, options: Mapping[str, Any]) -> int:
    """Count the multiply-adds of base; 0 for models of other libraries."""
    fixed = settings.fixed
    base, side = options.get("base", fixed["base"]), options.get("img-size")
    config = make_base(base, 10, fixed["img_size"] if side is None else (side, side), fixed["in_chans"])
    return count_macs(config) if isinstance(config, ViTConfig) else 0


def _named_vit(settings: Settings, options: Mapping[str, Any]) -> tuple[str, int | None, int, int, Any] | None:
    """Parse the name of base; None if it is not a ViT by its name, or starts from trained weights."""
    base = settings.fixed["base"]
    if not isinstance(base, str) or is_foreign(base) or "start" in settings.fixed:
        return None
    try:
        return parse_name(options.get("base", base))
    except UserError:
        return None


def _smaller_images(settings: Settings, options: Mapping[str, Any]) -> dict[str, Any]:
    (rows, columns), name = settings.fixed["img_size"], _named_vit(settings, {})
    if name is None or rows != columns:
        return {}
    side, patch = options.get("img-size", rows), name[3]
    sides = [new for new in SIDES if new < side and new % patch == 0 and new // patch >= FEWEST_PATCHES]
    return {"img-size": sides[0]} if sides else {}


def _smaller_base(settings: Settings, options: Mapping[str, Any]) -> dict[str, Any]:
    if (name := _named_vit(settings, options)) is None:
        return {}
    size, depth, parallel, patch, _ = name
    is_plain = depth is None and parallel == 1 and size in NEXT_SIZE
    return {"base": f"{NEXT_SIZE[size]}/{patch}"} if is_plain else {}


def _fewer_epochs(settings: Settings, options: Mapping[str, Any]) -> dict[str, Any]:
    recipe = settings.recipe
    half = options.get("epochs", recipe.epochs) // 2
    if recipe.steps is not None or half < FEWEST_EPOCHS:
        return {}
    try:
        resolve(recipe.with_(epochs=half), 100 * recipe.batch_size)
    except UserError:  # the warm-up would be as long
        return {}
    return {"epochs": half}


T = TypeVar("T")
CALL_S = 0.25  # batches are halved until a timed call takes at most about this long
TIMED_S = 0.3  # of steps, of every arm
SLOW_S = 1.0  # a measurement that takes so long is not repeated
LENGTH = {"epochs", "steps", "lr", "min_lr", "weight_decay", *(field.name for field in dataclasses.fields(Schedule))}
"""fields of a recipe that a step's time does not depend on"""


def estimate(
    runner: TrialRunner,
    points: Sequence[Point],
    build: Callable[..., Iterable[tuple[Arm, nn.Module, Recipe]]],
    state: StudyState,
    workers: int,
    parallel: int,
    device: torch.device,
    say: Callable[[str], None],
) -> Estimate:
    """Time every arm's steps and evaluation, and read what is known of the spread.

    Args:
        runner: of the study; gives the images.
        points: the settings of the sweep, those of the smallest base first.
        build: gives every arm with its model and recipe under a setting, base first, and of those arms that
            `outlined` names shapes alone. The models are trained a little, and not kept.
        state: of the study, which may have finished trials. Where base has, their time takes the place of the estimate.
        workers: trials at a time.
        parallel: those that do not slow each other down.
        device: where the steps are made.
        say: takes a line an arm.
    """
    settings, found = runner.settings, {}
    rows = len(settings.every_arm) * len(settings.sweep.points)
    stopwatch = Stopwatch(runner, device, max(1, torch.get_num_threads() // workers))
    counted = state.tried if settings.same_seeds else state.answered
    for setting in points:
        for arm, model, recipe in build(setting, outlined=partial(stopwatch.knows, setting)):
            key = arm, setting
            own = {trial: record for trial, record in state.records.items() if (trial.arm, trial.setting) == key}
            tried = [trial.point for trial, record in own.items() if not record.ended]
            tried += [AS_IS] * ((settings.planned // rows) - len(own))  # their point is not chosen yet
            done = sum(record.ended for trial, record in counted.items() if (trial.arm, trial.setting) == key)
            timed = found[arm.name, setting] = stopwatch.time(arm, model, recipe, tried, done, setting)
            say(
                f"{len(found):>3} of {rows}  {timed.arm}: {duration(timed.step_s)} a step, about "
                f"{duration(timed.trial_s)} a trial"
            )
            del model
    arms = [found[arm.name, setting] for setting in settings.sweep.points for arm in settings.every_arm]
    walls = [
        record.wall_s
        for trial, record in counted.items()
        if trial.arm.name == BASE
        and trial.setting == settings.sweep.points[0]
        and record.status == "finished"
        and record.wall_s
    ]
    if walls:
        factor = statistics.median(walls) / arms[0].trial_s
        arms, parallel = [replace(arm, trial_s=factor * arm.trial_s) for arm in arms], workers
    dataset = runner.dataset(settings.recipe)
    length = resolve_on(settings.recipe, dataset)
    steps = {str(point): stopwatch.steps(point) for point in settings.sweep.points}
    path = state.folder.path
    spread = known_spread(None if path == Path(os.devnull) else path, state, length)
    sd, config = spread.sd if spread else 1.0, base_config(settings, dataset.num_classes)
    estimated = Estimate(
        settings,
        tuple(arms),
        workers,
        parallel,
        steps,
        {name: len(split) for name, split in dataset.splits.items()},
        spread,
    )
    if settings.measure.name == "top1" and settings.generalize == "images" and not settings.folds:
        count, grouped = independent(dataset.splits[split] for split in answer_splits(settings, dataset))
        estimated = replace(estimated, test_images=count, grouped=grouped)
    unit = estimated.unit if spread else "sd of a trial"
    return replace(estimated, design=factorial_design(settings, config, sd, unit))


@dataclass(frozen=True)
class Pace:
    """Seconds that a model takes here: to train an image, to update, and to evaluate an image."""

    image_s: float
    update_s: float
    infer_s: float

    def scaled(self, arm: Pace, base: Pace) -> Pace:
        """Of an arm on the base with this pace, by how arm and base compare elsewhere."""
        ratios = (getattr(arm, name) / getattr(base, name) for name in ("image_s", "update_s", "infer_s"))
        return Pace(*(own * ratio for own, ratio in zip(dataclasses.astuple(self), ratios, strict=True)))


class Stopwatch:
    """Times every arm of a study, one after the other: steps on noise, and once the reading of images that all share.

    What is known is not timed again: settings that differ in the length of the training, and, on a CPU, arms on a
    second base, which are to that base what they are to the first one.

    threads: those that a worker would have.
    """

    def __init__(self, runner: TrialRunner, device: torch.device, threads: int):
        self._runner, self._device, self._threads = runner, device, threads
        self._reading: dict[tuple[object, ...], tuple[float, float]] = {}
        self._paces: dict[tuple[str, str], Pace] = {}
        self._batches: dict[str, tuple[int, int]] = {}
        self._first = ""

    def knows(self, setting: Point, arm: Arm) -> bool:
        """Whether the arm under this setting needs not be timed."""
        return self._known(arm, self._place(arm, setting)) is not None

    def steps(self, setting: Point) -> int:
        """Of a training of base."""
        recipe = self._runner.settings.at(setting).recipe
        return resolve_on(recipe, self._runner.dataset(recipe, setting)).steps

    def _place(self, arm: Arm, setting: Point) -> str:
        """Base, and what of the arm's recipe a step depends on."""
        settings = self._runner.settings.at(setting)
        recipe = settings.recipe_of(arm).settings().items()
        return repr((settings.fixed["base"], [(name, value) for name, value in recipe if name not in LENGTH]))

    def _known(self, arm: Arm, place: str) -> Pace | None:
        if found := self._paces.get((arm.name, place)):
            return found
        base = self._paces.get((BASE, place))
        first = [self._paces.get((name, self._first)) for name in (arm.name, BASE)]
        if self._device.type != "cpu" or base is None or None in first:  # on a GPU memory may not suffice
            return None
        return base.scaled(*cast("list[Pace]", first))

    def time(
        self, arm: Arm, model: nn.Module, recipe: Recipe, points: Sequence[Point], finished: int, setting: Point = AS_IS
    ) -> ArmEstimate:
        """Of trials at these points. The model is trained a little. UserError where a part of a batch does not fit the
        device."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return self._time(arm, model, recipe, points, finished, setting)
        except Exception as error:
            if is_out_of_memory(error):
                raise does_not_fit(recipe.part_size, self._device) from None
            raise
        finally:
            torch.set_num_threads(threads)

    def _time(
        self, arm: Arm, model: nn.Module, recipe: Recipe, points: Sequence[Point], done: int, setting: Point
    ) -> ArmEstimate:
        settings = self._runner.settings.at(setting)
        dataset = self._runner.dataset(recipe, setting)
        images = base_config(settings, dataset.num_classes)
        macs, params = macs_of(model, images), count_params(model)
        place = self._place(arm, setting)
        self._first = self._first or place
        if next(model.parameters()).is_meta:
            pace = cast("Pace", self._known(arm, place))
        else:
            steps = Steps(model, task_of(settings.fixed, recipe), recipe, self._device, images)
            pace = self._paces[arm.name, place] = self._measured(steps, recipe.part_size, place)
        infer_s = pace.infer_s
        read_s, read_one_s = self._read(dataset, recipe)
        step_s = recipe.batch_size * pace.image_s + pace.update_s
        step_s = max(step_s, read_s) if self._runner.data_workers else step_s + read_s
        trial_s = statistics.fmean(
            self._trial_s(dataset, recipe, settings.recipe_of(arm, point), step_s, infer_s + read_one_s)
            for point in points or [AS_IS]
        )
        name = ", ".join(filter(None, (str(setting), arm.name)))
        return ArmEstimate(name, arm.short, params, macs, step_s, trial_s, len(points), done)

    def _measured(self, steps: Steps, largest: int, place: str) -> Pace:
        if place not in self._batches:  # base's serve its arms
            train = steps.fitting(steps.train, largest, CALL_S, least=2)
            self._batches[place] = train, steps.fitting(steps.infer, largest, CALL_S)
        else:
            steps.timed(self._batches[place][0])
        part, count = self._batches[place]
        timed = _repeated(lambda: steps.timed(part))
        part_s, update_s = (statistics.median(one[i] for one in timed) for i in (1, 2))
        infer = steps.infer(count)
        infer_s = statistics.median(_repeated(lambda: seconds_per_call(infer, 1, self._device, wall=True)))
        return Pace(part_s / part, update_s, infer_s / count)

    def _trial_s(self, dataset: ImageDataset, timed: Recipe, recipe: Recipe, step_s: float, image_s: float) -> float:
        """Seconds of a trial, where the steps of another recipe were timed; `image_s` to evaluate an image."""
        length = resolve_on(recipe, dataset)
        val, test = (len(dataset.splits[split]) for split in (dataset.val_split, dataset.eval_split))
        last = 0.0 if dataset.val_split == dataset.eval_split else test / len(self._runner.settings.grid.points)
        evaluated = length.evaluations(images=val) * val + last
        return length.steps * step_s * recipe.batch_size / timed.batch_size + evaluated * image_s

    def _read(self, dataset: ImageDataset, recipe: Recipe) -> tuple[float, float]:
        """Seconds to read a batch of the training, and an image of an evaluation; arms that read alike share them."""
        key = recipe.augment, recipe.task_parts, recipe.batch_size
        if key not in self._reading:
            batches = self._seconds_each(_batches(dataset, recipe.batch_size))
            split = dataset.val_split
            evaluated = self._seconds_each(dataset.eval_batches(split, recipe.batch_size))
            self._reading[key] = batches, evaluated / min(recipe.batch_size, len(dataset.splits[split]))
        return self._reading[key]

    def _seconds_each(self, batches: Iterator[Batch]) -> float:
        """The median over a few; the first one may start threads."""
        seconds: list[float] = []
        begin = now(self._device)
        for _ in batches:
            end = now(self._device)
            seconds.append(end - begin)
            if len(seconds) > 1 and sum(seconds) > TIMED_S:
                break
            begin = end
        return statistics.median(seconds[1:] or seconds)


def _repeated(timed: Callable[[], T]) -> list[T]:
    """Two measurements, one where it takes seconds, and more until TIMED_S seconds have passed."""
    begin = time.monotonic()
    found = [timed()]
    while (took := time.monotonic() - begin) < TIMED_S or (len(found) < 2 and took < SLOW_S):
        found.append(timed())
    return found


def _batches(dataset: ImageDataset, size: int) -> Iterator[Batch]:
    for epoch in range(100):
        yield from dataset.train_batches(seed=0, epoch=epoch, batch_size=size)
