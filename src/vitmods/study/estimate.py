"""What a study would take and could find, before it is run: from a few timed steps and what is known of its spread."""

from __future__ import annotations

import math
import os
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import nn

from vitmods.analysis.timing import now, seconds_per_call
from vitmods.changes import Change, conflicts
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_params
from vitmods.recipes import Recipe
from vitmods.recipes.length import resolve_on
from vitmods.stats.design import MOST_CHANGES, plan_factorial
from vitmods.stats.factorial import detectable as detectable_by
from vitmods.stats.plan import MOST, detectable, images_at_worst, sd_range, seeds_for
from vitmods.stats.sequential import nominal_level
from vitmods.study.arms import BASE, Arm
from vitmods.study.bases import Base
from vitmods.study.models import macs_of
from vitmods.study.plan import Settings
from vitmods.study.spread import Spread, known_spread
from vitmods.study.state import StudyState
from vitmods.study.steps import Steps, does_not_fit
from vitmods.study.trial import TrialRunner, base_config, task_of
from vitmods.study.tuning import AS_IS, Point
from vitmods.study.weights import Keep
from vitmods.util.errors import UserError
from vitmods.util.text import duration, listing, plural, rendered, size

if TYPE_CHECKING:
    from vitmods.data import Batch, ImageDataset
    from vitmods.study.fits import Smaller

T = TypeVar("T")
CALL_S = 0.5  # batches are halved until a timed call takes at most about this long
TIMED_S = 0.3  # of steps, of every arm
SEEDS = (3, 5, 8, 16)
OUT_OF_REACH = 32  # seeds, the most of a study that runs until it is decided
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

    workers: trials at a time, of which `abreast` do not slow each other down: on GPUs one each
    spread:  None: not known
    budget_s: seconds that the study may take; None: no end
    smaller: a study that takes less, where this one does not fit or takes long
    refused: why no number of seeds fits the budget; None: one does
    design:  what a factorial design of the arms' changes would find; empty: there is none
    """

    settings: Settings
    arms: tuple[ArmEstimate, ...]
    workers: int
    abreast: int
    steps: int
    dataset: Mapping[str, int]
    spread: Spread | None = None
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
                f"Images: {splits}. A trial has {self.steps:,} steps.{tried}",
                f"{sum(arm.trials for arm in self.arms)} trials to run{done}, {self.workers} at a time: {lasts}.",
                self._disk(),
                "",
                *self._plan(),
                *textwrap.wrap(self.design, WIDTH),
                *textwrap.wrap(str(self.refused or ""), WIDTH),
                *([str(self.smaller)] if self.smaller else []),
            ]
        )

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
        if self.spread is None or not margin or self.settings.folds:
            return
        what = f"equivalent within {margin:g} {self.unit}".rstrip()
        seeds = seeds_for(margin / sd, k, self.alpha, equivalent=True)
        if seeds is None:
            yield f"{what}: more than {MOST:,} seeds; out of reach."
            return
        beyond = seeds > OUT_OF_REACH or (self.budget_s is not None and self.seconds(seeds) > self.budget_s)
        reach = "; out of reach" if beyond else ""
        yield f"{what}: {seeds} seeds, about {duration(self.seconds(seeds))}{reach}."


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


def estimate(
    runner: TrialRunner,
    built: Iterable[tuple[Point, Arm, nn.Module, Recipe]],
    state: StudyState,
    workers: int,
    abreast: int,
    device: torch.device,
    say: Callable[[str], None],
) -> Estimate:
    """Time every arm's steps and evaluation, and read what is known of the spread.

    Args:
        runner: of the study; gives the images.
        built: every arm's model and recipe under each setting, base first; trained a little, and not kept.
        state: of the study, which may have finished trials. Where base has, their time takes the place of the estimate.
        workers: trials at a time.
        abreast: those that do not slow each other down.
        device: where the steps are made.
        say: takes a line an arm.
    """
    settings, arms = runner.settings, []
    rows = len(settings.every_arm) * len(settings.sweep.points)
    stopwatch = Stopwatch(runner, device, max(1, torch.get_num_threads() // workers))
    counted = state.tried if settings.same_seeds else state.answered
    for number, (setting, arm, model, recipe) in enumerate(built, 1):
        own = {trial: record for trial, record in state.records.items() if (trial.arm, trial.setting) == (arm, setting)}
        points = [trial.point for trial, record in own.items() if not record.ended]
        points += [AS_IS] * ((settings.planned // rows) - len(own))  # their point is not chosen yet
        done = sum(record.ended for trial, record in counted.items() if (trial.arm, trial.setting) == (arm, setting))
        timed = stopwatch.time(arm, model, recipe, points, done, setting)
        say(
            f"{number:>3} of {rows}  {timed.arm}: {duration(timed.step_s)} a step, about "
            f"{duration(timed.trial_s)} a trial"
        )
        arms.append(timed)
        del model
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
        arms, abreast = [replace(arm, trial_s=factor * arm.trial_s) for arm in arms], workers
    dataset = runner.dataset(settings.recipe)
    length = resolve_on(settings.recipe, dataset)
    path = state.folder.path
    spread = known_spread(None if path == Path(os.devnull) else path, state, length)
    sd, config = spread.sd if spread else 1.0, base_config(settings, dataset.num_classes)
    found = Estimate(
        settings,
        tuple(arms),
        workers,
        abreast,
        length.steps,
        {name: len(split) for name, split in dataset.splits.items()},
        spread,
    )
    return replace(found, design=factorial_design(settings, config, sd, found.unit if spread else "sd of a trial"))


class Stopwatch:
    """Times every arm of a study, one after the other: steps on noise, and once the reading of images that all share.

    threads: those that a worker would have.
    """

    def __init__(self, runner: TrialRunner, device: torch.device, threads: int):
        self._runner, self._device, self._threads = runner, device, threads
        self._reading: dict[tuple[object, int], tuple[float, float]] = {}

    def time(
        self, arm: Arm, model: nn.Module, recipe: Recipe, points: Sequence[Point], finished: int, setting: Point = AS_IS
    ) -> ArmEstimate:
        """Of trials at these points. The model is trained a little. UserError where a part of a batch does not fit the
        device."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return self._time(arm, model, recipe, points, finished, setting)
        except torch.OutOfMemoryError:
            raise does_not_fit(recipe.part_size, self._device) from None
        finally:
            torch.set_num_threads(threads)

    def _time(
        self, arm: Arm, model: nn.Module, recipe: Recipe, points: Sequence[Point], done: int, setting: Point
    ) -> ArmEstimate:
        settings = self._runner.settings.at(setting)
        dataset = self._runner.dataset(recipe, setting)
        images = base_config(settings, dataset.num_classes)
        macs, params = macs_of(model, images), count_params(model)
        steps = Steps(model, task_of(settings.fixed, recipe), recipe, self._device, images)
        part = steps.fitting(steps.train, recipe.part_size, CALL_S, least=2)
        timed = _repeated(lambda: steps.timed(part))
        part_s, update_s = (statistics.median(one[i] for one in timed) for i in (1, 2))
        count = steps.fitting(steps.infer, recipe.part_size, CALL_S)
        infer = steps.infer(count)
        infer_s = statistics.median(_repeated(lambda: seconds_per_call(infer, 1, self._device, wall=True))) / count
        read_s, read_one_s = self._read(dataset, recipe)
        step_s = recipe.batch_size / part * part_s + update_s
        step_s = max(step_s, read_s) if self._runner.data_workers else step_s + read_s
        trial_s = statistics.fmean(
            self._trial_s(dataset, recipe, settings.recipe_of(arm, point), step_s, infer_s + read_one_s)
            for point in points or [AS_IS]
        )
        name = ", ".join(filter(None, (str(setting), arm.name)))
        return ArmEstimate(name, arm.short, params, macs, step_s, trial_s, len(points), done)

    def _trial_s(self, dataset: ImageDataset, timed: Recipe, recipe: Recipe, step_s: float, image_s: float) -> float:
        """Seconds of a trial, where the steps of another recipe were timed; `image_s` to evaluate an image."""
        length = resolve_on(recipe, dataset)
        val, test = (len(dataset.splits[split]) for split in (dataset.val_split, dataset.eval_split))
        last = 0.0 if dataset.val_split == dataset.eval_split else test / len(self._runner.settings.grid.points)
        evaluated = length.evaluations() * val + last
        return length.steps * step_s * recipe.batch_size / timed.batch_size + evaluated * image_s

    def _read(self, dataset: ImageDataset, recipe: Recipe) -> tuple[float, float]:
        """Seconds to read a batch of the training, and an image of an evaluation; arms that read alike share them."""
        key = recipe.augment, recipe.batch_size
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
    """Two measurements, and more until TIMED_S seconds have passed."""
    found, begin = [timed(), timed()], time.monotonic()
    while time.monotonic() - begin < TIMED_S:
        found.append(timed())
    return found


def _batches(dataset: ImageDataset, size: int) -> Iterator[Batch]:
    for epoch in range(100):
        yield from dataset.train_batches(seed=0, epoch=epoch, batch_size=size)


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
