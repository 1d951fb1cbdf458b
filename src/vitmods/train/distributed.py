"""Several processes that train one model: how they join, what they agree on, and what each of them holds."""

from __future__ import annotations

import atexit
import os
import pickle
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitmods.data.batch import Batch
from vitmods.tasks.base import Task, TaskModel
from vitmods.util.errors import UserError

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # that processes wait for one that reads images or writes a checkpoint


class PeerEnded(UserError):
    """Another process of the trial has ended; it says why, unless it was killed."""

    repeats = True  # what another one has said: `vitmods.util.errors.said`


def peer_ended(error: BaseException) -> PeerEnded | None:
    """The error of a sum over processes that one of them has left, as what it means; None for any other error."""
    if not (isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))):
        return None
    return PeerEnded(
        "Another process of this trial has ended without a word (killed, or out of memory?). What was saved is there: "
        "the same command goes on."
    )


@dataclass(frozen=True)
class Processes:
    """This process among those that train one model; alone by default, and then nothing here costs anything."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files."""
        return self.rank == 0

    def agree(self, *values: int) -> tuple[int, ...]:
        """The largest of each value over all processes."""
        if self.size == 1:
            return values
        found = torch.tensor(values)
        self._collect(lambda: dist.all_reduce(found, dist.ReduceOp.MAX))
        return tuple(found.tolist())

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            self._collect(lambda: dist.all_reduce(tensor))
        return tensor

    def gathered(self, value: T) -> list[T]:
        """The values of all processes, by their ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._collect(lambda: dist.all_gather_object(found, value))
        return found

    def once(self, work: Callable[[], T]) -> T:
        """What the first process finds, in all of them; an error there is raised in all of them."""
        if self.size == 1:
            return work()
        found: list[Any] = [None, None]
        if self.first:
            try:
                found[0] = work()
            except Exception as error:
                found[1] = error
                try:
                    pickle.dumps(error)
                except Exception:
                    found[1] = RuntimeError(str(error))
        self._collect(lambda: dist.broadcast_object_list(found))
        if found[1] is not None:
            raise found[1] if self.first else PeerEnded(str(found[1]))
        answer: T = found[0]
        return answer

    def in_turn(self, work: Callable[[], T]) -> T:
        """Work in all processes, the first one before the others: it may repair files, or leave a cache."""
        results: list[T] = []
        self.once(lambda: results.append(work()))
        return results[0] if self.first else work()

    def _collect(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except RuntimeError as error:
            if ended := peer_ended(error):
                raise ended from error
            raise


ALONE = Processes()


def launched() -> bool:
    """Whether torchrun, or `vitmods train --devices`, has started this process among others."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def join() -> Processes:
    """Join the processes that torchrun started: gloo between CPUs, NCCL between GPUs. Alone without torchrun."""
    if not launched() or int(os.environ["WORLD_SIZE"]) == 1:
        return Processes()
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
        atexit.register(_leave)
    return Processes(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class StepLoss(nn.Module):
    """A task's loss as a module, so that whatever a task calls of its model lies inside of one forward."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.task.loss(self.model, batch)


class Together:
    """The loss of a model that several processes train: gradients become the mean over processes in the last part of
    each step. Alone: the loss."""

    def __init__(self, task: Task, model: nn.Module, processes: Processes, shard: bool, compile: bool = False) -> None:
        self._loss: Any = StepLoss(task, model)
        if compile:
            torch.compiler.reset()  # beyond eight trials of one process it would silently stop compiling
            self._loss.compile()
        self._model, self._shard = model, shard
        self._alone = processes.size == 1
        if not self._alone and not shard:
            from torch.nn.parallel import DistributedDataParallel

            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # its successor is torch 2.13's
                self._loss = DistributedDataParallel(
                    self._loss, broadcast_buffers=False, find_unused_parameters=_skips_branches(model)
                )

    def __call__(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        found: tuple[Tensor, dict[str, Tensor]] = self._loss(batch)
        return found

    def part(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one part of a batch: only the last one exchanges gradients."""
        if self._alone or last:
            if self._shard:
                self._model.set_requires_gradient_sync(True)  # type: ignore[operator]
            return nullcontext()
        if self._shard:
            self._model.set_requires_gradient_sync(False)  # type: ignore[operator]
            return nullcontext()
        context: AbstractContextManager[Any] = self._loss.no_sync()
        return context


def _skips_branches(model: nn.Module) -> bool:
    """Whether a step may leave parameters without gradient: stochastic depth may drop a branch for all images."""
    rates = (getattr(m, "rate", getattr(m, "drop_prob", 0.0)) for m in model.modules() if _is_drop_path(m))
    return any(rate and rate > 0 for rate in rates)


def _is_drop_path(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("DropPath", "StochasticDepth"))


def shard(model: nn.Module, processes: Processes, device: torch.device) -> None:
    """Divide the parameters among the processes (FSDP2), block by block: each is whole only while it computes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (processes.size,))
    backbone = model.backbone if isinstance(model, TaskModel) else model
    blocks: Iterable[nn.Module] = getattr(backbone, "blocks", ())
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # an average changes where no backward comes between
    for name in model.also_forward if isinstance(model, TaskModel) else ():
        register_fsdp_forward_method(model, name)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory."""
    found: Any = tensor
    mine: Tensor = found.to_local() if hasattr(found, "to_local") else found
    return mine


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be divided among processes; all of them have to ask."""
    found: Any = tensor
    return found.full_tensor() if hasattr(found, "full_tensor") else tensor


def whole_state(state: Any, keep: bool) -> Any:
    """A state dict with whole tensors; on the CPU, and None where they are not to be kept, if they were divided."""
    if isinstance(state, dict):
        return {name: whole_state(value, keep) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole_state(value, keep) for value in state)
    if not hasattr(state, "full_tensor"):
        return state
    found = state.full_tensor()
    return found.cpu() if keep else None


def divided_as(value: Any, like: Any) -> Any:
    """Divide a whole tensor as `like` is; returns anything else as it is."""
    if not (hasattr(like, "placements") and getattr(value, "shape", None) == like.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def load_weights(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load whole tensors into a model that may be divided."""
    now = model.state_dict()
    model.load_state_dict({name: divided_as(value, now.get(name)) for name, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The same for an optimizer: what has a parameter's shape is divided as that is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = {
        i: {name: divided_as(value, parameters[i]) for name, value in values.items()}
        for i, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": held})


class Divided(nn.Module):
    """A model in evaluation whose batches are divided among the processes; each gets the outputs of all images.

    So a task evaluates as in one process, and counts each image once.
    """

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        super().__init__()
        self.model, self._processes = model, processes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def forward(self, inputs: Tensor, *more: Any) -> Any:
        count, own = len(inputs), slice(self._processes.rank, None, self._processes.size)
        if self._processes.rank >= count:  # all processes have to compute
            own = slice(0, 1)
        mine = [value[own] if isinstance(value, list | Tensor) else value for value in more]
        found = self.model(inputs[own].contiguous(), *mine)
        return self._of_all(found, count)

    def _of_all(self, found: Any, count: int) -> Any:
        if isinstance(found, Tensor):
            return self._tensors(found, count)
        if isinstance(found, dict):
            return {name: self._of_all(value, count) for name, value in found.items()}
        if isinstance(found, tuple):
            return tuple(self._of_all(value, count) for value in found)
        parts = self._processes.gathered(found)  # a list with an entry an image
        return [parts[i % len(parts)][i // len(parts)] for i in range(count)]

    def _tensors(self, found: Tensor, count: int) -> Tensor:
        size = self._processes.size
        most = -(-count // size)
        padded = found.new_zeros(most, *found.shape[1:])
        padded[: len(found)] = found[:most]
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded)
        return torch.stack(parts, dim=1).flatten(0, 1)[:count]
