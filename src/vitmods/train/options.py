"""How a trial runs on this machine. The shell, Python, worker processes and clusters all read these fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tyro.conf import Suppress

from vitmods.finetune.roles import TrainedPart
from vitmods.util.errors import UserError, nearest
from vitmods.util.text import listing

if TYPE_CHECKING:
    from torch import nn

    from vitmods.recipes import Recipe
    from vitmods.recipes.recipe import Precision
    from vitmods.tasks.base import Task

Recorded = Literal["gradients", "lambdas"]
WAYS = ("recompute", "checkpointing", "tf32", "compile")
"""fields of RunOptions that are on or off, and may change the last digits or the speed"""


@dataclass(frozen=True)
class RunOptions:
    """Machine settings. Results are unaffected, up to rounding.

    A new option is a field here, read where it acts. Fields marked `Suppress` are not offered by the shell.
    """

    device: str = "auto"
    """auto (the fastest device), cpu, cuda, cuda:1 or mps"""
    data_workers: int | None = None
    """threads per trial that prepare images ahead; None: none on a CPU, one per core and at most 8 for a GPU"""
    checkpoint_minutes: float | None = 5.0
    """minutes between the checkpoints of a trial, or more where writing takes over a twentieth of the time; None:
    only by steps"""
    cache_dir: Path | None = None
    """folder for decoded images, shared by all trials and later runs; None: the user's cache folder"""
    recompute: bool = False
    """keep less of each block for backward: 0.6 of the activations for 1.02 to 1.04 of the time"""
    checkpointing: bool = False
    """keep only the input of each block for backward: less memory for a quarter more time"""
    tf32: bool = False
    """float32 products with 10 bits of mantissa, on a GPU that supports them: several times as fast"""
    compile: bool = False
    """compile training steps with torch.compile: the first takes a minute, the others less time on a GPU"""
    shard: bool = False
    """divide weights, gradients and optimizer state among several processes (FSDP2), for models that do not fit one
    device: `vitmods train --devices N`, or --devices-per-trial N of a study"""
    log: tuple[str, ...] = ()
    """loggers that get each trial's numbers, and the verdicts of a study, besides TensorBoard: wandb, mlflow
    (docs/training.md)"""
    record: tuple[Recorded, ...] = ()
    """log the gradient norm of each layer, or the trade-off of dynamic token norms (docs/analysis.md)"""
    progress: Suppress[bool] = True
    """print progress on the error stream, with a bar on a terminal"""
    checkpoint_every_steps: Suppress[int | None] = None
    """also write a checkpoint after this many steps"""
    eval_every_epochs: Suppress[int] = 1
    """evaluate `val_split` this often, but at most 100 times (an epoch of a small set may be one step), and ten times
    where that would be more than half as many images as are trained on; always after the last step. metrics.jsonl
    depends on it, so it may not change when a trial resumes"""
    tensorboard: Suppress[bool] = True
    """write TensorBoard logs to `tb/`"""

    def __post_init__(self) -> None:
        for name in ("log", "record"):  # also a single name, and lists from JSON
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(dict.fromkeys([value] if isinstance(value, str) else value)))
        object.__setattr__(self, "cache_dir", Path(self.cache_dir) if self.cache_dir else None)
        for name, least in {"data_workers": 0, "checkpoint_minutes": 0, "checkpoint_every_steps": 1}.items():
            check_at_least(name, getattr(self, name), least)
        for name in self.record:
            if name not in get_args(Recorded):
                raise UserError(f"'{name}' cannot be recorded. {nearest(name, get_args(Recorded))}")
        if self.recompute and self.compile:
            raise UserError("torch.compile decides by itself what to recompute: drop --recompute or --compile.")
        if self.shard and self.compile:
            raise UserError("--compile does not support sharded models: drop --shard or --compile.")
        if self.shard and "gradients" in self.record:
            raise UserError("Gradients of a sharded model are not recorded: drop --shard, or record only lambdas.")

    def to_dict(self) -> dict[str, Any]:
        """Return what a worker process needs to make the same RunOptions from JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(RunOptions)}
        return {**values, "cache_dir": self.cache_dir and str(self.cache_dir)}

    def check_here(self, precisions: Iterable[Precision] = ()) -> None:
        """Raise UserError if this machine lacks the device, logger or precision, before any work is done."""
        from vitmods.train.device import check_tf32, usable
        from vitmods.train.loggers import check_loggers

        check_loggers(self.log)
        for precision in ("32-true", *precisions):
            device = usable(self.device, precision)
        if self.tf32:
            check_tf32(device)

    def check_processes(self, size: int) -> None:
        """Raise UserError if `size` processes cannot train a model together like this."""
        if self.shard and size == 1:
            raise UserError(
                "--shard divides a model among several processes: use `vitmods train --devices N`, "
                "or --devices-per-trial N of a study."
            )

    def check_task(self, task: Task, recipe: Recipe) -> None:
        """Raise UserError if the recipe or these options do not support the task's teacher, or its loss."""
        if task.has_teacher() and recipe.ema is not None:
            raise UserError(f"The task {task.name} evaluates its teacher, not an average of weights: set ema to None.")
        if task.has_teacher() and self.shard:
            raise UserError(f"--shard does not divide the teacher of the task {task.name}: drop --shard.")
        if self.shard and recipe.precision == "fp16-mixed":
            raise UserError("--shard does not support scaled gradients: use --precision bf16-mixed, or drop --shard.")
        if (task.has_teacher() or self.shard) and TrainedPart.of(recipe.train).adapters:
            what = "--shard" if self.shard else f"The task {task.name}, which has a teacher,"
            raise UserError(f"{what} does not support adapters: train biases, last(4) or roles, not {recipe.train}.")
        if task.whole_batch and recipe.accumulate > 1:
            raise UserError(f"The loss of the task {task.name} compares all images of a batch: set accumulate to 1.")

    def save_memory(self, model: nn.Module) -> None:
        """Switch on recomputation or checkpointing in the model. Raises UserError if the model does not support it."""
        from vitmods import fast
        from vitmods.tasks.base import TaskModel

        backbone = model.backbone if isinstance(model, TaskModel) else model
        if self.recompute:
            fast.recompute(backbone)
        if self.checkpointing:
            fast.checkpoint(backbone)


def check_at_least(name: str, value: float | None, least: int) -> None:
    """Raise UserError for a number that is too small. None is not checked."""
    if value is not None and not value >= least:
        raise UserError(f"{name} must be at least {least}, not {value}.")


def check_divides(batch_size: int, size: int) -> None:
    """Raise UserError where a batch cannot be divided evenly among the processes."""
    if batch_size % size:
        fitting = listing([str(count) for count in range(1, 2 * size) if batch_size % count == 0], "or")
        raise UserError(
            f"A batch of {batch_size} images cannot be divided evenly among {size} processes: set batch_size to a "
            f"multiple of {size}, or their number to {fitting}."
        )
