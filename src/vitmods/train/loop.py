"""The training loop of one trial: steps, evaluations, and checkpoints from which it resumes bit for bit."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitmods.data.batch import Batch, for_device, kept_on
from vitmods.data.threads import ahead
from vitmods.finetune.blended import BlendedNorms
from vitmods.recipes import Recipe
from vitmods.recipes.schedule import lr_at, resolve_on
from vitmods.tasks.base import Example, Measured, Task, TaskModel
from vitmods.tasks.features import check_head
from vitmods.train import checkpoint
from vitmods.train.device import (
    DataWait,
    check_tf32,
    place,
    remove_unfinished_graphs,
    tf32_products,
    timed_convolutions,
)
from vitmods.train.distributed import (
    ALONE,
    Agreement,
    DistributedLoss,
    GatheredModel,
    Processes,
    load_optimizer,
    load_weights,
    shard,
    whole_state,
)
from vitmods.train.interrupt import Interrupted, StopRequest, stop_by
from vitmods.train.loggers import (
    LAMBDA,
    Diverged,
    LoggedRun,
    MetricsFile,
    ProgressBar,
    Window,
    gradient_norms,
    lambdas_of,
    layers_of,
    open_logs,
)
from vitmods.train.optim import (
    Ema,
    check_every_parameter_is_trained,
    clip_gradients,
    freeze,
    make_optimizer,
    set_weight_decay,
    without_gradient,
)
from vitmods.train.options import RunOptions
from vitmods.train.probe import head_from_probe
from vitmods.util.errors import UserError

METRICS = "metrics.jsonl"
FORMAT = 2  # of the checkpoint
SAVE_FRACTION = 0.05  # of the time, at most, goes into checkpoints that are due by the clock


MeasureSplit = Callable[[nn.Module, str], Measured]
"""Measures a model on a split by its name."""


class TrialData(Protocol):
    """A data set as the loop reads it; `vitmods.data.load` returns one."""

    @property
    def eval_split(self) -> str: ...
    @property
    def val_split(self) -> str: ...
    @property
    def splits(self) -> Mapping[str, Any]:
        """Return objects with a length and `ids`."""
        ...

    def steps_per_epoch(self, batch_size: int) -> int: ...
    def train_batches(self, *, seed: int, epoch: int, batch_size: int, start: int = 0) -> Iterator[Batch]: ...
    def eval_batches(self, split: str, batch_size: int) -> Iterator[Batch]: ...
    def plain_images(self, split: str, most: int, batch_size: int) -> Iterator[Tensor]: ...
    def for_process(self, rank: int, world_size: int) -> Self: ...
    def summary(self) -> dict[str, Any]: ...


class TrialRun:
    """Training of one model, from the first to the last step.

    Everything the next step depends on is in `state_dict()`: weights, optimizer, moving average, the task's state,
    torch's random numbers, the step, and the losses that wait to be logged. The data needs no state: batch k of an
    epoch is a function of (seed, epoch, k).
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        ds: TrialData,
        recipe: Recipe,
        *,
        folder: Path,
        seed: int = 0,
        options: RunOptions | None = None,
        processes: Processes = ALONE,
        logged: LoggedRun | None = None,
        measure: MeasureSplit | None = None,
    ) -> None:
        self.task, self.recipe, self.seed, self.folder = task, recipe, seed, folder
        self._measure = measure
        self.options = options = options or RunOptions()
        options.check_processes(processes.size)
        options.check_task(task, recipe)
        self.length = resolve_on(recipe, ds)
        self.log_every = min(50, max(5, self.length.steps // 100))
        evaluated = len(ds.splits[ds.val_split]) if ds.val_split in ds.splits else 0
        self.eval_every = self.length.evaluate_every(options.eval_every_epochs, evaluated)

        self.processes, self._agreement = processes, Agreement(processes)
        several = self.processes.size > 1
        self.placement = place(options.device, recipe.precision, self.processes.local_rank if several else None)
        if options.tf32:
            check_tf32(self.placement.device)
        self.ds = for_device(ds, self.placement.device)
        alone = self.processes.size == 1
        part = self.ds if alone else self.ds.for_process(self.processes.rank, self.processes.size)
        self.train_ds = task.training_data(model, kept_on(part, self.placement.device))
        self.model = model.to(self.placement.device)
        if recipe.head_start == "probe" and "head_start" not in task.ignored_fields() and not checkpoint.exists(folder):
            outset = BlendedNorms(*([self.model] if recipe.norm_blend else []))  # the head reads what step 0 gives
            self._begin_as_probe()
            outset.remove()
        options.save_memory(self.model)
        freeze(self.model, recipe)
        divide = partial(shard, processes=self.processes, device=self.placement.device) if options.shard else None
        self.ema = Ema(self.model, recipe.ema, divide) if recipe.ema is not None else None
        if divide is not None:
            divide(self.model)
        if self.ema is not None:
            self.ema.follow(self.model)
        blended = [self.model, *([] if self.ema is None else [self.ema.model])] if recipe.norm_blend else []
        self._blended = BlendedNorms(*blended)
        self.optimizer = make_optimizer(self.model, recipe)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._layers = layers_of(self.model) if "gradients" in options.record else {}
        if options.compile:
            remove_unfinished_graphs()
        self._loss = DistributedLoss(task, self.model, self.processes, options.shard, options.compile)

        self._scaler = self.placement.scaler()
        self._loss_scale = self._scaler.get_scale()
        self.step = 0
        self.skipped = 0  # of these: gradients in float16 were not finite
        self.evaluated_at = 0
        self.last_evaluation: dict[str, float] = {}
        self.examples: dict[str, tuple[Example, ...]] = {}
        """split -> those of its last evaluation"""
        self._scored: dict[str, tuple[list[Tensor], Mapping[str, NDArray[Any]]]] = {}
        self._window = Window(self.processes)
        self._data_wait = DataWait(self.placement.device)
        self._wall_before = self._save_s = 0.0
        torch.manual_seed(seed)
        task.begin(self.model)
        check_every_parameter_is_trained(self.model, self.optimizer)
        _seed_apart(seed, 0, self.processes)
        metrics_length = self._restore()
        board = folder / "tb" if options.tensorboard else None
        self.metrics: MetricsFile | None = None  # in processes that write no files
        if self.processes.first:
            self.metrics = MetricsFile(folder / METRICS, metrics_length, board)
            self.metrics.logs = open_logs(options.log, logged, folder, seed) if options.log else None
        self._started = self._saved = self._logged = time.perf_counter()

    @property
    def wall_s(self) -> float:
        """Seconds of this trial so far, including those before an interruption."""
        return self._wall_before + time.perf_counter() - self._started

    @property
    def evaluated_model(self) -> nn.Module:
        """The model whose numbers count: the task's teacher, or the moving average, where there is one."""
        if (teacher := self.task.evaluated(self.model)) is not None:
            return teacher
        return self.model if self.ema is None else self.ema.model

    @property
    def scores(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Split -> `ids` and scores of each image from its last evaluation, for splits that have scores."""
        return {
            split: {"ids": np.array(self.ds.splits[split].ids, dtype=str)[torch.cat(index).numpy()], **scores}
            for split, (index, scores) in self._scored.items()
            if scores
        }

    def run(self, request: StopRequest, bar: ProgressBar) -> dict[str, float]:
        """Train to the last step and evaluate on `ds.eval_split`. Returns the metrics, none if all images are trained
        on. Call `close` afterwards.

        Raises:
            Diverged: a loss or a gradient was not finite.
            Interrupted: a signal came; the checkpoint is written.
            UserError: the disk is full or may not be written.
        """
        try:
            times = self.task.same_shapes and self.placement.device.type == "cuda"
            with tf32_products(self.options.tf32), timed_convolutions(times):
                self._train(request, bar)
                if not self._has_evaluation:
                    return {}
                if self.ds.val_split not in self._scored:  # a resumed trial has only the metrics
                    self._metrics(self.ds.val_split, request)
                is_val = self.ds.eval_split == self.ds.val_split
                return self.last_evaluation if is_val else self._metrics(self.ds.eval_split, request)
        except Interrupted as interruption:
            self.save()
            raise Interrupted(
                f"{interruption} at step {self.step} of {self.length.steps}. The state is saved in {self.folder}; run "
                "the same command again to resume.",
                interruption.signum,
            ) from None

    def close(self, status: str, metrics: Mapping[str, float]) -> None:
        """Close the logs of a finished, diverged, stopped or failed trial; loggers get the metrics too."""
        self._blended.remove()
        if self.metrics is not None:
            self.metrics.close(status, {f"{self.ds.eval_split}/{name}": value for name, value in metrics.items()})

    def _begin_as_probe(self) -> None:
        """Give the head the weights of a linear probe, which the first process learns."""
        backbone = self.model.backbone if isinstance(self.model, TaskModel) else self.model

        def learn() -> tuple[Tensor, Tensor] | str:
            try:
                return head_from_probe(backbone, self.ds, self.placement.device, self.placement.autocast)
            except UserError as error:
                return str(error)

        found = self.processes.once(learn)
        if isinstance(found, str):
            warnings.warn(f"The head is drawn, not a linear probe: {found}. --head-start drawn says so.", stacklevel=2)
            return
        with torch.no_grad():
            for parameter, value in zip(check_head(backbone).parameters(), found, strict=True):
                parameter.copy_(value)

    def _train(self, request: StopRequest, bar: ProgressBar) -> None:
        batches = prefetch(self._batches(), self.placement.device)
        self.model.train()
        self._logged = time.perf_counter()
        while True:
            if self._blended.norms:
                self._blended.set(self.step / max(1, round(self.recipe.norm_blend * self.length.steps)))
            # Between two steps, in this order: a checkpoint contains the number of its last evaluation.
            at_evaluation = self.step % self.eval_every == 0 or self.step == self.length.steps
            if self._has_evaluation and at_evaluation and self.step > self.evaluated_at:
                metrics = self._metrics(self.ds.val_split, request)
                self._write("val", metrics)
                lambdas = lambdas_of(self.evaluated_model) if "lambdas" in self.options.record else {}
                if lambdas:
                    self._write("record", {LAMBDA: lambdas})
                self.evaluated_at, self.last_evaluation = self.step, metrics
            every = self.options.checkpoint_every_steps
            due_by_steps = every is not None and self.step > 0 and self.step % every == 0
            signum, is_due = self._agreement(request.signum, self._due_by_clock())
            if is_due or due_by_steps:
                self.save()
            if self.step == self.length.steps:
                return
            stop_by(signum)
            self._train_step(self._data_wait.next(batches))
            self._data_wait.step_is_queued()
            if len(self._window) and (self.step % self.log_every == 0 or self.step == self.length.steps):
                bar.show(self._log())
            bar.advance(self.step)

    def _batches(self) -> Iterator[Batch]:
        epoch, start = divmod(self.step, self.length.steps_per_epoch)
        while True:
            yield from self.train_ds.train_batches(
                seed=self.seed, epoch=epoch, batch_size=self.recipe.batch_size, start=start
            )
            epoch, start = epoch + 1, 0

    def _train_step(self, batch: Batch) -> None:
        updates, steps = self.step - self.skipped, self.length.steps
        lr = lr_at(self.length, updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        set_weight_decay(self.optimizer, self.recipe, updates, steps)
        self.optimizer.zero_grad(set_to_none=True)
        statistics = self._backward(batch)
        self._scaler.unscale_(self.optimizer)
        statistics |= gradient_norms(self._layers, self.processes.size)
        if self.recipe.optimizer.clip_norm is not None:
            norm = clip_gradients(self.parameters, self.recipe.optimizer.clip_norm, self.recipe.optimizer.clip_each)
            statistics["grad_norm"] = norm / self.processes.size  # statistics are parts of a sum over processes
        if self.step == 0 and (names := without_gradient(self.model)):
            warnings.warn(f"{len(names)} trainable parameters get no gradient: {', '.join(names[:5])}", stacklevel=2)
        self.task.before_step(self.model, updates + 1, steps)
        self.step += 1
        if not self._update():  # as if the step had not been: its batch is used up
            self.skipped += 1
            return
        if self.ema is not None:
            self.ema.update()
        self._window.add(statistics, len(batch) * self.processes.size)
        self.task.after_step(self.model, updates + 1, steps - self.skipped)

    def _update(self) -> bool:
        """Make the optimizer's step. False: gradients in float16 were not finite, which the host waits to learn. Raises
        Diverged if no scale helps."""
        self._scaler.step(self.optimizer)
        self._scaler.update()
        before, self._loss_scale = self._loss_scale, self._scaler.get_scale()
        if self._loss_scale < 1 or (self._loss_scale < before and self.step == self.skipped + 1 == self.length.steps):
            raise Diverged(f"the float16 gradient was not finite at step {self.step}, with a loss scale of {before:g}")
        return self._loss_scale >= before

    def _backward(self, batch: Batch) -> dict[str, Tensor]:
        """Leave the gradient of the mean loss over the batch of all processes in the parameters, however many parts it
        is computed in. `batch` is the part of this process. Returns the statistics of its images, divided by the number
        of all."""
        totals: dict[str, Tensor] = {}
        if batch.deferred is not None:  # bytes: all of them fit
            batch = batch.moved(self.placement.device)
        parts = list(batch.parts(self.recipe.accumulate))
        for number, part in enumerate(parts, 1):
            fraction = len(part) / (len(batch) * self.processes.size)
            with self._loss.part(last=number == len(parts)):
                with self.placement.autocast():
                    loss, statistics = self._loss(part.to(self.placement.device))
                statistics["loss"] = loss.detach()
                if fraction == 1:
                    self._scaler.scale(loss).backward()
                    return statistics
                # Over processes the mean of gradients is taken, and not their sum.
                self._scaler.scale(loss * (fraction * self.processes.size)).backward()
            for name, value in statistics.items():
                totals[name] = totals.get(name, 0) + value * fraction
        return totals

    def _log(self) -> dict[str, Any]:
        """Log the means over the steps since the last row. Only here does the loop wait for the device."""
        images, means = self._window.images, self._window.take(self.step)
        elapsed = max(time.perf_counter() - self._logged, 1e-9)  # now that the device has done these steps
        values = {
            **means,
            "lr": lr_at(self.length, self.step - self.skipped - 1),
            "images_per_s": round(images / elapsed, 1),
            "data_wait": round(self._data_wait.take() / elapsed, 4),
        }
        if self._scaler.is_enabled():
            values |= {"loss_scale": self._loss_scale, "skipped_steps": self.skipped}
        self._logged += elapsed
        return self._write("train", values)

    def _write(self, split: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write a row of metrics.jsonl."""
        epoch = round(self.step / self.length.steps_per_epoch, 4)
        row = {"step": self.step, "epoch": epoch, "wall_s": round(self.wall_s, 3), "split": split, **values}
        if self.metrics is not None:
            self.metrics.write(row)
        return row

    @property
    def _has_evaluation(self) -> bool:
        """Whether some images are not trained on."""
        return self.ds.val_split in self.ds.splits

    def _metrics(self, split: str, request: StopRequest) -> dict[str, float]:
        """Evaluate the model on a split; the training state is left as it was."""
        index: list[Tensor] = []

        def batches() -> Iterator[Batch]:
            for batch in prefetch(self.ds.eval_batches(split, self.recipe.part_size), self.placement.device):
                stop_by(self._agreement(request.signum)[0])
                index.append(batch.index)
                yield batch.to(self.placement.device)

        self.model.eval()
        with self.placement.autocast():
            model = self.evaluated_model
            divided = self.processes.size > 1 and self.task.divides
            evaluation = self.task.evaluate(GatheredModel(model, self.processes) if divided else model, batches())
        self.model.train()
        if not math.isfinite(evaluation.metrics["loss"]):
            raise Diverged(f"the loss on {split} was not finite after step {self.step}")
        if evaluation.failure:
            raise Diverged(f"{evaluation.failure} after step {self.step}")
        if self._measure is not None and self._is_protocol_due():
            measured = self._measure(self.evaluated_model, split)
            self.model.train()
            evaluation = replace(
                evaluation,
                metrics={**evaluation.metrics, **measured.metrics},
                per_image={**evaluation.per_image, **measured.per_image},
            )
        self._scored[split], self.examples[split] = (index, evaluation.per_image), evaluation.examples
        return evaluation.metrics

    def _is_protocol_due(self) -> bool:
        """Whether this evaluation is the last one, or the first after another `protocol_epochs` epochs."""
        period = self.task.protocol_epochs * self.length.steps_per_epoch
        return self.step == self.length.steps or self.step % period < self.eval_every <= self.step

    def _due_by_clock(self) -> bool:
        minutes = self.options.checkpoint_minutes
        if minutes is None:
            return False
        least = self._save_s * (1 / SAVE_FRACTION - 1)  # a slow disk: training comes first
        return time.perf_counter() - self._saved >= max(60 * minutes, least)

    def save(self) -> None:
        """Write the checkpoint in the first process, after the rows of metrics.jsonl that it counts are on the disk."""
        began = time.perf_counter()
        length = 0 if self.metrics is None else self.metrics.sync()
        state = whole_state(self.state_dict(), keep=self.processes.first)
        state |= {"metrics_bytes": length, "wall_s": self.wall_s}
        self.processes.once(lambda: checkpoint.save(self.folder, state))
        self._saved = time.perf_counter()
        self._save_s = self._saved - began

    def state_dict(self) -> dict[str, Any]:
        """Return all that later steps depend on, as tensors and plain values; sharded tensors stay so."""
        cuda = self.placement.device.type == "cuda"
        random = {
            "rng_cpu": torch.get_rng_state(),
            "rng_cuda": torch.cuda.get_rng_state(self.placement.device) if cuda else None,
        }
        others = self.processes.gathered(random)[1:]
        return {
            "format": FORMAT,
            "step": self.step,
            "skipped": self.skipped,
            "scaler": self._scaler.state_dict(),
            "evaluated_at": self.evaluated_at,
            "last_evaluation": self.last_evaluation,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "task": self.task.state_dict(),
            **random,
            "rng_others": others,
            "window": self._window.state_dict(),
        }

    def _restore(self) -> int:
        """Load the newest checkpoint, if any. Returns the length of metrics.jsonl at that step."""
        state = self.processes.in_turn(lambda: checkpoint.load(self.folder))
        if state is None:
            return 0
        if state["format"] != FORMAT:
            raise UserError(f"{self.folder} is from another version of vitmods. Delete it to train again.")
        self.step, self.evaluated_at = state["step"], state["evaluated_at"]
        self.last_evaluation = state["last_evaluation"]
        load_weights(self.model, state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        if self._scaler.is_enabled():
            self.skipped = state["skipped"]
            self._scaler.load_state_dict(state["scaler"])
            self._loss_scale = self._scaler.get_scale()
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.task.load_state_dict(state["task"])
        random = [state, *state.get("rng_others", [])]
        if len(random) == self.processes.size:
            states = random[self.processes.rank]
            torch.set_rng_state(states["rng_cpu"])
            if states["rng_cuda"] is not None and self.placement.device.type == "cuda":
                torch.cuda.set_rng_state(states["rng_cuda"], self.placement.device)
        else:  # another number of processes than before
            _seed_apart(self.seed, self.step, self.processes)
        self._window.load_state_dict(state["window"], self.placement.device)
        self._wall_before = state["wall_s"]
        return int(state["metrics_bytes"])


def prefetch(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the same batches; for a GPU prepared ahead in a thread, and pinned, so that the host need not wait."""
    if device.type == "cpu":
        return batches
    return ahead(batches, Batch.pinned if device.type == "cuda" else lambda batch: batch)


def _seed_apart(seed: int, step: int, processes: Processes) -> None:
    """Seed dropout and stochastic depth of other processes than the first, whose images are different ones."""
    if processes.rank or step:
        torch.manual_seed(seed + (processes.rank << 32) + (step << 40))
