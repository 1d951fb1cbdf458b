"""What a study would take and could find, before it runs: time, disk, effects, and the seeds that fit a budget."""

from __future__ import annotations

import math
import os
import statistics
import textwrap
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from vitmods.data.dataset import independent
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.stats.gains import collapsed, has_learned
from vitmods.stats.sample_size import (
    SEARCHED_SEEDS,
    SHARED_DISAGREEMENT,
    USUAL_DISAGREEMENT,
    Findable,
    images_at_worst,
    resolution,
    sd_range,
    seeds_for,
    seeds_within,
    usual_sd,
)
from vitmods.stats.sequential import ALPHA, LOOK_SEEDS, MAXIMUM_SEEDS
from vitmods.stats.verdict import POINTS_PER_FRACTION
from vitmods.study.arms import BASE
from vitmods.study.budget import ENDLESS, MOST_FOR_COSTS, Budget, NotInTime, seconds_after_trials, slowdown
from vitmods.study.cells import MOST_SEEDS, Cell, Trial
from vitmods.study.design import DESIGNS
from vitmods.study.executors import Keep
from vitmods.study.frozen import times_at_other_sizes, trained_lines
from vitmods.study.grid import Point
from vitmods.study.prepare import (
    PreparedStudy,
    build_arms,
    build_cell,
    named_cell,
    parallel_trials,
    say,
    workers_for,
)
from vitmods.study.reuse import Pool
from vitmods.study.settings import Measure, Settings, as_now
from vitmods.study.state import Evaluated, StudyState
from vitmods.study.stopwatch import ArmEstimate, Stopwatch, as_a_worker
from vitmods.study.store import StudyFolder
from vitmods.study.tables import decision_at
from vitmods.study.trial import TrialRunner, already_reported, answer_splits, base_config
from vitmods.train.device import resolve as device_of
from vitmods.train.optim import freeze
from vitmods.train.options import RunOptions
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.files import rendered
from vitmods.util.text import Printed, duration, first_of, listing, plural, size

SEEDS = (3, 5, 8, 16)
WIDTH, TABLE_WIDTH = 80, 100  # of what is printed
LONG_S = 12 * 3600.0  # a night: a smaller study is proposed for one that takes longer
FEWEST = 3  # seeds of a given study that fits a budget
MARGIN = 0.03  # of a time budget: trials may be slower than the steps that were timed
MORE_MARGIN = 0.05  # for the seeds that a study needs; more are dropped if they are late
START_S = 10.0  # of workers: they import what they need and read the images
USUAL_DF = 3.0  # how sure the usual spread is


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
class Estimate(Printed):
    """The printed estimate of `vitmods compare --dry-run`.

    workers:      trials at a time, of which `parallel` do not slow each other down: on GPUs one each
    processes:    that train a trial together; on one device each, `alone` trials would not slow each other down
    steps:        of a trial of base, under each setting of the sweep
    dataset:      split -> number of its images
    spread:       None: unknown
    test_images:  test images that verdicts are about, or groups of them if `grouped`; 0: without scores of images
    budget_s:     seconds that the study may take; None: unlimited
    suggestion:   a smaller study, if this one does not fit or takes long; else empty
    refused:      why no number of seeds fits the budget; None: one does
    reserve_s:    seconds of the budget that trials may not take: start, costs, report, and a margin
    spent:        where the time of the budget went before the trials
    safe_seeds:   seeds that must not be late, so that more time is left; others may be dropped. None: all
    instead:      other designs that would find more
    reused:       study -> how many of the trials it has finished; saved_s: the seconds that this saves
    not_reused:   for an arm, the setting in which the nearest finished trial differs
    measures_costs: whether costs are measured after the trials
    frozen:       setting -> what the trained weights that base starts from reach without training
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
    instead: str = ""
    keep_weights: Keep = "all"
    reused: Mapping[str, int] = field(default_factory=dict)
    saved_s: float = 0.0
    finished: int = 0
    measures_costs: bool = True
    not_reused: tuple[str, ...] = ()
    reserve_s: float = 0.0
    spent: str = ""
    safe_seeds: int | None = None
    frozen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    processes: int = 1
    alone: int = 1

    @property
    def available_s(self) -> float:
        """Seconds of the budget for trials."""
        return math.inf if self.budget_s is None else self.budget_s - self.reserve_s

    def trials(self, seeds: int) -> list[int]:
        """Trials of each arm to be run in a study with so many seeds, of which the finished ones are the first. With 0
        seeds: the trials that points are chosen by."""
        more = seeds - len(self.settings.seeds)
        of_base_alone = len(self.settings.seeds_of(BASE)) - len(self.settings.seeds)  # beyond the seeds of the arms
        alone = (of_base_alone if arm.arm == BASE else 0 for arm in self.arms)
        each = zip(self.arms, self._each_seed, alone, strict=True)
        return [max(0, math.ceil(arm.trials + more * n - known)) for arm, n, known in each]

    @cached_property
    def _each_seed(self) -> list[float]:
        """How many trials a seed has of each arm, on average; base is also trained at the points that arms choose."""
        settings, places = self.settings, trials_by_cell(self.settings)
        matched = [settings.matched_points * (cell.arm.name == BASE) for cell in settings.cells]
        return [places[cell] / len(settings.seeds) + n for cell, n in zip(settings.cells, matched, strict=True)]

    def seconds(self, seeds: int) -> float:
        """Seconds of these trials, `parallel` at a time, without the measurement of costs and the report."""
        return sum(arm.trial_s * n for arm, n in zip(self.arms, self.trials(seeds), strict=True)) / self.parallel

    @property
    def total_s(self) -> float:
        return self.seconds(len(self.settings.seeds))

    @property
    def safe_s(self) -> float:
        """Seconds of the budget for trials that must not be late."""
        return self.available_s - MORE_MARGIN * (self.budget_s or 0.0)

    def in_time(self, seeds: int) -> bool:
        """Whether so many seeds fit the time budget."""
        safe = seeds if self.safe_seeds is None else min(seeds, self.safe_seeds)
        return self.seconds(safe) <= self.safe_s and self.seconds(seeds) <= self.available_s

    def check_fits(self) -> None:
        """Raise NotInTime if no number of seeds fits the budget."""
        if self.refused:
            raise NotInTime("\n".join(filter(None, (self.spent, str(self.refused), self.suggestion))))

    def weights_bytes(self, keep: Keep | None = None) -> int:
        """Bytes of the final weights that are kept of the trials to be run."""
        most = {"all": None, "best": 1, "none": 0}[keep or self.keep_weights]
        return sum(4 * arm.params * (arm.trials if most is None else min(arm.trials, most)) for arm in self.arms)

    @property
    def working_bytes(self) -> int:
        """More bytes while trials run: three checkpoints per worker (the last two, and one that is being written) of
        weights and Adam's state."""
        return self.workers * 3 * 12 * max((arm.params for arm in self.arms if arm.trials), default=0)

    @property
    def alpha(self) -> float:
        """The level of the last look of a study until decided, or of the only one."""
        return self.settings.design.last_level if self.settings.until_decided else ALPHA

    @property
    def unit(self) -> str:
        unit = self.settings.measure.metric.unit
        return "points" if unit == "%" else unit

    def findable(self, seeds: int, images_sd: float = 0.0) -> Findable:
        """Return the effects that so many seeds find, in the metric's unit, or in sd of a trial if that is unknown."""
        sd = self.spread.sd if self.spread else 1.0
        # Intervals are wider if seeds are tested on other parts of the images.
        overlap = self.dataset["test"] / self.dataset["train"] if self.settings.folds else 0.0
        effects = self.settings.design.findable(self.settings, seeds, self.alpha, round(images_sd / sd, 2))
        return effects * (sd * math.sqrt(1 + seeds * overlap))

    def finds(self, seeds: int, images_sd: float = 0.0) -> str:
        """Write the smallest of these effects."""
        unit = self.unit if self.spread else "sd of a trial"
        return f"{self.findable(seeds, images_sd).effect:.2g} {unit}".rstrip()

    def decides(self) -> str:
        """Return `5 seeds of 4 arms and base in about 25 min find effects above about 1.2 points; intervals are about
        +-0.9 points.`"""
        seeds, most = len(self.settings.seeds), "At most " * self.settings.until_decided
        arms = f"{plural(len(self.settings.arms), 'arm')} and base" if self.settings.arms else "base"
        plan = f"{most}{plural(seeds, 'seed')} of {arms} in about {duration(self.total_s)}"
        if not self.settings.arms:
            return f"{plan}."
        if self.spread is None:
            return f"{plan}; the effects that they can find are unknown: estimate them with --pilot."
        expected = self.findable(seeds, self.images_sd)
        effect, half = (f"{size:.2g} {self.unit}".rstrip() for size in (expected.effect, expected.half))
        return f"{plan} find effects above about {effect}; intervals are about ±{half}."

    @property
    def images_sd(self) -> float:
        """What the choice of test images is likely to add to the standard error of an effect."""
        disagree = self.spread.disagree if self.spread and self.spread.images else USUAL_DISAGREEMENT
        return images_at_worst(SHARED_DISAGREEMENT * disagree, self.test_images) if self.test_images else 0.0

    def __str__(self) -> str:
        is_named = any(arm.changes not in ("", arm.arm) for arm in self.arms)
        rows = [["arm", *["changes"] * is_named, "parameters", "GMACs", "trials", "s/step", "a trial"]]
        for arm in self.arms:
            sizes = f"{arm.params:,}", "unknown" if arm.macs is None else f"{arm.macs / 1e9:.3g}"
            times = str(arm.trials), f"{arm.step_s:.3g}", duration(arm.trial_s)
            rows.append([arm.arm, *[arm.changes] * is_named, *sizes, *times])
        splits = ", ".join(f"{count:,} {name}" for name, count in self.dataset.items())
        lengths = [f"{plural(count, 'step')} with {setting}" for setting, count in self.steps.items()]
        if len(counts := set(self.steps.values())) == 1:
            lengths = [plural(counts.pop(), "step")]
        points = len(self.settings.tune.points)
        tried = f" Every arm is tried with {points} points of the grid." if points > 1 else ""
        if self.settings.matched_points:
            tried += " Base is trained at the points that arms choose, too."
        done = f" ({self.finished} are finished)" if self.finished else ""
        at_most = "At most " * (self.settings.matched_points > 0)
        to_run = f"{at_most}{plural(sum(arm.trials for arm in self.arms), 'trial')} to run{done}"
        costs = ", and the measurement of costs" * self.measures_costs
        lasts = f"about {duration(self.total_s)} of training{costs}"
        other: Keep = "best" if self.keep_weights == "all" else "all"
        return "\n".join(
            [
                *_format_table(rows, 2 if is_named else 1),
                "",
                f"Images: {splits}. A trial has {listing(lengths)}.{tried}",
                f"{to_run}, {self.workers} at a time: {lasts}.",
                *textwrap.wrap(self._layouts(), WIDTH),
                *(part for line in trained_lines(self.settings, self.frozen) for part in textwrap.wrap(line, WIDTH)),
                *textwrap.wrap(times_at_other_sizes(self.settings), WIDTH),
                *self._trials_of_others(),
                f"Final weights that stay in the folder ({self.keep_weights}) take {size(self.weights_bytes())}; with "
                f"--keep-weights {other} {size(self.weights_bytes(other))}.",
                f"While trials run, checkpoints take up to {size(self.working_bytes)} more.",
                "",
                *self._effects_by_seeds(),
                *textwrap.wrap(self.instead, WIDTH),
                *textwrap.wrap(self.decides() if self.budget_s is not None and self.refused is None else "", WIDTH),
                *textwrap.wrap(str(self.refused or ""), WIDTH),
                *textwrap.wrap(self.suggestion, WIDTH),
            ]
        )

    def _layouts(self) -> str:
        """Compare trials on several devices with trials on one; empty for one."""
        if self.processes == 1:
            return ""
        alone_s = sum(arm.alone_s * arm.trials for arm in self.arms) / self.alone
        basis = "by finished trials" if self.finished else "derived from one device, without exchanging gradients"
        several = f"On {self.processes} devices per trial, {self.parallel} at a time: about {duration(self.total_s)}"
        return f"{several} ({basis}). On one, {self.alone} at a time, if a trial fits it: about {duration(alone_s)}."

    def _trials_of_others(self) -> Iterator[str]:
        """Yield which trials are not trained again, and why others are."""
        if self.reused:
            places = listing([f"{study} ({count})" for study, count in self.reused.items()])
            yield (
                f"Trained already, in {places}: {plural(sum(self.reused.values()), 'trial')}, which saves about "
                f"{duration(self.saved_s)}."
            )
        for reason in self.not_reused:
            yield from textwrap.wrap(reason, WIDTH, break_long_words=False, break_on_hyphens=False)

    def _effects_by_seeds(self) -> Iterator[str]:
        """Yield the effects that can be found by the number of seeds, and what it takes to show equivalence."""
        settings, spread, k = self.settings, self.spread, self.settings.compared
        if k < 1:
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
        if not settings.design.compares_arms:
            return
        if self.test_images:
            n = max(len(settings.seeds), FEWEST)
            half = self.findable(n, self.images_sd).half if spread else None
            is_usual = spread is not None and spread.df == USUAL_DF and not spread.images
            text = resolution(self.test_images, self.grouped, settings.margin, k, n, None if is_usual else half)
            yield from textwrap.wrap(text, WIDTH)
        if spread is None or not settings.margin or settings.folds:
            return
        claim = f"equivalent within {settings.margin:g} {self.unit}".rstrip()
        needed = seeds_for(settings.margin / spread.sd, k, self.alpha)
        if needed is None:
            yield f"{claim}: not feasible (> {SEARCHED_SEEDS:,} seeds)."
            return
        beyond = self.budget_s is not None and self.seconds(needed) > self.budget_s
        most = LOOK_SEEDS[-1]
        limit = f"; not feasible (> {most} seeds)" if needed > most else "; more than the budget" * beyond
        yield f"{claim}: {needed} seeds, about {duration(self.seconds(needed))}{limit}."


def _format_table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Format a table, the first row as its head, the first `left` columns flush left, TABLE_WIDTH at most."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(rows[0]):
        is_text = number < left
        table.add_column(heading, overflow="fold", justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows[1:]:
        table.add_row(*row)
    return [line for line in rendered(table, TABLE_WIDTH).splitlines() if line]


def estimate(
    study: PreparedStudy,
    budget: Budget,
    command: str | None,
    least: int = FEWEST,
    pool: Pool | None = None,
    stopwatch: Stopwatch | None = None,
    quiet: bool = False,
) -> Estimate:
    """Time every arm's steps and evaluation, and read the spread from finished trials.

    Unless their number is settled, as many seeds are planned as fit the budget, `least` or more. If the study does not
    fit, or takes long, a smaller one is suggested. If trials of base are finished, their time replaces the estimate.

    command: the shell command that suggestions are written for; None: it is a Python call.
    pool: trials that other studies have finished.
    stopwatch: what was timed before; it times the rest.
    quiet: whether the times are printed already, of another length of the training.
    """
    runner, dataset, options, settings = study.runner, study.dataset, study.options, study.settings
    facts, splits = runner.folder.facts(), answer_splits(settings, dataset)
    constant = facts.data.get("constant", {}) if facts else {}
    sizes = (len(dataset.splits["test"]), len(dataset.splits["train"])) if settings.folds else None
    state = StudyState(runner.folder, settings, Evaluated(splits, constant, sizes=sizes))
    workers = study.workers(len(state.missing))
    parallel = min(workers, parallel_trials(options))
    on_one = replace(options, devices_per_trial=None, shard=False, workers=None)
    alone = min(workers_for(on_one, len(state.missing), study.trial_bytes), parallel_trials(on_one))
    reused = pool.find(state.missing) if pool else {}
    stopwatch = stopwatch or Stopwatch(runner, device_of(options.device), budget, options.processes)
    stopwatch.runner = runner
    timed = _time_arms(study, state, stopwatch, parallel, reused, quiet)
    arms = [timed[cell] for cell in settings.cells]
    first = [record for trial, record in state.answered.items() if trial.setting == settings.sweep.points[0]]
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
        {str(setting): runner.steps(settings.cell(BASE, setting)) for setting in settings.sweep.points},
        {name: len(split) for name, split in dataset.splits.items()},
        known_spread(folder, state) or usual_spread(test_images),
        test_images,
        grouped,
        budget.seconds,
        keep_weights=options.keep_weights,
        frozen=study.frozen,
        processes=options.processes,
        alone=alone,
        reused=Counter(named(finished.study.path) for finished in reused.values()),
        finished=sum(record.ended for record in state.records.values()),
        measures_costs=bool(settings.arms) and options.cost_seconds > 0,
        saved_s=sum(timed[settings.cell(trial.arm.name, trial.setting)].trial_s for trial in reused) / parallel,
        not_reused=tuple(pool.nearest(trial for trial in state.missing if trial not in reused)) if pool else (),
    )
    if budget.seconds is not None:
        slower = slowdown()
        after_s = seconds_after_trials(budget, options.cost_seconds * len(settings.sweep.points), slower)
        start_s = (workers > 1) * min(START_S * slower, MOST_FOR_COSTS * budget.seconds)
        reserve_s = budget.seconds - budget.left_s + MARGIN * budget.seconds + start_s + after_s
        planned = replace(planned, reserve_s=reserve_s, spent=budget.spent())
    base = base_config(settings.cells[0], dataset.num_classes)
    sd, unit = (planned.spread.sd, planned.unit) if planned.spread else (1.0, "sd of a trial")
    proposals = (design.instead(settings, base, sd, unit) for design in DESIGNS.values() if design != settings.kind)
    planned = replace(planned, instead=" ".join(filter(None, proposals)))
    if not settings.is_settled and budget != ENDLESS:
        planned = fit_to_budget(budget, planned, least)
    fits = planned.total_s <= LONG_S if budget.seconds is None else planned.in_time(len(planned.settings.seeds))
    return planned if fits else replace(planned, suggestion=_smaller(planned, budget, least, command is not None))


def _time_arms(
    study: PreparedStudy, state: StudyState, stopwatch: Stopwatch, parallel: int, reused: Container[Trial], quiet: bool
) -> dict[Cell, ArmEstimate]:
    """Time a trial of each arm under each setting, with the trials that are to be run, but for those that are reused:
    other libraries' models first, then by their size."""
    settings, options, dataset = study.settings, study.options, study.dataset
    seeds, points, timed = len(settings.seeds), settings.tune.points, dict[Cell, ArmEstimate]()
    planned_of, for_tuning = trials_by_cell(settings), len(settings.seeds_for_tuning) * len(points)

    def macs(setting: Point) -> int:
        config = base_config(settings.cell(BASE, setting), dataset.num_classes)
        return count_macs(config) if isinstance(config, ViTConfig) else 0

    beside = parallel * options.processes if stopwatch.budget.may_time else 1
    with already_reported(), as_a_worker(stopwatch.device, beside, study.threads):
        for setting in sorted(settings.sweep.points, key=macs):
            is_open = any(state.selections[setting, arm.name].chosen is None for arm in settings.every_arm)
            for cell, model in build_arms(settings, setting, dataset.num_classes):
                trials = [trial for trial in state.records if (trial.arm, trial.setting) == (cell.arm, setting)]
                trained = [trial.cell for trial in trials if not state.records[trial].ended and trial not in reused]
                of_base = settings.matched_points * seeds if cell.arm.name == BASE and is_open else 0
                unchosen = planned_of[cell] + for_tuning + of_base - len(trials)  # trials whose point is not chosen yet
                arm = timed[cell] = stopwatch.time(cell, model, trained + [cell] * unchosen, len(points))
                if not quiet:
                    times = f"{duration(arm.step_s)} a step, about {duration(arm.trial_s)} a trial"
                    say(options, f"{len(timed):>3} of {len(settings.cells)}  {arm.arm}: {times}")
                del model  # before the next one is built
    return timed


def _smaller(planned: Estimate, budget: Budget, least: int, is_shell: bool) -> str:
    """Suggest what fits, where a study takes long or does not fit its budget."""
    if planned.refused is not None and budget.seconds and planned.settings.open >= {"base", "img_size", "epochs"}:
        used_s = budget.seconds - budget.left_s + (planned.workers > 1) * START_S
        needed_s = (planned.seconds(max(least, FEWEST)) + used_s) / (1 - MARGIN - MORE_MARGIN - 2 * MOST_FOR_COSTS)
        enough = f"{math.ceil(needed_s / 60)}m"
        enough = f"--budget {enough}" if is_shell else f'budget="{enough}"'
        return f"This is the smallest study that is tried; {enough} is enough for it."
    limit, names = "--budget 2h", "--base, --img-size and --epochs"
    if not is_shell:
        limit, names = 'budget="2h"', "base, img_size and recipe"
    return (
        f"The study takes about {duration(planned.total_s)}. A new one with {limit} and without {names} takes values "
        "that fit."
    )


def trials_by_cell(settings: Settings) -> Counter[Cell]:
    """Count the trials of arms under each setting that the answer counts, without those of base alone."""
    places = (place for place in settings.places() if place[2] in settings.seeds)
    return Counter(settings.cell(arm, setting) for setting, arm, _ in places)


def estimate_trial(cell: Cell, measure: Measure, options: RunOptions) -> ArmEstimate:
    """Time a trial of a cell."""
    runner = TrialRunner(StudyFolder(os.devnull), measure, options)
    classes = runner.dataset(cell).num_classes
    with already_reported():
        try:
            model = build_cell(cell, base_config(cell, classes), 0, classes)
            freeze(model, cell.recipe)
        except UserError as error:
            raise type(error)(named_cell(cell, error)) from error
        return Stopwatch(runner, device_of(options.device)).time(cell, model)


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
            if facts is None or path is None or folder.path.resolve() == path.resolve() or "sweep" in facts.settings:
                continue
            recorded = as_now(facts.settings)
            if any(recorded.get(name) != expected.get(name) for name in names):
                continue
            other = StudyState.of(folder, facts)
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
    sources = first_of([spread.source for spread in spreads], 3)
    return Spread(sd, df, f"from {sources}", with_images.disagree, with_images.images)


def usual_spread(test_images: int) -> Spread | None:
    """Estimate the spread of top-1 before any trial."""
    if not test_images:
        return None
    return Spread(usual_sd(test_images), USUAL_DF, f"usual for {test_images:,} test images; --pilot measures it")


def spread_of(state: StudyState) -> Spread | None:
    """Estimate from the residuals of arms and seeds, or from base if only base has finished; without failed trials."""
    settings = state.settings
    base = _learned(state)
    if len(base) < 2:
        return None
    sd, df, source = math.nan, 0.0, "from this study's trials"
    if settings.arms and not settings.sweep:
        decision = decision_at(state, settings.seeds)
        sd, df = decision.sd, float(decision.df)
    if not df > 0:
        scale = POINTS_PER_FRACTION if settings.measure.metric.unit == "%" else 1
        sd, df = scale * statistics.stdev(base.values()), float(len(base) - 1)
        source = f"from {plural(len(base) * len(settings.sweep.points), 'trial')} of base"
    if not sd > 0:
        return None
    images = [state.answered[trial].images for trial in state.answered if trial.arm.name == BASE and trial.seed in base]
    values = [scores.values for scores in images if scores is not None]
    if (
        settings.folds
        or settings.sweep
        or len(values) < 2
        or not all(np.isin(scores, (0, 1)).all() for scores in values)
    ):
        return Spread(sd, df, source)  # folds have other images
    disagree = statistics.fmean(float(np.mean(scores != others)) for scores, others in combinations(values, 2))
    return Spread(sd, df, source, disagree, len(values[0]))


def _learned(state: StudyState) -> dict[int, float]:
    """Return seed -> score of the finished trials of base that are neither constant nor collapsed; in a sweep, the mean
    over its settings."""
    metric = state.settings.measure.metric
    records = (record for trial, record in state.answered.items() if trial.arm.name == BASE and not record.constant)
    by_seed: dict[int, list[float]] = {}
    for record in records:
        if record.status == "finished":
            by_seed.setdefault(record.seed, []).append(record.metrics[metric.name])
    settings = len(state.settings.sweep.points)
    scores = {seed: statistics.fmean(values) for seed, values in by_seed.items() if len(values) == settings}
    chance, sign = state.images.constant.get(metric.name), 1 if metric.higher_is_better else -1
    values = sign * np.array([*scores.values()])
    if chance is None or not scores or not has_learned(values, np.zeros(len(values), bool), sign * chance, 0.0):
        return scores
    failed = collapsed(values[None], sign * chance)[0]
    return {seed: score for (seed, score), has_failed in zip(scores.items(), failed, strict=True) if not has_failed}


def fit_to_budget(budget: Budget, planned: Estimate, least: int = FEWEST) -> Estimate:
    """Plan the most seeds that fit; with `until_decided` the largest maximum of 8, 16 and 32 that fits (factorial: 8).

    If fewer than `least` fit, or fewer than the first look needs, `refused` shows the arithmetic.
    """
    settings, k = planned.settings, len(planned.settings.arms)
    looks = settings.design.look_seeds(settings)
    least = looks[0] if settings.until_decided else least
    safe = None if settings.until_decided or settings.tune else least
    planned = replace(planned, budget_s=budget.seconds, safe_seeds=safe)

    def fits(seeds: int) -> bool:
        return planned.in_time(seeds) and (budget.trials is None or sum(planned.trials(seeds)) <= budget.trials)

    seeds = 0
    while seeds < MOST_SEEDS and fits(seeds + 1):
        seeds += 1
    try:
        if seeds < least and budget.seconds is not None:  # raises, with the arithmetic of all that the study takes
            each_s = [arm.trial_s / planned.parallel for arm in planned.arms]
            base_s = sum(each_s[:: k + 1])  # base comes first at each setting of a sweep
            seeds_within(planned.safe_s - planned.seconds(0), base_s, (sum(each_s) - base_s) / k, k, least)
        elif seeds < least:
            trials = (budget.trials or 0) - sum(planned.trials(0))
            seeds_within(trials, 1, 1, k, least, lambda count: plural(round(count), "trial"))
    except UserError as error:
        return replace(planned, refused=error)
    if settings.until_decided:
        seeds = max((most for most in MAXIMUM_SEEDS if most <= min(seeds, looks[-1])), default=seeds)
    arms = [replace(arm, trials=count) for arm, count in zip(planned.arms, planned.trials(seeds), strict=True)]
    return replace(planned, settings=replace(settings, seeds=settings.first_seeds(seeds)), arms=tuple(arms))
