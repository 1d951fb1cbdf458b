"""How long a study would take, from a few timed steps of every arm on the real images."""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vitmods.model.flops import count_params
from vitmods.recipes import Recipe
from vitmods.recipes.length import resolve_on
from vitmods.study.arms import Arm
from vitmods.study.models import macs_of
from vitmods.study.plan import Trial
from vitmods.study.trial import TrialRunner, base_config, task_of
from vitmods.study.tuning import AS_IS, Point
from vitmods.study.weights import Keep
from vitmods.train import RunOptions, train_trial
from vitmods.util.text import duration, size

if TYPE_CHECKING:
    from vitmods.data import Batch, ImageDataset

TIMED_STEPS = 3


@dataclass(frozen=True)
class ArmEstimate:
    """One arm: sizes, and seconds for a trial, on average over the points that are tried. `trials` are those that are
    still to be run; the evaluations on test that follow a choice are part of them."""

    arm: str
    changes: str
    params: int
    macs: int | None
    """None: not known of this model"""
    step_s: float
    trial_s: float
    trials: int


@dataclass(frozen=True)
class Estimate:
    """What `vitmods compare --dry-run` prints."""

    arms: tuple[ArmEstimate, ...]
    finished: int
    workers: int
    steps: int
    dataset: Mapping[str, int]
    points: int = 1
    keep_weights: Keep = "all"

    @property
    def total_s(self) -> float:
        """Seconds for all trials, `workers` at a time; the measurement of costs and the report come on top."""
        return sum(arm.trial_s * arm.trials for arm in self.arms) / self.workers

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

    def __str__(self) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("arm", overflow="fold")
        named = any(arm.changes not in ("", arm.arm) for arm in self.arms)
        if named:
            table.add_column("changes", overflow="fold")
        for heading in ("parameters", "GMACs", "trials", "s/step", "a trial"):
            table.add_column(heading, justify="right", no_wrap=True)
        for arm in self.arms:
            sizes = f"{arm.params:,}", "not known" if arm.macs is None else f"{arm.macs / 1e9:.3g}"
            record = (arm.arm, arm.changes) if named else (arm.arm,)
            table.add_row(*record, *sizes, str(arm.trials), f"{arm.step_s:.3g}", duration(arm.trial_s))
        console = Console(file=io.StringIO(), width=100, color_system=None)
        with console.capture() as captured:
            console.print(table)
        lines = [line.rstrip() for line in captured.get().splitlines() if line.strip()]
        splits = ", ".join(f"{count:,} {name}" for name, count in self.dataset.items())
        trials = sum(arm.trials for arm in self.arms)
        lasts = f"about {duration(self.total_s)} of training, and the measurement of costs"
        done = f" ({self.finished} are finished)" if self.finished else ""
        tried = f" Every arm is tried with {self.points} points of the grid." if self.points > 1 else ""
        return "\n".join(
            [
                *lines,
                "",
                f"Images: {splits}. A trial has {self.steps:,} steps.{tried}",
                f"{trials} trials to run{done}, {self.workers} at a time: {lasts}.",
                self._disk(),
            ]
        )

    def _disk(self) -> str:
        other: Keep = "best" if self.keep_weights == "all" else "all"
        return (
            f"Final weights that stay in the folder ({self.keep_weights}) take {size(self.weights_bytes())}; with "
            f"--keep-weights {other} {size(self.weights_bytes(other))}.\n"
            f"While trials run, checkpoints take up to {size(self.working_bytes)} more."
        )


def estimate(
    runner: TrialRunner,
    built: Iterable[tuple[Point, Arm, nn.Module, Recipe]],
    missing: Sequence[Trial],
    workers: int,
    device: torch.device,
    keep_weights: Keep = "all",
) -> Estimate:
    """Time TIMED_STEPS steps and an evaluation batch of every arm, with the threads that a worker would have.

    Args:
        runner: of the study; gives the images.
        built: every arm's model and recipe under each setting, base first; trained a little, and not kept.
        missing: the trials that are still to be run.
        workers: trials at a time.
        device: where the steps are made.
        keep_weights: final weights that stay.
    """
    settings = runner.settings
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // workers))
    try:
        arms = tuple(
            _estimate_arm(
                runner,
                setting,
                arm,
                model,
                recipe,
                [trial for trial in missing if trial.arm.name == arm.name and trial.setting == setting],
                device,
            )
            for setting, arm, model, recipe in built
        )
    finally:
        torch.set_num_threads(threads)
    dataset = runner.dataset(settings.recipe)
    recipe = settings.recipe
    return Estimate(
        arms=arms,
        finished=settings.planned - len(missing),
        workers=workers,
        steps=resolve_on(recipe, dataset).steps,
        dataset={name: len(split) for name, split in dataset.splits.items()},
        points=len(settings.grid.points),
        keep_weights=keep_weights,
    )


def _estimate_arm(
    runner: TrialRunner,
    setting: Point,
    arm: Arm,
    model: nn.Module,
    recipe: Recipe,
    missing: Sequence[Trial],
    device: torch.device,
) -> ArmEstimate:
    settings, dataset = runner.settings.at(setting), runner.dataset(recipe, setting)
    few = _FirstSteps(dataset, device)
    with tempfile.TemporaryDirectory() as nowhere:
        short = recipe.with_(epochs=1, steps=None, warmup_epochs=None, warmup_steps=None, cooldown_steps=0)
        train_trial(
            model,
            task_of(settings.fixed, recipe),
            few,
            short,
            out=nowhere,
            how=RunOptions(str(device), progress=False, tensorboard=False),
        )
    points = [trial.point for trial in missing] or [AS_IS]
    recipes = [settings.recipe_of(arm, point) for point in points]
    tried = len(settings.grid.points)
    trial_s = statistics.fmean(_trial_s(runner.dataset(one, setting), tried, few, recipe, one) for one in recipes)
    macs = macs_of(model, base_config(settings, dataset.num_classes))
    name = ", ".join(filter(None, (str(setting), arm.name)))
    return ArmEstimate(name, arm.short, count_params(model), macs, few.step_s, trial_s, len(missing))


def _trial_s(dataset: ImageDataset, points: int, few: _FirstSteps, timed: Recipe, recipe: Recipe) -> float:
    """Seconds of a trial of one of several points, where the steps of another recipe were timed."""
    length = resolve_on(recipe, dataset)
    val, test = (len(dataset.splits[split]) for split in (dataset.val_split, dataset.eval_split))
    evaluated = 0.0 if dataset.val_split == dataset.eval_split else test / points
    evaluated = length.evaluations() * val + evaluated
    return length.steps * few.step_s * recipe.batch_size / timed.batch_size + evaluated * few.evaluation_s


class _FirstSteps:
    """The images cut down to a few batches, which notes when the loop comes back for more."""

    def __init__(self, dataset: ImageDataset, device: torch.device):
        self._dataset, self._device = dataset, device
        self._steps: list[float] = []
        self._evaluations: list[float] = []
        self.eval_split = self.val_split = dataset.val_split
        self.splits = dataset.splits

    @property
    def step_s(self) -> float:
        """Seconds of a step, reading the images included; the first step only warms up."""
        return statistics.median(self._steps[1:])

    @property
    def evaluation_s(self) -> float:
        """Seconds to evaluate one image."""
        return self._evaluations[0]

    def summary(self) -> dict[str, Any]:
        return self._dataset.summary()

    def steps_per_epoch(self, batch_size: int) -> int:
        return TIMED_STEPS + 1

    def train_batches(self, *, seed: int, epoch: int, batch_size: int, start: int = 0) -> Iterator[Batch]:
        begin = self._now()
        for number in range(TIMED_STEPS + 1):
            size = self._dataset.steps_per_epoch(batch_size)
            yield next(
                self._dataset.train_batches(seed=seed, epoch=number // size, batch_size=batch_size, start=number % size)
            )
            end = self._now()
            self._steps.append(end - begin)
            begin = end

    def eval_batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        begin = self._now()
        batch = next(self._dataset.eval_batches(split, batch_size))
        yield batch
        self._evaluations.append((self._now() - begin) / len(batch.index))

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
