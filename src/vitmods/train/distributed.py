"""Several processes that train one model: how they join, what they agree on, and what each of them holds."""

from __future__ import annotations

import atexit
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from vitmods.data.batch import Batch
from vitmods.tasks.base import Task, TaskModel
from vitmods.train.device import usable
from vitmods.train.launch import PEER_ENDED
from vitmods.util.errors import UserError

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # that processes wait for one that reads images or writes a checkpoint


class PeerEnded(UserError):
    """Another process of the trial has ended, and has printed why unless it was killed."""

    repeats = True  # the message of another process: `vitmods.util.errors.said`


def peer_ended(error: BaseException) -> PeerEnded | None:
    """Translate the error of a collective operation that a process has left; None for any other error."""
    if not (isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))):
        return None
    return PeerEnded(
        f"{PEER_ENDED} without a message (killed, or out of memory?). The state is saved; run the same command again "
        "to resume."
    )


@dataclass(frozen=True)
class Processes:
    """This process among those that train one model; by default the only one, and then nothing here costs anything."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files."""
        return self.rank == 0

    def agree(self, *values: int) -> tuple[int, ...]:
        """Return the largest of each value over all processes."""
        if self.size == 1:
            return values
        largest = torch.tensor(values)
        self._collect(lambda: dist.all_reduce(largest, dist.ReduceOp.MAX))
        return tuple(largest.tolist())

    def total(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.size > 1:
            self._collect(lambda: dist.all_reduce(tensor))
        return tensor

    def gathered(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._collect(lambda: dist.all_gather_object(values, value))
        return values

    def once(self, work: Callable[[], T]) -> T:
        """Work in the first process and return its result in all; an error there is raised in all."""
        if self.size == 1:
            return work()
        outcome: list[Any]
        error, outcome = None, [None, None]  # result, message of an error
        if self.first:
            try:
                outcome[0] = work()
            except Exception as raised:
                error, outcome[1] = raised, str(raised)
        self._collect(lambda: dist.broadcast_object_list(outcome))
        if error is not None:
            raise error
        if outcome[1] is not None:
            raise PeerEnded(outcome[1])
        return outcome[0]

    def in_turn(self, work: Callable[[], T]) -> T:
        """Work in all processes, in the first one before the others: it may repair files, or write a cache."""
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
AGREE_S = 0.5  # processes look for each other's signals about so often,
AGREE_CALLS = 10  # and at least in every tenth call


class Agreement:
    """What all processes do after the same step: stop by a signal to one of them, and save by the first one's clock.

    To agree they wait for each other, so they do it about twice a second, by the first one's clock, and not after every
    step. All of them call it equally often.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes, self._calls, self._after, self._last = processes, 0, 1, time.perf_counter()

    def __call__(self, signum: int | None, due: bool = False) -> tuple[int | None, bool]:
        """Return the signal that came to any process, and whether a checkpoint is due in the first one; None and False
        where it is not yet time to agree."""
        if self._processes.size == 1:
            return signum, due
        self._calls += 1
        if self._calls < self._after:
            return None, False
        per_call = (time.perf_counter() - self._last) / self._calls
        calls = min(AGREE_CALLS, max(1, int(AGREE_S / max(per_call, 1e-9))))
        first = self._processes.first
        anyone, is_due, self._after = self._processes.agree(signum or 0, due and first, calls if first else 0)
        self._calls, self._last = 0, time.perf_counter()
        return anyone or None, bool(is_due)


def launched() -> bool:
    """Whether torchrun, or `vitmods train --devices`, has started this process among others."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def join(device: str = "auto") -> Processes:
    """Join the processes that torchrun or Slurm started: gloo between CPUs, NCCL between GPUs. Alone without them.

    Raises UserError where `usable` does, or if two processes have the same GPU.
    """
    if not launched() or int(os.environ["WORLD_SIZE"]) == 1:
        return Processes()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not dist.is_initialized():
        target = usable(device, local_rank=local_rank)
        store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
        group: dict[str, Any] = {"store": store, "rank": rank, "world_size": size, "timeout": PATIENCE}
        if target.type == "cuda":  # NCCL connects the GPUs at once, and would wait or fail if one came twice
            torch.cuda.set_device(target)
            store.set(f"vitmods/{rank}", f"{socket.gethostname()} {torch.cuda.get_device_properties(target).uuid}")
            if (gpus := len({store.get(f"vitmods/{other}") for other in range(size)})) < size:
                raise UserError(
                    f"{size} processes have {gpus} GPUs: start one for each GPU. Slurm shows each task its own with "
                    "--gpus-per-task=1."
                )
            group["device_id"] = target
        dist.init_process_group("cpu:gloo,cuda:nccl" if target.type == "cuda" else "gloo", **group)
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    return Processes(dist.get_rank(), dist.get_world_size(), local_rank)


class StepLoss(nn.Module):
    """A task's loss as a module, so that all calls of its model are within one forward."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.task.loss(self.model, batch)


class DistributedLoss:
    """The loss of a model that several processes train: the last part of each step averages gradients over them. In a
    single process: the loss."""

    def __init__(self, task: Task, model: nn.Module, processes: Processes, shard: bool, compile: bool = False) -> None:
        self._loss: Any = StepLoss(task, model)
        if compile:
            torch.compiler.reset()  # beyond eight trials of one process it would silently stop compiling
            self._loss.compile()
        self._model, self._shard = model, shard
        self._alone = processes.size == 1
        if not self._alone and not shard:
            from torch.nn.parallel import DistributedDataParallel

            # Stochastic depth may drop a branch for all images, which leaves its parameters without gradient.
            drops = (m for m in model.modules() if type(m).__name__.endswith(("DropPath", "StochasticDepth")))
            skips = any((getattr(m, "rate", getattr(m, "drop_prob", 0.0)) or 0) > 0 for m in drops)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # its successor is torch 2.13's
                self._loss = DistributedDataParallel(self._loss, broadcast_buffers=False, find_unused_parameters=skips)

    def __call__(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, statistics = self._loss(batch)
        return loss, statistics

    def part(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of forward and backward of one part of a batch: only the last one exchanges gradients."""
        if self._shard:
            self._model.set_requires_gradient_sync(last)  # type: ignore[operator]
        context: AbstractContextManager[None] = nullcontext()
        return context if last or self._alone or self._shard else self._loss.no_sync()


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
    """Return the part of a tensor that this process holds, sharing its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded; all processes have to call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_state(state: Any, keep: bool) -> Any:
    """Return a state dict with gathered tensors; those that were sharded are on the CPU, or None without `keep`."""
    if isinstance(state, dict):
        return {name: whole_state(value, keep) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole_state(value, keep) for value in state)
    if not hasattr(state, "full_tensor"):
        return state
    tensor = state.full_tensor()
    return tensor.cpu() if keep else None


def _sharded_as(value: Any, like: Any) -> Any:
    """Shard a tensor as `like` is; returns anything else unchanged."""
    if not (hasattr(like, "placements") and getattr(value, "shape", None) == like.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def load_weights(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load gathered tensors into a model that may be sharded."""
    present = model.state_dict()
    model.load_state_dict({name: _sharded_as(value, present.get(name)) for name, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load gathered tensors into an optimizer: those of a parameter's shape are sharded as the parameter is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values_of = {
        i: {name: _sharded_as(value, parameters[i]) for name, value in values.items()}
        for i, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": values_of})


class GatheredModel(nn.Module):
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
        count, part = len(inputs), slice(self._processes.rank, None, self._processes.size)
        if self._processes.rank >= count:  # all processes have to compute
            part = slice(0, 1)
        arguments = [value[part] if isinstance(value, list | Tensor) else value for value in more]
        return self._gather(self.model(inputs[part].contiguous(), *arguments), count)

    def _gather(self, outputs: Any, count: int) -> Any:
        if isinstance(outputs, dict):
            return {name: self._gather(value, count) for name, value in outputs.items()}
        if isinstance(outputs, tuple):
            return tuple(self._gather(value, count) for value in outputs)
        size = self._processes.size
        if not isinstance(outputs, Tensor):  # a list with an entry an image
            lists = self._processes.gathered(outputs)
            return [lists[i % size][i // size] for i in range(count)]
        most = -(-count // size)
        padded = outputs.new_zeros(most, *outputs.shape[1:])
        padded[: len(outputs)] = outputs[:most]
        tensors = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(tensors, padded)
        return torch.stack(tensors, dim=1).flatten(0, 1)[:count]
