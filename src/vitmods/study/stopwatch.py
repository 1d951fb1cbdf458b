"""How long the trials of a study take: a few steps and images of every arm, timed before it is run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from vitmods.analysis.timing import now, seconds_per_call
from vitmods.data.dataset import independent
from vitmods.model.flops import count_params
from vitmods.recipes import Recipe
from vitmods.recipes.length import resolve_on
from vitmods.study.arms import BASE, Arm
from vitmods.study.estimate import ArmEstimate, Estimate, factorial_design
from vitmods.study.evaluation import answer_splits
from vitmods.study.models import macs_of
from vitmods.study.spread import known_spread
from vitmods.study.state import StudyState
from vitmods.study.steps import Steps
from vitmods.study.trial import TrialRunner, base_config, task_of
from vitmods.study.tuning import AS_IS, Point
from vitmods.train.memory import does_not_fit, is_out_of_memory
from vitmods.util.text import duration

if TYPE_CHECKING:
    from vitmods.data import Batch, ImageDataset


T = TypeVar("T")
CALL_S = 0.5  # batches are halved until a timed call takes at most about this long
TIMED_S = 0.3  # of steps, of every arm


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
    if settings.measure.name == "top1" and settings.generalize == "images" and not settings.folds:
        count, grouped = independent(dataset.splits[split] for split in answer_splits(settings, dataset))
        found = replace(found, test_images=count, grouped=grouped)
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
        evaluated = length.evaluations(images=val) * val + last
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
