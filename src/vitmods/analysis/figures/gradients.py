"""Gradient norms by depth and over training (Dual PatchNorm, Figures 2 and 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vitmods.analysis.figure import (
    Arrays,
    Examined,
    NotHere,
    blank,
    colors,
    figure_kind,
    from_zero,
    legend,
    markers,
    plain,
    short,
)
from vitmods.train.record import GRADIENT, HEAD, STEM

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
    drawn = blank(400, 300)
    numbers = {name: _numbers(norms) for name, norms in found.items()}
    depths = {name: max(own.values(), default=1) for name, own in numbers.items()}
    most, alike = max(depths.values()), len(set(depths.values())) == 1
    axes = plain(drawn.add_subplot(), "layer" if alike else "layer; blocks by their part of the depth", "gradient norm")
    shade, shape = colors(list(found)), markers(list(found))
    lines = []
    for name, norms in found.items():
        ends = {STEM: 0.0, HEAD: most + 1.0}  # a block lies in the middle of its part of the depth
        blocks = {layer: 0.5 + most * (k - 0.5) / depths[name] for layer, k in numbers[name].items()}
        places = [(ends | blocks)[layer] for layer in norms]
        lines += axes.plot(places, [float(v) for v in norms.values()], color=shade[name], marker=shape[name], ms=5,
                           lw=1.6, label=name)  # fmt: skip
    from_zero(axes)
    between: list[tuple[float, str]] = [(k, str(k)) for k in range(1, most + 1, -(-most // 14))]
    if not alike:
        between = [(0.5 + most * part, f"{100 * part:.0f} %") for part in (0.25, 0.5, 0.75)]
    axes.set_xticks(*zip((0, STEM), *between, (most + 1, HEAD)))
    legend(drawn, lines)
    return drawn


def _numbers(norms: Arrays) -> dict[str, int]:
    """Of each block, from 1 on, also where the first ones are not trained."""
    blocks = [layer for layer in norms if layer not in (STEM, HEAD)]
    return {name: int(short(name)) if name.startswith("blocks.") else k for k, name in enumerate(blocks, 1)}


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
    drawn = blank(400, 300)
    axes = plain(drawn.add_subplot(), "step", "gradient norm of the stem")
    shade, shape = colors(list(found)), markers(list(found))
    lines = []
    for name, arrays in found.items():
        steps, every = arrays["step"].tolist(), max(1, len(arrays["step"]) // 12)
        lines += axes.plot(steps, arrays[STEM].tolist(), color=shade[name], marker=shape[name], ms=5, lw=1.6,
                           markevery=every, label=name)  # fmt: skip
    from_zero(axes)
    axes.set_xlim(left=0)
    legend(drawn, lines)
    return drawn
