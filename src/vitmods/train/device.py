"""The device of a trial: its name, precision and memory, waiting for data, and graphs of torch.compile."""

import os
import shutil
import struct
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout

from vitmods.recipes.recipe import Precision
from vitmods.util.errors import UserError, first_line
from vitmods.util.text import plural

T = TypeVar("T")
MOST_WORKERS = 8  # threads that prepare images, by default
HALF = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


@dataclass(frozen=True)
class DeviceAndPrecision:
    """The device and precision of a model."""

    device: torch.device
    precision: Precision

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for losses and outputs."""
        dtype = HALF.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Return what scales losses, so that gradients in float16 do not vanish. Other precisions ignore it."""
        return torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16-mixed")


def place(device: str, precision: Precision = "32-true", local_rank: int | None = None) -> DeviceAndPrecision:
    """Return `usable` as the device that this process uses from now on; of several processes each has its own GPU."""
    target = usable(device, precision, local_rank)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    return DeviceAndPrecision(target, precision)


def usable(device: str, precision: Precision = "32-true", local_rank: int | None = None) -> torch.device:
    """Return a device of this machine. A GPU is not used yet, so one that admits a single process is open to others.

    Args:
        device: "auto" (the fastest), "cpu", "cuda", "cuda:1", "mps".
        local_rank: of one of several processes on this machine, which has the GPU of this number or the only one.

    Raises:
        UserError: the device does not exist on this machine, PyTorch cannot use it, or it lacks the precision.
    """
    target = resolve(device)
    present = torch.accelerator.current_accelerator(check_available=True)
    is_present = present is not None and present.type == target.type
    count = torch.accelerator.device_count() if is_present else int(target.type == "cpu")
    if target.type == "cuda":  # Slurm shows each process its own
        target = torch.device("cuda", target.index or 0 if local_rank is None else local_rank if count > 1 else 0)
    if (target.index or 0) >= count:
        have = f"this machine has {count} of its kind" if count else f"this machine does not have {target.type}"
        if target.type == "cuda" and not count and (reason := _why_unusable()):
            have = f"PyTorch cannot use the GPU of this machine: {reason}"
        raise UserError(f"device {str(target)!r} is not available: {have}. Try --device auto or cpu.")
    if target.type == "cuda" and precision == "bf16-mixed" and torch.cuda.get_device_capability(target) < (8, 0):
        raise UserError(f"{device_name(str(target))} only emulates bfloat16, slowly: use --precision fp16-mixed.")
    return target


def resolve(device: str) -> torch.device:
    """Return the device that "auto" (the fastest), "cpu", "cuda:1" or "mps" means. UserError for other words, and for
    "auto" where PyTorch cannot use the machine's GPU."""
    try:
        if device != "auto":
            return torch.device(device)
    except RuntimeError as error:
        raise UserError(f"unknown device {device!r}. Try --device auto or cpu.") from error
    if (found := torch.accelerator.current_accelerator(check_available=True)) is None and (reason := _why_unusable()):
        message = f"This machine has a GPU that PyTorch {torch.__version__} cannot use: {reason}. Repair this"
        raise UserError(f"{message}, or train without it: --device cpu.")
    return found or torch.device("cpu")


def _why_unusable() -> str | None:
    """Return PyTorch's reason not to use the NVIDIA GPU of this machine; None without one, or if it is hidden."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    if hidden or not (program := shutil.which("nvidia-smi")):
        return None
    try:
        if "GPU" not in subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=True).stdout:
            return None
        torch.cuda.init()
    except (OSError, subprocess.SubprocessError):
        return None
    except (RuntimeError, AssertionError) as error:
        return first_line(error).rstrip(".")
    return "it does not find any"


def device_name(device: str) -> str:
    """Return the name of a device in records: "cpu", "mps" or the name of the GPU."""
    target = resolve(device)
    if target.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(target.index or 0)
    return target.type


def check_tf32(device: torch.device) -> None:
    """Raise UserError if a device does not support TF32."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError(
            f"{device_name(str(device))} does not support TF32, as NVIDIA GPUs since Ampere do: drop --tf32."
        )


@contextmanager
def tf32_products(on: bool) -> Iterator[None]:
    """Compute float32 products of CUDA devices in TF32 if `on`, by PyTorch's switch that compiled graphs read too. It
    cannot be mixed with those for single kinds of product. Convolutions have a separate switch, which is on by default.
    """
    before = torch.get_float32_matmul_precision()
    if on:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if on:
            torch.set_float32_matmul_precision(before)


@contextmanager
def timed_convolutions(on: bool) -> Iterator[None]:
    """Let CUDA devices time kernels of convolutions and keep the fastest if `on`, for shapes that stay the same."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def remove_unfinished_graphs() -> None:
    """Delete libraries that a killed torch.compile left unfinished in its cache, with a warning: loading one fails or
    ends the process. Those that another process is writing stay."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # as the compiler names it, also without a user name

    folder = Path(cache_dir())
    removed = 0
    for library in folder.glob("??/*.so"):
        lock = FileLock(folder / "locks" / f"{library.name.partition('.')[0]}.lock", timeout=0)
        with suppress(Timeout, OSError):
            if not _is_whole(library):
                with lock:  # the compiler's own: whoever holds it is writing
                    if not _is_whole(library):
                        library.unlink()
                        removed += 1
    if removed:
        text = f"A torch.compile that was killed left {plural(removed, 'unfinished file')} in {folder}"
        warnings.warn(f"{text}: deleted, and compiled again.", stacklevel=2)


def _is_whole(library: Path) -> bool:
    """Whether an ELF file reaches to the end of its table of sections, which linkers write last; True for others."""
    with library.open("rb") as file:
        head = file.read(64)
    if head and not head.startswith(b"\x7fELF\x02\x01"):  # of 64 bits, the lowest byte first
        return True
    if len(head) < 64:
        return False
    (offset,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
    return bool(library.stat().st_size >= offset + size * count)


class DataWait:
    """Measures how long a device is idle because the next batch is not ready.

    A GPU works while the host waits, so a wait counts from the end of the step before: an event marks that end, and
    another one the arrival of the batch. They are read when a row is logged, which waits for the device anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step: torch.Event | None = None
        self._waits: list[tuple[float, torch.Event | None, torch.Event | None]] = []

    def next(self, batches: Iterator[T]) -> T:
        """Return the next batch."""
        began = time.perf_counter()
        batch = next(batches)
        self._waits.append((time.perf_counter() - began, self._step, self._mark()))
        return batch

    def step_is_queued(self) -> None:
        """Mark the end of a step; call it after each."""
        self._step = self._mark()

    def take(self) -> float:
        """Return the seconds of waiting since the last call."""
        total = 0.0
        for seconds, step, batch in self._waits:
            if step is not None and batch is not None:
                batch.synchronize()
                seconds = min(seconds, step.elapsed_time(batch) / 1e3)
            total += max(seconds, 0.0)
        self._waits = []
        return total

    def _mark(self) -> torch.Event | None:
        if self._device.type == "cpu":
            return None
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def usual_workers(device: str) -> int:
    """Return the number of threads that prepare images: 0 for a CPU, which trains meanwhile; else torch's threads."""
    return 0 if resolve(device).type == "cpu" else min(MOST_WORKERS, torch.get_num_threads())


_MEMORY_ERRORS = ("can't allocate memory", "not enough memory", "Cannot allocate memory")  # torch's on a CPU


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the machine or of its accelerator could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in _MEMORY_ERRORS)


def does_not_fit(count: int, device: torch.device) -> UserError:
    """Make the error for a batch that is too large."""
    return UserError(
        f"{count} images at once do not fit the memory of {device}. Cut the batch into more parts with accumulate, or "
        "choose a smaller batch_size, model or image size. Without another study: --recompute or --checkpointing, and "
        "fewer --workers."
    )
