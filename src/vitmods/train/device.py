"""Where a trial computes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.train.distributed import Processes

MOST_WORKERS = 8  # threads that prepare images, by default


@dataclass(frozen=True)
class Placement:
    """Where a model computes, and how precisely."""

    device: torch.device
    precision: Literal["32-true", "bf16-mixed"]

    def autocast(self) -> AbstractContextManager[Any]:
        """In which losses and outputs are computed."""
        mixed = self.precision == "bf16-mixed"
        return torch.autocast(self.device.type, torch.bfloat16) if mixed else nullcontext()


def place(
    device: str, precision: Literal["32-true", "bf16-mixed"] = "32-true", processes: "Processes | None" = None
) -> Placement:
    """Where this process computes.

    Args:
        device: "auto" (the fastest there is), "cpu", "cuda", "cuda:1", "mps".
        processes: of several each has the GPU of its number on this machine.

    Raises:
        UserError: there is no such device here.
    """
    if processes is not None and processes.size > 1 and resolve(device).type == "cuda":
        device = f"cuda:{processes.local_rank}"
    found = resolve(device)
    present = torch.accelerator.current_accelerator(check_available=True)
    if found.type == "cpu":
        count = 1
    else:
        count = torch.accelerator.device_count() if present is not None and present.type == found.type else 0
    if (found.index or 0) >= count:
        have = f"there are {count} of its kind" if count else f"there is no {found.type}"
        raise UserError(f"device {device!r} cannot be used here: {have}. Try --device auto or cpu.")
    if found.type == "cuda":
        found = torch.device("cuda", found.index or 0)
        torch.cuda.set_device(found)
    return Placement(found, precision)


def resolve(device: str) -> torch.device:
    """What "auto", "cpu", "cuda:1" or "mps" means here; "auto" is the fastest there is.

    Raises:
        UserError: the word names no kind of device.
    """
    if device == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device {device!r} cannot be used here: it names none. Try --device auto or cpu.") from error


def device_name(device: str) -> str:
    """What a device is called in a record: "cpu", "mps" or the name of the GPU."""
    found = resolve(device)
    if found.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(found.index or 0)
    return found.type


def check_tf32(device: torch.device) -> None:
    """Raise UserError where a device has no TF32."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(f"{device_name(str(device))} has no TF32, as NVIDIA GPUs since Ampere do: leave --tf32 out.")


@contextmanager
def tf32_products(on: bool) -> Iterator[None]:
    """Inside, float32 products of CUDA devices are made in TF32 if `on`; otherwise they are as they were."""
    cudnn: Any = torch.backends.cudnn
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv) if on else ()
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "tf32"
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def usual_workers(device: str) -> int:
    """Threads that prepare images: none for a CPU, which trains meanwhile; for a GPU as many as torch takes cores."""
    return 0 if resolve(device).type == "cpu" else min(MOST_WORKERS, torch.get_num_threads())
