"""The hMLP stem at 224 px, paired and interleaved: a model's training step against the linear stem's, and the stem
alone with all patches and with some visible.

    python benchmarks/hmlp.py --out benchmarks/results

"plain convolutions" is the stem as DeiT writes it: convolutions and norms on (B, C, rows, columns) in memory.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paired import one_thread, paired, report
from torch import nn
from torch.nn import functional as F

import vitmods as vm
from vitmods.layers import HMLPStem, LinearStem, StemSize
from vitmods.layers.norms import BatchNorm, LayerNorm

WIDTHS = {"Ti/16": 192, "S/16": 384, "B/16": 768}
NORMS: dict[str, Any] = {"batch": BatchNorm, "layer": LayerNorm}
VISIBLE = (0.6, 0.4, 0.25)


class Plain(nn.Module):
    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        self.norm = norm
        quarter = width // 4
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(3, quarter, 4, 4), nn.Conv2d(quarter, quarter, 2, 2), nn.Conv2d(quarter, width, 2, 2)]
        )
        make = nn.BatchNorm2d if norm == "batch" else LayerNorm
        self.norms = nn.ModuleList([make(quarter), make(quarter), make(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, (conv, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = conv(x)
            x = norm(x) if self.norm == "batch" else norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            x = F.gelu(x) if i < 2 else x
        return x.flatten(2).transpose(1, 2)


def training(stem: nn.Module, *inputs: torch.Tensor) -> Callable[[], None]:
    grad = torch.randn_like(stem(*inputs))

    def step() -> None:
        stem.zero_grad(set_to_none=True)
        stem(*inputs).backward(grad)

    return step


def inference(stem: nn.Module, *inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        stem.eval()
        with torch.inference_mode():
            out: torch.Tensor = stem(*inputs)
        stem.train()
        return out

    return step


def stems(size: str, norm: str, batch: int, rounds: int) -> dict[str, Any]:
    width, make = WIDTHS[size], NORMS[norm]
    images = torch.randn(batch, 3, 224, 224)
    hmlp = HMLPStem(StemSize(224, 16, 3, width), norm_layer=make, inner_norm=make)
    inputs: dict[str, tuple[Any, ...]] = {
        "hmlp": (hmlp, images),
        "plain convolutions": (Plain(width, norm), images),
        "linear": (LinearStem(StemSize(224, 16, 3, width)), images),
    }
    for fraction in VISIBLE:
        keep = torch.rand(batch, 196).argsort(1)[:, : round(196 * fraction)]
        inputs[f"hmlp, {fraction:.0%} visible"] = (hmlp, images, keep)
    train = {name: training(*parts) for name, parts in inputs.items()}
    infer = {name: inference(*parts) for name, parts in inputs.items()}
    return {
        f"stem {size} {norm} batch {batch} train": paired(train, "hmlp", rounds, repeats=2),
        f"stem {size} {norm} batch {batch} inference": paired(infer, "hmlp", rounds, repeats=4),
    }


def model_step(model: vm.ViT, images: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    labels = torch.arange(len(images))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def models(size: str, batch: int, rounds: int) -> dict[str, Any]:
    images = torch.randn(batch, 3, 224, 224)
    base = vm.vit(size)
    arms = {"linear": base, **{arm: vm.apply(base, *vm.parse_changes(arm)) for arm in ("hmlp", "hmlp-ln")}}
    steps = {name: model_step(model, images) for name, model in arms.items()}
    return {f"model {size} batch {batch} train": paired(steps, "linear", rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S/16", "B/16"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40, help="of the stem alone")
    parser.add_argument("--model-rounds", type=int, default=12, help="of the whole model; 0 leaves it out")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    # A freed block of this size lets the allocator keep what it frees, as it does in a process that trains a model.
    torch.empty(30 << 20, dtype=torch.uint8)
    results: dict[str, Any] = {}
    for size in options.sizes:
        for norm in NORMS:
            results |= stems(size, norm, options.batch, options.rounds)
        if options.model_rounds:
            results |= models(size, options.batch, options.model_rounds)
    report("hmlp", results, options.out)


if __name__ == "__main__":
    main()
