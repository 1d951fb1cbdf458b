"""Speed and memory of any models side by side: paired, interleaved, and against what the machine can multiply."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from vitmods.analysis.timing import (
    BLOCK_S,
    Ratio,
    Work,
    device_name,
    interleave,
    peak_bytes,
    quiet_threads,
    seconds_per_call,
)
from vitmods.model.flops import count_params
from vitmods.util.errors import UserError
from vitmods.util.files import disk_errors, rendered

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
            are moved to `device`. A model without trainable parameters is left out of training.
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

    Raises UserError when a model does not take the images.
    """
    place = torch.device(device)
    with quiet_threads(place):
        counted = {name: _count(model.to(place), name, img_size) for name, model in models.items()}
        ready = dict(models)
        if compiled:
            ready = {name: cast(nn.Module, torch.compile(model)) for name, model in models.items()}
        lab = _Lab(ready, img_size, place, bf16)
        cells = [cell for kind in kinds for batch in batches for cell in lab.cells(kind, batch, counted, budget_s)]
    return {
        "machine": _machine(place),
        "settings": {"img_size": list(img_size), "bf16": bf16, "compiled": compiled},
        "models": {name: {"params": count_params(model), "macs": counted[name]} for name, model in models.items()},
        "cells": cells,
    }


class _Lab:
    def __init__(self, models: Mapping[str, nn.Module], img_size: tuple[int, int], device: torch.device, bf16: bool):
        self.models, self.img_size, self.device, self.bf16 = models, img_size, device, bf16

    def cells(self, kind: Kind, batch: int, macs: Mapping[str, int], budget_s: float) -> list[dict[str, Any]]:
        """One row for each model that can do this kind of work."""
        make = self._inference if kind == "inference" else self._training
        able = [name for name, model in self.models.items() if kind == "inference" or _learns(model)]
        if not able:
            return []
        calls: dict[str, Work] = {name: make(self.models[name], batch) for name in able}
        work = {**calls, PRODUCT: self._product()}
        repeats = {name: self._repeats(call) for name, call in work.items()}
        rounds = interleave({"step": work}, list(work), lambda c, n: self._seconds(c[n], repeats[n]), budget_s)["step"]
        seconds = {name: [times[name] for times in rounds] for name in work}
        passes = 3 if kind == "training" else 1
        peak = [self._side**3 / s for s in seconds[PRODUCT]]
        rows = []
        for name in able:
            rates = [passes * batch * macs[name] / s for s in seconds[name]]
            ratio = Ratio.of_rounds([a / b for a, b in zip(seconds[able[0]], seconds[name])])
            middle = statistics.median(seconds[name])
            rows.append(
                {
                    "model": name,
                    "kind": kind,
                    "batch": batch,
                    "seconds": middle,
                    "images_per_s": batch / middle,
                    "throughput": asdict(ratio),
                    "share_of_peak": statistics.median(a / b for a, b in zip(rates, peak)),
                    "peak_memory_bytes": self._peak(name, calls[name]),
                    "rounds": len(seconds[name]),
                }
            )
        return rows

    @property
    def _side(self) -> int:
        return SIDE.get(self.device.type, SIDE["cpu"])

    def _repeats(self, call: Work) -> int:
        call()  # warm-up: kernels are chosen, optimizer state is made, graphs are compiled
        return max(1, round(BLOCK_S / max(self._seconds(call, 1), 1e-6)))

    def _seconds(self, call: Work, repeats: int) -> float:
        return seconds_per_call(call, repeats, self.device)

    def _product(self) -> Work:
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        matrix = torch.randn(self._side, self._side, device=self.device).to(dtype)
        return lambda: matrix @ matrix

    def _images(self, model: nn.Module, batch: int) -> Tensor:
        return _images(model, batch, self.img_size)

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def _inference(self, model: nn.Module, batch: int) -> Work:
        images = self._images(model, batch)

        def infer() -> None:
            model.eval()
            with torch.inference_mode(), self._autocast():
                model(images)

        return infer

    def _training(self, model: nn.Module, batch: int) -> Work:
        images = self._images(model, batch)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-6, fused=True)

        def step() -> None:
            model.train()
            with self._autocast():
                logits = _logits(model(images))
                loss = cross_entropy(logits, torch.arange(batch, device=self.device) % logits.shape[-1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def _peak(self, name: str, call: Callable[[], Any]) -> int:
        own = [*self.models[name].parameters(), *self.models[name].buffers()]
        return peak_bytes(call, own, self.device)


def _learns(model: nn.Module) -> bool:
    return any(p.requires_grad for p in model.parameters())


def _logits(out: Any) -> Tensor:
    logits: Tensor = getattr(out, "logits", out)
    return logits


def _images(model: nn.Module, batch: int, img_size: tuple[int, int]) -> Tensor:
    first = next(p for p in model.parameters() if p.ndim == 4)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, first.shape[1], *img_size, generator=generator).to(first.device, first.dtype)


@torch.no_grad()
def _count(model: nn.Module, name: str, img_size: tuple[int, int]) -> int:
    """Multiply-adds of one image: products, convolutions and attention, as PyTorch counts them."""
    counter = FlopCounterMode(display=False)
    try:
        images = _images(model.eval(), 1, img_size)
        # oneDNN's own products are unknown to the counter: with gradients a packed model does without them.
        with counter, torch.enable_grad():
            out = _logits(model(images))
    except StopIteration:
        raise UserError(f"{name} reads no images: it has no patch projection.") from None
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(f"{name} does not take images of {img_size[0]}x{img_size[1]}: {error}") from error
    if not isinstance(out, Tensor) or out.ndim != 2:
        raise UserError(f"{name} gives no logits (images, classes): take a model with a head for classes.")
    return counter.get_total_flops() // 2


def _machine(device: torch.device) -> dict[str, Any]:
    on_cpu = device.type == "cpu"
    return {
        "device": device_name(device),
        "threads": 1 if on_cpu else None,
        "clock": "CPU time" if on_cpu else "wall clock, synchronized",
        "torch": torch.__version__,
    }


def table(found: Mapping[str, Any], width: int = 100) -> str:
    """What ``bench`` found, for the terminal: one block for each kind of work and batch."""
    cells = groupby(found["cells"], key=lambda cell: (cell["kind"], cell["batch"]))
    blocks = [rendered(_block(f"{kind}, batch {batch}", list(rows)), width) for (kind, batch), rows in cells]
    machine = found["machine"]
    threads = "" if machine["threads"] is None else f", {machine['threads']} thread"
    note = f"throughput: to the first model, median over rounds [95 % interval]. {machine['device']}{threads}."
    return "\n".join([*blocks, note])


def _block(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
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
    return block


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Images a second against the batch, a panel for each kind of work, a line for each model (.png, .svg, .pdf)."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(cell["kind"] for cell in found["cells"]))
    color = {name: f"C{i}" for i, name in enumerate(found["models"])}
    figure = Figure(figsize=(4.6 * len(kinds), 3.9), layout="constrained")
    axes = figure.subplots(1, len(kinds), squeeze=False)[0]
    for kind, axis in zip(kinds, axes):
        cells = [cell for cell in found["cells"] if cell["kind"] == kind]
        for name in dict.fromkeys(cell["model"] for cell in cells):
            mine = sorted((c["batch"], c["images_per_s"]) for c in cells if c["model"] == name)
            axis.plot(*zip(*mine), marker="o", markersize=4, color=color[name], label=name)
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
