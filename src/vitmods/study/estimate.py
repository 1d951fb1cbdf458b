"""What a study would take and could find, before it runs: time, disk, effects, and the seeds that fit a budget."""

from __future__ import annotations

import math
import os
import shlex
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn

from vitmods.bench import now, seconds_per_call
from vitmods.changes import Change, conflicts
from vitmods.data.dataset import independent
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs, count_params
from vitmods.model.names import MODELS, parse_name
from vitmods.recipes import Recipe
from vitmods.recipes.recipe import Schedule
from vitmods.recipes.schedule import resolve, resolve_on
from vitmods.stats.design import MOST_CHANGES, plan_factorial
from vitmods.stats.factorial import detectable as detectable_by
from vitmods.stats.gains import collapsed, has_learned
from vitmods.stats.plan import MOST, detectable, images_at_worst, resolution, sd_range, seeds_for, seeds_within
from vitmods.stats.sequential import LOOKS, NOMINAL, nominal_level
from vitmods.stats.verdict import POINTS
from vitmods.study.arms import BASE, Arm, is_foreign
from vitmods.study.bases import Base, macs_of, make_base
from vitmods.study.cost import Steps
from vitmods.study.executors import Keep
from vitmods.study.plan import AS_IS, MOST_SEEDS, Point, Settings, as_now
from vitmods.study.prepare import PreparedStudy, build_arms, parallel_trials, say, smallest_first
from vitmods.study.schedule import ENDLESS, Budget
from vitmods.study.state import Evaluated, StudyState, decision_at, evaluated_of
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, already_reported, answer_splits, base_config, task_of
from vitmods.train.device import does_not_fit, is_out_of_memory
from vitmods.train.device import resolve as device_of
from vitmods.train.options import RunOptions
from vitmods.util.errors import UserError
from vitmods.util.files import rendered
from vitmods.util.shorthand import without_options
from vitmods.util.text import duration, listing, plural, size

if TYPE_CHECKING:
    from vitmods.data import ImageDataset

T = TypeVar("T")
SEEDS = (3, 5, 8, 16)
WIDTH = 100  # of what is printed
LONG_S = 12 * 3600.0  # a night: a smaller study is proposed for one that takes longer


@dataclass(frozen=True)
class Spread:
    """sd:       of one trial, in points if the metric is a fraction, with `df` degrees of freedom
    source:   where it comes from
    disagree: fraction of the test images on which two trials of base disagree; NaN: unknown
    images:   number of test images; 0: unknown
    """

    sd: float
    df: float
    source: str
    disagree: float = math.nan
    images: int = 0


@dataclass(frozen=True)
class ArmEstimate:
    """One arm: sizes, seconds of a trial on average over the points that are tried, and the trials to be run. `macs` is
    None if unknown."""

    arm: str
    changes: str
    params: int
    macs: int | None
    step_s: float
    trial_s: float
    trials: int


@dataclass(frozen=True)
class Estimate:
    """The printed estimate of `vitmods compare --dry-run`.

    workers:      trials at a time, of which `parallel` do not slow each other down: on GPUs one each
    steps:        of a trial of base, under each setting of the sweep
    dataset:      split -> number of its images
    spread:       None: unknown
    test_images:  test images that verdicts are about, or groups of them if `grouped`; 0: without scores of images
    budget_s:     seconds that the study may take; None: unlimited
    suggestion:   a smaller study, if this one does not fit or takes long; else empty
    refused:      why no number of seeds fits the budget; None: one does
    factorial:    what a factorial design of the arms' changes would find; empty: it would not find more
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
    suggestion: str = ""
    refused: UserError | None = None
    factorial: str = ""
    keep_weights: Keep = "all"

    @property
    def finished(self) -> int:
        return self.settings.planned - sum(arm.trials for arm in self.arms)

    @property
    def each(self) -> int:
        """Trials of an arm with one seed, under one setting."""
        return len(self.settings.tune.points) if self.settings.same_seeds else 1

    def trials(self, seeds: int) -> list[int]:
        """Trials of each arm to be run in a study with so many seeds, of which the finished ones are the first. With 0
        seeds: the trials that points are chosen by."""
        more = self.each * (seeds - len(self.settings.seeds))
        return [max(0, arm.trials + more) for arm in self.arms]

    def seconds(self, seeds: int) -> float:
        """Seconds of these trials, `parallel` at a time, without the measurement of costs and the report."""
        return sum(arm.trial_s * n for arm, n in zip(self.arms, self.trials(seeds), strict=True)) / self.parallel

    @property
    def total_s(self) -> float:
        return self.seconds(len(self.settings.seeds))

    def weights_bytes(self, keep: Keep | None = None) -> int:
        """Bytes of the final weights that are kept of the trials to be run."""
        most = {"all": None, "best": 1, "none": 0}[keep or self.keep_weights]
        return sum(4 * arm.params * (arm.trials if most is None else min(arm.trials, most)) for arm in self.arms)

    @property
    def working_bytes(self) -> int:
        """More bytes while trials run: three checkpoints per worker (the last two, and one that is being written) of
        weights and Adam's state; in a tuned study also weights that wait for the choice."""
        checkpoints = self.workers * 3 * 12 * max((arm.params for arm in self.arms if arm.trials), default=0)
        is_tuned = len(self.settings.tune.points) > 1
        return checkpoints + (self.weights_bytes("all") - self.weights_bytes() if is_tuned else 0)

    @property
    def alpha(self) -> float:
        """The level of each look of a study until decided, or of the only one."""
        return nominal_level(len(self.settings.seeds)) if self.settings.until_decided else 0.05

    @property
    def unit(self) -> str:
        unit = self.settings.measure.metric.unit
        return "points" if unit == "%" else unit

    def finds(self, seeds: int, images_sd: float = 0.0) -> str:
        """The smallest effect that so many seeds find, in the metric's unit, or in sd of a trial if that is unknown."""
        sd, unit = (self.spread.sd, self.unit) if self.spread else (1.0, "sd of a trial")
        # Intervals are wider if seeds are tested on other parts of the images.
        overlap = self.dataset["test"] / self.dataset["train"] if self.settings.folds else 0.0
        effect = (detectable(self.settings.compared, seeds, self.alpha, round(images_sd / sd, 2)) * sd).effect
        return f"{effect * math.sqrt(1 + seeds * overlap):.2g} {unit}".rstrip()

    def decides(self) -> str:
        """Return `5 seeds of 4 arms and base in about 25 min find effects above about 1.2 points.`"""
        seeds, most = len(self.settings.seeds), "At most " * self.settings.until_decided
        arms = f"{plural(len(self.settings.arms), 'arm')} and base"
        plan = f"{most}{plural(seeds, 'seed')} of {arms} in about {duration(self.total_s)}"
        if self.settings.design:
            return f"{plan}."
        if self.spread is None:
            return f"{plan}; the effects that they can find are unknown: estimate them with --pilot."
        return f"{plan} find effects above about {self.finds(seeds)}."

    def __str__(self) -> str:
        is_named = any(arm.changes not in ("", arm.arm) for arm in self.arms)
        rows = [["arm", *["changes"] * is_named, "parameters", "GMACs", "trials", "s/step", "a trial"]]
        for arm in self.arms:
            sizes = f"{arm.params:,}", "unknown" if arm.macs is None else f"{arm.macs / 1e9:.3g}"
            times = str(arm.trials), f"{arm.step_s:.3g}", duration(arm.trial_s)
            rows.append([arm.arm, *[arm.changes] * is_named, *sizes, *times])
        splits = ", ".join(f"{count:,} {name}" for name, count in self.dataset.items())
        lengths = [f"{count:,} steps with {setting}" for setting, count in self.steps.items()]
        if len(counts := set(self.steps.values())) == 1:
            lengths = [f"{counts.pop():,} steps"]
        points = len(self.settings.tune.points)
        tried = f" Every arm is tried with {points} points of the grid." if points > 1 else ""
        done = f" ({self.finished} are finished)" if self.finished else ""
        lasts = f"about {duration(self.total_s)} of training, and the measurement of costs"
        other: Keep = "best" if self.keep_weights == "all" else "all"
        return "\n".join(
            [
                *_format_table(rows, 2 if is_named else 1),
                "",
                f"Images: {splits}. A trial has {listing(lengths)}.{tried}",
                f"{sum(arm.trials for arm in self.arms)} trials to run{done}, {self.workers} at a time: {lasts}.",
                f"Final weights that stay in the folder ({self.keep_weights}) take {size(self.weights_bytes())}; with "
                f"--keep-weights {other} {size(self.weights_bytes(other))}.",
                f"While trials run, checkpoints take up to {size(self.working_bytes)} more.",
                "",
                *self._effects_by_seeds(),
                *textwrap.wrap(self.factorial, WIDTH),
                *textwrap.wrap(str(self.refused or ""), WIDTH),
                *filter(None, [self.suggestion]),
            ]
        )

    def _effects_by_seeds(self) -> Iterator[str]:
        """Yield the effects that can be found by the number of seeds, and what it takes to show equivalence."""
        settings, spread, k = self.settings, self.spread, self.settings.compared
        if k < 1 or settings.design:  # whose effects are not those of runs
            return
        worst = 0.0  # sqrt of the images' part of the variance at worst
        if spread is None:
            yield "sd of a trial: unknown. --pilot trains four trials of base, which then count."
        else:
            low, high = sd_range(spread.sd, spread.df)
            yield f"sd of a trial: {spread.sd:.2g} {self.unit} (80 % range {low:.2g} to {high:.2g}), {spread.source}."
            if spread.images and settings.generalize != "seeds" and not settings.folds:
                worst = images_at_worst(spread.disagree, spread.images)
        rows = [["seeds", "time", "finds effects above", *["on other images, at worst"] * bool(worst)]]
        for seeds in SEEDS:
            effects = [self.finds(seeds), *[self.finds(seeds, worst)] * bool(worst)]
            rows.append([str(seeds), duration(self.seconds(seeds)), *effects])
        yield from _format_table(rows, 0)
        if self.test_images:
            text = resolution(self.test_images, self.grouped, settings.margin, k, self.alpha)
            yield from textwrap.wrap(text, WIDTH)
        if spread is None or not settings.margin or settings.folds:
            return
        claim = f"equivalent within {settings.margin:g} {self.unit}".rstrip()
        needed = seeds_for(settings.margin / spread.sd, k, self.alpha)
        if needed is None:
            yield f"{claim}: not feasible (> {MOST:,} seeds)."
            return
        beyond = self.budget_s is not None and self.seconds(needed) > self.budget_s
        limit = f"; not feasible (> {LOOKS[-1]} seeds)" if needed > LOOKS[-1] else "; more than the budget" * beyond
        yield f"{claim}: {needed} seeds, about {duration(self.seconds(needed))}{limit}."


def _format_table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Format a table, the first row as its head, the first `left` columns flush left, in at most WIDTH columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(rows[0]):
        is_text = number < left
        table.add_column(heading, overflow="fold", justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows[1:]:
        table.add_row(*row)
    return [line for line in rendered(table, WIDTH).splitlines() if line]


def estimate(study: PreparedStudy, budget: Budget, command: str | None, fixed: bool = False) -> Estimate:
    """Time every arm's steps and evaluation, and read the spread from finished trials.

    Unless seeds are `fixed`, as many are planned as fit the budget. If the study does not fit, or takes long, a smaller
    one is suggested. If trials of base are finished, their time replaces the estimate.

    command: the shell command that the suggestion changes; None: it is a Python call.
    """
    runner, dataset, options, settings = study.runner, study.dataset, study.options, study.settings
    facts, splits = runner.folder.facts(), answer_splits(settings, dataset)
    constant = facts.data.get("constant", {}) if facts else {}
    state = StudyState(runner.folder, settings, Evaluated(splits, constant))
    workers = study.workers(len(state.missing))
    stopwatch = Stopwatch(runner, device_of(options.device), max(1, torch.get_num_threads() // workers))
    timed: dict[tuple[str, Point], ArmEstimate] = {}
    rows = len(settings.every_arm) * len(settings.sweep.points)
    with already_reported():
        for point in smallest_first(settings, dataset.num_classes):
            for arm, model, recipe in build_arms(settings, point, dataset.num_classes):
                trials = [trial for trial in state.records if (trial.arm, trial.setting) == (arm, point)]
                points = [trial.point for trial in trials if not state.records[trial].ended]
                points += [AS_IS] * (settings.planned // rows - len(trials))  # their point is not chosen yet
                arm_time = timed[arm.name, point] = stopwatch.time(arm, model, recipe, points, point)
                times = f"{duration(arm_time.step_s)} a step, about {duration(arm_time.trial_s)} a trial"
                say(options, f"{len(timed):>3} of {rows}  {arm_time.arm}: {times}")
                del model  # before the next one is built
    arms = [timed[arm.name, point] for point in settings.sweep.points for arm in settings.every_arm]
    parallel = min(workers, parallel_trials(options))
    counted = state.tried if settings.same_seeds else state.answered
    first = [record for trial, record in counted.items() if trial.setting == settings.sweep.points[0]]
    walls = [record.wall_s for record in first if record.arm == BASE and record.status == "finished" and record.wall_s]
    if walls:
        factor = statistics.median(walls) / arms[0].trial_s
        arms, parallel = [replace(arm, trial_s=factor * arm.trial_s) for arm in arms], workers
    folder = None if runner.folder.path == Path(os.devnull) else runner.folder.path
    test_images, grouped = 0, False
    if settings.measure.name == "top1" and settings.generalize == "images" and not settings.folds:
        test_images, grouped = independent(dataset.splits[split] for split in splits)
    planned = Estimate(
        settings,
        tuple(arms),
        workers,
        parallel,
        {str(point): stopwatch.steps(point) for point in settings.sweep.points},
        {name: len(split) for name, split in dataset.splits.items()},
        known_spread(folder, state),
        test_images,
        grouped,
        budget.seconds,
        keep_weights=options.keep_weights,
    )
    planned = replace(planned, factorial=compare_with_factorial(planned, base_config(settings, dataset.num_classes)))
    if not fixed and budget != ENDLESS:
        planned = fit_to_budget(budget, planned)
    limit_s = LONG_S if budget.seconds is None else budget.seconds
    if planned.total_s <= limit_s:
        return planned
    return replace(planned, suggestion=suggest_smaller(planned, limit_s, command))


def estimate_trial(settings: Settings, options: RunOptions) -> ArmEstimate:
    """Time a trial of the last arm of the settings."""
    runner = TrialRunner(StudyFolder(os.devnull), settings, options)
    *_, (arm, model, recipe) = build_arms(settings, AS_IS, runner.dataset(settings.recipe).num_classes)
    with already_reported():
        return Stopwatch(runner, device_of(options.device), torch.get_num_threads()).time(arm, model, recipe)


def known_spread(path: Path | None, state: StudyState) -> Spread | None:
    """Estimate the spread from the studies next to this one with the same images, metric, base and recipe, or else from
    its own finished trials. None if neither has two trials of one arm."""
    expected = state.settings.to_dict()
    names = ("images", "metric", "base", "start", "task", "folds", "recipe")
    spreads: list[Spread] = []
    counted: set[tuple[int, float]] = set()
    for file in sorted(path.absolute().parent.glob("*/study.json")) if path else ():
        folder = StudyFolder(file.parent)
        try:
            facts = folder.facts()
            if facts is None or path is None or folder.path == path.absolute() or "sweep" in facts.settings:
                continue
            recorded = as_now(facts.settings)
            if any(recorded.get(name) != expected.get(name) for name in names):
                continue
            other = StudyState(folder, Settings.from_dict(facts.settings), evaluated_of(folder, facts))
            spread, scores = spread_of(other), set(_learned(other).items())
        except UserError:  # a damaged study, or one of another version
            continue
        if spread is not None and not scores <= counted:  # else a copy, or the same seeds of base again
            counted |= scores
            spreads.append(replace(spread, source=str(path.parent / folder.path.name)))
    if not spreads:
        return spread_of(state)
    df = sum(spread.df for spread in spreads)
    sd = math.sqrt(sum(spread.df * spread.sd**2 for spread in spreads) / df)
    with_images = next((spread for spread in spreads if spread.images), spreads[0])
    sources = ", ".join(spread.source for spread in spreads[:3])
    more = f" and {len(spreads) - 3} more" if len(spreads) > 3 else ""
    return Spread(sd, df, f"from {sources}{more}", with_images.disagree, with_images.images)


def spread_of(state: StudyState) -> Spread | None:
    """Estimate from the residuals of arms and seeds, or from base if only base has finished; without failed trials."""
    settings = state.settings
    base = {} if settings.sweep else _learned(state)
    if len(base) < 2:
        return None
    decision = decision_at(state, settings.seeds)
    sd, df, source = decision.sd, float(decision.df), "from this study's trials"
    if not df > 0:
        scale = POINTS if settings.measure.metric.unit == "%" else 1
        sd, df = scale * statistics.stdev(base.values()), float(len(base) - 1)
        source = f"from {plural(len(base), 'trial')} of base"
    if not sd > 0:
        return None
    images = [state.answered[trial].images for trial in state.answered if trial.arm.name == BASE and trial.seed in base]
    values = [scores.values for scores in images if scores is not None]
    if settings.folds or len(values) < 2 or not all(np.isin(scores, (0, 1)).all() for scores in values):
        return Spread(sd, df, source)  # folds have other images
    disagree = statistics.fmean(float(np.mean(scores != others)) for scores, others in combinations(values, 2))
    return Spread(sd, df, source, disagree, len(values[0]))


def _learned(state: StudyState) -> dict[int, float]:
    """Return seed -> score of the finished trials of base that are neither constant nor collapsed."""
    metric = state.settings.measure.metric
    records = (record for trial, record in state.answered.items() if trial.arm.name == BASE and not record.constant)
    scores = {record.seed: record.metrics[metric.name] for record in records if record.status == "finished"}
    chance, sign = state.images.constant.get(metric.name), 1 if metric.higher_is_better else -1
    values = sign * np.array([*scores.values()])
    if chance is None or not scores or not has_learned(values, np.zeros(len(values), bool), sign * chance, 0.0):
        return scores
    failed = collapsed(values[None], sign * chance)[0]
    return {seed: score for (seed, score), has_failed in zip(scores.items(), failed, strict=True) if not has_failed}


def compare_with_factorial(planned: Estimate, base: Base) -> str:
    """Describe a factorial design with about as many trials that finds smaller effects; empty if there is none, or if
    fewer than three arms are single changes of a ViT."""
    settings = planned.settings
    changes: dict[str, tuple[Change, ...]] = {}
    for arm in settings.arms:
        if [isinstance(change, Change) for change in arm.changes] == [True] and not arm.recipe and arm.start is None:
            changes[arm.name] = arm.changes  # type: ignore[assignment]
    k, seeds = len(settings.arms), len(settings.seeds)
    if not 3 <= len(changes) == k <= MOST_CHANGES or not isinstance(base, ViTConfig) or settings.tune:
        return ""
    try:
        design = plan_factorial(list(changes), conflicts(changes, base))
    except UserError:  # they do not go together
        return ""
    runs, trials = len(design.runs), (k + 1) * seeds
    repeats = max(2, round(trials / runs))
    together, alone = detectable_by(design, repeats).effect, detectable(k, seeds).effect
    if not together < alone:
        return ""
    sd, unit = (planned.spread.sd, planned.unit) if planned.spread else (1.0, "sd of a trial")
    return (
        f"{listing(list(design.changes))} go together: a factorial design (--design factorial) of {runs} runs x "
        f"{repeats} seeds, {runs * repeats} trials, finds effects above about {together * sd:.2g} {unit}; one at a "
        f"time, {trials} trials find {alone * sd:.2g}."
    )


USUAL_SEEDS, FEWEST = 5, 3
NEXT_SIZE = {"H": "L", "L": "B", "B": "S", "S": "Ti"}
SIDES = (384, 224, 160, 128, 96, 64, 48, 32)
FEWEST_PATCHES = 4  # per side
FEWEST_EPOCHS = 5


def fit_to_budget(budget: Budget, planned: Estimate) -> Estimate:
    """Plan the most seeds that fit; with `until_decided` the largest maximum of 8, 16 and 32 that fits.

    If fewer than three fit, or fewer than the first look needs, `refused` shows the arithmetic.
    """
    settings, k, per_seed = planned.settings, len(planned.settings.arms), planned.each
    least = LOOKS[0] if settings.until_decided else FEWEST

    def fits(seeds: int) -> bool:
        in_time = budget.seconds is None or planned.seconds(seeds) <= budget.seconds
        return in_time and (budget.trials is None or sum(planned.trials(seeds)) <= budget.trials)

    seeds = 0
    while seeds < MOST_SEEDS and fits(seeds + 1):
        seeds += 1
    try:
        if seeds < least and budget.seconds is not None:  # raises, with the arithmetic of all that the study takes
            base_s, *arms_s = (arm.trial_s * per_seed / planned.parallel for arm in planned.arms)
            seeds_within(budget.seconds - planned.seconds(0), base_s, statistics.fmean(arms_s), k, least)
        elif seeds < least:
            trials = (budget.trials or 0) - sum(planned.trials(0))
            seeds_within(trials, per_seed, per_seed, k, least, lambda count: plural(round(count), "trial"))
    except UserError as error:
        return replace(planned, refused=error)
    if settings.until_decided:
        seeds = max((most for most in NOMINAL if most <= seeds), default=seeds)
    arms = [replace(arm, trials=count) for arm, count in zip(planned.arms, planned.trials(seeds), strict=True)]
    return replace(planned, settings=settings.with_seeds(tuple(range(seeds))), arms=tuple(arms))


def suggest_smaller(planned: Estimate, limit_s: float, command: str | None) -> str:
    """Describe the first study that fits `limit_s` seconds, reducing seeds, then image size, base and epochs in turn.

    Its time follows from the measured one by multiply-adds and steps. Empty if even the smallest does not fit.

    command: the shell command to change; None: the study was started from Python.
    """
    settings, recipe, fixed = planned.settings, planned.settings.recipe, planned.settings.fixed
    options: dict[str, Any] = {}  # that differ, as the shell names them
    rows, columns = fixed["img_size"]

    def base_macs() -> int:
        """Multiply-adds of base; 0 for other libraries' models."""
        side = options.get("img-size")
        img_size = fixed["img_size"] if side is None else (side, side)
        config = make_base(options.get("base", fixed["base"]), 10, img_size, fixed["in_chans"])
        return count_macs(config) if isinstance(config, ViTConfig) else 0

    def reduced(option: str) -> Any:
        """The next smaller value of an option; None without any."""
        if option == "epochs":
            half = options.get("epochs", recipe.epochs) // 2
            with suppress(UserError):  # the warm-up would be as long
                if recipe.steps is None and half >= FEWEST_EPOCHS:
                    resolve(recipe.with_(epochs=half), 100 * recipe.batch_size)
                    return half
            return None
        base = options.get("base", fixed["base"])
        if not isinstance(base, str) or is_foreign(base) or base in MODELS or "start" in fixed:
            return None
        size, depth, branches, patch = parse_name(base)[:4]
        if option == "base":
            is_plain = depth is None and branches == 1 and size in NEXT_SIZE
            return f"{NEXT_SIZE[size]}/{patch}" if is_plain else None
        side = options.get("img-size", rows) if rows == columns else 0
        smaller = (new for new in SIDES if new < side and new % patch == 0 and new // patch >= FEWEST_PATCHES)
        return next(smaller, None)

    seeds, least, full_macs = len(settings.seeds), LOOKS[0] if settings.until_decided else FEWEST, base_macs()
    tuning = len(settings.tuning_trials()) / len(planned.arms) * (not settings.same_seeds)
    if seeds > USUAL_SEEDS and not settings.until_decided:
        seeds = options["seeds"] = USUAL_SEEDS
    reductions = ["img-size", "base", "epochs"]
    while True:
        fraction = float(options.get("epochs", recipe.epochs)) / recipe.epochs
        fraction *= base_macs() / full_macs if full_macs else 1.0
        # Finished trials do not count: those of another base or size are new ones.
        trials_s = (seeds * planned.each + tuning) * sum(arm.trial_s for arm in planned.arms)
        seconds = fraction * trials_s / planned.parallel
        if seconds <= limit_s:
            break
        if reductions:
            if (value := reduced(option := reductions.pop(0))) is not None:
                options[option] = value
                reductions.append(option)
        elif seeds > least:
            seeds = options["max-seeds" if settings.until_decided else "seeds"] = least
        else:
            return ""
    if not options:
        return ""
    if command is None:
        values = {name.replace("-", "_"): repr(value) for name, value in options.items()}
        if "epochs" in values:
            values["recipe"] = f"recipe.with_(epochs={values.pop('epochs')})"
        call = f"vm.Study(..., {', '.join(f'{name}={value}' for name, value in values.items())})"
    else:
        words = without_options(shlex.split(command), {"--dry-run", "--pilot", *(f"--{name}" for name in options)})
        call = shlex.join([*words, *(str(word) for name in options for word in (f"--{name}", options[name]))])
    return (
        f"The study takes about {duration(planned.total_s)}, more than {duration(limit_s)}. This one takes about "
        f"{duration(seconds)}:\n  {call}"
    )


CALL_S = 0.25  # batches are halved until a timed call takes at most about this long
TIMED_S = 0.3  # of steps, of every arm
SLOW_S = 1.0  # a measurement that takes so long is not repeated
LENGTH = {"epochs", "steps", "lr", "min_lr", "weight_decay", *(option.name for option in fields(Schedule))}
"""fields of a recipe that a step's time does not depend on"""


@dataclass(frozen=True)
class Pace:
    """Seconds that a model takes here: to train an image, to update, and to evaluate an image."""

    image_s: float
    update_s: float
    infer_s: float


@dataclass
class Stopwatch:
    """Times every arm of a study, one after the other: steps on noise, and once the reading of images that all share.

    Settings that differ only in the length of the training are timed once. On a CPU, arms on a second base are to that
    base what they are to the first one; on a GPU, its memory may not suffice, so each is tried.

    threads: those that a worker would have.
    """

    runner: TrialRunner
    device: torch.device
    threads: int
    _read_s: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    _paces: dict[tuple[str, str], Pace] = field(default_factory=dict)
    _batches: dict[str, tuple[int, int]] = field(default_factory=dict)

    def steps(self, setting: Point) -> int:
        """Count the steps of a training of base."""
        recipe = self.runner.settings.at(setting).recipe
        return resolve_on(recipe, self.runner.dataset(recipe, setting)).steps

    def time(
        self, arm: Arm, model: nn.Module, recipe: Recipe, points: Sequence[Point] = (), setting: Point = AS_IS
    ) -> ArmEstimate:
        """Time trials at these points; the model is trained a little. Raises UserError if a part of a batch does not
        fit."""
        settings = self.runner.settings.at(setting)
        dataset = self.runner.dataset(recipe, setting)
        images = base_config(settings, dataset.num_classes)
        macs, params = macs_of(model, images), count_params(model)
        timed_fields = [(name, value) for name, value in recipe.settings().items() if name not in LENGTH]
        place = repr((settings.fixed["base"], timed_fields))
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            if (arm.name, place) not in self._paces:
                self._paces[arm.name, place] = self.scale_pace(arm.name, place) or self._measured(
                    Steps(model, task_of(settings.fixed, recipe), recipe, self.device, images), recipe.part_size, place
                )
            read_s, read_one_s = self._read(dataset, recipe)
        except Exception as error:
            if is_out_of_memory(error):
                raise does_not_fit(recipe.part_size, self.device) from None
            raise
        finally:
            torch.set_num_threads(threads)
        pace = self._paces[arm.name, place]
        step_s = recipe.batch_size * pace.image_s + pace.update_s
        step_s = max(step_s, read_s) if self.runner.data_workers else step_s + read_s
        val, test = (len(dataset.splits[split]) for split in (dataset.val_split, dataset.eval_split))
        last = 0.0 if dataset.val_split == dataset.eval_split else test / len(self.runner.settings.tune.points)
        seconds = []
        for point in points or [AS_IS]:
            trained = settings.recipe_of(arm, point)  # its batch may differ from that of the timed steps
            length = resolve_on(trained, dataset)
            evaluated = length.evaluations(images=val) * val + last
            training_s = length.steps * step_s * trained.batch_size / recipe.batch_size
            seconds.append(training_s + evaluated * (pace.infer_s + read_one_s))
        name = ", ".join(filter(None, (str(setting), arm.name)))
        return ArmEstimate(name, arm.short, params, macs, step_s, statistics.fmean(seconds), len(points))

    def scale_pace(self, arm: str, place: str) -> Pace | None:
        """Derive an arm's pace on a CPU from base's, by how the two compare on the base that was timed first."""
        first = next(iter(self._paces), (BASE, place))[1]
        paces = [self._paces.get(key) for key in ((BASE, place), (arm, first), (BASE, first))]
        if self.device.type != "cpu" or None in paces:
            return None
        base, arm_at_first, base_at_first = ((pace.image_s, pace.update_s, pace.infer_s) for pace in paces if pace)
        return Pace(*(seconds * a / b for seconds, a, b in zip(base, arm_at_first, base_at_first, strict=True)))

    def _measured(self, steps: Steps, largest: int, place: str) -> Pace:
        if place not in self._batches:  # base's serve its arms
            train = steps.fitting(steps.train, largest, CALL_S, least=2)
            self._batches[place] = train, steps.fitting(steps.infer, largest, CALL_S)
        else:
            steps.timed(self._batches[place][0])
        part, count = self._batches[place]
        steps_s = _repeated(lambda: steps.timed(part))
        part_s, update_s = (statistics.median(timed[i] for timed in steps_s) for i in (1, 2))
        infer = steps.infer(count)
        infer_s = statistics.median(_repeated(lambda: seconds_per_call(infer, 1, self.device, wall=True)))
        return Pace(part_s / part, update_s, infer_s / count)

    def _read(self, dataset: ImageDataset, recipe: Recipe) -> tuple[float, float]:
        """Time the reading of a training batch and of an evaluated image; arms that read alike share them."""
        key = recipe.augment, recipe.task_parts, recipe.batch_size
        if key not in self._read_s:
            batch_size, split = recipe.batch_size, dataset.val_split
            batches = (
                batch
                for epoch in range(100)
                for batch in dataset.train_batches(seed=0, epoch=epoch, batch_size=batch_size)
            )
            train_s, eval_s = map(self._seconds_each, (batches, dataset.eval_batches(split, batch_size)))
            self._read_s[key] = train_s, eval_s / min(batch_size, len(dataset.splits[split]))
        return self._read_s[key]

    def _seconds_each(self, batches: Iterable[object]) -> float:
        """Return the median over a few batches; the first one may start threads."""
        seconds: list[float] = []
        begin = now(self.device)
        for _ in batches:
            end = now(self.device)
            seconds.append(end - begin)
            if len(seconds) > 1 and sum(seconds) > TIMED_S:
                break
            begin = end
        return statistics.median(seconds[1:] or seconds)


def _repeated(timed: Callable[[], T]) -> list[T]:
    """Measure twice, once if it takes seconds, and more often until TIMED_S seconds have passed."""
    begin, results = time.monotonic(), [timed()]
    while (took := time.monotonic() - begin) < TIMED_S or (len(results) < 2 and took < SLOW_S):
        results.append(timed())
    return results
