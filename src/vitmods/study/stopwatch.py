"""How long the trials of a study take: a few steps and images of every arm, timed before it is run."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import nn

from vitmods.bench import now, seconds_per_call
from vitmods.data.dataset import independent
from vitmods.model.flops import count_params
from vitmods.recipes import Recipe
from vitmods.recipes.recipe import Schedule
from vitmods.recipes.schedule import resolve_on
from vitmods.study.arms import BASE, Arm
from vitmods.study.bases import macs_of
from vitmods.study.estimate import ArmEstimate, Estimate, factorial_design, known_spread
from vitmods.study.plan import AS_IS, Point
from vitmods.study.state import StudyState
from vitmods.study.steps import Steps
from vitmods.study.trial import TrialRunner, answer_splits, base_config, task_of
from vitmods.train.device import does_not_fit, is_out_of_memory
from vitmods.util.text import duration

if TYPE_CHECKING:
    from vitmods.data import Batch, ImageDataset


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
    abreast: int,
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
        abreast: those that do not slow each other down.
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
        arms, abreast = [replace(arm, trial_s=factor * arm.trial_s) for arm in arms], workers
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
        abreast,
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
