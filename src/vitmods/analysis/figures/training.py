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
    Arrays,
    Examined,
    NotHere,
    blank,
    draw_lines,
    figure_kind,
    legend,
    plain,
    short,
)
from vitmods.bench import BLOCK_S, Work, interleave, peak_bytes, quiet_threads, seconds_per_call
from vitmods.finetune import train_only
from vitmods.report.figures import INK, PALETTE
from vitmods.train.loggers import GRADIENT, HEAD, STEM

LAST = 1000
"""steps that the paper's mean is over; of a short training at most its last tenth"""


def gradients_by_depth(record: Sequence[Mapping[str, Any]], last: int | None = None) -> dict[str, torch.Tensor]:
    """Layer -> the mean over the last steps of the norm of the gradient of its parameters, 0-d; in order of depth.

    Args:
        record: rows of metrics.jsonl of a training with `record=("gradients",)`; each is a mean over the steps since
            the one before, and counts as many times.
        last: how many steps; None: 1000 as in the paper, but at most a tenth of all.

    Raises:
        NotHere: nothing was recorded.
    """
    steps, norms = _columns(record)
    first = steps[-1] - (last or min(LAST, max(1, steps[-1] // 10)))
    counts = np.diff(np.concatenate([[0], steps]))
    within = np.clip(np.minimum(steps - first, counts), 0, None)  # of a row that is partly in
    return {name: torch.tensor(float(values @ within / within.sum())) for name, values in norms.items()}


def stem_gradient(record: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """`stem` and `step`, (rows,) each: the norm of the gradient of the patch embedding, and after how many steps.

    Raises:
        NotHere: it was not recorded.
    """
    steps, norms = _columns(record)
    if STEM not in norms:
        raise NotHere("its stem has no trained parameters, or none that is known as one.")
    return {STEM: torch.from_numpy(norms[STEM]), "step": torch.from_numpy(steps)}


def _columns(record: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rows = [row for row in record if any(name.startswith(GRADIENT) for name in row)]
    if not rows:
        raise NotHere("its gradients were not recorded: train it with --record gradients.")
    names = [name for name in rows[-1] if name.startswith(GRADIENT) and all(name in row for row in rows)]
    steps = np.array([row["step"] for row in rows])
    return steps, {name.removeprefix(GRADIENT): np.array([row[name] for row in rows], float) for name in names}


def _of_all_blocks(one: Examined) -> Arrays:
    """NaN for blocks that are not trained, so that the others keep their place in the depth."""
    blocks = {f"blocks.{k}": torch.tensor(torch.nan) for k in range(one.config.get("depth", 0))}
    layers = {**blocks, **gradients_by_depth(one.record)}
    return dict(sorted(layers.items(), key=lambda layer: {STEM: 0, HEAD: 2}.get(layer[0], 1)))


@figure_kind(
    "gradients",
    each=_of_all_blocks,
    title="Gradient norm by depth",
    source="Dual PatchNorm, Figures 2 (left) and 4",
    needs="record",
    columns=("layer", "gradient norm"),
    see="The norm of the gradient of each layer's parameters, a mean over the last steps of training. In the "
    "paper the patch embedding of a plain ViT, on the left, stands out from the blocks, and a norm around it brings it "
    "down. Where depths differ, blocks stand at their part of the depth, and the heads behind the last ones.",
)
def draw_gradients(found: Mapping[str, Arrays]) -> Any:
    """A line a model: the stem, the blocks by number or, where depths differ, by their place in the depth, the head."""
    numbers = {}  # of each block, from 1 on, also if the first ones are not trained
    for name, norms in found.items():
        blocks = [layer for layer in norms if layer not in (STEM, HEAD)]
        numbers[name] = {b: int(short(b)) if b.startswith("blocks.") else k for k, b in enumerate(blocks, 1)}
    depths = {name: max(own.values(), default=1) for name, own in numbers.items()}
    most, is_one_depth = max(depths.values()), len(set(depths.values())) == 1
    lines = {}
    for name, norms in found.items():
        # A block is in the middle of its part of the depth.
        middles = {layer: 0.5 + most * (k - 0.5) / depths[name] for layer, k in numbers[name].items()}
        places = {STEM: 0.0, HEAD: most + 1.0} | middles
        lines[name] = [places[layer] for layer in norms], [float(v) for v in norms.values()]
    label = "layer" if is_one_depth else "layer; blocks by their part of the depth"
    drawn = draw_lines(label, "gradient norm", lines)
    between: list[tuple[float, str]] = [(k, str(k)) for k in range(1, most + 1, -(-most // 14))]
    if not is_one_depth:
        between = [(0.5 + most * part, f"{100 * part:.0f} %") for part in (0.25, 0.5, 0.75)]
    drawn.axes[0].set_xticks(*zip((0, STEM), *between, (most + 1, HEAD)))
    return drawn


@figure_kind(
    "stem_gradient",
    each=lambda one: stem_gradient(one.record),
    title="Gradient norm of the patch embedding over training",
    source="Dual PatchNorm, Figure 2 (right)",
    needs="record",
    columns=("part", "step", "gradient norm"),
    see="The norm of the gradient of the patch embedding, a mean over the steps between two rows of the log. In the "
    "paper Dual PatchNorm lowers it from the first step to the last, not at the end alone.",
)
def draw_stem_gradient(found: Mapping[str, Arrays]) -> Any:
    """A line a model over steps."""
    lines = {name: (arrays["step"].tolist(), arrays[STEM].tolist()) for name, arrays in found.items()}
    every = max(1, max(len(steps) for steps, _ in lines.values()) // 12)
    drawn = draw_lines("step", "gradient norm of the stem", lines, markevery=every)
    drawn.axes[0].set_xlim(left=0)
    return drawn


PARTS = ("all", "attention", "ffn")
QUANTITIES = {"parameters": "trained parameters", "step": "time of a step", "memory": "peak memory"}


def training_costs(
    model: nn.Module, images: Tensor, parts: Sequence[str] = PARTS, budget_s: float = 10.0
) -> dict[str, Tensor]:
    """What a training step takes where all of a model is trained, or a part: `parameters` that are trained, seconds of
    a `step` and bytes of `memory` at its peak, by part, (parts,) each.

    Args:
        model: gives logits; copies of it are trained (AdamW), on its own device.
        images: (B, channels, height, width), a batch.
        parts: roles as `vitmods.finetune.train_only` takes them.
        budget_s: seconds for the rounds of timing; seven rounds are always made.

    Raises:
        UserError: the model has no such part.
    """
    place = next(model.parameters()).device
    steps: dict[str, Work] = {}
    counts, memory = [], []
    with quiet_threads(place):
        for part in parts:
            mine = copy.deepcopy(model).train()
            counts.append(float(train_only(mine, part).trained))
            steps[part] = _step(mine, images.to(place))
            steps[part]()  # warm-up: the optimizer's state is made
            memory.append(float(peak_bytes(steps[part], [*mine.parameters(), *mine.buffers()], place)))
        repeats = max(1, round(BLOCK_S / max(seconds_per_call(steps[parts[0]], 1, place), 1e-6)))
        timed = interleave({"step": steps}, list(steps), lambda s, n: seconds_per_call(s[n], repeats, place), budget_s)
    seconds = [sorted(one[part] for one in timed["step"])[len(timed["step"]) // 2] for part in parts]
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


def _of_the_first(models: Sequence[Examined]) -> tuple[dict[str, Arrays], dict[str, str]]:
    first, *others = models
    return {first.name: _costs(first)}, {one.name: f"it is timed for {first.name} alone." for one in others}


def _costs(one: Examined) -> Arrays:
    model, size = one.known, one.config.get("img_size")
    head = getattr(model, "head", None)
    if size is None or not isinstance(head, nn.Linear):
        raise NotHere("it gives no classes of images, which a step is timed with.")
    images = torch.randn(8, int(one.config["in_chans"]), *size, generator=torch.Generator().manual_seed(0))
    return training_costs(model, images, budget_s=one.seconds)


@figure_kind(
    "partial_training",
    arrays=_of_the_first,
    title="What fine-tuning all, attention or the MLPs takes",
    source="Three things everyone should know about ViTs, Figure 4",
    needs="time",
    columns=("quantity", "trained", "value"),
    see="Trained parameters, time and peak memory of a training step (8 images, AdamW, this machine), where all "
    "is trained, attention alone, or the MLPs (ffn) alone, as fractions of full training; parts in that order. "
    "In the paper attention alone takes 10 % less memory and time, and stores a third of the weights.",
)
def draw_costs(found: Mapping[str, Arrays]) -> Any:
    """Bars: a group a quantity, a bar a part, a panel a model."""
    drawn = blank(400, 60 + 230 * len(found))
    rows = drawn.subplots(len(found), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    bars: list[Any] = []
    for axes, (name, quantities) in zip(rows, found.items(), strict=True):
        plain(axes, y="fraction of full training", title=name if len(found) > 1 else "")
        shares = torch.stack([quantities[q] / quantities[q][0] for q in QUANTITIES], 1)
        bars = [
            axes.bar([x + 0.27 * (k - 1) for x in range(len(QUANTITIES))], own.tolist(), 0.25, color=shade, label=part)
            for k, (part, own, shade) in enumerate(zip(PARTS, shares, PALETTE))
        ]  # fmt: skip
        for group in bars:
            axes.bar_label(group, fmt=lambda v: f"{100 * v:.0f} %", fontsize=10, color=INK, padding=2)
        axes.set_xticks(range(len(QUANTITIES)), list(QUANTITIES.values()))
    rows[0].set_ylim(0, 1.15 * max(1.0, float(shares.max())))
    legend(drawn, bars)
    return drawn


BATCHES = (1, 2, 4, 8, 16, 32)


def throughput(
    models: Mapping[str, nn.Module],
    img_size: tuple[int, int],
    batches: Sequence[int] = BATCHES,
    device: torch.device | str = "cpu",
    budget_s: float = 60.0,
) -> dict[str, dict[str, torch.Tensor]]:
    """`images a second` and the `batch`, (batches,) each, of inference, timed interleaved by `vitmods.bench`.

    Raises:
        UserError: a model does not take images of that size, or has no logits.
    """
    from vitmods.bench import bench

    found = bench(
        models, img_size, batches=batches, kinds=("inference",), device=device, budget_s=budget_s / len(batches)
    )
    rates = {name: [c["images_per_s"] for c in found["cells"] if c["model"] == name] for name in models}
    return {name: {"images a second": torch.tensor(own), "batch": torch.tensor(batches)} for name, own in rates.items()}


def _throughput(models: Sequence[Examined]) -> tuple[dict[str, Arrays], dict[str, str]]:
    sizes = {one.name: one.config.get("img_size") for one in models}
    able = {one.name: one.known for one in models if one.model is not None and sizes[one.name] is not None}
    able = {name: model for name, model in able.items() if hasattr(model, "head") and _has_logits(model)}
    why = {one.name: "it has no weights, or gives no classes of images." for one in models if one.name not in able}
    first = next((sizes[name] for name in able), None)
    if first is None:
        raise NotHere("there is no model that gives classes of images.")
    able = {name: model for name, model in able.items() if sizes[name] == first}
    device = next(next(iter(able.values())).parameters()).device
    found = throughput(able, (first[0], first[1]), device=device, budget_s=models[0].seconds)
    return dict(found), why


def _has_logits(model: Any) -> bool:
    return isinstance(model.head, nn.Linear)


@figure_kind(
    "throughput",
    arrays=_throughput,
    title="Images a second against the batch size",
    source="Three things everyone should know about ViTs, Table 4",
    needs="time",
    columns=("quantity", "batch", "rate"),
    see="Speed of inference on this machine, models timed in turns. Parallel branches need fewer steps one after "
    "another, and gain in the paper at small batches on a GPU (up to 46 %); at large ones, and on a CPU, "
    "there is nothing to gain.",
)
def draw_throughput(found: Mapping[str, Arrays]) -> Any:
    """A line a model, both axes with logarithms."""
    lines = {name: (arrays["batch"].tolist(), arrays["images a second"].tolist()) for name, arrays in found.items()}
    drawn = draw_lines("batch", "images a second", lines, ms=6)
    axes, batches = drawn.axes[0], next(iter(lines.values()))[0]
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    return drawn
