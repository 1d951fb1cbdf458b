"""What full and partial fine-tuning take (Three things everyone should know about ViTs, Figure 4)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vitmods.analysis.figure import Arrays, Examined, NotHere, blank, figure_kind, legend, plain
from vitmods.bench import BLOCK_S, Work, interleave, peak_bytes, quiet_threads, seconds_per_call
from vitmods.finetune import train_only
from vitmods.report.figures import INK, PALETTE

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
