"""Images a second against the batch size (Three things everyone should know about ViTs, Table 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

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
)

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
    drawn = blank(400, 300)
    axes = plain(drawn.add_subplot(), "batch", "images a second")
    shade, shape = colors(list(found)), markers(list(found))
    lines = []
    for name, arrays in found.items():
        batches, rates = arrays["batch"].tolist(), arrays["images a second"].tolist()
        lines += axes.plot(batches, rates, color=shade[name], marker=shape[name], ms=6, lw=1.6, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    from_zero(axes)
    legend(drawn, lines)
    return drawn
