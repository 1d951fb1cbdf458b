"""The Dual PatchNorm stem against the plain one at 224 px: forward + backward, and inference, paired and interleaved.

    python benchmarks/stem.py --out benchmarks/results

The plain stem is a strided convolution, timm's PatchEmbed too. "naive" is the paper's listing: cut, LayerNorm,
linear, LayerNorm.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paired import one_thread, paired, report
from timm.layers import PatchEmbed
from torch import nn

from vitmods.layers import DualPatchNormStem, LinearStem, StemSize
from vitmods.layers.stems import patchify

WIDTHS = {"Ti/16": 192, "S/16": 384, "B/16": 768}


class Naive(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(768, eps=1e-6), nn.Linear(768, width), nn.LayerNorm(width, eps=1e-6))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(patchify(images, (16, 16)))


def training(stem: nn.Module, images: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        stem.zero_grad(set_to_none=True)
        stem(images).backward(grad)

    return step


def inference(stem: nn.Module, images: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.inference_mode():
            return stem(images)

    return step


def measure(size: str, batch: int, rounds: int) -> dict[str, Any]:
    width = WIDTHS[size]
    images = torch.randn(batch, 3, 224, 224)
    grad = torch.randn(batch, 196, width)
    stems: dict[str, nn.Module] = {
        "plain": LinearStem(StemSize(224, 16, 3, width)),
        "timm PatchEmbed": PatchEmbed(224, 16, 3, width),
        "dual patchnorm": DualPatchNormStem(StemSize(224, 16, 3, width)),
        "naive": Naive(width),
    }
    train = {name: training(stem, images, grad) for name, stem in stems.items()}
    infer = {name: inference(stem, images) for name, stem in stems.items()}
    return {
        f"{size} batch {batch} train": paired(train, "plain", rounds, repeats=2),
        f"{size} batch {batch} inference": paired(infer, "plain", rounds, repeats=4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(WIDTHS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    # A freed block of this size lets the allocator keep what it frees, as it does in a process that trains a model.
    torch.empty(30 << 20, dtype=torch.uint8)
    results: dict[str, Any] = {}
    for size in options.sizes:
        for batch in options.batches:
            results |= measure(size, batch, options.rounds)
    report("stem", results, options.out)


if __name__ == "__main__":
    main()
