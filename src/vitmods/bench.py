"""Compare the speed and memory of models in pairs, so that other load on the machine cancels.

Each round times all models in short turns, and every second round reverses their order. A ratio is the median over
rounds of model / base, so what other processes slow down, they slow down for both. On a CPU, one thread and its CPU
clock are used: wall time with all threads can be wrong by a factor on a shared machine.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby, product
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from vitmods.model.flops import count_params
from vitmods.util.errors import UserError
from vitmods.util.files import disk_errors, rendered

BLOCK_S = 0.04  # a timed block repeats its work until it lasts about this long
ROUNDS = (7, 60)
WIDTH = 0.05  # of the interval, as a fraction of the ratio, at which no more rounds are made
LEVEL = 0.98  # of an interval after a given number of rounds: looking at it after each leaves 95 % of them right
Work = Callable[[], Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Ratio:
    """arm / base: the median over rounds, and its 95 % interval."""

    ratio: float
    low: float
    high: float

    @classmethod
    def of_rounds(cls, ratios: Sequence[float]) -> Ratio:
        """Use two of the ratios as the interval, whatever their distribution: the chance that at most k of n are below
        the true median is that of at most k heads among n coins."""
        values, count = sorted(ratios), len(ratios)
        tails = accumulate(math.comb(count, heads) for heads in range(count))
        outside = sum(tail <= (1 - LEVEL) / 2 * 2**count for tail in tails)
        rank = max(outside - 1, 0)
        return cls(statistics.median(values), values[rank], values[count - 1 - rank])

    @property
    def is_precise(self) -> bool:
        return self.high - self.low <= WIDTH * self.ratio


def interleave(
    kinds: Mapping[str, T], names: list[str], seconds: Callable[[T, str], float], budget_s: float
) -> dict[str, list[dict[str, float]]]:
    """Return kind -> one {model: seconds per call} a round. Every second round is reversed, so that a drift cancels.

    Seven rounds at least and 60 at most; none begins after `budget_s` seconds, and a kind has no more once the
    intervals of its ratios to the first model are at most 5 % wide.
    """
    return finish(rounds_of(kinds, names, seconds, budget_s))


def finish(steps: Generator[None, None, T]) -> T:
    """Make all steps and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def rounds_of(
    kinds: Mapping[str, T], names: list[str], seconds: Callable[[T, str], float], budget_s: float
) -> Generator[None, None, dict[str, list[dict[str, float]]]]:
    """`interleave` in steps of a round."""
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    end = time.monotonic() + budget_s
    least, most = ROUNDS
    base, *others = names

    def is_precise(kind: str) -> bool:
        ratios = ([times[name] / times[base] for times in rounds[kind]] for name in others)
        return all(Ratio.of_rounds(values).is_precise for values in ratios)

    for number in range(most):
        if number >= least:
            kinds = {kind: timed for kind, timed in kinds.items() if not is_precise(kind)}
            if not kinds or time.monotonic() > end:
                break
        order = names if number % 2 == 0 else names[::-1]
        for kind, timed in kinds.items():
            rounds[kind].append({name: seconds(timed, name) for name in order})
        yield
    return rounds


def seconds_per_call(call: Work, repeats: int, device: torch.device, wall: bool = False) -> float:
    """Time a call: on a CPU by its own clock unless `wall`, elsewhere by the wall clock, since an accelerator works
    while the CPU waits."""
    is_cpu_time = device.type == "cpu" and not wall
    start = time.process_time() if is_cpu_time else now(device)
    for _ in range(repeats):
        call()
    return ((time.process_time() if is_cpu_time else now(device)) - start) / repeats


def now(device: torch.device) -> float:
    """Return seconds by the wall clock, once the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def quiet_threads(device: torch.device) -> Iterator[None]:
    """Use one thread on a CPU, where the CPU clock then is the time of the work."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _LiveStorages(TorchDispatchMode):
    """Adds up the storages that are alive, from the outputs of every operation and the end of every storage."""

    def __init__(self, already: Iterable[torch.Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for tensor in already:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known.add(storage)
            self._resize(storage.nbytes())
            weakref.finalize(storage, self._resize, -storage.nbytes()).atexit = False

    def _resize(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


def peak_bytes(work: Callable[[], Any], alive: Iterable[torch.Tensor], device: torch.device) -> int:
    """Return the largest number of bytes of tensors alive at once while `work` runs.

    Args:
        work: the computation, e.g. one training step.
        alive: tensors that exist before it and count too: parameters, buffers, gradients, optimizer state.
        device: on a CUDA device the allocator is asked, which counts all tensors there and the space inside operations;
            on a CPU the storages that operations return are counted, not their scratch space.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    tracker = _LiveStorages(alive)
    with tracker:
        work()
    return tracker.peak


def device_name(device: torch.device) -> str:
    """Return the product name of the GPU or processor, if the system reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


Kind = Literal["inference", "training"]
PRODUCT = "matrix product"
SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices whose product is the machine's peak


def bench(
    models: Mapping[str, nn.Module],
    img_size: tuple[int, int],
    *,
    batches: Sequence[int] = (1, 8),
    kinds: Sequence[Kind] = ("inference", "training"),
    device: torch.device | str = "cpu",
    bf16: bool = False,
    compiled: bool = False,
    budget_s: float = 60.0,
) -> dict[str, Any]:
    """Measure models against the first of them, in rounds that time each once, in turning order, after a warm-up.

    On a CPU one thread and its CPU clock are used, on a GPU the wall clock around synchronized work.

    Args:
        models: name -> module that maps images (B, 3, height, width) to logits, or to an object with ``logits``. They
            are moved to `device`. A model without trainable parameters is not trained.
        img_size: (rows, columns) of the images, in pixels; channels are read off the first weight that has them.
        batches: images at a time.
        kinds: "inference", or "training": forward, backward and a step of AdamW.
        bf16: under bfloat16 autocast.
        compiled: the models under torch.compile.
        budget_s: seconds for the rounds of each batch and kind; seven rounds are always made.

    Returns a dict for JSON: `machine`, `models` (parameters, multiply-adds of an image) and `cells`, one for each
    model, kind and batch: seconds, images_per_s, throughput (ratio to the first model, median over rounds and its 95 %
    interval), share_of_peak (multiply-adds done a second, by those of a large matrix product in the same rounds),
    peak_memory_bytes.

    Raises UserError if a model does not accept the images.
    """
    target = torch.device(device)
    with quiet_threads(target):
        counts = {name: _count(model.to(target), name, img_size) for name, model in models.items()}
        ready = {n: cast(nn.Module, torch.compile(model)) for n, model in models.items()} if compiled else models
        trainable = {n: model for n, model in ready.items() if any(p.requires_grad for p in model.parameters())}
        cells = []
        for kind, batch in product(kinds, batches):
            able = ready if kind == "inference" else trainable
            cells += _cells(able, kind, batch, img_size, target, bf16, counts, budget_s) if able else []
    return {
        "machine": {
            "device": device_name(target),
            "threads": 1 if target.type == "cpu" else None,
            "clock": "CPU time" if target.type == "cpu" else "wall clock, synchronized",
            "torch": torch.__version__,
        },
        "settings": {"img_size": list(img_size), "bf16": bf16, "compiled": compiled},
        "models": {name: {"params": count_params(model), "macs": counts[name]} for name, model in models.items()},
        "cells": cells,
    }


def _cells(
    models: Mapping[str, nn.Module],
    kind: Kind,
    batch: int,
    img_size: tuple[int, int],
    device: torch.device,
    bf16: bool,
    macs: Mapping[str, int],
    budget_s: float,
) -> list[dict[str, Any]]:
    """Measure one kind of work at one batch size; one row for each model."""

    def make_call(model: nn.Module) -> Work:
        images = _images(model, batch, img_size)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)

        def infer() -> None:
            model.eval()
            with torch.inference_mode(), autocast:
                model(images)

        if kind == "inference":
            return infer
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-6, fused=True)

        def step() -> None:
            model.train()
            with autocast:
                logits = _logits(model(images))
                loss = cross_entropy(logits, torch.arange(batch, device=device) % logits.shape[-1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    side = SIDE.get(device.type, SIDE["cpu"])
    matrix = torch.randn(side, side, device=device).to(torch.bfloat16 if bf16 else torch.float32)
    work: dict[str, Work] = {name: make_call(model) for name, model in models.items()}
    work[PRODUCT] = lambda: matrix @ matrix
    repeats = {}
    for name, call in work.items():
        call()  # warm-up: kernels are chosen, optimizer state is made, graphs are compiled
        repeats[name] = max(1, round(BLOCK_S / max(seconds_per_call(call, 1, device), 1e-6)))

    def seconds_of(calls: Mapping[str, Work], name: str) -> float:
        return seconds_per_call(calls[name], repeats[name], device)

    rounds = interleave({"step": work}, list(work), seconds_of, budget_s)["step"]
    seconds = {name: [times[name] for times in rounds] for name in work}
    base = next(iter(models))
    passes = 3 if kind == "training" else 1
    rows = []
    for name, model in models.items():
        rates = [passes * batch * macs[name] / s for s in seconds[name]]
        ratio = Ratio.of_rounds([a / b for a, b in zip(seconds[base], seconds[name])])
        median = statistics.median(seconds[name])
        rows.append(
            {
                "model": name,
                "kind": kind,
                "batch": batch,
                "seconds": median,
                "images_per_s": batch / median,
                "throughput": asdict(ratio),
                "share_of_peak": statistics.median(a * s / side**3 for a, s in zip(rates, seconds[PRODUCT])),
                "peak_memory_bytes": peak_bytes(work[name], [*model.parameters(), *model.buffers()], device),
                "rounds": len(seconds[name]),
            }
        )
    return rows


def _logits(out: Any) -> Tensor:
    logits: Tensor = getattr(out, "logits", out)
    return logits


def _images(model: nn.Module, batch: int, img_size: tuple[int, int]) -> Tensor:
    first = next(p for p in model.parameters() if p.ndim == 4)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, first.shape[1], *img_size, generator=generator).to(first.device, first.dtype)


@torch.no_grad()
def _count(model: nn.Module, name: str, img_size: tuple[int, int]) -> int:
    """Count the multiply-adds of one image: products, convolutions and attention, as PyTorch counts them."""
    counter = FlopCounterMode(display=False)
    try:
        images = _images(model.eval(), 1, img_size)
        # oneDNN's own products are unknown to the counter: with gradients a packed model does without them.
        with counter, torch.enable_grad():
            out = _logits(model(images))
    except StopIteration:
        raise UserError(f"{name} does not read images: it does not have a patch projection.") from None
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(f"{name} does not take images of {img_size[0]}x{img_size[1]}: {error}") from error
    if not isinstance(out, Tensor) or out.ndim != 2:
        raise UserError(f"{name} does not return logits (images, classes): choose a model with a classification head.")
    return counter.get_total_flops() // 2


def table(result: Mapping[str, Any], width: int = 100) -> str:
    """Format the result of ``bench`` for a terminal: one block for each kind of work and batch."""
    blocks = []
    for (kind, batch), rows in groupby(result["cells"], key=lambda cell: (cell["kind"], cell["batch"])):
        title = f"{kind}, batch {batch}"
        block = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
        block.add_column("model", overflow="fold")
        for head in ("ms", "images/s", "throughput", "fraction of peak", "memory"):
            block.add_column(head, justify="right", no_wrap=True)
        for row in rows:
            ratio = row["throughput"]
            block.add_row(
                row["model"],
                f"{row['seconds'] * 1e3:.4g}",
                f"{row['images_per_s']:.4g}",
                f"{ratio['ratio']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
                f"{row['share_of_peak']:.0%}",
                f"{row['peak_memory_bytes'] / 1e6:.0f} MB",
            )
        blocks.append(rendered(block, width))
    machine = result["machine"]
    threads = "" if machine["threads"] is None else f", {machine['threads']} thread"
    note = f"throughput: to the first model, median over rounds [95 % interval]. {machine['device']}{threads}."
    return "\n".join([*blocks, note])


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Plot images a second against the batch: a panel for each kind of work, a line for each model."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(cell["kind"] for cell in result["cells"]))
    color = {name: f"C{i}" for i, name in enumerate(result["models"])}
    figure = Figure(figsize=(4.6 * len(kinds), 3.9), layout="constrained")
    axes = figure.subplots(1, len(kinds), squeeze=False)[0]
    for kind, axis in zip(kinds, axes):
        cells = [cell for cell in result["cells"] if cell["kind"] == kind]
        for name in dict.fromkeys(cell["model"] for cell in cells):
            points = sorted((c["batch"], c["images_per_s"]) for c in cells if c["model"] == name)
            axis.plot(*zip(*points), marker="o", markersize=4, color=color[name], label=name)
        batches = sorted({cell["batch"] for cell in cells})
        axis.set(title=kind, xlabel="batch", ylabel="images a second", xscale="log", xticks=batches)
        axis.set_xticklabels([str(batch) for batch in batches])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(3, len(names)), frameon=False, fontsize="small")
    with disk_errors(path):
        figure.savefig(path, dpi=150)
