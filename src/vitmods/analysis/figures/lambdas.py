"""The trade-off lambda of dynamic token norms over training (Dynamic Token Normalization, Figure 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitmods.analysis.figure import Arrays, Examined, NotHere, blank, clipped, figure_kind, legend, plain, short
from vitmods.model.vit import ViT
from vitmods.report.figures import MUTED, PALETTE
from vitmods.train.record import LAMBDA, lambdas_of

LINES = ("-", "--", ":", "-.")
STATISTICS = ("mean", "variance")


def trade_offs(model: ViT) -> dict[str, Tensor]:
    """`mean` and `variance` with the name of each dynamic token norm -> lambda of each head, (H,). 1 is LayerNorm, 0
    reads other tokens alone.

    Raises:
        NotHere: the model has no such norm that learns them.
    """
    found = {name: torch.tensor(values) for name, values in lambdas_of(model).items()}
    if not found:
        raise NotHere("it has no dynamic token norm that learns lambda: apply dtn.")
    return found


def trade_offs_over_training(record: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The same names -> (evaluations, H), and the `epoch` of each, of a training with `record=("lambdas",)`.

    Raises:
        NotHere: nothing was recorded.
    """
    rows = [row for row in record if LAMBDA in row]
    if not rows:
        raise NotHere("its lambdas were not recorded: train it with --record lambdas.")
    names = rows[-1][LAMBDA]
    found = {name: torch.tensor([row[LAMBDA][name] for row in rows]) for name in names}
    return {**found, "epoch": torch.tensor([float(row["epoch"]) for row in rows])}


def _lambdas(one: Examined) -> Arrays:
    """From the record, with the start in front; without a record from the weights at the start and at the end.
    Of weights alone the epoch is not known, and no number."""
    before = one.vit_at_start
    start = {} if before is None else trade_offs(before)
    try:
        found = trade_offs_over_training(one.record)
    except NotHere:
        end = trade_offs(one.vit)
        if not start:
            return {**{name: values[None] for name, values in end.items()}, "epoch": torch.full((1,), torch.nan)}
        pairs = {name: torch.stack([start[name], values]) for name, values in end.items()}
        return {**pairs, "epoch": torch.tensor([0.0, _epochs(one.record)])}
    first = {name: torch.cat([start[name][None], found[name]]) for name in start if name in found}
    return {**found, **first, "epoch": torch.cat([torch.zeros(1), found["epoch"]]) if first else found["epoch"]}


def _epochs(record: Sequence[Mapping[str, Any]]) -> float:
    return max((float(row["epoch"]) for row in record if "epoch" in row), default=1.0)


@figure_kind(
    "lambdas",
    each=_lambdas,
    title="Lambda by head and layer over training",
    source="Dynamic Token Normalization, Figure 8",
    needs="weights",
    columns=("norm", "epoch", "head", "lambda"),
    see="The weight of LayerNorm's statistics in each head's norm, for the mean and for the variance: 1 is "
    "LayerNorm, below a head reads other tokens. In the paper heads of early layers go down, those of late "
    "layers stay up, and means differ more than variances. Without a record (--record lambdas) the line joins "
    "the start and the end, and of weights alone there is one point.",
)
def draw_lambdas(found: Mapping[str, Arrays]) -> Any:
    """A panel a layer, means above variances, a line a head."""
    parts = {(name, what): _layers(arrays, what) for name, arrays in found.items() for what in STATISTICS}
    parts = {key: layers for key, layers in parts.items() if layers}
    most = max(map(len, parts.values()))
    drawn = blank(max(360, 70 + 86 * most), 60 + 125 * len(parts))
    grid = drawn.subplots(len(parts), most, squeeze=False, sharex=True, sharey=True)
    known = any(found[name]["epoch"].isfinite().any() for name, _ in parts)
    handles: list[Any] = []
    for row, ((name, what), layers) in zip(grid, parts.items(), strict=True):
        for axes in row[len(layers) :]:
            axes.set_visible(False)
        for axes, (norm, values) in zip(row, layers.items()):
            plain(axes, title=f"layer {short(norm)}" if axes is row[0] else short(norm))
            lines = _draw_heads(axes, found[name]["epoch"].nan_to_num(0.0), values, aside=0.0 if known else 1.0)
            handles = lines if len(lines) > len(handles) else handles
        row[0].set_ylabel(f"{clipped(name)}\nλ, {what}", fontsize=11, parse_math=False)
    grid[0][0].set_ylim(-0.03, 1.03)
    if known:
        grid[-1][0].set_xlabel("epoch", fontsize=11, color=MUTED)
        grid[-1][0].xaxis.get_major_locator().set_params(integer=True)
    else:
        grid[-1][0].set_xticks([])
    legend(drawn, handles, columns=6)
    return drawn


def _layers(arrays: Arrays, what: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{what} "): v for name, v in arrays.items() if name.startswith(f"{what} ")}


def _draw_heads(axes: Any, epochs: Tensor, values: Tensor, aside: float) -> list[Any]:
    """`aside`: how far heads stand beside each other."""
    lines, shades = [], PALETTE[1:]
    for head in range(values.shape[1]):
        turn, place = divmod(head, len(shades))
        how = {"color": shades[place], "ls": LINES[turn % len(LINES)], "marker": "o" if len(epochs) < 3 else None}
        places = (epochs + aside * head).tolist()
        lines += axes.plot(places, values[:, head].tolist(), label=f"head {head + 1}", lw=1.5, ms=4, **how)
    return lines
