"""How long a step of each arm takes on a device, measured as a worker makes it."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from vitmods.bench import now, seconds_per_call
from vitmods.model.flops import count_params
from vitmods.recipes.recipe import Schedule
from vitmods.recipes.schedule import resolve_on
from vitmods.study.arms import BASE
from vitmods.study.bases import macs_of
from vitmods.study.budget import ENDLESS, Budget
from vitmods.study.cells import Cell
from vitmods.study.cost import Steps
from vitmods.study.trial import TrialRunner, base_config, task_of
from vitmods.train.device import does_not_fit, is_out_of_memory

if TYPE_CHECKING:
    from vitmods.data import ImageDataset

T = TypeVar("T")
NEIGHBOR = """
import os, numpy
parent, matrix = os.getppid(), numpy.ones((384, 384), "f")
while os.getppid() == parent:
    numpy.tanh(matrix @ matrix)
"""


@contextmanager
def as_a_worker(device: torch.device, workers: int, threads: int) -> Iterator[None]:
    """Limit torch to the threads of a worker; on a CPU, as many other processes compute as other workers would."""
    single = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    count, before = workers - 1 if device.type == "cpu" else 0, torch.get_num_threads()
    neighbors = [subprocess.Popen([sys.executable, "-c", NEIGHBOR], env=single) for _ in range(count)]
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        for neighbor in neighbors:
            neighbor.kill()
            neighbor.wait()


CALL_S = 0.25  # batches are halved until a timed call takes at most about this long
TIMED_S = 0.3  # of steps, of every arm
TRIAL_S = 1.0  # of a trial: the model is built, files are written
SLOW_S = 1.0  # a measurement that takes so long is not repeated
LENGTH = {"epochs", "steps", "lr", "min_lr", "weight_decay", *(option.name for option in fields(Schedule))}
"""fields of a recipe that a step's time does not depend on"""


@dataclass(frozen=True)
class ArmEstimate:
    """One arm: sizes, seconds of a step and of a trial on average over the points that are tried, and the trials to be
    run. `macs` is None if unknown. `alone_s`: of a trial on one device, where it is trained on several."""

    arm: str
    changes: str
    params: int
    macs: int | None
    step_s: float
    trial_s: float
    trials: int
    alone_s: float = 0.0


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
    base what they are to the first one; on a GPU, its memory may not suffice, so each is tried. Once a budget has no
    time left for timing, models follow from those that were timed, by their multiply-adds.

    processes: that train a trial together. Their steps are derived: each has its part of the images, nothing is
        exchanged.
    """

    runner: TrialRunner
    device: torch.device
    budget: Budget = ENDLESS
    processes: int = 1
    _read_s: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    _paces: dict[tuple[str, str], Pace] = field(default_factory=dict)
    _sizes: dict[tuple[str, str], int] = field(default_factory=dict)
    _batches: dict[str, tuple[int, int]] = field(default_factory=dict)

    def time(self, cell: Cell, model: nn.Module, trained: Sequence[Cell] = (), points: int = 1) -> ArmEstimate:
        """Time trials of an arm; its model is trained a little. Raises UserError if a part of a batch does not fit.

        trained: the cells of the trials, which may be at other points of the grid. points: how many it has; only the
        chosen one is evaluated on test.
        """
        dataset, recipe = self.runner.dataset(cell), cell.recipe
        macs, params = macs_of(model, base_config(cell, dataset.num_classes)), count_params(model)
        try:
            pace = self.pace(cell, model, dataset.num_classes)
            read_s, read_one_s = self._read(dataset, cell)
        except Exception as error:
            if is_out_of_memory(error):
                raise does_not_fit(recipe.part_size, self.device) from None
            raise
        divides = task_of(cell).divides

        def times(processes: int) -> tuple[float, float]:
            """Return seconds of a step, and of the evaluation of an image."""
            step_s, batch_s = recipe.batch_size / processes * pace.image_s + pace.update_s, read_s / processes
            step_s = max(step_s, batch_s) if self.runner.data_workers else step_s + batch_s
            return step_s, pace.infer_s / (processes if divides else 1) + read_one_s

        val, test = (len(dataset.splits[split]) for split in (dataset.val_split, dataset.eval_split))
        last = 0.0 if dataset.val_split == dataset.eval_split else test / points
        seconds: dict[int, list[float]] = {1: [], self.processes: []}
        for at_point in [other.recipe for other in trained] or [recipe]:
            length = resolve_on(at_point, dataset)
            evaluated = length.evaluations(images=val) * val + last
            for processes, of_trials in seconds.items():
                step_s, infer_s = times(processes)
                training_s = length.steps * step_s * at_point.batch_size / recipe.batch_size
                of_trials.append(TRIAL_S + training_s + evaluated * infer_s)
        trial_s, alone_s = (statistics.fmean(seconds[processes]) for processes in (self.processes, 1))
        step_s, _ = times(self.processes)
        return ArmEstimate(cell.name, cell.arm.short, params, macs, step_s, trial_s, len(trained), alone_s)

    def pace(self, cell: Cell, model: nn.Module, num_classes: int) -> Pace:
        """Time a model, or derive its pace from those that were timed."""
        images, recipe, arm = base_config(cell, num_classes), cell.recipe, cell.arm.name
        timed_fields = [(name, value) for name, value in recipe.settings().items() if name not in LENGTH]
        place = repr((cell.fixed["base"], cell.fixed["img_size"], timed_fields))
        key, size = (arm, place), macs_of(model, images) or 0
        if key not in self._paces:
            self._sizes[key], pace = size, self.scale_pace(arm, place)
            if pace is None and self._paces and not self.budget.may_time:
                near = (BASE, place) if (BASE, place) in self._paces else [*self._paces][-1]
                times = size / self._sizes[near] if size and self._sizes[near] else 1.0
                pace = Pace(*(times * seconds for seconds in astuple(self._paces[near])))
            if pace is None:
                with self.budget.timing():
                    steps = Steps(model, task_of(cell), recipe, self.device, images)
                    pace = self._measured(steps, max(1, recipe.part_size // self.processes), place)
            self._paces[key] = pace
        return self._paces[key]

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

    def _read(self, dataset: ImageDataset, cell: Cell) -> tuple[float, float]:
        """Time the reading of a training batch and of an evaluated image; arms that read alike share them."""
        recipe = cell.recipe
        key = recipe.augment, recipe.task_parts, recipe.batch_size, tuple(cell.fixed["img_size"])
        if key not in self._read_s and self._read_s and not self.budget.may_time:
            return [*self._read_s.values()][-1]
        if key not in self._read_s:
            batch_size, split = recipe.batch_size, dataset.val_split
            batches = (
                batch
                for epoch in range(100)
                for batch in dataset.train_batches(seed=0, epoch=epoch, batch_size=batch_size)
            )
            with self.budget.timing():
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
