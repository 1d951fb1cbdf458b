"""Figures of training and speed: gradient norms, the cost of partial fine-tuning, images a second.

Dual PatchNorm, Figures 2 and 4; Three things everyone should know about ViTs, Figure 4 and Table 4.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vitmods.analysis.figure import (
    NARROW,
    Arrays,
    Examined,
    NotHere,
    draw_lines,
    legend,
    log_axis,
    panels,
    plain,
    short,
)
from vitmods.analysis.figures import paper_figure
from vitmods.bench import BLOCK_S, Work, interleave, peak_bytes, quiet_threads, seconds_per_call
from vitmods.finetune import train_only
from vitmods.report.figures import INK, PALETTE, PAPER
from vitmods.train.loggers import GRADIENT, HEAD, STEM

LAST = 1000
"""steps that the paper's mean is over; of a short training at most its last tenth"""


def gradients_by_depth(record: Sequence[Mapping[str, Any]], last: int | None = None) -> dict[str, Tensor]:
    """Layer -> the mean over the last steps of the norm of the gradient of its parameters, 0-d; in order of depth.

    Args:
        record: rows of metrics.jsonl of a training with `record=("gradients",)`; each is a mean over the steps since
            the one before, and counts as many times.
        last: how many steps; None: 1000 as in the paper, but at most a tenth of all.

    Raises:
        NotHere: nothing was recorded.
    """
    steps, norms = _recorded(record)
    first = steps[-1] - (last or min(LAST, max(1, steps[-1] // 10)))
    counts = np.diff(np.concatenate([[0], steps]))
    within = np.clip(np.minimum(steps - first, counts), 0, None)  # of a row that is partly in
    return {name: torch.tensor(float(values @ within / within.sum())) for name, values in norms.items()}


def stem_gradient(record: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """`stem` and `step`, (rows,) each: the norm of the gradient of the patch embedding, and after how many steps.

    Raises:
        NotHere: it was not recorded.
    """
    steps, norms = _recorded(record)
    if STEM not in norms:
        raise NotHere("trained parameters of the stem are missing or unknown.")
    return {STEM: torch.from_numpy(norms[STEM]), "step": torch.from_numpy(steps)}


def _recorded(record: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The steps (rows,) and, by layer, the gradient norms (rows,)."""
    rows = [row for row in record if any(name.startswith(GRADIENT) for name in row)]
    if not rows:
        raise NotHere("gradients were not recorded: train with --record gradients.")
    names = [name for name in rows[-1] if name.startswith(GRADIENT) and all(name in row for row in rows)]
    steps = np.array([row["step"] for row in rows])
    return steps, {name.removeprefix(GRADIENT): np.array([row[name] for row in rows], float) for name in names}


def _gradients(subject: Examined) -> Arrays:
    """Return gradient norms by depth, NaN for blocks that are not trained; the head's only on request."""
    blocks = {f"blocks.{k}": torch.tensor(torch.nan) for k in range(subject.config.get("depth", 0))}
    layers = {**blocks, **gradients_by_depth(subject.record)}
    if not subject.head:
        layers.pop(HEAD, None)
    return dict(sorted(layers.items(), key=lambda layer: {STEM: 0, HEAD: 2}.get(layer[0], 1)))


@paper_figure("gradients", each=_gradients)
def draw_gradients(models: Mapping[str, Arrays]) -> Any:
    """Draw a line for each model over stem, blocks and head (if it is there), with a logarithmic axis.

    Blocks are placed by relative depth where depths differ.
    """
    numbers = {}  # of each block, from 1 on, also if the first ones are not trained
    for name, norms in models.items():
        blocks = [layer for layer in norms if layer not in (STEM, HEAD)]
        numbers[name] = {b: int(short(b)) if b.startswith("blocks.") else k for k, b in enumerate(blocks, 1)}
    depths = {name: max(numbered.values(), default=1) for name, numbered in numbers.items()}
    most, is_one_depth = max(depths.values()), len(set(depths.values())) == 1
    lines = {}
    for name, norms in models.items():
        # A block is in the middle of its part of the depth.
        middles = {layer: 0.5 + most * (k - 0.5) / depths[name] for layer, k in numbers[name].items()}
        places = {STEM: 0.0, HEAD: most + 1.0} | middles
        lines[name] = [places[layer] for layer in norms], [float(v) for v in norms.values()]
    label = "layer" if is_one_depth else "layer; blocks by their part of the depth"
    drawn = draw_lines(label, "gradient norm", lines)
    log_axis(drawn.axes[0])
    between: list[tuple[float, str]] = [(k, str(k)) for k in range(1, most + 1, -(-most // 14))]
    if not is_one_depth:
        between = [(0.5 + most * part, f"{100 * part:.0f} %") for part in (0.25, 0.5, 0.75)]
    last = [(most + 1, HEAD)] if any(HEAD in norms for norms in models.values()) else []
    drawn.axes[0].set_xticks(*zip((0, STEM), *between, *last))
    return drawn


@paper_figure("stem_gradient", each=lambda subject: stem_gradient(subject.record))
def draw_stem_gradient(models: Mapping[str, Arrays]) -> Any:
    """Draw a line for each model over steps."""
    lines = {name: (arrays["step"].tolist(), arrays[STEM].tolist()) for name, arrays in models.items()}
    every = max(1, max(len(steps) for steps, _ in lines.values()) // 12)
    drawn = draw_lines("step", "gradient norm of the stem", lines, markevery=every)
    log_axis(drawn.axes[0])
    drawn.axes[0].set_xlim(left=0)
    return drawn


PARTS = ("all", "attention", "ffn")
HATCHES = ("", "///", "...")
QUANTITIES = {"parameters": "trained parameters", "step": "time of a step", "memory": "peak memory"}


def training_costs(
    model: nn.Module, images: Tensor, parts: Sequence[str] = PARTS, budget_s: float = 10.0
) -> dict[str, Tensor]:
    """The costs of a training step of all of a model, or of a part: `parameters` that are trained, seconds of a `step`
    and bytes of `memory` at its peak, by part, (parts,) each.

    Args:
        model: returns logits; copies of it are trained (AdamW), on its own device.
        images: (B, channels, height, width), a batch.
        parts: roles as in `vitmods.finetune.train_only`. UserError for unknown ones.
        budget_s: seconds for the rounds of timing; seven rounds are always made.
    """
    device = next(model.parameters()).device
    steps: dict[str, Work] = {}
    counts, memory = [], []
    with quiet_threads(device):
        for part in parts:
            trained = copy.deepcopy(model).train()
            counts.append(float(train_only(trained, part).trained))
            steps[part] = _step(trained, images.to(device))
            steps[part]()  # warm-up: the optimizer's state is made
            memory.append(float(peak_bytes(steps[part], [*trained.parameters(), *trained.buffers()], device)))
        repeats = max(1, round(BLOCK_S / max(seconds_per_call(steps[parts[0]], 1, device), 1e-6)))
        timed = interleave({"step": steps}, list(steps), lambda s, n: seconds_per_call(s[n], repeats, device), budget_s)
    rounds = timed["step"]
    seconds = [sorted(times[part] for times in rounds)[len(rounds) // 2] for part in parts]
    return {name: torch.tensor(v, dtype=torch.float64) for name, v in zip(QUANTITIES, (counts, seconds, memory))}


def _step(model: nn.Module, images: Tensor) -> Work:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6)

    def step() -> None:
        logits: Any = model(images)
        logits = getattr(logits, "logits", logits)
        cross_entropy(logits, torch.arange(len(images), device=images.device) % logits.shape[-1]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def is_classifier(model: Any) -> bool:
    """Whether the model ends in a linear head, so that it returns logits."""
    return isinstance(getattr(model, "head", None), nn.Linear)


def _partial_training(models: Sequence[Examined]) -> tuple[dict[str, Arrays], dict[str, str]]:
    first, *others = models
    size = first.config.get("img_size")
    if size is None or not is_classifier(first.known):
        raise NotHere("does not classify images, which a step is timed with.")
    images = torch.randn(8, int(first.config["in_chans"]), *size, generator=torch.Generator().manual_seed(0))
    costs = training_costs(first.known, images, budget_s=first.seconds)
    return {first.name: costs}, {subject.name: f"timed only for {first.name}." for subject in others}


@paper_figure("partial_training", arrays=_partial_training)
def draw_costs(models: Mapping[str, Arrays]) -> Any:
    """Draw bars: one group per quantity, one bar per part, one panel per model."""
    drawn, rows = panels(NARROW, 60 + 230 * len(models), [1] * len(models), sharex=True, sharey=True)
    bars: list[Any] = []
    for (axes,), (name, quantities) in zip(rows, models.items(), strict=True):
        plain(axes, y="fraction of full training", title=name if len(models) > 1 else "")
        shares = torch.stack([quantities[q] / quantities[q][0] for q in QUANTITIES], 1)
        bars = []
        for k, (part, share, shade) in enumerate(zip(PARTS, shares, PALETTE)):
            places = [x + 0.27 * (k - 1) for x in range(len(QUANTITIES))]
            style = {"color": shade, "hatch": HATCHES[k], "edgecolor": PAPER, "lw": 0}
            bars.append(axes.bar(places, share.tolist(), 0.25, label=part, **style))
            axes.bar_label(bars[-1], fmt=lambda v: f"{100 * v:.0f} %", fontsize=10, color=INK, padding=2)
        axes.set_xticks(range(len(QUANTITIES)), list(QUANTITIES.values()))
    rows[0][0].set_ylim(0, 1.15 * max(1.0, float(shares.max())))
    legend(drawn, bars)
    return drawn


BATCHES = (1, 2, 4, 8, 16, 32)


def throughput(
    models: Mapping[str, nn.Module],
    img_size: tuple[int, int],
    batches: Sequence[int] = BATCHES,
    device: torch.device | str = "cpu",
    budget_s: float = 60.0,
) -> dict[str, dict[str, Tensor]]:
    """`images a second` and the `batch`, (batches,) each, of inference, timed interleaved by `vitmods.bench`.

    Raises:
        UserError: a model does not accept images of that size, or does not return logits.
    """
    from vitmods.bench import bench

    per_batch = budget_s / len(batches)
    cells = bench(models, img_size, batches=batches, kinds=("inference",), device=device, budget_s=per_batch)["cells"]
    rates = {name: [cell["images_per_s"] for cell in cells if cell["model"] == name] for name in models}
    return {name: {"images a second": torch.tensor(v), "batch": torch.tensor(batches)} for name, v in rates.items()}


def _throughput(models: Sequence[Examined]) -> tuple[dict[str, Arrays], dict[str, str]]:
    sizes = {subject.name: subject.config.get("img_size") for subject in models}
    able = {subject.name: subject.known for subject in models if subject.model is not None and sizes[subject.name]}
    able = {name: model for name, model in able.items() if is_classifier(model)}
    names = [subject.name for subject in models if subject.name not in able]
    if not able:
        raise NotHere("none of the models classifies images.")
    size: Any = sizes[next(iter(able))]
    able = {name: model for name, model in able.items() if sizes[name] == size}
    device = next(next(iter(able.values())).parameters()).device
    rates = throughput(able, (size[0], size[1]), device=device, budget_s=models[0].seconds)
    return dict(rates), dict.fromkeys(names, "without weights, or does not classify images.")


@paper_figure("throughput", arrays=_throughput)
def draw_throughput(models: Mapping[str, Arrays]) -> Any:
    """Draw a line for each model, with a logarithmic axis of batches."""
    lines = {name: (arrays["batch"].tolist(), arrays["images a second"].tolist()) for name, arrays in models.items()}
    drawn = draw_lines("batch", "images a second", lines, ms=6)
    axes, batches = drawn.axes[0], next(iter(lines.values()))[0]
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    return drawn
