"""How a trial is run, apart from what is trained."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from vitmods.tasks.base import TaskModel
from vitmods.train.distributed import ALONE, Processes
from vitmods.train.loggers import NO_LOGS, LogTo
from vitmods.train.record import check_recorded
from vitmods.util.errors import UserError

WAYS = ("recompute", "checkpointing", "tf32", "compile")
"""Fields of RunOptions that are on or off"""


def check_ways(recompute: bool, checkpointing: bool, tf32: bool, compile: bool) -> None:
    """Raise UserError where one would be of no effect."""
    if recompute and compile:
        raise UserError("torch.compile chooses itself what to make again: leave --recompute or --compile out.")


def check_shared(size: int, shard: bool, compile: bool = False, record: Sequence[str] = ()) -> None:
    """Raise UserError where so many processes cannot train a model together so."""
    if shard and compile:
        raise UserError("A model that is divided among processes is not compiled: leave --shard or --compile out.")
    if shard and "gradients" in record:
        raise UserError("Gradients of a divided model are not recorded: leave shard out, or record lambdas alone.")
    if shard and size == 1:
        raise UserError("shard divides a model among processes, and here is one: add devices, or leave it out.")


def check_divides(batch_size: int, size: int) -> None:
    """Raise UserError where a batch cannot be divided evenly among the processes."""
    if batch_size % size:
        raise UserError(
            f"A batch of {batch_size} images cannot be divided evenly among {size} processes: set batch_size to a "
            f"multiple of {size}."
        )


@dataclass(frozen=True)
class RunOptions:
    """How a trial is run, which never changes what its weights become."""

    device: str = "auto"
    """auto (the fastest there is), cpu, cuda, cuda:1 or mps"""
    checkpoint_every_steps: int | None = None
    """a checkpoint after so many steps; None: by time alone"""
    checkpoint_every_minutes: float | None = 5.0
    """a checkpoint after so many minutes, or later where writing takes more than a twentieth of them; None: by steps
    alone"""
    eval_every_epochs: int = 1
    """how often `ds.val_split` is evaluated, but at most 100 times (an epoch of a small set may be one step), and ten
    where that would be more than half as many images as are trained on; always after the last step. Metrics.jsonl then
    has other rows, so it may not change when a trial goes on"""
    progress: bool = True
    """show a progress bar if there is a terminal"""
    tensorboard: bool = True
    """write TensorBoard logs to `tb/`"""
    log: LogTo = NO_LOGS
    """loggers that get the rows too, as `LogTo(("wandb",))`"""
    recompute: bool = False
    """keep fewer activations for backward, by making cheap ones again (`vitmods.fast.recompute`)"""
    checkpointing: bool = False
    """keep the input of each block alone, and run the block again (`vitmods.fast.checkpoint`)"""
    processes: Processes = ALONE
    """those that train the model together (`vitmods.train.join`): each batch is divided among them"""
    shard: bool = False
    """divide weights, gradients and optimizer state among the processes too (FSDP2); needs two or more"""
    tf32: bool = False
    """float32 products of a GPU with 10 bits of mantissa, several times as fast; needs one that has them"""
    compile: bool = False
    """make training steps by torch.compile, which takes about a minute before the first; evaluation is not compiled"""
    record: tuple[str, ...] = ()
    """what metrics.jsonl keeps of the inside of the model too, gradients and lambdas (`vitmods.train.record`)"""

    def __post_init__(self) -> None:
        check_ways(**{way: getattr(self, way) for way in WAYS})
        check_recorded(self.record)
        check_shared(self.processes.size, self.shard, self.compile, self.record)

    def save_memory(self, model: nn.Module) -> None:
        """Switch on in the model what is asked for. Raises UserError where it cannot do that."""
        from vitmods import fast

        backbone = model.backbone if isinstance(model, TaskModel) else model
        if self.recompute:
            fast.recompute(backbone)
        if self.checkpointing:
            fast.checkpoint(backbone)
